"""The runner of a machine with a card: parts that it keeps, repeats and stops."""

from __future__ import annotations

import json
import time
from pathlib import Path
from subprocess import Popen

import pytest

from benchmarks import gpu
from benchmarks.gpu import FAILED, PASSED, STOPPED, Part, run_all


def python(name: str, code: str) -> Part:
    return Part(name=name, command=("-c", code))


def test_parts_that_passed_are_left_out_and_others_run_again(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    noted = f"open({str(marks)!r}, 'a').write('x')"
    todo = [python("good", noted), python("bad", f"{noted}; raise SystemExit(3)")]
    for _ in range(2):
        found = run_all(todo, tmp_path / "out", minutes=5, part_minutes=5)
        assert found == {"good": PASSED, "bad": FAILED}
        assert json.loads((tmp_path / "out" / "parts.json").read_text()) == found
    assert marks.read_text() == "xxx"


def test_a_part_that_takes_too_long_is_stopped_and_its_output_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, limits, wait = "import time; print('begun', flush=True); time.sleep(600)", list[float](), Popen.wait

    def until_it_has_begun(child: Popen[bytes], timeout: float | None = None) -> int:
        limits.extend([] if timeout is None else [timeout])
        while "begun" in child.args[-1] and not (tmp_path / "slow.log").read_text():
            time.sleep(0.01)
        return wait(child, 0.1 if timeout is not None and "begun" in child.args[-1] else timeout)

    monkeypatch.setattr(Popen, "wait", until_it_has_begun)
    todo = [python("slow", hangs), python("next", "print('next')")]
    assert run_all(todo, tmp_path, minutes=50, part_minutes=5) == {"slow": STOPPED, "next": PASSED}
    assert limits == [300, 300]
    assert (tmp_path / "slow.log").read_text() == "begun\n" and (tmp_path / "next.log").read_text() == "next\n"


def test_the_table_says_how_each_part_ended(tmp_path: Path) -> None:
    todo = [python("good", "print('a | b'); print()"), python("bad", "raise SystemExit(3)"), python("later", "pass")]
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "README.md").touch()
    run_all(todo[:2], tmp_path, minutes=5, part_minutes=5)
    assert gpu.report(todo, json.loads((tmp_path / "parts.json").read_text()), tmp_path).splitlines()[4:] == [
        "| [good](good/README.md) | passed | a / b |",
        "| bad | failed | ended with status 3 |",
        "| later | not begun |  |",
    ]
    assert "| bad | failed |" in (tmp_path / "README.md").read_text()


def test_the_simulated_device_gets_every_part_in_a_small_size(tmp_path: Path) -> None:
    found = {part.name: part.command for part in gpu.parts(tmp_path, 5, simulated=True)}
    assert found.keys() == {part.name for part in gpu.parts(tmp_path, 5)} and gpu.SIMULATED.keys() == {*gpu.SUITES}
    for name, command in found.items():
        assert ("--simdev" in command) is not ("tests.simdev.run" in command)
        assert set(gpu.SIMULATED.get(name, ())) <= set(command)


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert run_all([python("never", "pass")], tmp_path, minutes=0, part_minutes=5) == {}


def test_every_test_file_and_suite_is_a_part(tmp_path: Path) -> None:
    found = {part.name: part.command for part in gpu.parts(tmp_path, 5)}
    tests = {path.stem for path in (gpu.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert tests | {"first_contact", *gpu.SUITES} == found.keys()
    assert list(found)[:3] == ["first_contact", *gpu.FIRST_TESTS] and list(found)[-len(gpu.SUITES) :] == [*gpu.SUITES]
    assert "default" in found["test_store"] and found["pareto"][-2:] == ("--minutes", "3.5")
    assert all((gpu.ROOT / "benchmarks" / "suites" / f"{suite}.py").exists() for suite in gpu.SUITES)
