"""Pictures of a report: the browser's arguments, and a missing browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import screenshots


def test_three_pictures_are_taken_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **given: Any) -> None:
        commands.append(command)
        if "report" in command:
            Path(command[-1]).write_text("<html>")
        else:
            assert Path(command[-1].removeprefix("file://")).exists()

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: "/chrome" if name == "google-chrome" else None)
    monkeypatch.setattr(sys, "argv", ["screenshots", "runs/demo", "--out", str(tmp_path / "made")])
    screenshots.main()
    report, *taken = commands
    assert report[1:5] == ["-m", "ebbtide", "report", "runs/demo"]
    assert [c[0] for c in taken] == ["/chrome"] * 3
    assert [screenshots._DARK in c for c in taken] == [False, True, False]
    pictures = [next(x.partition("=")[2] for x in c if x.startswith("--screenshot=")) for c in taken]
    assert [Path(p).name for p in pictures] == ["report-light.png", "report-dark.png", "report-phone.png"]
    assert (tmp_path / "made").is_dir() and "width:390px" in screenshots.framed("report.html")


def test_without_a_browser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["screenshots", "runs/demo"])
    with pytest.raises(SystemExit, match="hint: install Chromium"):
        screenshots.main()
