"""Each wait, record, hold and guard of the store, removed: a test on the simulated device must fail every time.

See ``tests.helpers.mutants``, which runs them.
"""

from __future__ import annotations

from tests.helpers.mutants import Mutant

TESTS = ("--simdev", "--timeout=60", "tests/simdev/test_ordering.py", "tests/simdev/test_two_streams.py")
GROUPS = ("--simdev", "--timeout=60", "tests/simdev/test_groups.py")
ARENA = ("tests/unit/store/test_arena.py",)
HEADROOM = ("tests/unit/store/test_headroom.py",)
SPILL = ("tests/unit/store/test_spill.py",)


def without(name: str, file: str, text: str, replacement: str = "pass", *, tests: tuple[str, ...] = TESTS) -> Mutant:
    """Return a mutant of ``src/ebbtide/store``: the missing guard, the text and its replacement."""
    return Mutant(name, f"ebbtide/store/{file}", text, replacement, tests)


MUTANTS = (
    without("copy-out waits for compute", "hostcopies.py", "device.wait(out, device.record(compute))"),
    without("copy-out waits for the place", "hostcopies.py", "            device.wait(out, event)", "            pass"),
    without("copy-out claims the place", "hostcopies.py", "guard.claim(out)"),
    without(
        "slot holds the source",
        "hostcopies.py",
        "slot.source, slot.compute = source,",
        "slot.source, slot.compute = None,",
    ),
    without("source recorded on its stream", "hostcopies.py", "device.record_use(source, compute)"),
    without("several compute streams noticed", "hostcopies.py", "return len(seen) > 1", "return False"),
    without(
        "the first stream that saves may be another than the default one",
        "hostcopies.py",
        "[compute if default is None else default]",
        "[compute]",
    ),
    without(
        "synchronous copies wait for the stream that saved",
        "hostcopies.py",
        "device.wait(now, device.record(compute))",
    ),
    without("filling waits for the place", "host.py", "self.device.synchronize(event)"),
    without("taking waits for the copy-in", "host.py", "self.copies.stall(compute, ahead.done)"),
    without("prefetched memory recorded", "host.py", "self.device.record_use(ahead.target, compute)"),
    without("host waits for the copy-out", "host.py", "self.device.synchronize(slot.done)"),
    without(
        "stall waits where nothing is timed",
        "hostcopies.py",
        "            self.device.wait(stream, event)\n            return",
        "            return",
    ),
    without(
        "stall waits when late", "hostcopies.py", "        self.device.wait(stream, event)\n        end", "        end"
    ),
    without(
        "second copy-in drops the first",
        "hostcopies.py",
        "                self.drop(slot)\n            place",
        "                pass\n            place",
    ),
    without("copy-in waits for compute", "hostcopies.py", "device.wait(into, device.record(compute))"),
    without("copy-in waits for the copy-out", "hostcopies.py", "device.wait(into, event)"),
    without("copy-in claims the place", "hostcopies.py", "guard.claim(into)", tests=GROUPS),
    without(
        "dropped copy-in waited for",
        "hostcopies.py",
        "self.stall(slot.ahead.compute, self.device.record(slot.ahead.into) if done is None else done)",
    ),
    without(
        "freed slot drops its copy-in",
        "host.py",
        "                    self.copies.drop(slot)\n                if slot.source",
        "                    pass\n                if slot.source",
    ),
    without("freed slot leaves its source", "host.py", "self._leaving.append(slot)"),
    without(
        "leaving sources wait",
        "host.py",
        "while self._leaving and ((done := self._leaving[0].done) is None or self.copies.is_done(done)):",
        "while self._leaving:",
    ),
    without(
        "source of a finished copy is dropped",
        "host.py",
        "        for slot in slots:\n            slot.source = None\n        return True",
        "        return True",
    ),
    without("compute waits for the copy-out", "host.py", "self.copies.stall(slot.compute, slot.done)"),
    without(
        "waited source is dropped",
        "host.py",
        "slot.compute, slot.done)\n        for slot in slots:\n            slot.source = None",
        "slot.compute, slot.done)",
    ),
    without(
        "a slot has the event of its group going out",
        "hostcopies.py",
        "            slot.done = done",
        "            pass",
        tests=GROUPS,
    ),
    without(
        "a group waits for every copy-out of its bytes",
        "hostcopies.py",
        "[slot.done for slot, _, _ in group if slot.done is not None]",
        "[slot.done for slot, _, _ in group[:1] if slot.done is not None]",
        tests=GROUPS,
    ),
    without(
        "sources are copied after the stream that made them",
        "hostcopies.py",
        "        if compute is None:\n",
        "        if True:\n",
        tests=GROUPS,
    ),
    without("guard has events", "guards.py", "return [leaf.done(device) for leaf in self.leaves()]", "return []"),
    without(
        "guard is of the last copy",
        "guards.py",
        "        self._event = None\n        self._stream = stream",
        "        self._stream = stream",
        tests=("tests/unit/store/test_guards.py",),
    ),
    without("unclaimed guard passes on", "guards.py", "yield from guard.leaves()"),
    without(
        "one wait for one event", "host.py", "if event is not ahead.done or stream != compute:", "if event is None:"
    ),
    without(
        "a group's sources are released when its copies are done",
        "host.py",
        " and not self.copies.is_done(latest):\n",
        " and False:\n",
    ),
    without("places inherit guards", "arena.py", "Guard(self._cooling.over(spans)))", "Guard())"),
    without("places given back cool", "arena.py", "self._cooling.add(span, record.guard)"),
    without(
        "bytes are guarded until their copies are done",
        "guards.py",
        "if self._marks and all(map(device.query, self._marks)):",
        "if self._marks:",
    ),
    without(
        "bytes given back after a mark are guarded by the next",
        "guards.py",
        "self._spans = [span for span in self._spans if span[3] == self._generation]",
        "self._spans = []",
        tests=ARENA,
    ),
    without(
        "a mark is on every stream", "guards.py", "[device.record(stream) for stream in streams]", "[]", tests=ARENA
    ),
    without(
        "lost places are found",
        "arena.py",
        "if not self._torn and not self._lost:",
        "if not self._torn:",
        tests=ARENA,
    ),
    without(
        "a prefetch asks what is free",
        "host.py",
        "granted = self._headroom.take([slot.nbytes for slot in group], origin)",
        "granted = len(group)",
        tests=HEADROOM,
    ),
    without(
        "a cache that was given back refuses a prefetch",
        "headroom.py",
        "if flushed or room.free_bytes < nbytes:",
        "if room.free_bytes < nbytes:",
        tests=HEADROOM,
    ),
    without("answers are forgotten", "host.py", "self._headroom.forget()", tests=HEADROOM),
    without(
        "memory has its pages before it is pinned",
        "pinned.py",
        "populate(address, mapping.nbytes, loan)",
        tests=("tests/unit/store/test_pinned.py",),
    ),
    without("chunks are quiet before they go", "arena.py", "elif not guard.quiet(self._device):", "elif False:"),
    without("copies run on their stream", "accelerator.py", "        with stream:", "        if True:"),
    without(
        "copies are asynchronous", "accelerator.py", "target.copy_(source, non_blocking=True)", "target.copy_(source)"
    ),
    without("events are recorded", "accelerator.py", "event.record(stream)"),
    without("streams wait", "accelerator.py", "stream.wait_event(event)"),
    without("queries ask", "accelerator.py", "return event.query()", "return True"),
    without(
        "host waits for events", "accelerator.py", "event.synchronize()\n\n    def elapsed", "pass\n\n    def elapsed"
    ),
    without("uses are recorded", "accelerator.py", "tensor.record_stream(stream)"),
    without("copies end before memory is unpinned", "pinned.py", "self._synchronize()\n        with", "with"),
    without("unpinning waits for the device", "accelerator.py", "torch.accelerator.synchronize(device)"),
    without(
        "the default budget is that of all tiers",
        "arena.py",
        "self._budget_bytes - (shared_bytes() - self._extents.size_bytes)",
        "self._budget_bytes",
        tests=SPILL,
    ),
    without("each tier has a stage", "arena.py", "return max(self._least_bytes, ", "return max(0, ", tests=SPILL),
    without(
        "what other tiers hold is a part of their budget",
        "__init__.py",
        "fair_share_bytes() + shared_bytes()",
        "fair_share_bytes()",
        tests=SPILL,
    ),
)
