"""The record of a measured step: plain values. See [Note: a measured step]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ebbtide.base.actions import Action, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedUnit(Unit):
    """One storage that a block saved in the measured step.

    Attributes:
        action: What was done with it.
        host_seconds: The host's time of carrying out the action when it was saved.
    """

    action: Action
    host_seconds: float = field(default=0.0, compare=False)  # of this machine now, not of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """One executed block.

    Attributes:
        name: Path of the module in the model.
        kind: Its class.
        units: What it saved, in that order.
        forward_seconds: From the start of its forward to what follows, without waits for copies.
        backward_seconds: The same of its backward; recomputes included.
        forward_peak_bytes: Most memory in its forward; None if not requested, or not known.
        backward_peak_bytes: The same of its backward.
        forward_resident_bytes: Bytes that were resident in its forward though the step had not kept them. See
            [Note: still resident memory].
        backward_resident_bytes: The same of its backward.
        plain: It ran without hooks, so it has no units. See [Note: plain blocks].
        checkpointed: Its forward ran a second time in backward, so its units are its inputs.
        checkpointable: Its forward could run a second time in backward.
        input_bytes: Bytes of its inputs that it would keep for that.
        pack_seconds: Time in the pack hook, without replays; 0 on an accelerator, which does not wait for the host.
    """

    name: str
    kind: str
    units: tuple[TimedUnit, ...]
    forward_seconds: float
    backward_seconds: float
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    forward_resident_bytes: int = 0
    backward_resident_bytes: int = 0
    plain: bool = False
    checkpointed: bool = False
    checkpointable: bool = False
    input_bytes: int = 0
    pack_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of its forward and backward together."""
        return self.forward_seconds + self.backward_seconds

    @property
    def saved_bytes(self) -> int:
        """Bytes of all that it saved under hooks."""
        return sum(unit.nbytes for unit in self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One measured step.

    Attributes:
        blocks: In the order in which their forwards began.
        head_seconds: Between the last forward and the first backward.
        epilogue_seconds: From the end of the first block's backward to the first block of the next pass.
        head_peak_bytes: Most memory during ``head_seconds``; None if not requested, or not known.
        head_resident_bytes: Bytes that were resident then though the step had not kept them.
        saved_bytes: What its blocks saved, as the engine counts it.
        in_use_bytes: Memory in use when it began; None if not requested, or not known.
        alone: No block of another pass began before its backward was over.
    """

    blocks: tuple[TimedBlock, ...]
    head_seconds: float
    epilogue_seconds: float
    head_peak_bytes: int | None
    head_resident_bytes: int = 0
    saved_bytes: int = 0
    in_use_bytes: int | None = None
    alone: bool = True


def recompute_seconds(units: Iterable[TimedUnit]) -> float:
    """Return the time of the executed recomputes."""
    return sum(unit.recompute_seconds or 0.0 for unit in units if unit.action is Action.RECOMPUTE)
