"""Predictions of plans, measurements, and their distance to the bound: the least time that any schedule could take.

Each case is a process of its own (``benchmarks/case.py``, with its gate): ordinary training, ``Auto`` with several
slowdowns, and ``Auto`` with budgets between the least memory that these took and that of ordinary training. The bound
is the linear program's, at the rates and times that the case itself measured for its plan. The cases of a
model run in lockstep, and each step is divided by the ordinary step of the same number. The timed steps are those under
the plan that remains once plans were judged.

    python -m benchmarks.suites.bound [--small] [--rounds 1] [--steps 10] [--budgets 3] [--minutes 30]
        [--models Qwen3-8B] [--tokens 4096] [--out DIR]
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.case import Case, Row
from benchmarks.cases import Book, against_plain, arguments, grouped
from benchmarks.peers import planned
from benchmarks.results_folder import spread, summary
from ebbtide.base.units import format_size

SLOWDOWNS = (0.0, 0.05, 0.15, 0.3)
SHARES = (0.25, 0.5, 0.75)
"""Budgets, between the least peak (0) and plain training's (1)."""

LENGTHS = {"Qwen3-8B": 8192, "Qwen3-1.7B": 32768}
SMALL_LENGTHS = {"small": 512, "SmolLM2-12": 192}


def aims(rows: list[Row], shares: Sequence[float] = SHARES) -> list[str]:
    """Return the modes to try.

    Args:
        rows: The results of this model so far: budgets follow from the first peaks.
        shares: Where the budgets are, between the least peak (0) and ordinary training's (1).
    """
    modes = ["plain", *(planned(max_slowdown=slowdown) for slowdown in SLOWDOWNS)]
    peaks = {mode: next((total(r) for r in rows if r.case.mode == mode and r.seconds), 0) for mode in modes}
    high, known = peaks["plain"], [nbytes for nbytes in peaks.values() if nbytes]
    if high and len(known) == len(modes):
        modes += [planned(memory_budget=int(min(known) + share * (high - min(known)))) for share in shares]
    return modes


def total(row: Row) -> int:
    """Return the peak with weights, gradients and inputs, which a budget limits."""
    return row.base_bytes + row.peak_bytes


def table(rows: list[Row]) -> list[str]:
    """Return a row for every model and aim; medians over all rounds."""
    lines = [
        "| model | mode | peak: predicted | measured | off | step ÷ plain: predicted | measured | beyond the promise"
        " | bound | above the bound | kept / offloaded / recomputed | status |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for (model, mode), (found, ratios) in grouped(rows, lambda case: (case.model, case.mode)).items():
        status = ", ".join(sorted({row.status for row in found}))
        cells = [f"{model}, {found[0].case.batch} x {found[0].case.tokens}", mode.removeprefix("ebbtide ")]
        cells += _figures([row for row in found if row.seconds], ratios) or [""] * 9
        lines.append("| " + " | ".join([*cells, status]) + " |")
    return lines


def promised(mode: str) -> float | None:
    """Return the largest slowdown that a mode promises; None: it promises no slowdown."""
    begin = planned(max_slowdown="")
    return float(mode.removeprefix(begin)) if mode.startswith(begin) else None


def kept_promises(rows: list[Row]) -> str:
    """Return by how much promised slowdowns were exceeded, in percent of a plain step.

    Of each run, and where there are several rounds also of all of a promise's steps together.
    """
    runs: dict[tuple[str, float], list[list[float]]] = defaultdict(list)
    for row, ratios in zip(rows, against_plain(rows), strict=True):
        if ratios and (slowdown := promised(row.case.mode)) is not None:
            runs[row.case.model, slowdown].append(ratios)
    if not runs:
        return "No promise was put to the test."
    said = _beyond("promised runs", [(ratios, slowdown) for (_, slowdown), all_of in runs.items() for ratios in all_of])
    if all(len(all_of) == 1 for all_of in runs.values()):
        return said
    together = [(list(itertools.chain(*all_of)), slowdown) for (_, slowdown), all_of in runs.items()]
    return f"{said} {_beyond('promises, each over all its rounds,', together)}"


def _beyond(what: str, promises: list[tuple[list[float], float]]) -> str:
    beyond = [100 * max(statistics.median(ratios) - 1 - slowdown, 0.0) for ratios, slowdown in promises]
    middle = statistics.median(beyond)
    return f"Of {len(beyond)} {what} the median was {middle:.1f} points beyond, the worst {max(beyond):.1f}."


def _figures(found: list[Row], ratios: list[float]) -> list[str]:
    if not found or not ratios:
        return []
    peak = statistics.median(map(total, found))
    ratio, came = statistics.median(ratios), spread(summary(ratios))
    plans = [row.notes["predicted"] for row in found if "predicted" in row.notes]
    if not plans:
        return ["", format_size(peak), "", "", came, "", "", "", ""]
    said = {name: statistics.median(plan[name] for plan in plans) for name in plans[0]}
    bound, slowdown = 1 + said["bound_percent"] / 100, promised(found[0].case.mode)
    has_peak = found[0].case.mode.startswith(planned(memory_budget=""))  # measured for a budget only
    return [
        format_size(said["peak_bytes"]) if has_peak else "",
        format_size(peak),
        f"{100 * (said['peak_bytes'] / peak - 1):+.1f} %" if has_peak else "",
        f"{1 + said['overhead_percent'] / 100:.3f}",
        came,
        "" if slowdown is None else f"{100 * (ratio - 1 - slowdown):+.1f} points",
        f"{bound:.3f}",
        f"{100 * (ratio - bound):+.1f} points",
        " / ".join(format_size(said[name]) for name in ("kept_bytes", "offloaded_bytes", "recomputed_bytes")),
    ]


def report(rows: list[Row]) -> str:
    """Return the README of a results folder."""
    return "\n".join(
        [
            "# Plans: predicted, measured, and the bound",
            "",
            "Forward and backward of one step, no head and no optimizer. Peaks are of the device, without one of the",
            "resident size, and predicted for budgets only. Without a device the processes go in lockstep. Each step",
            "is divided by ordinary training's of the same number (quartiles), the mean of two equal runs, which start",
            "first and last. The bound is the linear program's, at the measured rates and times: no schedule that",
            "keeps as many bytes is faster. Gradients were first compared bitwise with those of ordinary training.",
            "Made by `python -m benchmarks.suites.bound`; every step is in `run.json`.",
            "",
            *table(rows),
            "",
            kept_promises(rows),
            "",
        ]
    )


def main() -> None:
    """Measure, and write the results after every case."""
    given = arguments(__doc__, minutes=30.0, models="", rounds=1, tokens=0, steps=10, budgets=len(SHARES))
    lengths = SMALL_LENGTHS if given.small else LENGTHS
    book = Book("bound", given.out, given.minutes, report, {"small": given.small, "rounds": given.rounds})
    for model in given.models.split(",") if given.models else lengths:
        tokens = given.tokens or lengths.get(model, 512 if given.small else 8192)
        shape = {"model": model, "tokens": tokens, "batch": 2 if given.small else 1}

        def run(modes: list[str], shape: dict[str, Any] = shape) -> None:
            book.run_in_lockstep(Case(mode=mode, gate_tokens=128, steps=given.steps, **shape) for mode in modes)

        def following(model: str = model) -> list[str]:
            return aims([row for row in book.rows if row.case.model == model], SHARES[: given.budgets])

        for _ in range(given.rounds):
            modes = following()
            run([*modes, "plain"])  # equal runs differ: compare with their mean
            if later := following()[len(modes) :]:  # in the first round: budgets, now that there are peaks
                run(["plain", *later, "plain"])
    book.close()


if __name__ == "__main__":
    main()
