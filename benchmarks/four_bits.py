"""Four-bit weights of merged and repaired models, as a post-merging method of comparisons.

`scripts/results_four_bits.sh` runs it. llm-compressor quantizes every linear module except the
head, on the samples of the repair. The returned model has the quantized values in its own
precision, so it is scored like all others. Environment: constraints/after.txt.
"""

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusion_bench_featcal.lab.rivals import MethodResult, SampleSettings
from fusion_bench_featcal.settings.fields import setting


class RoundedWeights(SampleSettings):
    """Round a model's weights to fewer bits."""

    rounding: str = setting(
        "gptq",
        "`bfloat16`: all weights. `gptq` and `nearest`: linear modules to 4 bits, by GPTQ on the "
        "samples, or each weight to the nearest value.",
        choices=("bfloat16", "gptq", "nearest"),
    )
    group_size: int = setting(
        64, "Inputs with one scale. It divides the width of every linear module.", ge=1
    )

    @torch.no_grad()
    def post_merge(self, merged: Any, inputs: Any) -> MethodResult:
        """Return the model with rounded weights."""
        if self.rounding == "bfloat16":
            for value in merged.parameters():
                value.copy_(value.bfloat16())
            return MethodResult(merged)
        rows, counts = list[dict[str, Tensor]](), dict[str, int]()
        if self.rounding == "gptq":
            for task, batches in inputs.batches(self.calibration_settings).items():
                task_rows = [row for batch in batches for row in unpadded(batch)]
                counts[task] = len(task_rows)
                rows += task_rows
        modules = dict(merged.named_modules())
        for name, values in quantized_weights(merged, rows, self.group_size).items():
            modules[name].weight.copy_(values)
        return MethodResult(merged, counts)


def unpadded(batch: Any) -> list[dict[str, Tensor]]:
    """Return a batch's rows as batches of one without padding, which GPTQ would count."""
    return [
        {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def quantized_weights(
    model: Any, rows: list[dict[str, Tensor]], group_size: int
) -> dict[str, Tensor]:
    """Return linear module -> its 4-bit weights, by GPTQ on `rows`, or without rows the nearest."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    scheme = {"targets": ["Linear"], "weights": weights | {"group_size": group_size}}
    groups: Any = {"linear": scheme}
    modifier = GPTQModifier if rows else QuantizationModifier
    loader = DataLoader(cast(Any, rows), batch_size=None) if rows else None
    result: Any = oneshot(
        model=deepcopy(model),
        recipe=modifier(config_groups=groups, ignore=["lm_head"]),
        dataset=loader,
    )
    return {
        name: fake_quantize(
            module.weight,
            module.weight_scale,
            module.weight_zero_point,
            module.quantization_scheme.weights,
        )
        for name, module in result.named_modules()
        if hasattr(module, "weight_scale")
    }
