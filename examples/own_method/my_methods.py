"""An example of a post-merging method, which scales the merged model's step from the base.

Modules of the current folder are importable, so YAML can name `my_methods.Scaled` by `_target_`.
docs/howto/own-method.md has such a command.
"""

import torch

from fusion_bench_featcal.lab.rivals import Method
from fusion_bench_featcal.settings.fields import setting


class Scaled(Method):
    """Scale the step from the base by a number."""

    scale: float = setting(1.0, "Factor of the step.")

    def check(self, inputs):
        """Raise errors before any model is loaded."""
        inputs.require_base("the step needs")

    @torch.no_grad()
    def post_merge(self, merged, inputs):
        """Return the improved model. `merged` may be changed in place."""
        base = dict(inputs.modelpool.load_pretrained_model().named_parameters())
        for name, value in merged.named_parameters():
            base_value = base[name].to(value)
            value.copy_(base_value + self.scale * (value - base_value))
        return merged
