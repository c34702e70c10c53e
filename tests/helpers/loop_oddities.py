"""Parts of blocks with custom functions, hooks, contexts and unusual operators; and the table of all parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import loop_parts as plain
from tests.helpers import loop_stateful as stateful
from tests.helpers.loop_parts import WIDTH, Piece, numerics


class Halved(torch.autograd.Function):
    """Changes its saved tensor in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ctx.saved_tensors[0].mul_(0.5)
        return grads[0] * 2


class Copied(Piece):
    """A copy made by a cast to the same dtype; a backward changes its own copy."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        copied = (h.to(h.dtype, copy=True), h.clone(), h.contiguous().to(torch.float64).to(h.dtype))[self.variant]
        return h.sin() + (Halved.apply(copied) if self.late else copied.cos())


class Recurrent(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.layer = (nn.GRU, nn.LSTM)[variant](WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x)[0])


class Routed(Piece):
    """Two experts, chosen by values or alternately."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.variant == 1:
            return self.experts[self.step % 2 if self.late else 0](x) * weights[..., :1]
        flat, y = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for k, expert in enumerate(self.experts):
            rows = (weights.flatten(0, 1).argmax(-1) == k).nonzero()[:, 0]
            y = y.index_add(0, rows, (expert(flat[rows]) * weights.flatten(0, 1)[rows, k : k + 1]).to(y.dtype))
        return y.view_as(x)


class StraightThrough(Piece):
    """Rounded weights or activations whose gradient is passed on."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bits = 8 if self.late else 16
        if self.variant == 0:
            h = self.layer(x)
            return F.silu(h + ((h * bits).round() / bits - h).detach())
        w = self.layer.weight
        return F.silu(F.linear(x, w + ((w * bits).round() / bits - w).detach(), self.layer.bias))


class Tied(Piece):
    """One weight that is used twice, once transposed."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.layer = nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.layer(x))
        return F.linear(h, self.layer.weight.t()) if self.variant == 0 else h @ self.layer.weight


class Scaled(torch.autograd.Function):
    """Keeps a number and an undifferentiated tensor on its context, and saves input and output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = (x * scale).tanh()
        ctx.save_for_backward(x, y)
        ctx.scale, ctx.mean = scale, x.detach().mean()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return grads[0] * (1 - y * y) * ctx.scale + 0 * x * ctx.mean, None


class Updated(torch.autograd.Function):
    """Changes its input in place and marks it dirty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


class Weighed(torch.autograd.Function):
    """A hand-written linear layer: it saves its weight, and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, 1).t() @ x.flatten(0, 1)


class Custom(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.variant == 0:
            return self.out(Scaled.apply(h, 1.0 / (1 + self.step) if self.late else 1.0))
        if self.variant == 1:
            return self.out(F.gelu(Updated.apply(h + 1 if not self.late else h)))
        if self.variant == 2:
            return Weighed.apply(F.silu(h), self.out.weight.to(h.dtype))
        return self.out(Halved.apply(h) + (h.sin() if not self.late else 0.0))


class Hooked(Piece):
    """Module hooks and tensor hooks that change the tensors; the late ones are added late."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hook: Any = None

    def prepare(self, step: int, late: bool) -> None:
        super().prepare(step, late)
        if late and self.hook is None:
            self.hook = (
                lambda: self.up.register_forward_hook(lambda m, given, result: result * 2),
                lambda: self.up.register_forward_pre_hook(lambda m, given: (given[0] * 0.5,)),
                lambda: self.up.register_full_backward_hook(lambda m, below, above: (below[0] * 0.5,)),
                lambda: None,
            )[self.variant]()

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.variant == 3 and self.late and h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return self.out(h)


class Operators(Piece):
    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        if self.variant == 0:
            h = torch.einsum("bsh,bth->bst", a, b).softmax(-1) @ x
        elif self.variant == 1:
            h = torch.cat([a.cumsum(1), b], 1).mean(1, keepdim=True).expand_as(a) * a
        elif self.variant == 2:
            h = torch.where(a > b, a.square(), b.sigmoid()).roll(1, 1)
        elif self.variant == 3:
            h = torch.stack([a, b]).amax(0) + torch.logsumexp(b, -1, keepdim=True)
        elif self.variant == 4:
            h = torch.fft.irfft(torch.fft.rfft(a.float(), dim=1) * 0.5, n=a.shape[1], dim=1).to(a.dtype) * b
        else:
            h = F.glu(torch.cat([a, b], -1)).unfold(1, 2, 2).flatten(1, 1).mean(-1)
            h = h.repeat_interleave(2, 1).float().to(x.dtype)
        return self.out(h)


class Regions(Piece):
    """Contexts inside a block: precision, gradients off, detached parts."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == 0:  # as in norms that compute in float32
            with torch.autocast("cpu", enabled=False):
                h = F.gelu(F.linear(x.float(), self.up.weight.float(), self.up.bias.float())).to(x.dtype)
        elif self.variant == 1:
            with torch.autocast("cpu", torch.bfloat16) if self.late else nullcontext():
                h = F.gelu(self.up(x)).to(x.dtype)
        elif self.variant == 2:
            with torch.no_grad() if self.late else nullcontext():
                h = F.gelu(self.up(x))
            h = h * x
        elif self.variant == 3:
            h = F.gelu(self.up(x.detach() if self.late else x)) + x
        elif self.variant == 4:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                h = (F.silu(self.up(x)) * self.up(x)).to(x.dtype)
        else:  # like a kernel that depends on the numerics' state, on hardware where they make a difference
            h = F.gelu(self.up(x)) * (1 + zlib.crc32(repr(numerics()).encode()) % 7 * 0.1)
        return self.out(h)


MAKERS: dict[str, Callable[[int, int], Piece]] = {
    "mlp": plain.Mlp,
    "attention": plain.Attention,
    "norm": plain.Norm,
    "functional_norm": plain.FunctionalNorm,
    "conv": plain.Conv,
    "made_weight": plain.MadeWeight,
    "masked": plain.Masked,
    "frozen_merge": plain.FrozenMerge,
    "in_place": plain.InPlace,
    "decay": plain.Decay,
    "clamped": plain.Clamped,
    "data_write": plain.DataWrite,
    "dropout": plain.Dropout,
    "checkpointed": plain.Checkpointed,
    "states": stateful.States,
    "generators": stateful.Generators,
    "memory": stateful.Memory,
    "embedding": stateful.Embedding,
    "scheduled": stateful.Scheduled,
    "cached": stateful.Cached,
    "adapters": stateful.Adapters,
    "codebook": stateful.Codebook,
    "grown": stateful.Grown,
    "counted": stateful.Counted,
    "depth": stateful.Depth,
    "copied": Copied,
    "function": Custom,
    "hooked": Hooked,
    "operators": Operators,
    "regions": Regions,
    "recurrent": Recurrent,
    "routed": Routed,
    "straight_through": StraightThrough,
    "tied": Tied,
}
"""What makes a part, by its kind: called with its variant and the index of its block."""
