"""Adapts FusionBench 0.2.33 to Python 3.11 and transformers 5. Import this module to apply it.

A module that needs FusionBench's CLIP task pools imports this one first. On the command line,
`method=featcal` imports it before the model pool:

    import fusion_bench_featcal.fusionbench.compat  # noqa: F401

    # isort: split
    from fusion_bench.taskpool import CLIPVisionModelTaskPool
"""

import typing

import typing_extensions
from transformers import dynamic_module_utils
from transformers.models.clip import modeling_clip

# FusionBench's ResNet, ConvNeXt, DINOv2 and OpenCLIP pools import it from `typing`, which has it
# from Python 3.12 on. Delete once 3.11 is no longer supported (requires-python in pyproject.toml).
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

# transformers 5.6 merged CLIPVisionTransformer into CLIPVisionModel, and FusionBench's CLIP task
# pools import the old name (for annotations and isinstance checks, which the alias satisfies).
# Delete once the FusionBench release pinned in pyproject.toml no longer imports it.
if not hasattr(modeling_clip, "CLIPVisionTransformer"):
    modeling_clip.CLIPVisionTransformer = modeling_clip.CLIPVisionModel  # type: ignore[attr-defined]

# FusionBench's loaders pass no `trust_remote_code`, for which transformers asks on the terminal
# whether to run the code beside a model. With no time for an answer it refuses instead. Code still
# runs if an entry of a pool has `trust_remote_code: true`.
dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
