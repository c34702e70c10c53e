"""A decoder that is difficult to shard: weights used as activations, through views, by several blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.helpers.models import WIDTH, Attention, Mlp

VOCABULARY = 61


class ShiftedNorm(nn.Module):
    """A norm that uses its weight as an activation (``1 + weight``), and once more detached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        return scaled + x * self.weight.detach()


class Expert(nn.Module):
    """An expert whose matrix is used through views and through ``data``, which are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ShiftedNorm()
        self.up = nn.Parameter(torch.empty(40, WIDTH))
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = torch.sigmoid(y @ self.up.data.t())
        return torch.tanh(self.down(nn.functional.silu(y @ self.up.t()) * gate))


class Experts(nn.Module):
    """A router and its experts: every token goes to one of them, so shapes change between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return x + sum(e(x * share[..., i : i + 1]) for i, e in enumerate(self.experts))


class Layer(nn.Module):
    """One block: attention, feed-forward, experts, and a scale of its own that follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.moe = Attention(), Mlp(), Experts()
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor, shared: nn.Module) -> Tensor:
        y = self.moe(self.mlp(self.attention(x)))
        return x + torch.tanh(shared(y) * self.scale) * y


class Decoder(nn.Module):
    """Embedding, blocks, head; every block uses one projection of the root."""

    def __init__(self, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, order: Sequence[int] | None = None) -> Tensor:
        x = self.embed(input_ids)
        for i in range(len(self.layers)) if order is None else order:
            x = self.layers[i](x, self.shared)
        return self.head(self.norm(x))
