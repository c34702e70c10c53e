"""Interprets training programs, with and without a handle, and judges the results.

``train`` runs a ``Program`` and records every step: losses, gradients before the update, weights,
buffers, random states, numerics. ``judge`` compares two such traces bitwise. See [Note: a program], [Note: verdict].

To repeat a program that a test has printed::

    python -m tests.helpers.loops "Program(...)" "Setting(policy='minimal')"

[Note: verdict]
Ordinary training is right by definition. If it trains, ebbtide gives the same bits, or raises an error of its own where
the program has a feature of ``LIMITS``; nothing else. If it raises, ebbtide raises in the same step: a step that
ordinary training refuses is never trained. Afterwards no ticket is alive, the store is empty and no hook is open.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ebbtide.base.errors import EbbtideError
from tests.helpers.engines import drain, hooks_are_closed
from tests.helpers.loop_limits import excuse
from tests.helpers.loop_programs import Event, Part, Program, Setting
from tests.helpers.loop_training import Snapshot, Training
from tests.helpers.oracle import same_bits
from tests.helpers.torches import CURRENT_PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception that ended a training: its step and phase, and whether it is one of ebbtide's own."""

    step: int
    phase: str
    kind: str
    text: str
    own: bool

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase}: {self.text[:200]}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The record of a training: every step's values, its failure, and its leftovers."""

    steps: list[Snapshot] = field(repr=False)
    failure: Failure | None
    left: str


def train(
    program: Program,
    setting: Setting | None = None,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Trace:
    """Run a program.

    Args:
        program: What is trained.
        setting: What ebbtide is told; None: ordinary training.
        around: Make the context of every forward.
    """
    with _as_it_was():
        torch.manual_seed(program.seed)
        random.seed(program.seed)
        np.random.seed(program.seed)
        steps: list[Snapshot] = []
        failure, training = None, None
        try:
            training = Training(program, setting, around)
            for _ in range(program.steps):
                steps.append(training.take_step())
        except Exception as error:
            phase = "build" if training is None else training.phase
            own = isinstance(error, EbbtideError)
            failure = Failure(step=len(steps), phase=phase, kind=type(error).__name__, text=str(error), own=own)
        if failure is not None:
            drain()
        left = ""
        if training is not None:
            left = _left_by(training, failure)
            training.close()
        return Trace(steps=steps, failure=failure, left=left)


def identity_hooks() -> saved_tensors_hooks:
    """Return hooks that change nothing: they show the effect of any saved-tensor hooks."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def judge(program: Program, setting: Setting, plain: Trace, got: Trace) -> str:
    """Describe the fault of a training under ebbtide; an empty text means none. See [Note: verdict].

    Args:
        program: The program.
        setting: Ebbtide's settings.
        plain: The trace of ordinary training.
        got: The trace under ebbtide.
    """
    for k, (a, b) in enumerate(zip(plain.steps, got.steps, strict=False)):
        found = difference(a, b)
        if found:
            return excuse(program, setting, None) or f"step {k}: WRONG BITS: {found}"
    if plain.failure is not None:
        if got.failure is None or got.failure.step > plain.failure.step:
            return excuse(program, setting, None) or f"MISSING ERROR: plain {plain.failure}; ebbtide trains on"
        if got.failure.step == plain.failure.step:
            return got.left
    if got.failure is not None:
        kind = got.failure.kind
        said = f"step {got.failure.step}: plain trains; ebbtide {got.failure}"
        return excuse(program, setting, kind) or f"{'ERROR' if got.failure.own else 'CRASH'}: {said}"
    return got.left


def check(program: Program, setting: Setting) -> str:
    """Train without and with ebbtide; describe the fault. Empty, or beginning with ``excused``: none."""
    return judge(program, setting, train(program), train(program, setting))


def difference(one: Snapshot, other: Snapshot) -> str:
    """Name the values of a step that differ bitwise, and the worst."""
    if list(one) != list(other):
        return f"{sorted(one.keys() ^ other.keys()) or 'the order of what happened'} on one side only"
    found = [n for n in one if not _same(one[n], other[n])]
    if not found:
        return ""
    sizes = {n: _relative(one[n], other[n]) for n in found}
    worst = max(sizes, key=lambda n: sizes[n])
    return f"{len(found)} of {len(one)} values, first {found[0]!r}, worst {worst!r}: relative {sizes[worst]:.1e}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    return type(one) is type(other) and one == other


def _relative(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.numel():
        a, b = one.double(), other.double()
        return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).nan_to_num(9e9).item()
    return float("inf")


def _left_by(training: Training, failure: Failure | None) -> str:
    """Name a training's leftovers. Torch itself keeps a graph of jagged tensors for which it has no backward."""
    if failure is not None and failure.kind == "NotImplementedError":
        return ""
    training.release()
    for handle in training.handles:
        engine = handle._engine
        if engine.live_tickets or engine.live_entries or engine.tier.used_bytes:
            tickets, entries = len(engine.live_tickets), len(engine.live_entries)
            return f"LEFT: {tickets} tickets, {entries} entries, {engine.tier.used_bytes} bytes in the store"
    return "" if hooks_are_closed() else "LEFT: hooks are open"


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Begin from the same numerics each time, and restore all settings and random states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _default_numerics()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        _default_numerics()


def _default_numerics() -> None:
    b = torch.backends
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    b.cuda.enable_flash_sdp(True)
    for module in (b, b.cuda.matmul, b.mkldnn.conv, b.mkldnn.matmul) if CURRENT_PRECISIONS else ():
        module.fp32_precision = "none"


def kind_of(verdict: str) -> str:
    """Return the kind of a verdict's fault; empty: none."""
    return "" if verdict.startswith("excused") else re.sub(r"^step \d+: ", "", verdict).partition(":")[0]


def shrunk(program: Program, setting: Setting, *, tries: int = 60) -> tuple[Program, Setting]:
    """Remove everything that a fault does not need: parts, events, and fields that may have their default.

    Args:
        program: The failing program.
        setting: Its settings.
        tries: Largest number of programs to try.
    """
    kind = kind_of(check(program, setting))
    pending = iter(_smaller(program, setting))
    for _ in range(tries):
        candidate = next(pending, None)
        if candidate is None:
            break
        if kind and kind_of(check(*candidate)) == kind:
            program, setting = candidate
            pending = iter(_smaller(program, setting))
    return program, setting


def _smaller(program: Program, setting: Setting) -> Iterator[tuple[Program, Setting]]:
    for name in ("events", "parts"):
        items = getattr(program, name)
        for k in range(len(items)):
            rest = items[:k] + items[k + 1 :]
            if rest or name == "events":
                yield replace(program, **{name: rest}), setting
    plain = Program()
    for f in fields(Program):
        if f.name not in ("events", "parts") and getattr(program, f.name) != getattr(plain, f.name):
            yield replace(program, **{f.name: getattr(plain, f.name)}), setting
    for name in ("events", "parts"):
        items = getattr(program, name)
        for k, item in enumerate(items):
            simpler = type(item)(kind=item.kind)
            for f in fields(item):
                if getattr(item, f.name) != getattr(simpler, f.name):
                    less = replace(item, **{f.name: getattr(simpler, f.name)})
                    yield replace(program, **{name: (*items[:k], less, *items[k + 1 :])}), setting
    if setting.verify:
        yield program, replace(setting, verify=False)


def main(program: str, setting: str = "") -> int:
    """Run a program that a test has printed, under every policy if there is no setting."""
    known = {"Program": Program, "Part": Part, "Event": Event, "Setting": Setting}
    chosen = eval(program, known)
    if setting:
        settings = [eval(setting, known)]
    else:
        settings = [
            Setting(policy=p)
            for p in ("auto", "auto_relaxed", "minimal", "ckpt", "offload", "inputs", "keep", "checkpoint")
        ]
    verdicts = {s: check(chosen, s) for s in settings}
    print(chosen)
    print(f"  plain: {train(chosen).failure or 'trains'}")
    for s, verdict in verdicts.items():
        print(f"  {s}: {verdict or 'equal'}")
    return int(any(v and not v.startswith("excused") for v in verdicts.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*sys.argv[1:]))
