"""Distance of PEFT's `add_weighted_adapter` from the weighted sum of the adapters' changes.

    python benchmarks/weighted_adapters.py

Random adapters of rank 4 on one linear layer. Results: `docs/howto/symptoms.md`.
"""

import warnings

import peft
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

KINDS = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}


class OneLayer(nn.Module):
    """A model of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.linear(x)


def distance(value: Tensor, expected: Tensor) -> str:
    """Return the distance from a expected tensor in per cent of its norm."""
    return f"{float(100 * (value - expected).norm() / expected.norm()):.0f}"


@torch.no_grad()
def main() -> None:
    """Print one line per kind of adapter."""
    warnings.simplefilter("ignore")
    print(f"PEFT {peft.__version__}")
    print(
        "| adapters | one, weight 1 | two, weights .5: linear | svd | cat |\n|:--|--:|--:|--:|--:|"
    )
    for label, options in KINDS.items():
        torch.manual_seed(0)
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules=["linear"], init_lora_weights=False, **options
        )
        model = get_peft_model(OneLayer(), config, "a")
        model.add_adapter("b", config)
        layer, x = model.base_model.model.linear, torch.randn(64, 32)

        def changed(name: str, model=model, layer=layer, x=x) -> Tensor:
            model.set_adapter(name)
            return model(x) - layer.base_layer(x)

        model.add_weighted_adapter(["a"], [1.0], "same")
        cells = [distance(changed("same"), changed("a"))]
        expected = 0.5 * (layer.get_delta_weight("a") + layer.get_delta_weight("b"))
        for kind in ("linear", "svd", "cat"):
            model.add_weighted_adapter(["a", "b"], [0.5, 0.5], kind, combination_type=kind)
            got = layer.get_delta_weight(kind)
            cells.append("-" if label == "DoRA" else distance(got, expected))
        print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
