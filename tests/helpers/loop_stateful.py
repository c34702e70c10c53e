"""Parts of blocks that keep state, draw from their own generators, or can be switched from outside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.loop_parts import WIDTH, Piece

OF_THE_MODULE: dict[int, torch.Generator] = {}
"""Generators that belong to nobody but this module, by block."""


class States(Piece):
    """Computes with a value that the caller has set: a tuple, list, dictionary, module, tensor, function or object."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.names = ["first"]
        self.object = SimpleNamespace(scale=1.0)
        self.register_buffer("factor", torch.ones(()), persistent=False)
        self.hold(0)

    def hold(self, n: int) -> None:
        """Set the value for the next call."""
        self.now = n
        scale = 1.0 + 0.5 * n
        self.tuple, self.table = (scale, n), {"scale": scale}
        self.names[0] = "second" if n % 2 else "first"
        self.chosen = (self.first, self.second)[n % 2]
        self.tensor, self.function = torch.tensor(scale), lambda t: t * scale
        self.object.scale = scale

    def prepare(self, step: int, late: bool) -> None:
        super().prepare(step, late)
        self.hold(step % 3 if late else 0)

    def turn(self, n: int) -> None:
        if self.late:
            self.hold(n + self.step % 3)

    def switch(self) -> None:
        if self.late:
            self.hold(self.now + 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.variant == 0:
            return F.gelu(h * self.tuple[0])
        if self.variant == 1:
            return F.gelu(getattr(self, self.names[0])(x))
        if self.variant == 2:
            return F.gelu(h * self.table["scale"])
        if self.variant == 3:
            return F.gelu(self.chosen(x))
        if self.variant == 4:
            return F.gelu(h * self.tensor)
        return F.gelu(self.function(h) if self.variant == 5 else h * self.object.scale)


class Generators(Piece):
    """Draws noise from a generator that a checkpoint would have to find first."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        own = torch.Generator().manual_seed(index)
        OF_THE_MODULE[index] = torch.Generator().manual_seed(index)
        python, numpy = random.Random(index), np.random.default_rng(index)
        self.draw: Callable[[], float] | None = None
        if variant == 0:
            self.generator = own
        elif variant == 1:
            self.generators = [own]
        elif variant == 2:
            self.draw = lambda: torch.rand((), generator=own).item()
        elif variant == 4:
            self.python = python
        elif variant == 5:
            self.numpy = numpy
        elif variant == 6:
            self.draw = python.random
        elif variant == 7:
            self.numpies = {"noise": np.random.RandomState(index)}
        elif variant == 8:
            self.factors = itertools.cycle((0.5, 1.0, 2.0, 0.7))

    def noise(self) -> float:
        """Draw a random number."""
        sources: tuple[Callable[[], Any], ...] = (
            lambda: torch.rand((), generator=self.generator).item(),
            lambda: torch.rand((), generator=self.generators[0]).item(),
            lambda: self.draw(),
            lambda: torch.rand((), generator=OF_THE_MODULE[self.index]).item(),
            lambda: self.python.random(),
            lambda: self.numpy.random(),
            lambda: self.draw(),
            lambda: self.numpies["noise"].rand(),
            lambda: next(self.factors),
            lambda: random.random() + float(np.random.rand()),
            lambda: torch.rand(()).item(),
        )
        return float(sources[self.variant]())

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h * (0.5 + self.noise()) if self.late else h))


class Memory(Piece):
    """Keeps what it computed for the next call: Transformer-XL's memory."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory: Tensor | None = None
        self.past: list[Tensor] = []
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        before = (self.memory, self.past[-1] if self.past else None, self.kept, self.kept)[self.variant]
        y = h if before is None else h + 0.5 * before
        if self.late:
            after = h.detach().float().mean((0, 1)).to(h.dtype)
            if self.variant == 0:
                self.memory = after
            elif self.variant == 1:
                self.past.append(after)
            elif self.variant == 2:
                self.kept.copy_(after)
            else:
                self.kept = after.to(self.kept.dtype)
        return self.down(F.gelu(y))


class Embedding(Piece):
    """Looks up positions; ``max_norm`` changes the table in forward."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.table = nn.Embedding(8, WIDTH, max_norm=(2.0, None, 1e9)[variant], sparse=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (torch.arange(x.shape[1]) + (self.step if self.late else 0)) % 8
        return self.out(F.silu(x + self.table(rows).sin()))


class Scheduled(Piece):
    """A number that changes from step to step."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def switch(self) -> None:
        self.step += 1

    def forward(self, x: Tensor) -> Tensor:
        a = 1.0 / (1 + self.step) if self.late else 1.0
        h = self.up(x)
        if self.variant == 0:
            h = torch.add(h, x, alpha=a).clamp(max=a).exp()
        elif self.variant == 1:
            h = h.abs().add(0.1).pow(1 + a)
        elif self.variant == 2:
            h = F.softplus(h, beta=1 + a) * F.leaky_relu(h, a / 2)
        else:
            h = torch.lerp(h, x.to(h.dtype), a).tanh()
        return self.down(h)


class Cached(Piece):
    """A merged weight, or a table, that outlives its step: rebuilt in every second step."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.delta = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.merged: Tensor | None = None

    def prepare(self, step: int, late: bool) -> None:
        super().prepare(step, late)
        if not late or step % 2 == 0:
            self.merged = None

    def forget(self) -> None:
        self.merged = None

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is None:
            made = self.base + self.delta
            self.merged = (made, made.detach(), made.t())[self.variant]
        return self.out(F.gelu(x.flatten(0, 1) @ self.merged.to(x.dtype))).view(x.shape)


class Adapters(Piece):
    """A frozen or trained base with two low-rank adapters like PEFT's: active ones in a list, merged into the base."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.base, self.active, self.merged = nn.Linear(WIDTH, WIDTH), ["a"], False
        self.adapter_a, self.adapter_b = (
            nn.ParameterList([torch.randn(2, WIDTH) * 0.3, torch.randn(WIDTH, 2) * 0.3]) for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def delta(self) -> Tensor:
        """Return what the active adapters add to the weight."""
        return sum((getattr(self, f"adapter_{n}")[1] @ getattr(self, f"adapter_{n}")[0] for n in self.active), 0.0)  # type: ignore[return-value]

    def switch(self) -> None:
        if self.late:
            self.active = ["b"] if self.active == ["a"] else ["a"]
            if self.variant == 1:
                self.active = ["a", "b"]

    def merge(self) -> None:
        if self.late and not self.merged:
            with torch.no_grad():
                self.added = self.delta().to(self.base.weight.dtype)
                self._add(self.added)
            self.merged = True

    def unmerge(self) -> None:
        if self.merged:
            with torch.no_grad():
                self._add(-self.added)
            self.merged = False

    def _add(self, delta: Tensor) -> None:
        if self.variant == 3:
            self.base.weight.data = self.base.weight.data + delta
        elif self.variant == 2:
            self.base.weight.add_(delta)
        else:
            self.base.weight.data += delta

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.merged:
            for name in self.active:
                down, up = getattr(self, f"adapter_{name}")
                y = y + F.linear(F.linear(x, down), up)
        return self.out(F.silu(y))


class Codebook(Piece):
    """The nearest of a few vectors, which follow the data: VQ-VAE with a moving average."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        nearest = torch.cdist(h.detach().float(), self.codes.float()[None]).argmin(-1)
        codes = F.embedding(nearest, self.codes).to(h.dtype)
        if self.late and self.training:
            mean = h.detach().float().mean((0, 1)).to(self.codes.dtype)
            if self.variant == 0:
                self.codes.lerp_(mean.expand_as(self.codes), 0.1)
            elif self.variant == 1:
                self.codes = self.codes * 0.9 + 0.1 * mean
            else:
                self.codes.data.mul_(0.9).add_(0.1 * mean)
        return self.out(F.gelu(h * 0.5 + (codes - h * 0.5).detach() + (h - codes).square()))


class Grown(Piece):
    """Tables of angles that grow with the longest sequence, as rotary embeddings keep them."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.longest, self.angles = 0, torch.zeros(0, WIDTH)
        self.register_buffer("kept", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1] + (self.step if self.late else 0)
        if length > self.longest:
            self.longest = length
            made = (torch.arange(length)[:, None] * 0.3 + torch.arange(WIDTH) * 0.1) / (1 + self.step * 0.1)
            if self.variant == 0:
                self.angles = made.cos()
            elif self.variant == 1:
                self.register_buffer("kept", made.cos(), persistent=False)
            else:
                self.kept.resize_(length, WIDTH).copy_(made.cos())
        table = self.angles if self.variant == 0 else self.kept
        return self.out(F.gelu(self.up(x) * table[: x.shape[1]].to(x.dtype)))


class Counted(Piece):
    """Counts its calls, in a number or in a list, and computes with the count."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.log = 0, []

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            self.calls += 1
            self.log.append(1)
        count = self.calls if self.variant == 0 else len(self.log)
        return self.out(F.gelu(self.up(x) / (1 + count)))


class Depth(Piece):
    """A branch that is skipped at random: the generator, and how often, differ."""

    def __init__(self, variant: int, index: int) -> None:
        super().__init__(variant, index)
        self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chance = 0.5 if self.late else 0.0
        drawn = (random.random, lambda: float(np.random.rand()), lambda: torch.rand(()).item())[self.variant]()
        return self.out(x) if self.training and drawn < chance else self.out(F.gelu(self.up(x)))
