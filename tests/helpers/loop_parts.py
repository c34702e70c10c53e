"""The parts of the blocks of training programs: layers without state other than weights and buffers.

Every piece takes and returns ``[batch, length, WIDTH]``. ``late`` makes it peculiar: it is set before a step, by
the program. Pieces that keep other state, draw from generators or can be switched are in ``loop_stateful``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.torches import CURRENT_PRECISIONS

WIDTH = 16


def numerics() -> tuple[object, ...]:
    """Return the state that decides how kernels compute, read without the getters that raise on mixed settings."""
    b = torch.backends
    modules = (b, b.cuda.matmul, b.cudnn.conv, b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv) if CURRENT_PRECISIONS else ()
    return (
        *(m.fp32_precision for m in modules),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        b.cuda.flash_sdp_enabled(),
    )


class Piece(nn.Module):
    """A part of a block.

    Args:
        variant: Number of the variant.
        index: Index of its block.
    """

    def __init__(self, variant: int, index: int) -> None:
        super().__init__()
        self.variant, self.index = variant, index
        self.late, self.step = False, 0

    def prepare(self, step: int, late: bool) -> None:
        """Get ready for a step."""
        self.step, self.late = step, late

    def turn(self, n: int) -> None:
        """Get ready for the n-th call of the block in a forward."""

    def switch(self) -> None:
        """Make the changes that a caller may make between two calls."""

    def merge(self) -> None:
        """Fold additions into a weight."""

    def unmerge(self) -> None:
        """Undo ``merge``."""

    def forget(self) -> None:
        """Drop graphs kept from one step to the next."""


class Mlp(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=variant != 1), nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == 0:
            return self.down(F.gelu(self.up(x)))
        if self.variant == 1:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.variant == 2:
            return self.down(F.gelu(self.up(x), approximate="tanh") * self.gate(x).sigmoid())
        if self.variant == 3:
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.gelu(self.up(x.flatten(0, 1)))).view(x.shape)  # of two dimensions: other nodes in the graph


class Attention(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def jagged(self, x: Tensor) -> Tensor:
        """Attend within sequences of different lengths, packed as nested tensors are."""
        offsets = torch.tensor([0, 1, x.shape[1] * 2, x.shape[0] * x.shape[1]])
        packed = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), offsets)
        q, k, v = (m(packed).unflatten(-1, (2, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return y.values().view(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (2, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.variant == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.variant == 3:
            return self.o(self.jagged(x))
        else:
            scores = q @ k.transpose(-1, -2) / 8**0.5
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -1e4) if self.variant == 1 else scores + hidden * -1e4
            y = F.dropout(scores.softmax(-1), 0.1, self.training and self.late) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Norm(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.norm: nn.Module = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH, elementwise_affine=False),
            nn.RMSNorm(WIDTH),
            nn.LayerNorm(WIDTH, bias=False),
            nn.RMSNorm(WIDTH, elementwise_affine=False),
        )[variant]
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.norm(x)))


class FunctionalNorm(Piece):
    """A norm computed by a functional, and a leaf module that returns its input: timm's BatchNormAct2d."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.full((WIDTH,), 0.5 * index))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.leaf: nn.Module = (nn.Identity(), nn.Dropout(0.0), nn.Flatten(3))[variant % 3]
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        if self.variant < 3:
            y = F.batch_norm(y, self.mean, self.var, self.weight, self.bias, self.training, 0.1)
        else:
            y = F.group_norm(y, 2, self.weight, self.bias if self.late or self.variant > 3 else None)
        y = y.transpose(1, 2)
        return self.out(F.silu(self.leaf(y) if self.variant % 3 != 2 else self.leaf(y[..., None])[..., 0]))


class Conv(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=variant != 0)
        self.norm: nn.Module = (nn.BatchNorm2d(WIDTH), nn.GroupNorm(2, WIDTH), nn.InstanceNorm2d(WIDTH))[variant]
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2).unflatten(2, (2, -1))
        y = self.second(F.silu(self.norm(F.silu(self.conv(y)))))
        return y.flatten(2).transpose(1, 2)


class MadeWeight(Piece):
    """A weight computed from parameters: by hooks, by parametrizations, or in forward."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        make: Callable[[nn.Module], nn.Module] | None = (
            torch.nn.utils.weight_norm,
            torch.nn.utils.parametrizations.weight_norm,
            torch.nn.utils.spectral_norm,
            torch.nn.utils.parametrizations.spectral_norm,
            None,
            None,
        )[variant]
        if make is not None:
            make(self.up), make(self.down)
        elif variant == 4:
            self.up.register_forward_pre_hook(_standardized)
        self.scale = nn.Parameter(torch.ones(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == 5:
            h = F.linear(x, self.up.weight * self.scale, self.up.bias)
        else:
            h = self.up(x)
        return self.down(F.leaky_relu(h, 0.2))


def _standardized(module: Any, given: Any) -> None:
    weight = module._parameters["weight"]
    module.__dict__["weight"] = weight - weight.mean(1, keepdim=True)


class Masked(Piece):
    """Pruned weights: the mask is a buffer, and begins to prune late."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        for layer in (self.up, self.down):
            prune.identity(layer, "weight")

    def prepare(self, step: int, late: bool) -> None:
        super().prepare(step, late)
        for layer in (self.up, self.down):
            if late:
                mask = (layer.weight_orig.detach().abs() > 0.03 * step).to(layer.weight_mask.dtype)
                if self.variant == 0:
                    layer.weight_mask.copy_(mask)
                else:
                    layer.weight_mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class FrozenMerge(Piece):
    """A weight that silently replaces the layer's for the duration of a forward."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.layer, self.delta = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.05)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            return self.out(F.silu(self.layer(x)))
        own = self.layer._parameters.pop("weight")
        made = own + self.delta if self.variant == 0 else (own + self.delta).detach()
        self.layer.__dict__["weight"] = made
        try:
            return self.out(F.silu(self.layer(x)))
        finally:
            del self.layer.__dict__["weight"]
            self.layer._parameters["weight"] = own


class InPlace(Piece):
    """Changes in place: legal ones, and from ``late`` on (variants 2 and 5) of saved tensors."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.variant == 0:
            h.relu_()
        elif self.variant == 1:
            h += 1.0
            h[..., :4].mul_(2)
        elif self.variant == 2:
            h = h.exp()
            if self.late:
                h.mul_(0.5)
        elif self.variant == 3:
            h = h.sigmoid_().transpose(1, 2).contiguous().tanh_().transpose(1, 2)
        elif self.variant == 4:
            kept = h.clone()
            kept[:, 0] = h[:, -1].detach() if self.late else 0.0
            h = kept
        else:
            y = h.sin()
            if self.late:
                h.add_(1.0)
            h = y
        return self.down(h)


class Decay(Piece):
    """A parameter that the forward changes after its use, under ``no_grad``."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) + self.bias if self.variant != 1 else self.up(x) * (1 + self.bias)
        if self.late:
            with torch.no_grad():
                if self.variant == 2:
                    self.bias.data.mul_(0.7)
                else:
                    self.bias.mul_(0.7)
        return self.down(F.gelu(h))


class Clamped(Piece):
    """An unsaved intermediate, changed under ``no_grad``."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x.flatten(0, 1))
        if self.late:
            with torch.no_grad():
                h.clamp_(-0.1, 0.1) if self.variant == 0 else h.index_fill_(1, torch.tensor([0]), 0.3)
        return self.down(h.view(-1, WIDTH).exp()).view(x.shape)


class DataWrite(Piece):
    """A write through ``.data``, which bumps no version, between two operators that save the tensor."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = h.sin() if self.variant == 0 else 0.0
        if self.late:
            h.data.mul_(0.9)
        return self.down(h.cos() + y)


class Dropout(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.drop: nn.Module = (
            nn.Dropout(0.3),
            nn.AlphaDropout(0.3),
            nn.Dropout1d(0.3),
            nn.Dropout(0.3, inplace=True),
        )[variant]
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(self.drop(h) if self.late else h))


class Checkpointed(Piece):
    """Torch's checkpoint inside a block, or around a part of it."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Dropout(0.2)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.variant < 2 or not self.late:
            y = checkpoint(self.inner, x, use_reentrant=self.variant % 2 == 0)
        else:  # nested
            y = checkpoint(lambda t: checkpoint(self.inner, t, use_reentrant=False), x, use_reentrant=self.variant == 2)
        return F.silu(y)  # type: ignore[arg-type]
