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
        "norms calibrated though switched off",
        "engine/modules.py",
        'if site is None or (site.kind == "norm" and not calibrate_norm):',
        "if site is None:",
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
