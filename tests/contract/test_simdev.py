"""A machine that cannot build the simulated device skips its tests, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simdev import build, device

ROOT = Path(__file__).parents[2]


def compiler(tmp_path: Path, text: str) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = 'test "$1" = --version && exit 0\necho "x.cpp:1: error: C++20 is unknown" >&2\nexit 1'
    monkeypatch.setenv("CXX", compiler(tmp_path, old))
    monkeypatch.setattr(build, "FOLDER", tmp_path / "build")
    with pytest.raises(build.CannotBuildError, match=r"C\+\+20 is unknown"):
        build.build()


def test_no_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CannotBuildError, match="no C"):
        build.build()


def test_a_folder_that_cannot_be_written_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    monkeypatch.setattr(build, "FOLDER", tmp_path / "file")
    with pytest.raises(build.CannotBuildError, match="file"):
        build.build()


def test_a_module_that_this_torch_does_not_load_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one built with the headers of another torch or Python."""
    monkeypatch.setattr("torch.utils.rename_privateuse1_backend", lambda name: None)  # permanently, in this process
    made = tmp_path / f"{build.NAME}.so"
    made.write_bytes(b"no module")
    with pytest.raises(build.CannotBuildError, match=rf"{build.NAME}\.so does not load: "):
        device.load(made)
    assert build.NAME not in sys.modules


def test_another_torch_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = compiler(tmp_path, "exit 0")
    sources = sorted((build.HERE / "csrc").iterdir())
    before = build._key(same, sources)
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert build._key(same, sources) != before


def test_the_summary_says_why_nothing_ran(tmp_path: Path) -> None:
    environment = os.environ | {"CXX": compiler(tmp_path, 'echo "error: too old" >&2\nexit 1')}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--simdev", "tests/simdev"],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "SKIPPED: the simulated device cannot be built: error: too old" in found.stdout
