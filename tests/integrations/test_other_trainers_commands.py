"""The commands of docs/guides/from-ms-swift-and-verl.md, each run once with a tiny model in place of theirs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.conftest import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/from-ms-swift-and-verl.md").read_text()
RUNNING, REFUSED = PAGE.split("## What is refused")
SMALL = {"--model": "MODEL", "--dataset": "builtin:pydoc#60", "--max_length": "256", "--output_dir": "OUT"}
HINTS = {
    "--deepspeed": "--fsdp_strategy shard_grad_op is like ZeRO-2",
    "--train_type": "--train_type lora",
    "--fsdp_strategy": "--nproc_per_node for DDP on CPUs",
    "--memory_budget": "use Minimal()",
    "--activation_cpu_ofload": "did you mean 'activation_cpu_offload'",
}


def commands(text: str) -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


def start(command: str, model: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with small values in place of its own; what is sharded is started under torchrun with the shim."""
    before, after = command.split("ebbtide sft ", 1)
    words = shlex.split(after)
    values = {**SMALL, "--model": str(model), "--output_dir": str(out)}
    if "run.yaml" in words:
        content = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
        out.with_name("run.yaml").write_text(content.replace("Qwen/Qwen3-8B", str(model)))
        words[words.index("run.yaml")] = str(out.with_name("run.yaml"))
    for at, word in enumerate(words[:-1]):
        words[at + 1] = values.get(word, words[at + 1])
    words += ["--max_steps", "2", "--packing", "true"]  # packed: every row is long enough to be worth moving
    words += [] if "--max_length" in words else ["--max_length", "256"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment |= dict(pair.split("=") for pair in before.split())
    program = ["-m", "ebbtide.cli"]
    if "NPROC_PER_NODE=2" in before and any(word.startswith("--fsdp") for word in words):
        program = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            "-m",
            "tests.helpers.cpu_fsdp",
        ]
        environment.pop("NPROC_PER_NODE")
    argv = [sys.executable, *program, "sft", *words]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(RUNNING))
def test_commands_of_other_trainers(command: str, model: Path, tmp_path: Path) -> None:
    result = start(command, model, tmp_path / "out")
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["mode"], summary["status"], summary["steps"]) == ("ebbtide", "ok", 2)
    assert summary["memory_saved_bytes"] > 0
    ranks = 2 if "NPROC_PER_NODE=2" in command else 1
    strategy = "FSDP2" if "--fsdp" in command else "DDP" if ranks == 2 else "single-device"
    log = (tmp_path / "out" / "training.log").read_text()
    assert summary["world_size"] == ranks
    assert f"Enabling activation offloading for {strategy} strategy" in log
    assert ("--deepspeed zero2 has no effect here" in log) is ("--deepspeed" in command)
    if "--log_level debug" in command:
        assert "Offloading activation group 1/2" in log and "Reloading activation group 1/2" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [*commands(REFUSED), "ebbtide sft --model m --dataset d --activation_cpu_ofload true --output_dir o"]
)
def test_refusals_have_their_hint(command: str, model: Path, tmp_path: Path) -> None:
    if torch.accelerator.is_available() and "--fsdp_strategy" in command:
        pytest.skip("there is an accelerator")
    result = start(command, model, tmp_path / "out")
    assert result.returncode == 2, result.stderr[-3000:]
    hint = result.stderr[result.stderr.rindex("hint: ") :]
    assert any(flag in command and words in hint for flag, words in HINTS.items()), result.stderr
    assert not (tmp_path / "out").exists()


def test_the_page_has_commands_that_run_and_commands_that_are_refused() -> None:
    assert (len(commands(RUNNING)), len(commands(REFUSED))) == (9, len(HINTS) - 1)
