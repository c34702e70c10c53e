"""The commands of docs/guides/from-ms-swift-and-verl.md, each run once with a tiny model.

Flags that have no counterpart are refused, each with its hint.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations.commands import ROOT, Forks, replaced, start
from tests.integrations.conftest import make_tiny_model
from tests.integrations.families import make_llava, make_pictures

PAGE = (ROOT / "docs/guides/from-ms-swift-and-verl.md").read_text()
RUNNING = PAGE.split("## Differences")[0]
SMALL = {"--dataset": "builtin:pydoc#60", "--max_length": "256"}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", RUNNING, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


SHARDED, ALONE = (2, "FSDP2", "auto"), (1, "single-device", "auto")
RAN_AS = [
    SHARDED, SHARDED, (2, "FSDP2", "minimal"), (2, "FSDP2", "minimal"), SHARDED, SHARDED, SHARDED, SHARDED,
    (2, "DDP", "auto"), (2, "DDP", "auto"), SHARDED, ALONE, ALONE, (1, "single-device", "minimal"), ALONE,
    SHARDED, (2, "FSDP", "auto"), ALONE, ALONE, SHARDED, ALONE,
]  # fmt: skip
"""Processes, wrapper and policy of each command."""

REFUSALS = [
    ("--deepspeed zero2", "--fsdp_strategy shard_grad_op is like ZeRO-2, full_shard like ZeRO-3"),
    ("--fsdp_strategy full_shard", "--fsdp_strategy none, with --nproc_per_node for DDP on CPUs"),
    ("--fsdp_strategy no_shard", "did you mean 'full_shard'"),
    ("--train_type adapter", "--adapter_config boft, vera or ia3; --train_type lora is the usual kind"),
    ("--device_map auto", "trains one whole model, or one FSDP shard, per device"),
    ("--quant_bits 4", "--train_type qlora loads the weights in 4 bits"),
    ("--external_plugins nowhere.py", "looked in"),
    ("--use_hf false", "pip install 'ebbtide[modelscope]'"),
    ("--attn_impl flash_attn", "did you mean 'flash_attention_3', 'flash_attention_2'"),
    ("--activation_cpu_ofload true", "did you mean 'activation_cpu_offload'"),
    ("--tuner_typ lora", "did you mean 'tuner_type' (here 'train_type')"),
    (
        "actor_rollout_ref.actor.tau_neg=1.0",
        "actor_rollout_ref is a section of verl's keys, and this one is not translated",
    ),
    ("--enable_activation_offloading true", "'activation_cpu_offload'"),
    (
        "actor_rollout_ref.model.enable_activation_ofload=True",
        "did you mean 'actor_rollout_ref.model.enable_activation_offload'",
    ),
    ("critic.model.enable_activation_offload=True", "one model is trained, and there is no critic"),
    ("--activation-offloading true", "the flag is --activation_cpu_offload here"),
    ("--enable-gradient-checkpointing-type full", "--gradient_checkpointing true, or --policy for another choice"),
    ("--hsdp-shard-dim 1", "--fsdp_strategy hybrid_shard: shards within a node"),
]
"""Flags of other trainers and the hint of their refusal."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


@pytest.fixture(scope="module")
def seeing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that takes images, and rows with images."""
    folder = tmp_path_factory.mktemp("seeing")
    return make_llava(folder / "llava", model), make_pictures(folder / "pictures", count=32)


def made_small(command: str, model: Path, seeing: tuple[Path, Path], out: Path) -> list[str]:
    """Return a command's words with small values in place of its own."""
    words = shlex.split(command)
    words = words[words.index("sft") + 1 :]
    values = {**SMALL, "--model": str(model), "--model.path": str(model), "--output_dir": str(out)}
    words = [word.replace("=Qwen/Qwen3-8B", f"={model}") for word in words]
    images = "rows.jsonl" in words
    if images:
        values |= {"--model": str(seeing[0]), "--dataset": str(seeing[1])}
    if "run.yaml" in words:
        content = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
        out.with_name("run.yaml").write_text(content.replace("Qwen/Qwen3-8B", str(model)))
        words[words.index("run.yaml")] = str(out.with_name("run.yaml"))
    words = [*replaced(words, values), "--max_steps", "2"]
    words += [] if images else ["--packing", "true"]  # packed: every row is long enough to be worth moving
    return words + ([] if "--max_length" in words else ["--max_length", "256"])


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(1, len(commands()) + 1))
def test_commands_of_other_trainers(
    number: int, model: Path, seeing: tuple[Path, Path], forks: Forks, tmp_path: Path
) -> None:
    command, (ranks, strategy, policy) = commands()[number - 1], RAN_AS[number - 1]
    out = tmp_path / "out"
    words = made_small(command, model, seeing, out)
    if strategy == "FSDP":
        words += ["--save", "false"]  # on the CPU torch's FSDP1 frees gathered weights before they are read
    if strategy == "DDP":  # ebbtide starts the ranks, or torchrun does; on CPUs ebbtide refuses to start FSDP
        torchrun = command.startswith("torchrun")
        result = start(words, ranks=None if torchrun else "2", torchrun=torchrun)
        assert result.returncode == 0, result.stderr[-3000:]
    else:
        forks.sft(words, ranks)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["mode"], summary["status"], summary["steps"]) == ("ebbtide", "ok", 2)
    assert (summary["world_size"], summary["plan"]["name"]) == (ranks, policy)
    assert summary["memory_saved_bytes"] > 0
    log = (out / "training.log").read_text()
    assert f"Enabling activation offloading for {strategy} strategy" in log
    assert ("--deepspeed zero2 has no effect here" in log) is ("--deepspeed" in command)
    if "--log_level debug" in command:
        assert "Offloading activation group 1/2" in log and "Reloading activation group 1/2" in log


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "hint"), REFUSALS, ids=[flags.split("=")[0] for flags, _ in REFUSALS])
def test_refusals_have_their_hint(flags: str, hint: str, model: Path, tmp_path: Path) -> None:
    if torch.accelerator.is_available() and "full_shard" in flags:
        pytest.skip("there is an accelerator")
    given = ["--model", str(model), "--dataset", "builtin:pydoc", "--output_dir", str(tmp_path / "out")]
    result = start([*shlex.split(flags), *given])
    assert result.returncode == 2, result.stderr[-3000:]
    assert hint in result.stderr[result.stderr.rindex("hint: ") :], result.stderr
    assert not (tmp_path / "out").exists()


def test_every_command_of_the_page_is_introduced_and_expected() -> None:
    for number, (command, (ranks, _, _)) in enumerate(zip(commands(), RAN_AS, strict=True), 1):
        assert re.search(rf"(^|[^\d]){number}\. ", RUNNING), f"command {number} is not introduced"
        assert ("NPROC_PER_NODE=2" in command or "--nproc_per_node 2" in command) is (ranks == 2)
