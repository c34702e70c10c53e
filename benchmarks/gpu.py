"""Run first contact, tests/gpu and the suites of an accelerator in parts with time limits; finished parts are kept.

A machine with a card is often available for minutes only. Every part is a process of its own; its output is in
``DIR/<part>.log`` while it runs, a suite's results in ``DIR/<part>/``, how each part ended in ``DIR/parts.json``, and a
table of all of them in ``DIR/README.md``. The same command resumes: parts that passed are skipped, those that
failed or ran out of time are repeated.

    python -m benchmarks.gpu [--minutes 8] [--part-minutes 3] [--out runs/gpu] [--simdev] [PART ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
FIRST_TESTS = ("test_first_light", "test_store")
SUITES = ("rounds", "link", "host", "overhead", "bound", "pareto", "longest")
SIMULATED = {
    "rounds": ("--small", "--rounds", "2"),
    "link": ("--small", "--pairs", "2"),
    "host": ("--pairs", "2", "--total-mib", "64"),
    "overhead": ("--pairs", "3"),
    "bound": ("--small", "--rounds", "1", "--tokens", "64"),
    "pareto": ("--small", "--modes", "plain,ebbtide offload"),
    "longest": ("--small", "--modes", "plain,ebbtide offload", "--most-tokens", "256"),
}
"""What makes a suite small enough for the simulated device, whose memory and cores are those of this machine."""
WITH_MINUTES = ("rounds", "link", "bound", "pareto", "longest")
"""Suites that stop by themselves: they begin no further case after so many minutes."""
LAST_CASE_MINUTES = 1.5
"""What the case that has begun then may take, and a little more."""

PASSED, FAILED, STOPPED = "passed", "failed", "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of the run.

    Attributes:
        name: Of its log, and of its results.
        command: Without the interpreter.
    """

    name: str
    command: tuple[str, ...]


def parts(out: Path, minutes: float, *, simulated: bool = False) -> list[Part]:
    """Return every part, the most important first: first contact, the tests by file, the suites.

    Args:
        out: Folder of the suites' results.
        minutes: The time limit of one part.
        simulated: Run on the simulated device, to try the run itself; its numbers mean nothing.
    """
    # Warnings of CUDA and its tools, which no other machine shows, are not failures there.
    pytest = ("-m", "pytest", "-W", "default", "-q", "-p", "no:cacheprovider")
    tests = sorted((ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda path: (path.stem not in FIRST_TESTS, path))
    if simulated:
        pytest = (*pytest, "--simdev")
    module = ("-m", "tests.simdev.run") if simulated else ("-m",)
    found = [Part(name="first_contact", command=(*module, "benchmarks.first_contact"))]
    found += [Part(name=path.stem, command=(*pytest, str(path.relative_to(ROOT)))) for path in tests]
    for suite in SUITES:
        limit = ("--minutes", f"{max(minutes / 2, minutes - LAST_CASE_MINUTES):g}") if suite in WITH_MINUTES else ()
        small = SIMULATED[suite] if simulated else ()
        command = (*module, f"benchmarks.suites.{suite}", "--out", str(out / suite), *small, *limit)
        found.append(Part(name=suite, command=command))
    return found


def run(part: Part, out: Path, seconds: float) -> str:
    """Run one part and return how it ended; its output goes to its log."""
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(
            [sys.executable, *part.command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = child.wait(timeout=seconds)
            if status:
                log.write(f"ended with status {status}\n")  # a negative status is a signal: -9 if memory ran out
            return FAILED if status else PASSED
        except subprocess.TimeoutExpired:
            return STOPPED
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # its own children as well
                child.wait()


def report(todo: list[Part], found: dict[str, str], out: Path) -> str:
    """Return a table of the parts: how each ended, and the last line that it printed."""
    where = torch.accelerator.current_accelerator() or "the simulated device"
    lines = [
        f"# make gpu: torch {torch.__version__}, {where}",
        "",
        "| part | ended | last line |",
        "| --- | --- | --- |",
    ]
    for part in todo:
        log, results = out / f"{part.name}.log", out / part.name / "README.md"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "").strip(" =")
        name = f"[{part.name}]({part.name}/README.md)" if results.exists() else part.name
        lines.append(f"| {name} | {found.get(part.name, 'not begun')} | {last.replace('|', '/'):.100} |")
    return "\n".join([*lines, ""])


def run_all(todo: list[Part], out: Path, *, minutes: float, part_minutes: float) -> dict[str, str]:
    """Run the parts that have not passed yet, until the time is over; return how each part has ended so far.

    Args:
        todo: The parts.
        out: Folder of logs and results, made if missing.
        minutes: Begin no further part after this time.
        part_minutes: A part that takes longer is stopped.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept, begun = out / "parts.json", time.monotonic()
    found: dict[str, str] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for part in todo:
        if found.get(part.name) == PASSED:
            continue
        left = 60 * minutes - (time.monotonic() - begun)
        if left <= 0:
            break
        print(f"== {part.name}: ", end="", flush=True)
        found[part.name] = run(part, out, min(60 * part_minutes, left))
        kept.write_text(json.dumps(found, indent=1), encoding="utf-8")
        (out / "README.md").write_text(report(todo, found, out), encoding="utf-8")
        print(found[part.name], flush=True)
    return found


def main() -> None:
    """Run the remaining parts; exit with 1 if a part failed or remains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="names of parts; default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further part after this time")
    parser.add_argument("--part-minutes", type=float, default=10.0, help="stop a part that takes longer")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of logs and results")
    parser.add_argument("--simdev", action="store_true", help="on the simulated device, to try the run itself")
    given = parser.parse_args()
    if not given.simdev and not torch.accelerator.is_available():
        print("Nothing run: torch finds no accelerator on this machine")
        return
    out = given.out.resolve()
    todo = [
        part
        for part in parts(out, given.part_minutes, simulated=given.simdev)
        if not given.parts or part.name in given.parts
    ]
    found = run_all(todo, out, minutes=given.minutes, part_minutes=given.part_minutes)
    left = [f"{part.name} ({found.get(part.name, 'not begun')})" for part in todo if found.get(part.name) != PASSED]
    if left:
        raise SystemExit(f"Not passed: {', '.join(left)}; logs in {out}; the same command again goes on")
    print(f"All parts passed; logs and results in {out}")


if __name__ == "__main__":
    main()
