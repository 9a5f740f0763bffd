"""Names that FusionBench 0.2.33 needs and newer transformers lack; set by importing this module.

A module that needs FusionBench's CLIP task pools imports this one first:

    import fusion_bench_featcal.compat  # noqa: F401

    # isort: split
    from fusion_bench.taskpool import CLIPVisionModelTaskPool
"""

from transformers.models.clip import modeling_clip

# transformers 5.6 merged CLIPVisionTransformer into CLIPVisionModel, and FusionBench's CLIP task
# pools import the old name (for annotations and isinstance checks, which the alias satisfies).
# Delete once the FusionBench release pinned in pyproject.toml no longer imports it.
if not hasattr(modeling_clip, "CLIPVisionTransformer"):
    modeling_clip.CLIPVisionTransformer = modeling_clip.CLIPVisionModel  # type: ignore[attr-defined]
