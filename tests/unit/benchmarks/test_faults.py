"""The suite of page faults: its table."""

from __future__ import annotations

from benchmarks.case import Case, Row
from benchmarks.cases import against_plain
from benchmarks.peers import mode_named
from benchmarks.suites.faults import MODES, table

MIB = 1 << 20


def row(mode: str, seconds: float, faults: int, tokens: int = 256, *, lockstep: int = 1) -> Row:
    case = Case(mode=mode, model="tiny", tokens=tokens)
    times = [seconds, seconds, 9 * seconds]
    return Row(
        case=case,
        seconds=times,
        faults=[faults] * 3,
        system_seconds=[0.1] * 3,
        peak_bytes=MIB,
        base_bytes=MIB,
        allocated_bytes=MIB // 2,
        notes={"lockstep": lockstep},
    )


def test_ordinary_training_first_and_last_is_one_yardstick() -> None:
    rows = [row("plain", 3.0, 100), row("ebbtide auto", 4.0, 120), row("plain", 1.0, 100)]
    later = [row("ebbtide keep", 1.0, 120, lockstep=2)]  # a lockstep without ordinary training
    assert [ratios[0] for ratios in against_plain([*rows, *later])] == [1.5, 2.0, 0.5, 0.5]
    rows[2].seconds.clear()
    assert [ratios[:1] for ratios in against_plain(rows)] == [[1.0], [4 / 3], []]


def test_every_mode_is_known_and_plain_is_first() -> None:
    assert [mode_named(mode).name for mode in MODES] == list(MODES) and MODES[0] == "plain"


def test_a_step_is_divided_by_the_plain_one_of_its_lockstep() -> None:
    rows = [
        row("plain", 1.0, 100), row("ebbtide auto", 1.5, 120),
        row("plain", 2.0, 100, lockstep=2), row("ebbtide auto", 4.0, 120, lockstep=2),
        row("plain", 7.0, 1, tokens=512, lockstep=3),
    ]  # fmt: skip
    assert against_plain(rows)[1] == [1.5] * 3 and against_plain(rows)[3] == [2.0] * 3
    absent = Row(case=Case(mode="ebbtide keep", model="tiny", tokens=512), status="no", notes={"lockstep": 3})
    lines = table([*rows, absent])[2:]
    assert lines[1] == (
        "| 256 | ebbtide auto | 120 | 0.10 s | 4.00 s | x1.750 (1.500 to 2.000) | 2.0 MiB | 512.0 KiB | ok |"
    )
    assert lines[-1] == "| 512 | ebbtide keep |  |  |  |  |  |  | no |"
