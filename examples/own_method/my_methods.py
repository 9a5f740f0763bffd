"""A post-merging method of one's own: it scales the merged model's step from the base.

The folder in which `fusion_bench` is run is importable: there `my_methods.Scaled` can be named by
`_target_`. `featcal example own-method DIR` copies this file and prints such a command.
"""

import torch


class Scaled:
    """Multiplies the step from the base by a number."""

    def __init__(self, scale: float = 1.0):
        """Take the settings from YAML."""
        self.scale = float(scale)

    @property
    def settings(self):
        """All settings: a finished cell is made again when they change."""
        return {"scale": self.scale}

    def check(self, inputs):
        """Refuse what cannot work, before any model is loaded."""
        inputs.require_base("the step needs")

    @torch.no_grad()
    def post_merge(self, merged, inputs):
        """Return the improved model; `merged` may be changed in place."""
        base = dict(inputs.modelpool.load_pretrained_model().named_parameters())
        for name, value in merged.named_parameters():
            start = base[name].to(value)
            value.copy_(start + self.scale * (value - start))
        return merged

    def samples(self, model, tasks):
        """Task -> {"samples": number, "split": name} of the data that was used: none."""
        return {}

    def added(self, model):
        """Name -> parameters that the model carries besides the merged one's: none."""
        return {}
