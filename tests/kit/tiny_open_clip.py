"""open_clip's vision transformer rebuilt from torch's parts, so that tests need no open_clip."""

from collections import OrderedDict

import torch
from tiny_models import Suite, normal, suite_of
from torch import Tensor, nn
from transformers.activations import QuickGELUActivation

from fusion_bench_featcal.suites import open_clip

WIDTH, HEADS, HIDDEN, FEATURES = 12, 3, 20, 7


class Block(nn.Module):
    """Attention and MLP after a norm each, called as open_clip calls them."""

    def __init__(self, quick: bool, batch_first: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.ln_2 = nn.LayerNorm(WIDTH)
        gelu = QuickGELUActivation() if quick else nn.GELU()
        self.mlp = nn.Sequential(
            OrderedDict(c_fc=nn.Linear(WIDTH, HIDDEN), gelu=gelu, c_proj=nn.Linear(HIDDEN, WIDTH))
        )

    def forward(self, q_x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.ln_1(q_x)
        x = q_x + self.attn(x, x, x, need_weights=False, attn_mask=attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Blocks that may want positions in first place."""

    def __init__(self, depth: int, quick: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.resblocks = nn.ModuleList(Block(quick, batch_first) for _ in range(depth))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        for block in self.resblocks:
            x = block(x, attn_mask=attn_mask)
        return x if self.batch_first else x.transpose(0, 1)


class Tower(nn.Module):
    """The vision tower: its weights have open_clip's names."""

    def __init__(self, depth: int = 2, *, quick: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 4, 4, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(torch.randn(5, WIDTH))
        self.ln_pre = nn.LayerNorm(WIDTH)
        self.transformer = Transformer(depth, quick, batch_first)
        self.ln_post = nn.LayerNorm(WIDTH)
        self.proj = nn.Parameter(torch.randn(WIDTH, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv1(x).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(x), 1, -1)
        tokens = torch.cat([first, patches], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(tokens)))[:, 0] @ self.proj


class TwoTowers(nn.Module):
    """A CLIP model: the text tower's blocks are at its root, and fused too."""

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual, self.transformer = visual, Transformer(1)


def converted(vision_model: nn.Module, *, batch_first: bool) -> nn.Module:
    """A transformers CLIP vision model as such a tower."""
    torch.manual_seed(0)
    state = {n.removeprefix("vision_model."): t for n, t in vision_model.state_dict().items()}
    tower = Tower(batch_first=batch_first).double().eval()
    tower.load_state_dict({**open_clip.to_open_clip(state), "proj": tower.proj.detach()})
    return tower


def tower_suite(*, seed: int = 0, quick: bool = True, batch_first: bool = True) -> Suite:
    """Base, experts and merger of such towers, in float64."""
    torch.manual_seed(seed)
    inputs: dict[str, list] = {
        f"task_{i}": [normal(seed + 10 * i, size, 3, 8, 8) * (i + 1) for size in (4, 3)]
        for i in range(2)
    }
    blocks = ["transformer.resblocks.0", "transformer.resblocks.1"]
    return suite_of(Tower(quick=quick, batch_first=batch_first), inputs, blocks, seed)
