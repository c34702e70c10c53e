"""The same training in a host, without and with ebbtide: losses and parameters must be bitwise equal."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide
from tests.helpers.oracle import same_bits

MODES: dict[str, dict[str, Any]] = {"auto": {}, "enable_ckpt": {"enable_ckpt": True}}
"""Name → options. ``Auto`` plans after three steps: train at least four."""

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of a training: losses step by step, parameters, and the handle's figures."""

    losses: list[Tensor]
    parameters: dict[str, Tensor]
    stats: ebbtide.Stats | None = None


Train = Callable[[dict[str, Any] | None], Trained]
"""Trains a model made anew, with these options of ``enable_activation_offloading``; None: without ebbtide."""


def trained(losses: Iterable[float | Tensor], model: nn.Module, handle: ebbtide.Handle | None) -> Trained:
    """Return copies of a training's results."""
    return Trained(
        losses=[torch.as_tensor(loss).detach().clone() for loss in losses],
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        stats=None if handle is None else handle.stats(),
    )


def check_bitwise(train: Train) -> None:
    """Train without ebbtide, with the default policy and with ``enable_ckpt=True``, and compare."""
    plain = train(None)
    values = [loss.item() for loss in plain.losses]
    assert len(values) >= 4 and len(set(values)) > 1, f"losses without a trend: {values}"
    for mode, options in MODES.items():
        ours = train({"min_bytes": 0, **options})
        assert differences(plain, ours) == [], mode
        stats = ours.stats
        assert stats is not None and stats.packs > 0, mode
        assert stats.total_copy_out_bytes + stats.total_recomputes + stats.checkpointed_blocks > 0, mode


def differences(one: Trained, other: Trained) -> list[str]:
    """Name everything that differs bitwise."""
    found = [f"{len(one.losses)} losses against {len(other.losses)}"] if len(one.losses) != len(other.losses) else []
    if one.parameters.keys() != other.parameters.keys():
        found.append(f"parameters of one side only: {sorted(one.parameters.keys() ^ other.parameters.keys())}")
    losses = zip(one.losses, other.losses, strict=False)
    found += [f"loss of step {step}" for step, pair in enumerate(losses, 1) if not same_bits(*pair)]
    both = one.parameters.keys() & other.parameters.keys()
    return found + [name for name in sorted(both) if not same_bits(one.parameters[name], other.parameters[name])]


def seeded(seed: int = 0) -> None:
    """Seed every generator that a host may use."""
    random.seed(seed)
    torch.manual_seed(seed)


def enabled(model: nn.Module, options: Mapping[str, Any] | None) -> ebbtide.Handle | None:
    """Enable offloading with some options; None: do not enable it."""
    return None if options is None else ebbtide.enable_activation_offloading(model, **options)


def train_loop(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    options: Mapping[str, Any] | None,
    *,
    steps: int = STEPS,
) -> Trained:
    """Train in a loop of our own: the model, its blocks and its operators are the package's."""
    seeded()
    model = make()
    handle = enabled(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[Tensor] = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if handle is not None:
        handle.close()
    return trained(losses, model, handle)


def loop(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Tensor]) -> Train:
    """Return ``train_loop`` of a model, for ``check_bitwise``."""
    return functools.partial(train_loop, make, loss_of)


def batch(step: int, *shape: int) -> Tensor:
    """Return the numbers of one step, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def encoder_layers(count: int = 3, width: int = 32) -> nn.Sequential:
    """Return a stack of transformer layers with dropout: the random numbers must be the same too."""
    layers: Sequence[nn.Module] = [
        nn.TransformerEncoderLayer(width, 4, dim_feedforward=64, dropout=0.1, batch_first=True) for _ in range(count)
    ]
    return nn.Sequential(*layers)
