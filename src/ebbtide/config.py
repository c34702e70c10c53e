"""Policies and options: small frozen values, checked once, free of torch.

[Note: policies]
A *policy* is the user's choice; a *plan* (``ebbtide.planner``) is the resulting action for every site.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from ebbtide.base.checks import check_fields, check_value
from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.units import parse_size

MIN_BYTES = 64 * 1024
"""Smaller storages stay: a quarter of the saved tensors, under 1 % of their bytes, most of the per-tensor cost."""

DEFAULT_SLOWDOWN = 0.05
"""``max_slowdown`` of ``Auto``."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Keep every saved tensor on the device and count the bytes. Use it to see what a model saves."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Offload every storage of at least ``min_bytes`` once; recompute nothing. Use it with a fast link.

    The end of a forward, about a block's bytes, stays: backward reads it first.
    """


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Offload only the inputs of blocks, such as hidden states of shape ``[B, S, H]``; keep the rest."""


@dataclass(frozen=True, kw_only=True)
class Minimal:
    """The memory of activation checkpointing, or less, by the fastest of two or three methods.

    The first steps time, for each kind of block, checkpointing and what else the store allows. With an accelerator that
    is a plan that keeps, offloads and recomputes single tensors within the memory of checkpointing. Without one it is
    recipes (what can be recomputed is, the rest is offloaded) and, if the disk has room, offloading all that the block
    saves. A kind whose blocks cannot be compared uses recipes, or is checkpointed if they cover it badly. Use it when
    ``Auto`` does not fit. ``handle.explain()`` shows what was measured.
    """


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Warm up, measure two steps, then plan: the least memory within a slowdown, or the fastest step within a budget.

    Before the plan, cheap tensors are recomputed (element-wise chains, casts, norms, views) and the rest are offloaded.
    ``handle.plan.explain()`` shows the plan and its reasons.

    Example::

        ebbtide.Auto(max_slowdown=0.1)  # a step may be 10 % slower
        ebbtide.Auto(memory_budget="40GiB")

    Args:
        memory_budget: Largest peak, in bytes or as ``"40GiB"``: of the device's memory, or without an accelerator of
            the process's resident memory. The fastest plan within it is made.
        max_slowdown: Largest slowdown of a step against ordinary training, 0 to 1; 0.05 is 5 %. Not with a budget.

    Raises:
        ConfigError: A value cannot be used.
    """

    memory_budget: str | int | None = None
    max_slowdown: float = DEFAULT_SLOWDOWN

    def __post_init__(self) -> None:
        _ = self.budget_bytes
        check_value("max_slowdown", self.max_slowdown, float, advice="0.05 allows a step that is 5 % slower")
        if not 0 <= self.max_slowdown <= 1:
            raise ConfigError(
                f"max_slowdown is {self.max_slowdown!r}",
                expected="a fraction between 0 and 1",
                hint="0.05 allows a step that is 5 % slower; policy 'minimal' has no such limit",
            )
        if self.memory_budget is not None and self.max_slowdown != DEFAULT_SLOWDOWN:
            raise ConfigError(
                f"max_slowdown is {self.max_slowdown!r} and memory_budget is {self.memory_budget!r}",
                expected="one of them: within a budget the fastest plan is made, however slow it is",
                hint="leave out max_slowdown, or memory_budget",
            )

    @cached_property
    def budget_bytes(self) -> int | None:
        """``memory_budget`` in bytes; ``None``: there is none."""
        return None if self.memory_budget is None else parse_size(self.memory_budget, name="memory_budget")


Target = Literal["auto", "host", "disk"]
"""Where offloaded bytes go."""
Strategy = Literal["auto", "single", "ddp", "fsdp", "fsdp2"]
"""How a model is wrapped."""
TARGETS: tuple[Target, ...] = get_args(Target)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

Policy = Keep | Offload | Inputs | Minimal | Auto

POLICIES: dict[str, type[Policy]] = {
    "keep": Keep,
    "offload": Offload,
    "inputs": Inputs,
    "minimal": Minimal,
    "auto": Auto,
}


def policy_named(name: str) -> Policy:
    """Return the policy of a name such as ``"minimal"``.

    Raises:
        ConfigError: There is no such policy.
    """
    kind = POLICIES.get(name.lower())
    if kind is None:
        raise ConfigError(
            f"policy is {name!r}",
            expected=f"one of {', '.join(POLICIES)}, or a plan file whose name ends in .json",
            hint=nearest(name, POLICIES) or "'auto' is the default; 'minimal' has the memory of checkpointing",
        )
    return kind()


@dataclass(frozen=True, kw_only=True)
class Options:
    """Offloading settings that apply to all tensors.

    Args:
        target: Where offloaded bytes are stored: ``"host"``, ``"disk"``, or ``"auto"`` (host with an accelerator, disk
            without).
        min_bytes: Storages below this size stay, in bytes.
        window_bytes: Bytes allowed in flight each way; ``None``: follows the model's largest block.
        host_budget_bytes: Most host memory to use, in bytes; ``None``: a fair share of what the machine has.
        disk_path: Directory for the disk tier's file (created unlinked).
        synchronous: Whether copies to host memory run in order with compute.
        verify: Compare every restored and every recomputed tensor with what was saved. Slow.
    """

    target: Target = "auto"
    min_bytes: int = MIN_BYTES
    window_bytes: int | None = None
    host_budget_bytes: int | None = None
    disk_path: str | None = None
    synchronous: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        check_fields(self, {"target": "'auto' is host memory with an accelerator, disk without"})
