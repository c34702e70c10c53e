"""Which runs of pytest see the machine's accelerator: the decision, and the environment of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.tiers import HIDING, TESTS, sees_accelerator

SHOWS = """
import os, sys
import pytest

class Shows:
    def pytest_sessionstart(self):
        pytest.exit(f"seen: {os.environ['CUDA_VISIBLE_DEVICES']!r}", returncode=0)

pytest.main(sys.argv[1:], plugins=[Shows()])
"""


def sees(*paths: str, simdev: bool = False, folder: Path = TESTS.parent) -> bool:
    run: Any = SimpleNamespace(
        args=list(paths), invocation_params=SimpleNamespace(dir=folder), getoption=lambda name: simdev
    )
    return sees_accelerator(run)


@pytest.mark.parametrize("paths", [["tests"], ["tests/unit"], ["tests/gpu", "tests/unit"], ["tests/simdev"]])
def test_a_run_of_other_tests_sees_no_accelerator(paths: list[str]) -> None:
    assert not sees(*paths)


@pytest.mark.parametrize("paths", [["tests/gpu"], ["tests/gpu/test_a.py::test_b[c]", str(TESTS / "gpu/test_d.py")]])
def test_a_run_of_the_tests_of_an_accelerator_alone_sees_it(paths: list[str]) -> None:
    assert sees(*paths)
    assert not sees(*paths, simdev=True)


def test_paths_count_from_where_pytest_is_started() -> None:
    assert sees("gpu", folder=TESTS) and sees("../gpu", folder=TESTS / "unit") and not sees("unit", folder=TESTS)


@pytest.mark.parametrize(("path", "card"), [("tests/gpu", "3"), ("tests/unit", "")])
def test_the_environment_of_a_run_is_what_was_decided(path: str, card: str) -> None:
    shown = {name: value for name, value in os.environ.items() if name not in HIDING} | {"CUDA_VISIBLE_DEVICES": "3"}
    command = [sys.executable, "-c", SHOWS, "-q", "-p", "no:cacheprovider", path]
    ran = subprocess.run(command, cwd=TESTS.parent, env=shown, capture_output=True, text=True, timeout=120, check=False)
    assert f"seen: {card!r}" in ran.stdout, ran.stdout + ran.stderr


def test_this_run_and_its_children_see_none() -> None:
    script = "import torch; print(torch.cuda.is_available() or torch.xpu.is_available())"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "False\n" and HIDING.items() <= os.environ.items()
