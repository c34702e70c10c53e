"""The suite of plans: its cases, and its table of results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.case import Case, Row
from benchmarks.peers import mode_named, planned
from benchmarks.suites.bound import SLOWDOWNS, aims, kept_promises, table, total

MIB = 1 << 20


def row(mode: str, peak_mib: int, seconds: list[float], **predicted: float) -> Row:
    case = Case(mode=mode, model="small", tokens=512, batch=2)
    notes: dict[str, Any] = {"lockstep": 1} | ({"predicted": predicted} if predicted else {})
    return Row(case=case, seconds=seconds, base_bytes=100 * MIB, peak_bytes=peak_mib * MIB, notes=notes)


def test_budgets_lie_between_the_least_peak_and_that_of_plain_training() -> None:
    modes = aims([])
    assert modes == ["plain", *(planned(max_slowdown=s) for s in SLOWDOWNS)]
    rows = [row(mode, 900 - 100 * place, [1.0]) for place, mode in enumerate(modes)]
    assert aims(rows[:-1]) == modes
    budgets = [planned(memory_budget=(100 + 500 + between) * MIB) for between in (100, 200, 300)]
    assert aims(rows)[len(modes) :] == budgets
    assert aims([*rows, *(row(mode, 1, [1.0]) for mode in modes)]) == aims(rows), "budgets follow from the first round"
    assert aims(rows, ()) == modes


def test_the_table_compares_results_with_predictions_and_the_bound() -> None:
    said = {
        "peak_bytes": 204 * MIB, "overhead_percent": 4.0, "bound_percent": 2.0, "kept_bytes": MIB,
        "offloaded_bytes": 2 * MIB, "recomputed_bytes": 3 * MIB,
    }  # fmt: skip
    budget = planned(memory_budget=300 * MIB)
    rows = [
        row("plain", 300, [1.0, 1.0, 1.2]), row(budget, 100, [1.05, 1.05, 1.32], **said),
        row(planned(max_slowdown=0.05), 100, [1.1, 1.1, 1.32], **said),
        Row(case=Case(mode="x", model="small", tokens=512), status="no", notes={"lockstep": 1}),
    ]  # fmt: skip
    lines = table(rows)[2:]
    assert "| plain |  | 400.0 MiB |  |  | 1.000 (1.000 to 1.000) |  |  |  |  | ok |" in lines[0]
    assert (
        "| 204.0 MiB | 200.0 MiB | +2.0 % | 1.040 | 1.050 (1.050 to 1.075) |  | 1.020 | +3.0 points | "
        "1.0 MiB / 2.0 MiB / 3.0 MiB | ok |"
    ) in lines[1]
    assert "| auto, max_slowdown=0.05 |  | 200.0 MiB |  | 1.040 | 1.100 (1.100 to 1.100) | +5.0 points |" in lines[2]
    assert kept_promises(rows).endswith("the median was 5.0 points beyond, the worst 5.0.")
    assert kept_promises(rows[:2]) == "No promise was put to the test."
    assert lines[3].endswith("| x |  |  |  |  |  |  |  |  |  | no |")
    assert total(rows[0]) == 400 * MIB


def test_rounds_of_a_promise_count_alone_and_together() -> None:
    promise, rows = planned(max_slowdown=0.05), []
    for number, seconds in enumerate(([1.15, 1.15, 1.15], [1.01, 1.01, 1.01], [1.03, 1.03, 1.03])):
        pair = [row("plain", 300, [1.0, 1.0, 1.0]), row(promise, 200, seconds)]
        for each in pair:
            each.notes["lockstep"] = number
        rows += pair
    assert kept_promises(rows) == (
        "Of 3 promised runs the median was 0.0 points beyond, the worst 10.0."
        " Of 1 promises, each over all its rounds, the median was 0.0 points beyond, the worst 0.0."
    )


def test_a_mode_is_named_by_its_arguments() -> None:
    assert mode_named("plain").name == "plain"
    assert mode_named(planned(max_slowdown=0.3)).setting == "auto, max_slowdown=0.3"
    assert mode_named("ebbtide offload, window=1MiB").setting == "offload, window=1MiB"
    for name in ("ebbtide nothing", "ebbtide auto, x", "TRLs"):
        with pytest.raises(ValueError, match="is no mode"):
            mode_named(name)
