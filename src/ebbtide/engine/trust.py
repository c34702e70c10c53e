"""Trust: verify recipes against the tensors they replace, once per block before use and by fingerprint afterwards.

[Note: trust]
A recipe is built from the graph; bitwise equality is verified:

- The first time that a block saves at a site, the recipe runs while the real tensor is in memory, and all bytes are
  compared. A recipe that differs is never used: its site is offloaded in every block, and ``explain()`` names it. On an
  accelerator the host does not wait for the result: until then the tensor is offloaded. That takes host memory that the
  plan does not count, so beyond some bytes per step the host does wait.
- Later recomputes are compared with a fingerprint of the dropped tensor before anything is computed from them: on the
  host every time (a sample; all bytes in one block in 50 steps of its kind); on an accelerator only in those blocks,
  all bytes, with the result read at the latest before a torch optimizer changes a weight, or when the handle is
  closed. A difference is an error, and the site is offloaded from then on.

A verdict belongs to a block, its numerics, a site, the operators, the element types, and the dispatch modes around it.
Numbers and lengths that change from step to step make no new ones.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.base.actions import Site
from ebbtide.base.errors import RestoreError
from ebbtide.base.events import Bus
from ebbtide.engine.fingerprint import Compared, Fingerprint, Sample, can_be_taken, host_sample
from ebbtide.engine.layout import Layout, storage_bytes, with_layout
from ebbtide.engine.modes import modes_open, names_of_modes, outside_modes
from ebbtide.engine.tickets import Entry, Expr

logger = logging.getLogger("ebbtide.engine")

Key = tuple[Any, ...]

_Failed = Callable[[], Exception]
"""Returns the error to raise if a comparison failed."""

_PIECE_BYTES = 64 * 1024**2
"""Bytes compared at a time: a comparison takes one more byte for each."""

_MOST_UNREAD_BYTES = 256 * 1024**2
"""Most bytes offloaded in a step because a comparison has no result yet. If a step saves much more, its kernels take so
long that the host's waits do not count."""

STEPS_BETWEEN = 50
"""In so many steps, on average, one block of each kind has all its bytes compared."""


class _Letter:
    """Booleans that are being copied from a device to the host, which waits for them only if it reads too early.

    Args:
        flags: Tensors of one boolean each, on one device.
    """

    def __init__(self, flags: list[torch.Tensor]) -> None:
        self._bits, self._event = torch.stack(flags), None
        device = self._bits.device
        if device.type != "cpu":
            found = self._bits
            try:
                self._bits = torch.empty(len(flags), dtype=torch.bool, device="cpu", pin_memory=True)
            except RuntimeError:  # a device without pinned memory: the copy is over when it returns
                self._bits = torch.empty(len(flags), dtype=torch.bool, device="cpu")
            self._bits.copy_(found, non_blocking=True)
            now, self._event = torch.accelerator.current_stream(device), torch.Event(device=device)
            self._event.record(now)
            with contextlib.suppress(NotImplementedError):  # a device of one stream
                for flag in flags:  # its memory may be another stream's, which autograd has made this one wait for
                    flag.record_stream(now)

    @property
    def arrived(self) -> bool:
        """Whether reading waits for nothing."""
        return self._event is None or self._event.query()

    def read(self) -> list[bool]:
        """Return them; wait until they have arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._bits.tolist()


class Trust:
    """Remembers which recipes were compared and found equal, and compares what is recomputed. See [Note: trust].

    Args:
        bus: Receives a message for each demoted site.
        always_full: Compare all bytes every time (``verify=True``).
    """

    def __init__(self, bus: Bus, *, always_full: bool = False) -> None:
        self._bus, self._always_full = bus, always_full
        self._verdicts: dict[Key, bool] = {}
        self._met: dict[Key, set[str]] = {}  # blocks that have run, by kind
        self._drawn = random.Random(0)  # ranks draw alike; nobody else's numbers change
        self._unanswered: dict[Key, tuple[_Letter, Site]] = {}  # first comparisons, in order, by a device
        self._unread_bytes = 0  # offloaded since the last backward because of that
        self._unread: list[tuple[torch.Tensor, _Failed]] = []  # of this backward
        self._coming: deque[tuple[_Letter, list[_Failed]]] = deque()  # of earlier ones, oldest first
        self.fingerprints = True
        self.unsure = 0  # how often there was no verdict yet
        self.demoted: dict[Site, str] = {}

    # Before a recipe is used

    def holds(
        self, block_key: Key, entry: Entry, recipe: Expr, base: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> bool:
        """Return whether ``recipe`` gives ``base`` exactly; compares when this block has not saved here before.

        Args:
            block_key: Name of the block that saves ``base``, and the numerics under which it runs.
            entry: The tensor's.
            recipe: Its recipe.
            base: The tensor.
            run: Evaluates the recipe.
        """
        if entry.site in self.demoted:
            return False
        modes = names_of_modes() if modes_open() else ()
        key = (block_key, entry.site, base.dtype, recipe.structure, modes)
        verdict = self._verdicts.get(key)
        if verdict is not None:
            return verdict
        self.unsure += 1
        if key not in self._unanswered:
            try:
                answer = self._compare(entry, base, run)
            except (MemoryError, torch.OutOfMemoryError) as error:  # says nothing about the recipe: retried later
                # As text: a handler that keeps records would keep the error, its frames and their tensors.
                why = str(error)
                logger.info("no room to compare the recipe of %s now, so the tensor is offloaded: %s", entry.site, why)
                return False
            if isinstance(answer, bool):
                self._verdicts[key] = answer
                return answer
            self._unanswered[key] = _Letter([answer]), entry.site
        if not self._unanswered[key][0].arrived:
            self._unread_bytes += entry.nbytes
            if self._unread_bytes <= _MOST_UNREAD_BYTES:
                return False
        return self._learn(key)

    def _learn(self, key: Key) -> bool:
        """Read the answer of a first comparison."""
        letter, site = self._unanswered[key]
        (same,) = letter.read()
        verdict = self._verdicts[key] = same or self._demote(site, "the recomputed bytes differ")
        del self._unanswered[key]
        return verdict

    def _compare(self, entry: Entry, base: torch.Tensor, run: Callable[[], torch.Tensor]) -> bool | torch.Tensor:
        """Run a recipe and compare; twice on an accelerator, where a kernel may add up in another order each time.

        Returns:
            Whether it gives the tensor; on an accelerator a tensor of one boolean, without waiting for it.
        """
        first = self._gives(entry, base, run)
        if first is False or base.device.type == "cpu":
            return first
        second = self._gives(entry, base, run)
        return first & second

    def _gives(self, entry: Entry, base: torch.Tensor, run: Callable[[], torch.Tensor]) -> bool | torch.Tensor:
        try:
            value = outside_modes(run)  # as in backward
        except (MemoryError, torch.OutOfMemoryError):  # says nothing about the recipe
            raise
        except Exception as error:  # a rule that cannot run here must not cost the user the step
            return self._demote(entry.site, f"the rule failed: {type(error).__name__}: {error}")
        if value.device != base.device:
            return self._demote(entry.site, f"made on {value.device}, not on {base.device}")
        if value.shape != base.shape or value.dtype != base.dtype:
            return self._demote(entry.site, f"made {value.dtype}{list(value.shape)} of {base.dtype}{list(base.shape)}")
        same = self.same_bytes(with_layout(value, Layout.of(base)), base)
        return self._demote(entry.site, "the recomputed bytes differ") if same is False else same

    def same_bytes(self, value: torch.Tensor, base: torch.Tensor) -> bool | torch.Tensor:
        """Whether two tensors' storages hold the same bytes; on an accelerator a tensor of one boolean."""
        one, other = storage_bytes(value).split(_PIECE_BYTES), storage_bytes(base).split(_PIECE_BYTES)
        if len(one) != len(other):
            return False
        if base.device.type == "cpu":
            return all(map(torch.equal, one, other))
        return torch.stack([(a == b).all() for a, b in zip(one, other, strict=True)]).all()

    def _demote(self, site: Site, reason: str) -> bool:
        if site not in self.demoted:
            logger.info("not recomputed, %s: %s", site, reason)
            self._bus.emit("message", level="info", code="demoted", text=f"not recomputed, {site}: {reason}")
        self.demoted[site] = reason
        return False

    # When it is used

    def begin_block(self, name: str, kind: Key, *, accelerator: bool) -> Compared:
        """Return how a block's run compares what it recomputes, or what its second forward computes.

        Args:
            name: The block's.
            kind: Its kind, and whether it will run a second time; the first run of a block is compared whole.
            accelerator: Its tensors are on an accelerator.
        """
        if not self.fingerprints:
            return Compared.NOT
        met = self._met.setdefault(kind, set())
        first = name not in met
        met.add(name)
        if first or self._always_full or self._drawn.random() * len(met) * STEPS_BETWEEN < 1.0:
            return Compared.FULL
        return Compared.NOT if accelerator else Compared.SAMPLE

    def fingerprint(self, tensor: torch.Tensor, compared: Compared) -> Fingerprint | Sample | None:
        """Return a fingerprint of what is dropped; None if it is not to be compared."""
        if compared is Compared.SAMPLE and (sample := host_sample(tensor)) is not None:
            return sample
        if compared is Compared.NOT or not can_be_taken(tensor):
            return None
        return Fingerprint(tensor, full=compared is Compared.FULL)

    def require(self, same: torch.Tensor | bool, failed: _Failed) -> None:
        """Raise what ``failed`` returns if a comparison failed; later, if its result is on a device.

        Args:
            same: What a comparison answered.
            failed: Must not hold tensors: it may be kept beyond their graph.
        """
        if isinstance(same, torch.Tensor):
            self._unread.append((same, failed))
        elif not same:
            raise failed()

    def end_backward(self, *, wait: bool = False) -> None:
        """Read what a device has answered by now; ``wait`` for the rest."""
        self._unread_bytes = 0
        if wait:
            return self.await_comparisons()
        self._send()
        for key in [key for key, (letter, _) in self._unanswered.items() if letter.arrived]:
            self._learn(key)
        while self._coming and self._coming[0][0].arrived:
            _read(*self._coming.popleft())

    def await_comparisons(self) -> None:
        """Wait for comparisons that a device has not answered yet, and raise if one failed."""
        self._send()
        for key in list(self._unanswered):
            self._learn(key)
        coming = list(self._coming)
        self._coming.clear()
        for letter, failed in coming:
            _read(letter, failed)

    def _send(self) -> None:
        """Send the results of a backward's comparisons to the host."""
        unread, self._unread = self._unread, []
        for device in {same.device for same, _ in unread}:
            here = [(same, failed) for same, failed in unread if same.device == device]
            self._coming.append((_Letter([same for same, _ in here]), [failed for _, failed in here]))

    def differs(self, site: Site, block: str) -> RestoreError:
        """Return the error for a recomputed tensor that is not what was dropped, and use the recipe no more."""
        self._demote(site, "what was recomputed in backward differed from what was saved")
        return RestoreError(
            f"{site} of block {block!r} was recomputed and differs from what was saved: an operand changed "
            "between forward and backward without a new version",
            expected="the value of the forward",
            hint="change weights and inputs after the backward, not through .data; keep_filter=... keeps a tensor, "
            "policy 'offload' recomputes none",
        )


def _read(letter: _Letter, errors: list[_Failed]) -> None:
    """Raise if a device answered that a comparison failed."""
    failed = next((failed for same, failed in zip(letter.read(), errors, strict=True) if not same), None)
    if failed is not None:
        raise failed()
