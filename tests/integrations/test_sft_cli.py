"""`ebbtide sft` as a user starts it: in a process of its own, interrupted too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ebbtide.cli

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(ebbtide.cli.__file__).parents[2]),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def command(*argv: object) -> list[str]:
    return [sys.executable, "-m", "ebbtide", "sft", *map(str, argv)]


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
    assert "Warning" not in result.stderr  # neither from our code nor about our calls


@pytest.mark.parametrize(("level", "traceback"), [("info", False), ("debug", True)])
def test_bad_input_is_two_lines_and_a_traceback_only_for_debug(settings: Path, level: str, traceback: bool) -> None:
    argv = command(settings, "--max_length", 4096, "--log_level", level)
    result = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "error: max_length is 4096; expected at most 128" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("hint: use --max_length 128")
    assert ("Traceback" in result.stderr) is traceback


@pytest.mark.parametrize(
    ("number", "code", "word", "offload"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", "false", marks=pytest.mark.slow),
        (signal.SIGINT, 130, "interrupted", "true"),
        (signal.SIGTERM, 143, "terminated", "true"),
    ],
)
def test_ctrl_c_and_sigterm_close_the_run_file(
    settings: Path, number: signal.Signals, code: int, word: str, offload: str
) -> None:
    store, rows = settings.parent / "store", settings.parent / "rows.jsonl"
    store.mkdir()
    rows.write_text('{"text": "It returns the value of the argument."}\n' * 200)  # pydoc's rows take seconds to collect
    argv = command(settings, "--max_steps", 1_000_000, "--activation_cpu_offload", offload, "--disk_path", store)
    argv += ["--dataset", str(rows)]
    with subprocess.Popen(argv, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = [next(line for line in process.stderr if " step 2/" in line)]
        process.send_signal(number)
        before += process.stderr.readlines()
        assert process.wait(timeout=60) == code
    assert before[-1] == f"{word}\n"
    assert not any("Traceback" in line for line in before)
    assert any("stopped after step" in line and "no checkpoint was written before" in line for line in before)
    record = events(settings.parent / "out")
    assert (record[-1]["event"], record[-1]["status"]) == ("run_end", "interrupted")
    summary = json.loads((settings.parent / "out" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] >= 2
    assert list(store.iterdir()) == []


BAD = {
    "disk path": (["--disk_path", "nosuch"], "error: disk path 'nosuch' does not exist"),
    "disk that takes no file": (["--disk_path", "/proc"], "error: disk path '/proc' "),
    "target": (["--offload_target", "host"], "error: offload_target is 'host' on a machine without an accelerator"),
    "data": (["--dataset", "d.jsnl"], "error: data set file 'd.jsnl' does not exist"),
    "model": (["--model", "./nosuch"], "error: there is no model folder './nosuch'"),
    "budget": (["--memory_budget", "abc"], "error: memory_budget is 'abc'"),
    "seed": (["--seed", "-1"], "error: seed is -1"),
}
"""What is refused in every mode, here in plain training."""


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_loaded_or_written(
    settings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    from ebbtide_recipes.language import models

    if "/proc" in BAD[name][0] and not os.path.ismount("/proc"):
        pytest.skip("no proc here")
    if name == "target" and torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    monkeypatch.setattr(models, "look_up", lambda config: pytest.fail("a model was looked up"))
    flags, said = BAD[name]
    assert ebbtide.cli.main(["sft", str(settings), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said), error
    assert "; expected " in error and "\nhint: " in error
    assert [path.name for path in settings.parent.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--train_type", "lora", "--target_modules", "q_prj"], "error: target_modules names 'q_prj'"),
        (["--max_length", "4096"], "error: max_length is 4096; expected at most 128"),
        (["--report_to", "wandbb"], "error: report_to names 'wandbb'"),
        (["--dataset", "ROWS"], "rows.jsonl' has no 'text'"),
    ],
)
def test_weights_are_not_loaded_for_what_the_config_of_the_model_can_refuse(
    settings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    from ebbtide_recipes.language import models

    rows = settings.parent / "rows.jsonl"
    rows.write_text('{"text": "t"}\n{"other": "t"}\n')
    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the weights were loaded"))
    argv = ["sft", str(settings), *(str(rows) if flag == "ROWS" else flag for flag in flags)]
    assert ebbtide.cli.main(argv) == 2
    assert said in capsys.readouterr().err
