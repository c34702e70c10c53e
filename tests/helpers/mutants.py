"""Removes one guard of the code at a time and shows that a test notices.

``python -m tests.helpers.mutants`` runs the tables of ``mutant_table.py`` and of ``tests/simdev/mutants.py``; with
words, only the mutants whose names contain all of them. Each mutant changes one text in a copy of ``src``; the tests
named in its row run against that copy, and the first failure kills it. The test that killed it last time runs first:
``tests/mutants.md``, which a run of all mutants rewrites. The exit status is 1 if one survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "mutants.md"
_ABOUT = """# Guards removed, one at a time

For anyone who changes the engine or the store: the guards that were removed from each file
(`tests/helpers/mutant_table.py`, `tests/simdev/mutants.py`), and the test that failed then. Written by
`python -m tests.helpers.mutants`.
"""
LIMIT_SECONDS = 600
NO_END = f"(no end within {LIMIT_SECONDS} s)"
"""What kills a mutant under which the tests wait for ever."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change that some test must notice.

    Attributes:
        name: The removed guard.
        file: Below ``src``.
        old: Text that occurs in it once.
        new: Its replacement.
        tests: Paths and options of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def apply(mutant: Mutant, source: Path) -> None:
    """Change a copy of ``src``.

    Raises:
        ValueError: The text does not occur exactly once.
    """
    path = source / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name!r}: found {text.count(mutant.old)} times in {mutant.file}; expected once")
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, str(path), "exec")  # a mutant with a syntax error would count as killed
    path.write_text(changed)


def killed_by(mutant: Mutant, first: str = "") -> str:
    """Return the test that fails under a mutant, or how the run ended; an empty text if it survives.

    Args:
        mutant: The change.
        first: A test that is tried before all others.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        apply(mutant, source)
        options = [text for text in mutant.tests if text.startswith("-")]
        status, output = _run([*options, first], source) if first else (0, "")
        if status in (0, 4, 5):  # it passes, or does not exist
            status, output = _run(mutant.tests, source)
    if status is None:
        return NO_END
    if status < 0:
        return f"(the tests' process ended by signal {-status})"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status == 1 and failed:
        return failed[0].split(" ", 1)[1].partition(" - ")[0]
    if status not in (0, 1):
        raise RuntimeError(f"{mutant.name!r}: pytest returned {status}\n{output[-4000:]}")
    return ""


def _run(tests: Sequence[str], source: Path) -> tuple[int | None, str]:
    """Return the exit status of tests against a copy of ``src``, None if they did not end, and their output."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tb=no", *tests]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return ran.returncode, ran.stdout + ran.stderr


def known_killers() -> dict[str, str]:
    """Return the test that found each mutant when the page was written."""
    return dict(re.findall(r"^- (.+): `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def write_page(killers: Mapping[Mutant, str]) -> None:
    """Write the test that found each mutant, by file."""
    text = _ABOUT
    for file in dict.fromkeys(mutant.file for mutant in killers):
        found = [f"- {m.name}: `{killer}`" for m, killer in killers.items() if m.file == file]
        text += f"\n## `{file}`\n\n" + "\n".join(found) + "\n"
    PAGE.write_text(text, encoding="utf-8")


def main(words: Sequence[str]) -> int:
    """Run the mutants whose names contain all words, and print a table."""
    from tests.helpers.mutant_table import MUTANTS
    from tests.simdev.mutants import MUTANTS as OF_THE_STORE

    chosen = [m for m in (*MUTANTS, *OF_THE_STORE) if all(word in m.name for word in words)]
    begun, known = time.monotonic(), known_killers()
    killers: dict[Mutant, str] = {}
    for mutant in chosen:
        killer = killers[mutant] = killed_by(mutant, known.get(mutant.name, ""))
        print(f"{'killed' if killer else 'SURVIVES':9} {mutant.name:64} {killer}", flush=True)
    survivors = [mutant.name for mutant, killer in killers.items() if not killer]
    if not words and not survivors:
        write_page(killers)
    print(
        f"{len(chosen)} mutants in {time.monotonic() - begun:.0f} s, {len(survivors)} survive", *survivors, sep="\n  "
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
