"""Mistakes in families of models and in experts."""

from mistakes.entry import Mutation

PAPER = "test_calibrate_oracle.py::test_paper_equals_the_oracle"

MUTATIONS = [
    Mutation(
        "the mask of Whisper's features hides its positions",
        "families/t5.py",
        "padding = mask_named(inputs, self.mask)",
        'padding = mask_named(inputs, "attention_mask")',
        "families/test_families.py",
    ),
    Mutation(
        "encoder's last norm skipped before the decoder",
        "families/t5.py",
        "BaseModelOutput(norm(ended.clone()))",
        "BaseModelOutput(ended.clone())",
        PAPER,
    ),
    Mutation(
        "position bias handed on without the mask",
        "families/t5.py",
        "kwargs[BIAS] = bias + kwargs[MASK] if call.adds_mask else bias",
        "kwargs[BIAS] = bias",
        PAPER,
    ),
    Mutation(
        "decoder_rows=targets ignored beside a mask",
        "families/t5.py",
        'targets if mask is None or decoder_rows == "targets" else mask',
        "targets if mask is None else mask",
        PAPER,
    ),
    Mutation(
        "blocks in reverse order",
        "families/stack.py",
        "        return [blocks]\n",
        "        return [blocks[::-1]]\n",
        PAPER,
    ),
    Mutation(
        "rows of targets off by one in decoders",
        "families/stack.py",
        "predicts[:, :-1] = labelled[:, 1:]",
        "predicts[:] = labelled",
        PAPER,
    ),
    Mutation(
        "every decoder block gets the first one's mask",
        "families/stack.py",
        "for key, value in call.kwargs[block].items()}",
        "for key, value in next(iter(call.kwargs.values())).items()}",
        PAPER,
    ),
    Mutation(
        "steps that differ taken for equal",
        "families/check.py",
        "if not gap <= max(",
        "if gap < 0 * max(",
        "families/test_check.py",
    ),
    Mutation(
        "a block's writes into its arguments reach later blocks",
        "families/stack.py",
        "return copy.copy(value) if isinstance(",
        "return value if isinstance(",
        "families/test_check.py",
    ),
    Mutation(
        "padding counts in encoders",
        "families/stack.py",
        'return {"": mask}',
        "return {}",
        "test_model_types.py",
    ),
    Mutation(
        "a gain of one more than the weight solved as the weight",
        "modules/kinds.py",
        "return runs_as(module, nn.LayerNorm) or _agrees(type(module), nn.LayerNorm) is not False",
        "return True",
        "test_model_types.py",
    ),
    Mutation(
        "a lower accuracy is no reason for the verdict",
        "folders/verdict.py",
        " or accuracy.value < -accuracy.half",
        "",
        "folders/test_verdicts.py",
    ),
    Mutation(
        "rank left out of a LoRA expert's scale",
        "experts/lora.py",
        "scale = self._alpha / (math.sqrt(len(down)) if self._has_root else len(down))",
        "scale = self._alpha",
        "test_experts.py",
    ),
    Mutation(
        "a LoRA expert's rows from the first ones of its factors",
        "experts/lora.py",
        "up[start : start + len(rows)]",
        "up[: len(rows)]",
        "test_experts.py",
    ),
    Mutation(
        "adapters with ranks of their own read as plain ones",
        "experts/lora.py",
        'if kind != "LORA" or odd or',
        'if kind != "LORA" or',
        "test_experts.py",
    ),
]
