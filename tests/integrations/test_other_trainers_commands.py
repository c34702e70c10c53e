"""The commands of docs/guides/from-ms-swift-and-verl.md, each run once with a tiny model in place of theirs.

What each is held to stands on the page: the table of what it ran as, the table of refusals and their hints.
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
RUNNING, REFUSED = PAGE.split("## What is refused")
SMALL = {"--dataset": "builtin:pydoc#60", "--max_length": "256"}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", RUNNING, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def rows(text: str) -> list[list[str]]:
    """Return the cells of a page's tables, without their heads."""
    lines = re.findall(r"^\| (?!commands |flags |---)(.*) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines]


RAN_AS = sorted(
    (int(number), int(count), by, policy.strip("`"))
    for numbers, count, by, policy in rows(RUNNING)
    for number in numbers.split(", ")
)
REFUSALS = [
    (re.findall("`(.*?)`", flags)[0], hint.strip("`")) for flags, hint in rows(REFUSED.split("## Differences")[0])
]


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
    command, (_, ranks, strategy, policy) = commands()[number - 1], RAN_AS[number - 1]
    out = tmp_path / "out"
    words = made_small(command, model, seeing, out)
    if strategy == "FSDP":
        words += ["--save", "false"]  # torch's FSDP1 frees what it gathers, before it is read, where it lies on the CPU
    if strategy == "DDP":  # ebbtide starts the ranks, or torchrun does; of FSDP ebbtide refuses that on CPUs
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


def test_the_page_has_a_row_for_every_command_that_runs() -> None:
    assert [number for number, *_ in RAN_AS] == list(range(1, len(commands()) + 1))
    assert len(REFUSALS) > 10 and all(flags and hint for flags, hint in REFUSALS)
    for command, (number, ranks, _, _) in zip(commands(), RAN_AS, strict=True):
        assert re.search(rf"(^|[^\d]){number}\. ", RUNNING), f"command {number} is not introduced"
        assert ("NPROC_PER_NODE=2" in command or "--nproc_per_node 2" in command) is (ranks == 2)
