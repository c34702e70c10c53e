"""`ebbtide sft` as a user starts it: in a process of its own, interrupted too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide.cli

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(ebbtide.cli.__file__).parents[2]),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def command(*argv: object) -> list[str]:
    return [sys.executable, "-m", "ebbtide.cli", "sft", *map(str, argv)]


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {tiny_model}\ndataset: builtin:pydoc#40\nmax-length: 64\npacking: true\n"
        f"max_steps: 2\nsave: false\noutput_dir: {tmp_path / 'out'}\nlogging_steps: 1\n"
    )
    return file


def test_a_file_and_flags_train_a_model(settings: Path) -> None:
    argv = command(settings, "--max-steps", 3, "--gradient-checkpointing")
    result = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    out = settings.parent / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["mode"], summary["steps"], summary["status"]) == ("checkpointing", 3, "ok")
    assert "INFO step 3/3" in result.stderr
    assert " step 3/3 " in (out / "training.log").read_text()
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr  # neither ours nor about how we call others


@pytest.mark.parametrize(("level", "traceback"), [("info", False), ("debug", True)])
def test_bad_input_is_two_lines_and_a_traceback_only_for_debug(settings: Path, level: str, traceback: bool) -> None:
    argv = command(settings, "--max_length", 4096, "--log_level", level)
    result = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "error: max_length is 4096; expected at most 128" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("hint: use --max_length 128")
    assert ("Traceback" in result.stderr) is traceback


@pytest.mark.parametrize("offload", ["false", "true"])
def test_ctrl_c_closes_the_run_file(settings: Path, offload: str) -> None:
    store = settings.parent / "store"
    store.mkdir()
    argv = command(settings, "--max_steps", 1_000_000, "--activation_cpu_offload", offload, "--disk_path", store)
    with subprocess.Popen(argv, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = [next(line for line in process.stderr if " step 2/" in line)]
        process.send_signal(signal.SIGINT)
        before += process.stderr.readlines()
        assert process.wait(timeout=60) == 130
    assert before[-1] == "interrupted\n"
    assert not any("Traceback" in line for line in before)
    record = events(settings.parent / "out")
    assert (record[-1]["event"], record[-1]["status"]) == ("run_end", "interrupted")
    summary = json.loads((settings.parent / "out" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 2
    assert list(store.iterdir()) == []
