"""FusionBench's own RegMean and RegMean++, made runnable on a part of the bundled suite."""

from typing import Any

import torch

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench.method import RegMeanAlgorithmForCLIP
from fusion_bench.method.regmean_plusplus import (
    RegMeanAlgorithmForCLIPPlusPlus,
    RegMeanAlgorithmPlusPlus,
)
from fusion_bench.modelpool import CLIPVisionModelPool
from torch import Tensor, nn

from fusion_bench_featcal.suites import image

TASKS = ("mini_mnist", "mini_greek")
SAMPLES = 48
OPTIONS: dict[str, Any] = {
    "num_regmean_examples": SAMPLES,
    "exclude_param_names_regex": [],
    "weight_transpose": True,
    "dataloader_kwargs": {"batch_size": 16, "num_workers": 0},
}


class FewSamplesPool(CLIPVisionModelPool):
    """Two of the suite's experts with the first training pictures of each: all of them are used."""

    def __init__(self) -> None:
        models: Any = {"_pretrained_": image.path()} | {task: image.path(task) for task in TASKS}
        processor: Any = {"_target_": f"{image.__name__}.load_processor"}
        super().__init__(
            models,
            processor=processor,
            train_datasets=dict.fromkeys(TASKS, "read by load_train_dataset"),  # type: ignore
        )

    def load_train_dataset(self, dataset_name: str, *args: Any, **kwargs: Any) -> Any:
        data = image.load_split(dataset_name, "train")
        return [data[index] for index in range(SAMPLES)]


class NestedTower(nn.Module):
    """A CLIP vision model of transformers 5.6 or newer in the older layout, which they expect."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.vision_model = tower
        for layer in tower.encoder.layers:
            layer.register_forward_hook(lambda _, __, output: (output,))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class NestedPool(FewSamplesPool):
    """The pool with models in the layout that FusionBench's RegMean++ expects."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().load_model(*args, **kwargs)
        return model if hasattr(model, "vision_model") else NestedTower(model)


class RepairedPlusPlus(RegMeanAlgorithmForCLIPPlusPlus):
    """Can be constructed: its mapping has the keys of its base class too."""

    _config_mapping = RegMeanAlgorithmPlusPlus._config_mapping | {
        "dataloader_kwargs": "dataloader_kwargs"
    }


def their_regmean(off_diagonal: float) -> dict[str, Tensor]:
    merger = RegMeanAlgorithmForCLIP(reduce_non_diagonal_ratio=off_diagonal, **OPTIONS)
    return merger.run(FewSamplesPool()).state_dict()


def their_regmean_plusplus(off_diagonal: float) -> dict[str, Tensor]:
    merger = RepairedPlusPlus(reduce_non_diagonal_ratio=off_diagonal, **OPTIONS)
    model: Any = merger.run(NestedPool())
    return (model.vision_model if isinstance(model, NestedTower) else model).state_dict()
