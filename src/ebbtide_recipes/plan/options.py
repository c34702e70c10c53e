"""The options of training a model: the cost of each, whether it fits, and the recommended one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ebbtide.base.actions import Action
from ebbtide.base.errors import BudgetError
from ebbtide.base.units import format_size
from ebbtide.config import Auto, Keep, Minimal, Offload, Policy
from ebbtide.planner import plan_for
from ebbtide.planner.checkpointing import checkpointed_peak
from ebbtide.planner.machines import Machine
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Solution, follow
from ebbtide.profiling.solutions import minimal_mix, solution_for
from ebbtide.store.share import share_of

ROOM = 0.9
"""Share of a device's memory that a plan may fill and still fit. The rest is for what is not predicted."""

CHECKPOINTED = "ebbtide-minimal, checkpointed"
"""Name of ebbtide-minimal where the recompute rules cover a block badly; shown as if every block were checkpointed."""

ALIKE = 0.005
"""Options whose steps differ by less than this part of plain's are equally fast."""

Fits = Literal["yes", "barely", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory to fit into.

    Attributes:
        device_bytes: Memory of a device.
        budget_bytes: The user's limit of the peak; None: none.
        host_bytes: Host memory available to a node's ranks; None: offloaded bytes go to disk.
        ranks: Ranks on a node.
    """

    device_bytes: int
    budget_bytes: int | None
    host_bytes: int | None
    ranks: int

    @property
    def aim_bytes(self) -> int:
        """The peak to stay below."""
        return self.budget_bytes or int(ROOM * self.device_bytes)

    def fits_device(self, peak_bytes: int) -> Fits:
        """Return whether a peak fits; "barely": into the device, but not into nine tenths of it."""
        if peak_bytes <= min(self.aim_bytes, self.device_bytes):
            return "yes" if peak_bytes <= ROOM * self.device_bytes else "barely"
        return "barely" if self.budget_bytes is None and peak_bytes <= self.device_bytes else "no"

    @property
    def store_bytes(self) -> int | None:
        """Host memory for the offloaded bytes of a rank; None: they go to disk."""
        return None if self.host_bytes is None else self.host_bytes // self.ranks

    def fits_host(self, rank_bytes: int) -> bool:
        """Return whether the offloaded bytes of a rank fit into its share."""
        return self.store_bytes is None or rank_bytes <= self.store_bytes


def limits(machine: Machine, gpus: int, *, budget_bytes: int | None) -> Limits:
    """Return the memory to fit into.

    Args:
        machine: The node.
        gpus: Ranks on all nodes.
        budget_bytes: The user's limit of the peak.
    """
    host = machine.host_memory_bytes
    return Limits(
        device_bytes=machine.memory_bytes,
        budget_bytes=budget_bytes,
        host_bytes=None if machine.stores_on_disk else share_of(host, host, 1),
        ranks=min(gpus, machine.devices),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of training the model.

    Attributes:
        name: Its name in the table.
        policy: Policy of ebbtide; None: without ebbtide.
        peak_bytes: Most device memory of a rank; None: there is no such plan.
        step_ratio: Its step time relative to plain.
        offloaded_bytes: Offloaded bytes of a rank.
        fits: Whether the peak fits.
        fits_host: Whether the offloaded bytes fit.
        solution: The plan of ebbtide; None: no plan is made.
        problem: Why there is no such plan.
    """

    name: str
    policy: Policy | None
    peak_bytes: int | None = None
    step_ratio: float | None = None
    offloaded_bytes: int = 0
    fits: Fits = "no"
    fits_host: bool = True
    solution: Solution | None = None
    problem: str = ""


def options(profile: Profile, room: Limits, max_slowdown: float) -> list[Option]:
    """Return the cost of each option.

    Args:
        profile: The step that keeps everything.
        room: The memory to fit into.
        max_slowdown: For ebbtide-auto.
    """
    found = plain_options(profile, room)
    found += [_minimal(profile, room, found[1])]
    found += [_ebbtide("ebbtide-offload", Offload(), profile, room)]
    slow = Auto(max_slowdown=max_slowdown)
    found += [_ebbtide(f"ebbtide-auto, at most {100 * max_slowdown:g} % slower", slow, profile, room)]
    if room.budget_bytes is not None or (found[0].peak_bytes or 0) > room.aim_bytes:
        name = f"ebbtide-auto, within {format_size(room.aim_bytes)}"
        found += [_ebbtide(name, Auto(memory_budget=room.aim_bytes), profile, room)]
    return found


def plain_options(profile: Profile, room: Limits) -> list[Option]:
    """Return the cost of each option without ebbtide.

    Args:
        profile: The step that keeps everything.
        room: The memory to fit into.
    """
    return [_ebbtide("plain", Keep(), profile, room), _checkpointing(profile, room)]


def best(found: Sequence[Option]) -> Option | None:
    """Return the recommended option: the fastest that fits; of equally fast ones plain, then the least peak."""
    for degrees in (("yes",), ("yes", "barely")):
        fitting = [option for option in found if option.fits in degrees and option.fits_host]
        if fitting:
            least = min(option.step_ratio or 0.0 for option in fitting)
            alike = [option for option in fitting if (option.step_ratio or 0.0) <= least + ALIKE]
            return next(
                (option for option in alike if option.name == "plain"),
                min(alike, key=lambda option: option.peak_bytes or 0),
            )
    return None


def _ebbtide(name: str, policy: Policy, profile: Profile, room: Limits) -> Option:
    try:
        solution = solution_for(policy, profile)
    except BudgetError as error:
        return Option(name=name, policy=policy, problem=f"no plan fits: {error.expected}\nhint: {error.hint}")
    return _option(name, policy, solution, room)


def _option(name: str, policy: Policy, solution: Solution, room: Limits) -> Option:
    predicted = solution.predicted
    return Option(
        name=name,
        policy=policy,
        peak_bytes=predicted.peak_bytes,
        step_ratio=predicted.step_seconds / solution.profile.step_seconds,
        offloaded_bytes=predicted.moved_bytes,
        fits=room.fits_device(predicted.peak_bytes),
        fits_host=room.fits_host(predicted.moved_bytes),
        solution=solution,
    )


def _minimal(profile: Profile, room: Limits, checkpointing: Option) -> Option:
    """Return ebbtide-minimal: a mix if that promises anything, else recipes.

    If these cover blocks badly, it checkpoints them: then it is checkpointing that offloads the inputs.
    """
    mix = minimal_mix(profile, room.device_bytes)
    if mix is not None or not _checkpoints(profile):
        return _option("ebbtide-minimal", Minimal(), mix or follow(profile, plan_for(Minimal())), room)
    offloaded = sum(block.input_bytes for block in profile.blocks)
    return replace(
        checkpointing,
        name=CHECKPOINTED,
        policy=Minimal(),
        offloaded_bytes=offloaded,
        fits_host=room.fits_host(offloaded),
    )


def _checkpoints(profile: Profile) -> bool:
    """Whether ebbtide-minimal checkpoints some block, decided as in a step."""
    plan = plan_for(Minimal())
    for place, block in enumerate(profile.blocks):
        must_keep = sum(
            unit.nbytes
            for unit in block.units
            # Tensors stored in a narrower type (bfloat16 under its float32 copy) are covered.
            if unit.recompute_seconds is None and not unit.block_input and unit.narrow_bytes is None
        )
        held = block.input_bytes
        if plan.block_action(block.kind, place, input_bytes=held, must_keep_bytes=must_keep) is Action.CHECKPOINT:
            return True
    return False


def _checkpointing(profile: Profile, room: Limits) -> Option:
    peak_bytes = checkpointed_peak(profile)
    return Option(
        name="checkpointing",
        policy=None,
        peak_bytes=peak_bytes,
        step_ratio=1 + profile.forward_seconds / profile.step_seconds,
        fits=room.fits_device(peak_bytes),
    )
