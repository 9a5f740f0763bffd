"""Mistakes in families of models and in experts."""

from mistakes.entry import Mutation

MUTATIONS = [
    Mutation(
        "encoder's last norm skipped before the decoder",
        "families/t5.py",
        'return model.get_submodule("encoder.final_layer_norm")(call.hidden.clone())',
        "return call.hidden.clone()",
        "test_calibrate_t5.py",
    ),
    Mutation(
        "position bias handed on without the mask",
        "families/t5.py",
        'kwargs["position_bias"] = bias + kwargs["attention_mask"] if call.adds_mask else bias',
        'kwargs["position_bias"] = bias',
        "test_calibrate_t5.py",
    ),
    Mutation(
        "decoder_rows=targets ignored beside a mask",
        "families/t5.py",
        'return targets if mask is None or decoder_rows == "targets" else mask',
        "return targets if mask is None else mask",
        "test_calibrate_t5.py",
    ),
    Mutation(
        "expert's cross-attention fed by the calibrated encoder",
        "engine/loop.py",
        "ends = (batch.cal, batch.exp, batch.merged) if problem",
        "ends = (batch.cal, batch.cal, batch.merged) if problem",
        "test_calibrate_t5.py",
    ),
    Mutation(
        "blocks in reverse order",
        "families/clip.py",
        "    return [blocks]\n",
        "    return [blocks[::-1]]\n",
        "test_calibrate_oracle.py",
    ),
    Mutation(
        "rows of targets off by one in decoders",
        "families/rows.py",
        "predicts[:, :-1] = labelled[:, 1:]",
        "predicts[:] = labelled",
        "test_calibrate_decoders.py",
    ),
    Mutation(
        "every decoder block gets the first one's mask",
        "families/stack.py",
        "for key, value in call.kwargs[block].items()}",
        "for key, value in next(iter(call.kwargs.values())).items()}",
        "families/test_families.py test_calibrate_decoders.py",
    ),
    Mutation(
        "two towers of one size taken for one stack",
        "families/structure.py",
        "if not largest or _CLEARLY * (",
        "if not largest or 0 * (",
        "families/test_stack_family.py",
    ),
    Mutation(
        "steps that differ taken for equal",
        "engine/family_check.py",
        "if not gap <= max(",
        "if gap < 0 * max(",
        "engine/test_family_check.py",
    ),
    Mutation(
        "a block's writes into its arguments reach later blocks",
        "families/stack.py",
        "return copy.copy(value) if isinstance(",
        "return value if isinstance(",
        "engine/test_family_check.py",
    ),
    Mutation(
        "padding counts in encoders",
        "families/stack.py",
        'return mask_named(inputs, "attention_mask")',
        "return None",
        "test_model_types.py",
    ),
    Mutation(
        "a gain of one more than the weight solved as the weight",
        "engine/module_kinds.py",
        "return not own or _agrees(type(module), nn.LayerNorm) is not False",
        "return True",
        "test_model_types.py",
    ),
    Mutation(
        "norms calibrated though switched off",
        "engine/modules.py",
        'return site.kind == "norm" and not settings.calibrate_norm',
        "return False",
        "test_calibrate_oracle.py",
    ),
    Mutation(
        "rank left out of a LoRA expert's scale",
        "experts/lora.py",
        'return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)',
        "return alpha",
        "test_experts_lora.py",
    ),
]
