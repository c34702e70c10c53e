"""Page faults, steps and peaks on a CPU: plain training as users have it, checkpointing, and ebbtide's policies.

On a CPU memory that is freed and taken again costs page faults, and the kernel's time to clear pages. Each case is a
process of its own (``benchmarks/case.py``, with its gate) in which nothing of the allocator is set beforehand. The ways
of a length run in turn, round after round, and each round begins with another; a step is divided by plain training's of
the same round.

    python -m benchmarks.suites.faults [--tokens 256,512,1024] [--rounds 5] [--minutes 8] [--model NAME] [--out DIR]
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.case import Case, Row
from benchmarks.cases import Book, arguments
from benchmarks.results_folder import summary
from ebbtide.base.units import format_size

WAYS = ("plain", "checkpointing", "ebbtide auto", "ebbtide minimal", "ebbtide keep")
STEPS = 4


def turns(number: int) -> tuple[str, ...]:
    """Return the ways in the order of a round."""
    first = number % len(WAYS)
    return WAYS[first:] + WAYS[:first]


def ratios(rows: Sequence[Row]) -> dict[tuple[int, str], list[float]]:
    """Return, by tokens and way, the step of each round divided by plain training's of that round."""
    by_round: dict[tuple[int, str], list[float | None]] = defaultdict(list)
    for row in rows:
        by_round[row.case.tokens, row.case.way].append(statistics.median(row.seconds) if row.seconds else None)
    return {
        (tokens, way): [
            one / plain for one, plain in zip(times, by_round[tokens, "plain"], strict=False) if one and plain
        ]
        for (tokens, way), times in list(by_round.items())
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line for every length and way; medians over all rounds."""
    lines = [
        "| tokens | method | page faults a step | system time | step | step ÷ plain | peak | rounds | status |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.case.tokens, row.case.way].append(row)
    compared = ratios(rows)
    for (tokens, way), found in sorted(groups.items(), key=lambda group: (group[0][0], WAYS.index(group[0][1]))):
        status = ", ".join(sorted({row.status for row in found}))
        done = [row for row in found if row.seconds]
        cells = [""] * 6
        if done:
            over = summary(compared[tokens, way]) if compared[tokens, way] else None
            cells = [
                f"{statistics.median(n for row in done for n in row.faults):,.0f}",
                f"{statistics.median(s for row in done for s in row.system_seconds):.2f} s",
                f"{statistics.median(s for row in done for s in row.seconds):.2f} s",
                "" if over is None else f"x{over['median']:.3f} ({over['q1']:.3f} to {over['q3']:.3f})",
                format_size(statistics.median(row.base_bytes + row.peak_bytes for row in done)),
                str(len(done)),
            ]
        lines.append("| " + " | ".join([str(tokens), way, *cells, status]) + " |")
    return lines


def report(rows: list[Row]) -> str:
    """Return the README of a results folder."""
    return "\n".join(
        [
            "# Page faults, steps and peaks on a CPU",
            "",
            "Forward and backward of one step, no head and no optimizer, in fresh processes; medians. Faults are",
            "minor ones (`ru_minflt`), system time is `ru_stime`. Peaks are of the resident size, in a step of its",
            "own with a trimmed heap. Steps are divided by ordinary training's of the same round (quartiles).",
            "Gradients were first compared bitwise with those of ordinary training. Made by",
            "`python -m benchmarks.suites.faults`; every step is in `run.json`.",
            "",
            *table(rows),
            "",
        ]
    )


def main() -> None:
    """Measure, and write after every case."""
    given = arguments(__doc__, tokens="256,512,1024", rounds=5, model="SmolLM2-12")
    book = Book("faults", given.out, given.minutes, report, {"model": given.model, "rounds": given.rounds})
    for tokens in map(int, given.tokens.split(",")):
        for number in range(given.rounds):
            book.run_all(
                Case(way=way, model=given.model, tokens=tokens, steps=STEPS, gate_tokens=64) for way in turns(number)
            )
    book.close()


if __name__ == "__main__":
    main()
