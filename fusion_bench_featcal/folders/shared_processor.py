"""The tokenizer or image processor of all inputs of one `featcal calibrate`."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from fusion_bench_featcal.data.pictures import check_channels
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import TEXT_MODELS, ModelFolder
from fusion_bench_featcal.models.folder_files import FolderFiles
from fusion_bench_featcal.models.processors import (
    check_processors,
    has_processor,
    load_tokenizers,
    read_processor,
)


class SharedProcessor:
    """The processor that `--tokenizer` names, or else that of the first model that has one.

    Attributes:
        folder: Its folder.
        option: Its name in messages.
        loaded: The tokenizer or image processor. For a whole CLIP, both in one object.
        tokenizers: Option or expert -> its tokenizer. This one is the first. Empty for images.
        note: A sentence if it belongs to an expert, or None.
    """

    def __init__(self, inputs: InputModels, model: ModelFolder) -> None:
        """Load the processor, and compare it with those of the experts.

        Args:
            inputs: The models of the request.
            model: The model that defines the class of the calibrated one.

        Raises:
            CalibrationError: If there is none, or an expert has a different one.
            ValueError: If its images have other channels than the model reads.
        """
        self._request, self._is_text = inputs.request, model.kind in TEXT_MODELS
        self._experts = {expert.label: expert.folder for expert in inputs.experts.values()}
        self.folder, self.note = self._find(inputs, model), None
        self.tokenizers: Mapping[str, PreTrainedTokenizerBase] = {}
        self.option = f"--tokenizer {self.folder}"
        owner = next((e for e in inputs.experts.values() if e.folder == self.folder), None)
        if owner not in (None, model) and self._request.tokenizer is None:
            name = "tokenizer" if self._is_text else "image processor"
            self.note = f"the {name} is from {owner.label}, because MERGED and --base have none"
        self.loaded = self._load(model)

    def _find(self, inputs: InputModels, model: ModelFolder) -> Path:
        """Return the folder that has it."""
        if inputs.processor_folder is not None:
            return inputs.processor_folder
        models = filter(None, (model, inputs.base, *inputs.experts.values()))
        folders = (m.folder for m in models)
        is_image = not self._is_text
        return next((f for f in folders if has_processor(f, is_image=is_image)), model.folder)

    def _load(self, model: ModelFolder) -> Any:
        if not self._is_text:
            is_whole_clip = model.architecture.__name__ == "CLIPModel"
            kind = AutoProcessor if is_whole_clip else AutoImageProcessor
            loaded = read_processor(self.folder, kind, "--tokenizer")
            check_processors(loaded, self.option, self._experts)
            check_channels(loaded, getattr(model.empty.config, "num_channels", None), model.label)
            return loaded
        loaded = read_processor(self.folder, AutoTokenizer, "--tokenizer")
        others = load_tokenizers(loaded, self.option, self._experts)
        self.tokenizers = {self.option: loaded, **others}
        loaded.padding_side = "right"
        if (file := self._request.chat_template) is not None:
            loaded.chat_template = Path(file).expanduser().read_text("utf-8")
        return loaded

    def image_processor(self) -> Any:
        """Return the processor of texts with images.

        Raises:
            CalibrationError: If there is none, it has no chat template or patch size, or experts
                have others.
        """
        loaded = read_processor(self.folder, AutoProcessor, "--tokenizer")
        self.loaded.chat_template = self.loaded.chat_template or loaded.chat_template
        if not self.loaded.chat_template:
            raise CalibrationError(
                f"{self.option}: it has no chat template, but examples with images need one: give "
                "one with --chat-template FILE"
            )
        if getattr(loaded, "patch_size", 0) is None:  # as in files of LLaVA before release 4.45
            raise CalibrationError(
                f"{self.option}: its processor has no patch_size. Copy patch_size from the model's "
                "vision_config into the folder's processor_config.json"
            )
        check_processors(loaded, self.option, self._experts)
        return loaded

    def feature_extractor(self) -> Any:
        """Return the feature extractor of speech models.

        Raises:
            CalibrationError: If there is none, or experts have others.
        """
        loaded = read_processor(self.folder, AutoFeatureExtractor, "--tokenizer")
        check_processors(loaded, self.option, self._experts)
        return loaded

    def write(self, folder: Path) -> None:
        """Save it, by copying its original files if it has them.

        transformers 5 writes tokenizers that release 4 cannot load.
        """
        existing_files = set(folder.iterdir())
        self.loaded.save_pretrained(folder)
        is_new_template = self._request.chat_template is not None
        for file in set(folder.iterdir()) - existing_files:
            original = self.folder / file.name
            if original.is_file() and not (is_new_template and file.suffix == ".jinja"):
                shutil.copyfile(original, file)
        FolderFiles(self.folder).copy_small_files(folder, for_processor=True)
