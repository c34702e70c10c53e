"""Train one small model several ways, and compare every bit: losses, gradients of each step, final weights.

A run is kept as digests of bytes, so that runs of many steps fit in memory.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.planner.policies import PolicyPlan

RATE = 1e-3

Digests = dict[str, str | None]
"""What a run computed: name → digest of its bytes; None for a parameter without a gradient."""


@dataclass(frozen=True, repr=False)
class Recipes(PolicyPlan):
    """``Minimal`` with one method: what has a recipe is recomputed in every step, and no block is checkpointed.

    ``Minimal`` itself recomputes by recipes in its first two steps, and compares methods in the next six.
    """

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> ebbtide.Action:
        """Return KEEP: saved tensors are decided one by one."""
        return ebbtide.Action.KEEP


RECIPES = Recipes(ebbtide.Minimal(), "recipes", "what has a recipe is recomputed, the rest is offloaded")

WAYS: dict[str, dict[str, Any]] = {
    "minimal": {"policy": "minimal"},
    "recipes": {"policy": RECIPES},
    "offload": {"policy": "offload"},
    "auto": {"policy": "auto"},
    "verify": {"policy": "minimal", "verify": True},
}
"""Name → how offloading is enabled; every saved tensor counts, however small."""


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bytes."""
    flat = tensor.detach().reshape(-1).contiguous()
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    found.update(flat.view(torch.uint8).numpy())
    return found.hexdigest()


def loss_of(output: Any) -> Tensor:
    """Return the model's own loss, or the mean squares of all differentiable outputs."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.sum().float()
    found = list(floats(output))
    if not found:
        raise ValueError("no differentiable output")
    total = torch.zeros(())
    for one in found:
        total = total + one.float().square().mean()
    return total


def floats(output: Any, depth: int = 0) -> list[Tensor]:
    """Return the differentiable tensors of a forward's result, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)) and depth < 4:
        return [tensor for part in output for tensor in floats(part, depth + 1)]
    return []


def seed(number: int) -> None:
    """Seed every generator that a forward may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(
    model: nn.Module,
    batches: Sequence[dict[str, Any]],
    *,
    autocast: bool = False,
    after_step: Callable[[], None] = lambda: None,
) -> Digests:
    """Train with AdamW, a step for each batch; return everything that was computed."""
    found: Digests = {}
    finite = True
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], RATE)
    for step, batch in enumerate(batches):
        seed(step)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output = model(**batch)
        loss = loss_of(output)
        del output
        loss.backward()
        found[f"step {step}: loss"] = digest(loss)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            found[f"step {step}: {name}"] = None if grad is None else digest(grad)
        finite = finite and bool(loss.isfinite())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found[f"weight {name}"] = digest(value)
    found["all losses are finite"] = str(finite)
    return found


def differing(one: Digests, other: Digests) -> list[str]:
    """Name what is not bitwise equal in two runs, in order."""
    names = list(dict.fromkeys([*one, *other]))
    return [name for name in names if one.get(name, "absent") != other.get(name, "absent")]


def offloaded(
    make: Callable[[], nn.Module], batches: Sequence[dict[str, Any]], way: str, *, autocast: bool = False
) -> tuple[Digests, dict[str, Any]]:
    """Train under a policy; return what was computed, and figures.

    Shares and demoted sites are of the last step, replays of all, checkpointed blocks of the step with most. A recipe
    step is one in which a tensor was recomputed by its recipe.
    """
    model = make()
    steps: list[Any] = []
    with ebbtide.enable_activation_offloading(model, min_bytes=0, window=1, **WAYS[way]) as handle:
        found = train(model, batches, autocast=autocast, after_step=lambda: steps.append(handle.stats()))
    last, recomputes = steps[-1], [0, *(one.total_recomputes for one in steps)]
    return found, {
        "saved_percent": rounded(last.memory_saved_percent),
        "coverage_percent": rounded(last.coverage_percent),
        "checkpointed_blocks": max(one.checkpointed_blocks for one in steps),
        "recipe_steps": sum(before < after for before, after in pairwise(recomputes)),
        "replayed": sum(one.replayed for one in steps),
        "saved_tensors": sum(one.packs for one in steps),
        "demoted": list(last.demoted_sites)[:5],
        "live_tickets": last.live_tickets,
    }


def rounded(share: float | None) -> float | None:
    """Return a percentage with one digit."""
    return None if share is None else round(share, 1)
