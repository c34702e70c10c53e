"""Removes each wait, record, hold and guard of the store in turn: a test of this folder must fail every time.

    python -m tests.simdev.mutants [NAME ...]

Each mutant is a copy of the package with one text replaced. It prints a row for each, and ends with 1 if one survived.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/simdev/test_ordering.py", "tests/simdev/test_two_streams.py")
SECONDS = 240


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change.

    Attributes:
        name: What is missing then.
        file: Of ``src/ebbtide/store``.
        text: What is replaced, there exactly once.
        replacement: By what; the indentation of the text's first line is kept.
    """

    name: str
    file: str
    text: str
    replacement: str = "pass"


MUTANTS = (
    Mutant("copy-out waits for compute", "host.py", "device.wait(out, device.record(slot.compute))"),
    Mutant("copy-out waits for the place", "host.py", "            device.wait(out, event)", "            pass"),
    Mutant("copy-out claims the place", "host.py", "place.guard.claim(out)"),
    Mutant(
        "slot holds the source", "host.py", "slot.source, slot.compute = source,", "slot.source, slot.compute = None,"
    ),
    Mutant("source recorded on its stream", "host.py", "device.record_use(source, slot.compute)"),
    Mutant("several compute streams noticed", "host.py", "return len(seen) > 1", "return False"),
    Mutant("filling waits for the place", "host.py", "self.device.synchronize(event)"),
    Mutant("taking waits for the copy-in", "host.py", "self.stall(compute, ahead.done)"),
    Mutant("prefetched memory recorded", "host.py", "self.device.record_use(ahead.target, compute)"),
    Mutant("host waits for the copy-out", "host.py", "self.device.synchronize(slot.done)"),
    Mutant("stall waits when late", "host.py", "        self.device.wait(stream, event)\n        end", "        end"),
    Mutant(
        "second copy-in drops the first",
        "host.py",
        "        self._drop_ahead(slot)\n        device, place",
        "        device, place",
    ),
    Mutant("copy-in waits for compute", "host.py", "device.wait(into, device.record(compute))"),
    Mutant("copy-in waits for the copy-out", "host.py", "device.wait(into, slot.done)"),
    Mutant("copy-in claims the place", "host.py", "place.guard.claim(into)"),
    Mutant(
        "dropped copy-in waited for",
        "host.py",
        "self.stall(slot.ahead.compute, self.device.record(slot.ahead.into) if done is None else done)",
    ),
    Mutant(
        "freed slot drops its copy-in",
        "host.py",
        "            self._drop_ahead(slot)\n            if slot.source",
        "            if slot.source",
    ),
    Mutant("freed slot leaves its source", "host.py", "self._leaving.append(slot)"),
    Mutant(
        "leaving sources wait", "host.py", "while self._leaving and self._leaving[0].parked:", "while self._leaving:"
    ),
    Mutant(
        "source dropped only when parked",
        "hostslot.py",
        "        if done:\n            self.source",
        "        if True:\n            self.source",
    ),
    Mutant("parked source is dropped", "hostslot.py", "        if done:\n            self.source = None\n", ""),
    Mutant("compute waits for the copy-out", "hostslot.py", "self._tier.stall(self.compute, self.done)"),
    Mutant(
        "waited source is dropped",
        "hostslot.py",
        "self.compute, self.done)\n        self.source = None",
        "self.compute, self.done)",
    ),
    Mutant("guard has events", "guards.py", "return [leaf.done(device) for leaf in self.leaves()]", "return []"),
    Mutant(
        "guard is of the last copy",
        "guards.py",
        "        self._event = None\n        self._stream = stream",
        "        self._stream = stream",
    ),
    Mutant("unclaimed guard passes on", "guards.py", "yield from guard.leaves()"),
    Mutant("places inherit guards", "arena.py", "guard = Guard(self._cooling.over(spans))", "guard = Guard()"),
    Mutant("places given back cool", "arena.py", "self._cooling.add(span, record.guard)"),
    Mutant("chunks are quiet before they go", "arena.py", "elif not guard.quiet(self._device):", "elif False:"),
    Mutant("copies run on their stream", "accelerator.py", "        with stream:", "        if True:"),
    Mutant(
        "copies are asynchronous", "accelerator.py", "target.copy_(source, non_blocking=True)", "target.copy_(source)"
    ),
    Mutant("events are recorded", "accelerator.py", "event.record(stream)"),
    Mutant("streams wait", "accelerator.py", "stream.wait_event(event)"),
    Mutant("queries ask", "accelerator.py", "return event.query()", "return True"),
    Mutant(
        "host waits for events", "accelerator.py", "event.synchronize()\n\n    def elapsed", "pass\n\n    def elapsed"
    ),
    Mutant("uses are recorded", "accelerator.py", "tensor.record_stream(stream)"),
    Mutant("copies end before memory is unpinned", "pinned.py", "self._settle()\n        code", "code"),
    Mutant("settling waits for the device", "accelerator.py", "torch.accelerator.synchronize(where)"),
)


def mutate(mutant: Mutant, source: Path) -> None:
    """Apply a mutant to a copy of the package.

    Raises:
        SystemExit: Its text is not there exactly once.
    """
    path = source / "ebbtide" / "store" / mutant.file
    text = path.read_text(encoding="utf-8")
    if (found := text.count(mutant.text)) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.text!r} is {found} times in {mutant.file}; expected once")
    changed = text.replace(mutant.text, mutant.replacement)
    compile(changed, str(path), "exec")  # a mutant that is no Python would count as seen
    path.write_text(changed, encoding="utf-8")


def run(mutant: Mutant | None) -> tuple[bool, str]:
    """Return whether the tests passed, and which failed first."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            mutate(mutant, source)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--simdev", *TESTS]
        environment = os.environ | {"PYTHONPATH": str(source)}
        try:
            done = subprocess.run(
                [*command, "--timeout=60"], capture_output=True, text=True, env=environment, cwd=ROOT,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, "did not end"
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    said = re.search(r"race: .*|^E +(\S*Error.*)", done.stdout, re.MULTILINE)
    return done.returncode == 0, f"{failed[1] if failed else ''} | {said[0][:90] if said else ''}"


def main() -> None:
    """Run the mutants and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    passed, why = run(None)
    if not passed:
        raise SystemExit(f"the tests fail without a mutant: {why}")
    survivors = []
    print("| without: | result | s | first test that fails | how |\n| --- | --- | --- | --- | --- |", flush=True)
    for mutant in (m for m in MUTANTS if not names or m.name in names):
        begun = time.perf_counter()
        passed, why = run(mutant)
        survivors += [mutant.name] if passed else []
        seconds = time.perf_counter() - begun
        print(f"| {mutant.name} | {'SURVIVED' if passed else 'killed'} | {seconds:.0f} | {why} |", flush=True)
    if survivors:
        raise SystemExit(f"survived: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
