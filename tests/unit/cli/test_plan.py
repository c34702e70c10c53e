"""``ebbtide plan`` as a command: its output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide.cli as cli

QWEN = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def test_what_is_printed_for_programs_is_json_alone(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "plan.json")
    line = ["plan", "--model", model, "--gpu", "h200", "--max-length", "1024", "--json", "true", "--out", out]
    assert cli.main(line) == 0
    assert capsys.readouterr().out
    assert cli.main([*line, "--lora_rank", "4"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["recommended"] == "plain"
    assert "--lora_rank has no effect here" in shown.err
    assert f"saved        {out}, the plan of plain" in shown.err
    assert json.loads(Path(out).read_text())["name"] == "keep"


def test_what_is_printed_for_people_names_each_option(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", model, "--gpu", "h200", "--max_length", "1024"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        f"reading the config of {model}",
        f"making {model} without weights",
        "simulating a step of 1 x 1024 tokens on h200",
        "comparing the options",
    ]
    rows = [line.split("  ")[0] for line in shown.out.splitlines()]
    assert {"option", "plain", "checkpointing", "ebbtide-minimal", "ebbtide-offload"} <= set(rows)


@pytest.mark.parametrize(
    ("name", "words"),
    [("config.json", "holds something else; expected a new file, or an earlier result"), ("plan", "ends in .json")],
)
def test_a_plan_replaces_no_other_file(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(model)
    assert cli.main(["plan", "--model", model, "--gpu", "h200", "--out", name]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "hint: " in shown.err and shown.out == ""
    assert json.loads(Path("config.json").read_text()) == QWEN


def test_progress_is_no_part_of_what_is_printed_and_ends_with_an_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("ebbtide.profiling.simulated.simulate_model", fail)
    assert cli.main(["plan", "--model", model, "--gpu", "h200", "--json", "true"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[2].startswith("simulating a step")
    assert shown.err.splitlines()[3].startswith("error: a step of ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu", "h201"], "gpu is 'h201'; expected one of b200, h200, h100"),
        (["--gpu", "h1000"], "hint: did you mean 'h100'"),
        (["--dataset", "x"], "--max_length"),
        (["--gups", "8"], "did you mean 'gpus'"),
        (["--gpus", "many"], "--gpus is 'many'; expected an integer"),
        (["--train_type", "qlora", "--gpus", "8"], "expected a language model in bfloat16 on one device"),
        (["--optim", "adam"], "--optim is 'adam'"),
        (["--policy", "minimal"], "hint: leave it out: the table has a row for each"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    model: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", model, *flags]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "hint: " in shown.err
    assert shown.out == ""


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = "import sys; from ebbtide.cli import main; main(['plan', '--help']); " + (
        "sys.exit(bool({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
