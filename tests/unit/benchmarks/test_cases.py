"""Cases of the benchmarks: the gate comes before any number, and every failure stays a row."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import case as case_module
from benchmarks import cases as cases_module
from benchmarks.case import Case, CopyCount, Row, digests, most_allocated, run
from benchmarks.cases import Book, against_plain, compact_memory, run_in_lockstep, table
from benchmarks.peers import Mode, Prepared, absent, all_modes
from benchmarks.shapes import Shape
from benchmarks.suites.longest import longest
from benchmarks.suites.pareto import cases, report
from ebbtide.store import share as share_module


def feed(tokens: int, batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(batch, tokens, 8)}


class Returns(nn.Linear):
    """A linear layer that returns a tuple, as models do."""

    def forward(self, input: torch.Tensor) -> Any:
        return (super().forward(input).tanh(),)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_module, "SHAPES", {"linear": Shape(make=lambda: Returns(8, 8), feed=feed)})


def with_mode(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[nn.Module], Generator[Prepared]], **given: Any
) -> Row:
    monkeypatch.setattr(case_module, "mode_named", lambda name: Mode(name=name, prepare=prepare, **given))
    return run(Case(mode="w", model="linear", tokens=16, steps=2))


@pytest.mark.parametrize(("once", "prepared"), [(False, 2), (True, 1)])
def test_a_mode_whose_gradients_are_equal_is_timed(once: bool, prepared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is prepared again for the steps that are timed, if that is possible: a plan sees no step of the gate."""
    undone: list[bool] = []

    def prepare(model: nn.Module) -> Generator[Prepared]:
        yield Prepared(model=model)
        undone.append(True)

    row = with_mode(monkeypatch, prepare, once=once)
    assert row.status == "ok" and len(row.seconds) == 2 and row.base_bytes > 0 and undone == [True] * prepared
    assert row.gate == "2 gradients, bitwise equal, at 16 tokens"
    assert json.loads(json.dumps(asdict(row)))["case"]["mode"] == "w"


def test_no_number_where_a_gradient_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(model: Any) -> Generator[Prepared]:
        handle = model.bias.register_hook(lambda grad: grad * (1 + 1e-6))
        yield Prepared(model=model)
        handle.remove()

    row = with_mode(monkeypatch, prepare)
    assert row.status == "differs: 1 of 2 gradients, such as bias" and row.seconds == [] and row.peak_bytes == 0


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("no more"), "out of memory"), (KeyError("x"), "failed: KeyError: 'x'")],
)
def test_what_goes_wrong_is_the_rows_status(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(model: nn.Module) -> Generator[Prepared]:
        raise error
        yield

    assert with_mode(monkeypatch, prepare).status == status


def test_a_missing_package_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_mode(monkeypatch, lambda model: iter(()), package="no-such-peer").status == (  # type: ignore[arg-type]
        "not installed: pip install no-such-peer"
    )
    mode = Mode(name="w", prepare=lambda model: iter(()), package="pytest", accelerator=True)  # type: ignore[arg-type]
    assert absent(mode, accelerated=False) == "not run: its package needs an accelerator"
    assert absent(mode, accelerated=True) is None


def test_digests_see_one_bit_and_its_place() -> None:
    model = nn.Linear(40, 30)
    model.weight.grad, model.bias.grad = torch.randn(30, 40), torch.randn(30)
    before = digests(model)
    assert before == digests(model)
    with torch.no_grad():
        model.weight.grad[3, 5] = torch.nextafter(model.weight.grad[3, 5], torch.tensor(9.0))
        model.bias.grad.copy_(model.bias.grad.flip(0))
    after = digests(model)
    assert after["weight"] != before["weight"] and after["bias"] != before["bias"]


def test_copies_between_devices_are_counted() -> None:
    with CopyCount() as count:
        torch.zeros(10).to("meta")
        torch.zeros(5).copy_(torch.zeros(5))
    assert (count.out_bytes, count.in_bytes) == (0, 40)


@pytest.mark.parametrize("most", [0, 100, 1023, 4096, 5000, 100_000])
def test_the_longest_that_fits_is_found(most: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= most

    found = longest(fits, 128, 8192)
    assert found <= min(most, 8192) and (found == 0) == (most < 128)
    assert found == 8192 or not found or found + found // 8 + 1 >= most
    assert len(tried) == len(set(tried)) <= 12


def test_a_book_writes_after_each_row_and_reaches_no_further_than_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Case] = []

    def runs(cases: list[Case], *, limit_seconds: float) -> list[Row]:
        ran.extend(cases)
        return [Row(case=case, seconds=[2.0, 1.0, 3.0], peak_bytes=2_000_000) for case in cases]

    monkeypatch.setattr(cases_module, "run_in_lockstep", runs)
    monkeypatch.setattr(cases_module, "COMPACT_MEMORY", tmp_path / "compact_memory")
    book = Book("trial", tmp_path, 1.0, report, {"small": True})
    book.run(Case(mode="plain", model="tiny", tokens=128))
    first = json.loads((tmp_path / "run.json").read_text())
    assert [r["status"] for r in first["rows"]] == ["ok"]
    assert first["memory_compacted"] and (tmp_path / "compact_memory").read_text() == "1"
    book.run(Case(mode="torchtune", model="tiny", tokens=128))
    book._ends = 0.0
    book.run(Case(mode="save_on_cpu", model="tiny", tokens=128))
    found = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [r["status"].split(":")[0] for r in found][::2] == ["ok", "not reached"] and len(ran) == 1
    assert found[1]["status"].startswith(("not installed", "not run"))
    assert "| plain | 2.000 (1.500 to 2.500) | 1.000 | 2 | 1.00 | 0 | 0 | ok |" in (tmp_path / "README.md").read_text()


def test_memory_that_may_not_be_compacted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_module, "COMPACT_MEMORY", tmp_path)  # a folder: nobody may write it as a file
    assert not compact_memory()


def test_cases_in_lockstep_take_each_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case writes when it may take a step; a failing case leaves its steps to the others."""
    limits: list[float] = []

    class Timer(threading.Timer):
        def __init__(self, interval: float, function: Callable[[], object]) -> None:
            limits.append(interval)
            super().__init__(interval, function)

    monkeypatch.setattr(threading, "Timer", Timer)
    modes = ("plain", "ebbtide keep", "no such mode")
    tried = [Case(mode=mode, model="tiny", tokens=32, steps=3, gate_tokens=16, lockstep=True) for mode in modes]
    plain, keep, unknown = run_in_lockstep(tried, limit_seconds=300.0)
    assert len(limits) >= 3 + 2 * 3 and set(limits) == {300.0}, "many steps take no longer than one"
    assert (plain.status, keep.status) == ("ok", "ok")
    assert len(plain.seconds) == len(keep.seconds) == 3 and plain.allocated_bytes > 0
    assert unknown.seconds == [] and unknown.status == "its process died: out of memory, most likely"
    for row in (plain, keep, unknown):
        row.notes["lockstep"] = 1  # as a book does
    assert list(map(len, against_plain([plain, keep, unknown]))) == [3, 3, 0]


@pytest.mark.slow
def test_cases_that_memory_does_not_hold_together_follow_one_another(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(share_module, "free_memory_bytes", lambda: 1024**2)
    tried = [Case(mode="plain", model="tiny", tokens=32, steps=2, gate_tokens=16, lockstep=True)] * 2
    rows = run_in_lockstep(tried)
    assert [(row.status, len(row.seconds), row.case.lockstep) for row in rows] == [("ok", 2, False)] * 2
    assert "The cases follow one another: 2 at once need " in capfd.readouterr().out


def test_the_most_that_tensors_hold_is_exact() -> None:
    def act() -> None:
        held = torch.zeros(1000, dtype=torch.float64)
        freed = held + 1
        del freed
        torch.zeros(500, dtype=torch.float64)

    assert 16_000 <= most_allocated(act) < 16_100  # and a few scalars


def test_every_mode_is_a_row_of_every_group() -> None:
    found = list(cases(small=True, models=[], modes=[]))
    assert {case.mode for case in found} == set(all_modes()) and {case.tuning for case in found} == {"full", "lora"}
    large = list(cases(small=False, models=[], modes=["plain"]))
    short = {(c.batch, c.tokens) for c in large if c.batch > 1}
    assert short == {(b, t) for b in (8, 16) for t in (256, 512, 1024)} and large[0].model == "Qwen3-8B"
    lines = table([Row(case=found[0], status="out of memory")])
    assert lines[-1].endswith("| plain |  |  |  |  |  |  | out of memory |")


class Unsteady(nn.Linear):
    """A layer that sums in a different order each time, unless deterministic algorithms are on."""

    steady = True

    def forward(self, input: torch.Tensor) -> Any:
        noise = 0.0 if self.steady and torch.are_deterministic_algorithms_enabled() else torch.rand(())
        return (super().forward(input) + noise,)


def plainly(model: nn.Module) -> Generator[Prepared]:
    yield Prepared(model=model)


def test_a_gate_on_a_device_that_does_not_repeat_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(case_module.SHAPES, "linear", Shape(make=lambda: Unsteady(8, 8), feed=feed))
    row = with_mode(monkeypatch, plainly)
    assert row.status == "ok" and len(row.seconds) == 2
    assert row.gate == "2 gradients, bitwise equal, with deterministic algorithms, at 16 tokens"
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(Unsteady, "steady", False)
    row = with_mode(monkeypatch, plainly)
    assert row.status.startswith("not compared") and not row.seconds and not row.peak_bytes
    assert not torch.are_deterministic_algorithms_enabled()
