"""Removes one guard of the code at a time and shows that a test notices.

``python -m tests.helpers.mutants`` runs the tables of ``mutant_table.py`` beside it and of ``tests/simdev/mutants.py``;
with words, only the mutants whose names hold all of them. Each mutant changes one text in a copy of ``src``; the tests
named in its row run against that copy, and the first failure kills it. The exit status is 1 if one survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600
NO_END = f"(no end within {LIMIT_SECONDS} s)"
"""What kills a mutant under which the tests wait for ever."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change that some test must notice.

    Attributes:
        name: What is removed.
        file: Below ``src``.
        old: Text that occurs in it once.
        new: What it is replaced by.
        tests: What is run: paths, and options of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def apply(mutant: Mutant, source: Path) -> None:
    """Change a copy of ``src``.

    Raises:
        ValueError: The text is not there, or more than once.
    """
    path = source / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name!r}: found {text.count(mutant.old)} times in {mutant.file}; expected once")
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, str(path), "exec")  # a mutant that is no Python would count as killed
    path.write_text(changed)


def killed_by(mutant: Mutant) -> str:
    """Return the test that fails under a mutant, or ``NO_END``; an empty text if it survives."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        apply(mutant, source)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            *mutant.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ran = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return NO_END
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if ran.returncode == 1 and failed:
            return failed[0].split(" ", 1)[1].partition(" - ")[0]
        if ran.returncode not in (0, 1):
            raise RuntimeError(
                f"{mutant.name!r}: pytest returned {ran.returncode}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
            )
        return ""


def main(words: Sequence[str]) -> int:
    """Run the mutants whose names hold all words, and print a table."""
    from tests.helpers.mutant_table import MUTANTS
    from tests.simdev.mutants import MUTANTS as OF_THE_STORE

    chosen = [m for m in (*MUTANTS, *OF_THE_STORE) if all(word in m.name for word in words)]
    survivors: list[str] = []
    begun = time.monotonic()
    for mutant in chosen:
        killer = killed_by(mutant)
        survivors += [] if killer else [mutant.name]
        print(f"{'killed' if killer else 'SURVIVES':9} {mutant.name:64} {killer}", flush=True)
    print(
        f"{len(chosen)} mutants in {time.monotonic() - begun:.0f} s, {len(survivors)} survive", *survivors, sep="\n  "
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
