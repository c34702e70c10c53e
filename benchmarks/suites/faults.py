"""Page faults, steps and peaks on a CPU: ordinary training as users run it, checkpointing, and ebbtide's policies.

On a CPU, memory that is freed and allocated again costs page faults, and the kernel's time to clear pages. Each case is
a process of its own (``benchmarks/case.py``, with its gate) in which nothing of the allocator is set beforehand. The
modes of a length run in lockstep, and each step time is divided by that of ordinary training's step of the same number.

    python -m benchmarks.suites.faults [--tokens 256,512,1024] [--rounds 2] [--minutes 90] [--model NAME] [--out DIR]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.case import Case, Row
from benchmarks.cases import Book, arguments, grouped
from benchmarks.results_folder import spread, summary
from ebbtide.base.units import format_size

MODES = ("plain", "checkpointing", "ebbtide auto", "ebbtide minimal", "ebbtide keep")
STEPS = 10


def table(rows: Sequence[Row]) -> list[str]:
    """Return a row for every length and mode; medians over all rounds."""
    lines = [
        "| tokens | mode | page faults a step | system time | step | step ÷ plain | peak | of it tensors | status |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    groups = grouped(rows, lambda case: (case.tokens, MODES.index(case.mode)))
    for (tokens, mode), (found, ratios) in sorted(groups.items(), key=lambda group: group[0]):
        status = ", ".join(sorted({row.status for row in found}))
        done = [row for row in found if row.seconds]
        cells = [""] * 6
        if done:
            cells = [
                f"{statistics.median(n for row in done for n in row.faults):,.0f}",
                f"{statistics.median(s for row in done for s in row.system_seconds):.2f} s",
                f"{statistics.median(s for row in done for s in row.seconds):.2f} s",
                f"x{spread(summary(ratios))}" if ratios else "",
                format_size(statistics.median(row.base_bytes + row.peak_bytes for row in done)),
                format_size(statistics.median(row.allocated_bytes for row in done)),
            ]
        lines.append("| " + " | ".join([str(tokens), MODES[mode], *cells, status]) + " |")
    return lines


def report(rows: list[Row]) -> str:
    """Return the README of a results folder."""
    return "\n".join(
        [
            "# Page faults, steps and peaks on a CPU",
            "",
            "Forward and backward of one step, no head and no optimizer, in fresh processes; medians. Faults are",
            "minor ones (`ru_minflt`), system time is `ru_stime`. Peaks are of the resident size, in a step of its",
            "own with a trimmed heap; *of it tensors* is what tensors held at most in one step, above weights and",
            "gradients: the rest is libraries and what the allocator keeps of freed memory. The processes go in",
            "lockstep, and each step is divided by ordinary training's of the same number (quartiles), the mean of two",
            "equal runs, which start first and last. Gradients were first compared bitwise with those of ordinary",
            "training. Made by `python -m benchmarks.suites.faults`; every step is in `run.json`.",
            "",
            *table(rows),
            "",
        ]
    )


def main() -> None:
    """Measure, and write the results after every lockstep."""
    given = arguments(__doc__, minutes=90.0, tokens="256,512,1024", rounds=2, model="SmolLM2-12")
    book = Book("faults", given.out, given.minutes, report, {"model": given.model, "rounds": given.rounds})
    for tokens in map(int, given.tokens.split(",")):
        for _ in range(given.rounds):
            book.run_in_lockstep(
                Case(mode=mode, model=given.model, tokens=tokens, steps=STEPS, gate_tokens=64)
                for mode in (*MODES, "plain")
            )
    book.close()


if __name__ == "__main__":
    main()
