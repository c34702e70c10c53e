"""How far runs differ that are equal: the same ordinary training in five processes, in lockstep.

What two modes differ by means little where it is less than this. The processes start one after the other.

    python -m benchmarks.suites.equal [--rounds 4] [--minutes 20] [--model NAME] [--tokens 512] [--out DIR]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.case import Case, Row
from benchmarks.cases import Book, arguments

RUNS = 5
STEPS = 12


def table(rows: Sequence[Row]) -> list[str]:
    """Return a row for every round: each run's median step over the mean of all."""
    lines = [
        "| round | " + " | ".join(f"run {n}" for n in range(1, RUNS + 1)) + " |",
        "| ---: |" + " ---: |" * RUNS,
    ]
    for first in range(0, len(rows), RUNS):
        medians = [statistics.median(row.seconds) if row.seconds else None for row in rows[first : first + RUNS]]
        known = [one for one in medians if one is not None]
        cells = ["" if one is None else f"×{one / statistics.fmean(known):.3f}" for one in medians]
        lines.append("| " + " | ".join([str(first // RUNS + 1), *cells]) + " |")
    return lines


def report(rows: list[Row]) -> str:
    """Return the README of a results folder."""
    return "\n".join(
        [
            "# What equal runs differ by",
            "",
            f"Ordinary training in {RUNS} fresh processes that start one after the other and then take their steps in",
            "lockstep: forward and backward, no head and no optimizer. The median step of each is divided by the mean",
            "of all. Made by `python -m benchmarks.suites.equal`; every step is in `run.json`.",
            "",
            *table(rows),
            "",
        ]
    )


def main() -> None:
    """Measure, and write the results after every round."""
    given = arguments(__doc__, minutes=20.0, tokens=512, rounds=4, model="small")
    book = Book("equal", given.out, given.minutes, report, {"model": given.model, "rounds": given.rounds})
    case = Case(mode="plain", model=given.model, tokens=given.tokens, batch=2, steps=STEPS, gate_tokens=64)
    for _ in range(given.rounds):
        book.run_in_lockstep([case] * RUNS)
    book.close()


if __name__ == "__main__":
    main()
