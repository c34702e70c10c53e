"""The suite of page faults: whose turn it is, and what its table says."""

from __future__ import annotations

from benchmarks.case import Case, Row
from benchmarks.peers import way_named
from benchmarks.suites.faults import WAYS, ratios, table, turns

MIB = 1 << 20


def row(way: str, seconds: float, faults: int, tokens: int = 256) -> Row:
    case = Case(way=way, model="tiny", tokens=tokens)
    times = [seconds, seconds, 9 * seconds]
    return Row(case=case, seconds=times, faults=[faults] * 3, system_seconds=[0.1] * 3, peak_bytes=MIB, base_bytes=MIB)


def test_every_way_begins_a_round_and_is_known() -> None:
    assert [turns(number)[0] for number in range(len(WAYS))] == list(WAYS)
    assert all(sorted(turns(number)) == sorted(WAYS) for number in range(len(WAYS)))
    assert [way_named(way).name for way in WAYS] == list(WAYS)


def test_a_step_is_divided_by_the_plain_one_of_its_round() -> None:
    rows = [
        row("plain", 1.0, 100), row("ebbtide auto", 1.1, 120),
        row("ebbtide auto", 4.0, 120), row("plain", 2.0, 100),
        row("plain", 7.0, 1, tokens=512),
    ]  # fmt: skip
    assert ratios(rows)[256, "ebbtide auto"] == [1.1, 2.0]
    lines = table([*rows, Row(case=Case(way="ebbtide keep", model="tiny", tokens=512), status="no")])[2:]
    assert lines[1] == "| 256 | ebbtide auto | 120 | 0.10 s | 4.00 s | x1.550 (1.325 to 1.775) | 2.0 MiB | 2 | ok |"
    assert lines[-1] == "| 512 | ebbtide keep |  |  |  |  |  |  | no |"
