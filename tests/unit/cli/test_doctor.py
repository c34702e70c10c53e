"""``ebbtide doctor``: what it prints, writes and returns."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide.cli as cli
from ebbtide.doctor import Examination
from ebbtide.doctor.facts import Facts
from ebbtide.doctor.findings import findings
from ebbtide.planner.machines import machine_named
from ebbtide.store.location import filesystem_of
from tests.unit.doctor.made_up import SERVER, SMALL, changed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace this machine with a made-up one; return the requests to it."""
    asked: list[tuple[str, str | None]] = []

    def install(facts: Facts) -> list[tuple[str, str | None]]:
        def examine(target: str, disk_path: str | None) -> Examination:
            asked.append((target, disk_path))
            return Examination(facts=facts, findings=findings(facts))

        monkeypatch.setattr(importlib.import_module("ebbtide.doctor"), "examine", examine)
        return asked

    return install


def test_the_table_and_no_findings(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = machine(SMALL)
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["what", "value", "meaning"]
    at = lines[0].index("meaning")
    assert all(line[at - 2 : at] == "  " and line[at] != " " for line in lines[:-2]), "columns are aligned"
    assert lines[-2:] == ["", "no problems found"]
    assert asked == [("auto", None)]


def test_findings_come_after_the_table_and_a_problem_is_code_1(
    machine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = machine(changed(SMALL, disk__filesystem="tmpfs", host__load=1.9))
    assert cli.main(["doctor", "--disk-path", "/x", "--target", "disk"]) == 1
    assert capsys.readouterr().out.endswith(
        "\n\nEBB010 problem: /var/tmp is on tmpfs, which is RAM: offloading there frees nothing\n"
        "hint: choose a directory on a local disk with --disk_path\n"
        "\nEBB007 note: 1.9 threads ran or waited on 2 CPUs of the machine in the last minute: "
        "the measured rates are too low\n"
        "hint: repeat on an idle machine, above all for a machine file\n"
    )
    assert asked == [("disk", "/x")]


def test_notes_alone_are_code_0(machine: Any) -> None:
    machine(changed(SMALL, host__load=1.9))
    assert cli.main(["doctor"]) == 0


@pytest.mark.parametrize("facts", [SERVER, SMALL, changed(SMALL, machine=None, unmeasured="x")])
@pytest.mark.parametrize("as_json", [["--json"], ["--json", "true"]])
def test_json_and_nothing_else(
    machine: Any, capsys: pytest.CaptureFixture[str], facts: Facts, tmp_path: Path, as_json: list[str]
) -> None:
    machine(facts)
    code = cli.main(["doctor", *as_json, "--out", str(tmp_path / "machine.json")])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"healthy", "machine", "findings", "facts"}
    assert found["healthy"] is (code == 0)
    assert found["facts"]["host"]["cpus"] == sorted(facts.host.cpus)
    if facts.machine is None:
        assert found["machine"] is None and found["findings"][0]["code"] == "EBB002"
        assert not (tmp_path / "machine.json").exists()
    else:
        assert found["machine"] == json.loads((tmp_path / "machine.json").read_text())


def test_the_machine_is_written_as_plans_read_it(
    machine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine(SERVER)
    path = tmp_path / "machine.json"
    assert cli.main(["doctor", "--out", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{path}\n")
    assert cli.main(["doctor", "--out", str(path)]) == 0
    assert machine_named(path) == SERVER.machine


def test_what_was_not_measured_is_not_written(machine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine(changed(SMALL, machine=None, unmeasured="no room"))
    path = tmp_path / "machine.json"
    assert cli.main(["doctor", "--out", str(path)]) == 1
    assert capsys.readouterr().out.endswith(f"{path} was not written: there are no measurements\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "gpu"], "--target is 'gpu'; expected one of auto, host, disk\nhint: such as --target auto"),
        (["--out", "machine"], "--out 'machine' has another ending; expected a name that ends in .json"),
        (["--out", "none/machine.json"], "there is no folder 'none'; expected a file in an existing folder"),
        (["--out", "config.json"], "'config.json' holds something else; expected a new file, or an earlier result"),
        (["--disk_path", ""], "--disk_path is ''; expected a folder\nhint: leave --disk_path out for its default"),
        (["--disk_path", "~nobody-here/x"], "--disk_path is '~nobody-here/x', and there is no such home folder"),
        (["--jsno"], "did you mean '--json'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"hidden_size": 64}')
    asked = machine(SMALL)
    assert cli.main(["doctor", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.out == "" and asked == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_this_machine_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory lies in RAM")
    code = cli.main(["doctor", "--json", "--disk_path", str(tmp_path), "--out", str(tmp_path / "machine.json")])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["healthy"] else 1)
    assert found["facts"]["disk"]["path"] == str(tmp_path) and found["facts"]["unmeasured"] is None
    assert machine_named(tmp_path / "machine.json").out_bytes_per_second > 0
