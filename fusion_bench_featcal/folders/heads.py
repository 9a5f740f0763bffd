"""Heads of classifiers, which are not merged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.files.tensors import write_tensors
from fusion_bench_featcal.folders.model_folder import body_name

HEADS = "heads"
"""Folder of the heads inside a saved model's folder."""


@dataclass(frozen=True)
class ClassifierHeads:
    """The experts' heads. Each replaces the head of the merged model for its expert's task.

    Attributes:
        saved_name: Name of the model whose head the saved model has.
        empty_body: The body without weights, which replaces the body in a stored classifier.
        tail: Returns a task's tensors of the body that belong to its head, such as those of a
            pooler.
    """

    saved_name: str
    empty_body: nn.Module
    tail: Callable[[str], Mapping[str, Tensor]]

    def detach_body(self, classifier: Any) -> nn.Module:
        """Replace an expert's body by the empty one, which frees memory. Return the expert."""
        setattr(classifier, body_name(classifier), self.empty_body)
        return classifier

    def attach_body(self, task: str, head: Any, model: Any) -> nn.Module:
        """Put a model's body, with the expert's tail, into the expert's classifier. Return it."""
        body = model.get_submodule(body_name(model))
        body.load_state_dict(self.tail(task), strict=False)
        setattr(head, body_name(head), body)
        return head

    def write(self, heads: Mapping[str, Any], folder: Path) -> None:
        """Write each expert's head, with its tail, to a folder of its own."""
        for task, classifier in heads.items():
            head = folder / HEADS / task
            head.mkdir(parents=True)
            body = f"{body_name(classifier)}."
            tensors = classifier.state_dict().items()
            outside = {name: tensor for name, tensor in tensors if not name.startswith(body)}
            outside |= {f"{body}{name}": tensor for name, tensor in self.tail(task).items()}
            write_tensors(head / "head.safetensors", outside)
            classifier.config.save_pretrained(head)
