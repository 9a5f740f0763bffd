"""Base, experts and merged model of sentence-transformers, opened for one request."""

from typing import Any

from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.naming import class_of
from fusion_bench_featcal.encoders.opening import (
    merged_by_library,
    open_like,
    open_model,
    with_adapter,
    with_weights,
)
from fusion_bench_featcal.folders.kinds import models_of
from fusion_bench_featcal.folders.model_folder import refuse_adapter
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.model_files import ModelFiles
from fusion_bench_featcal.models.other_files import refuse_links


class EncoderModels:
    """Opened models, with equal modules and vocabularies.

    Attributes:
        request: The request.
        files: Name (`merged`, a task, `base`) -> its files.
        home: The model whose modules those get that are a transformer alone, as mergekit and
            transformers write it: the first one that names the class, else the first one.
        merged: The merged model, from its folder or merged now.
        base: The base, or None.
        experts: Task -> expert.
    """

    def __init__(self, request: Request, class_name: str) -> None:
        """Open all models.

        Args:
            request: The request.
            class_name: The library's class of the models.
        """
        self.request = request
        self.files = {name: files for (name, *_), files in models_of(request).items()}
        self.home = self._find_home(class_name)
        for files in (self.home, self.files.get("merged", self.home)):
            refuse_links(files.folder, ())
        home = open_model(class_name, self.home.folder, self.home.label, request.device)
        if request.merged is None:
            self._merge(home)
        else:
            self.merged = self._completed(home)
            self.base = self._open_base(home)
            self.experts = self._open_experts(home)

    def _find_home(self, class_name: str) -> ModelFiles:
        """Return the first model whose folder names the class, else the first that is whole."""
        whole = [files for files in self.files.values() if not files.is_adapter]
        named = [files for files in whole if class_of(files.folder) == class_name]
        return (named or whole)[0]

    def _open_base(self, reference: Any) -> Any:
        if (files := self.files.get("base")) is None:
            return None
        refuse_adapter(files)
        return self._open(files, reference)

    def _open_experts(self, reference: Any) -> dict[str, Any]:
        experts = {}
        for task in self.request.expert:
            files = self.files[task]
            if not files.is_adapter:
                experts[task] = self._open(files, reference)
            elif self.base is None:
                raise ValueError(f"{files.label} is an adapter: name its base by --base DIR")
            else:
                experts[task] = with_adapter(self.base, files.label, files.folder)
        return experts

    def _open(self, files: ModelFiles, reference: Any) -> Any:
        return reference if files is self.home else open_like(reference, files.label, files.folder)

    def _completed(self, home: Any) -> Any:
        """Return the merged model, with the modules of another one if it is a transformer alone."""
        merged = self.files["merged"]
        if merged is self.home:
            return home
        inside = {id(tensor) for tensor in transformer_of(merged.label, home).parameters()}
        if outside := [name for name, t in home.named_parameters() if id(t) not in inside]:
            raise ValueError(
                f"{merged.label} has no modules.json, and lacks {outside[0]} of "
                f"{self.home.folder}, which mergekit does not merge: merge by "
                f"{type(home).__name__}.merge of sentence-transformers, or give --merge HOW"
            )
        return with_weights(home, merged)

    def _merge(self, home: Any) -> None:
        """Open and merge the experts. What the base lacks, such as a head, is their average."""
        name, scale = self.request.merger
        if len(self.request.expert) < 2:
            raise ValueError("--merge needs at least two experts")
        has_adapters = any(self.files[task].is_adapter for task in self.request.expert)
        self.base = self._open_base(home) if has_adapters else None
        self.experts = self._open_experts(home)
        self.merged = average = merged_by_library([*self.experts.values()], None)
        self.base = self.base or self._open_base(average)
        if name != "simple_average":
            self.merged = merged_by_library([*self.experts.values()], scale, self.base)
