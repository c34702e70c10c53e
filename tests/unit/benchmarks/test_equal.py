"""The suite of equal runs: its table."""

from __future__ import annotations

from benchmarks.case import Case, Row
from benchmarks.suites.equal import RUNS, report, table


def rows(*seconds: float) -> list[Row]:
    case = Case(mode="plain", model="tiny", tokens=64)
    return [Row(case=case, seconds=[one, one, 9 * one]) for one in seconds]


def test_each_run_is_divided_by_the_mean_of_its_round() -> None:
    found = [*rows(1.2, 1.0, 1.0, 0.9, 0.9), *rows(*[2.0] * RUNS)]
    assert table(found)[2:] == [
        "| 1 | ×1.200 | ×1.000 | ×1.000 | ×0.900 | ×0.900 |",
        "| 2 | ×1.000 | ×1.000 | ×1.000 | ×1.000 | ×1.000 |",
    ]
    assert "What equal runs differ by" in report(found)


def test_a_run_that_failed_leaves_its_cell_empty() -> None:
    found = rows(*[1.0] * RUNS)
    found[1].seconds.clear()
    assert table(found)[2] == "| 1 | ×1.000 |  | ×1.000 | ×1.000 | ×1.000 |"
