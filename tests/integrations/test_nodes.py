"""Two nodes, two ranks each: torchrun's own rendezvous, a node that dies, and folders that nodes do not share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spawn import run_cases
from tests.integrations.conftest import make_tiny_model
from tests.integrations.nodes import Nodes, agent, free_port
from tests.integrations.ranks import recipe_case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

LIMIT_SECONDS = 400.0
STEPS = 12
HYBRID = {"fsdp_strategy": "hybrid_shard"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = (f"It returns the value {number} of the argument. " * 30 for number in range(100))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def plain(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Losses of four ranks, forks of one process, without ebbtide: DDP, and FSDP2 in two groups of two."""
    folder = tmp_path_factory.mktemp("plain")
    shared: dict[str, Any] = {"dataset": (str(rows),), "max_steps": STEPS}
    changes = {"ddp": shared, "hybrid": {**shared, **HYBRID, "ranks_a_node": 2}}
    cases = {name: (recipe_case, (str(model), str(folder / name), change)) for name, change in changes.items()}
    results = run_cases(cases, 4, timeout_seconds=LIMIT_SECONDS)
    return {name: by_step(results[name].values()[0]["losses"].items()) for name in changes}


def by_step(pairs: Any) -> dict[str, float]:
    return {str(step): loss for step, loss in pairs}


def flags(model: Path, rows: Path, out: Path, **changes: object) -> list[str]:
    values = {
        "model": model, "dataset": rows, "max_steps": STEPS, "max_length": 256, "packing": "true",
        "learning_rate": 1e-2, "logging_steps": 1, "save": "false", "output_dir": out, "activation_cpu_offload": "true",
        **changes,
    }  # fmt: skip
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def losses(record: Path) -> dict[str, float]:
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return by_step((event["step"], event["loss"]) for event in events if event["event"] == "step")


def test_ebbtide_starts_its_ranks_on_each_node(
    model: Path, rows: Path, plain: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "ebbtide", "sft", *flags(model, rows, tmp_path / "out", policy="minimal")]
    told = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "2"}
    with Nodes() as nodes:
        started = [nodes.start(command, **told, NODE_RANK=str(node)) for node in range(2)]
        assert [nodes.wait(node, LIMIT_SECONDS) for node in started] == [0, 0], nodes.tail()
    assert losses(tmp_path / "out" / "run.jsonl") == plain["ddp"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["world_size"], summary["status"]) == (4, "ok")
    assert summary["memory_saved_bytes"] > 0
    logs = sorted(path.name for path in (tmp_path / "out").glob("training*.log"))
    assert logs == ["training-rank1.log", "training-rank2.log", "training-rank3.log", "training.log"]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_that_dies(
    model: Path, rows: Path, plain: dict[str, dict[str, float]], tmp_path: Path, comes_back: bool
) -> None:
    out, port = tmp_path / "out", free_port()
    more = {**HYBRID, "save_steps": 2, "resume_from_checkpoint": "latest"}
    words = ["tests.helpers.cpu_fsdp", "sft", *flags(model, rows, out, **more)]
    first, second = (agent(*words, port=port, first=n == 0, restarts=int(comes_back)) for n in range(2))
    with Nodes() as nodes:
        survivor, other = nodes.start(first), nodes.start(second)
        nodes.await_line(" step 3/", LIMIT_SECONDS)  # checkpoint-2 is complete by then
        nodes.kill(other)
        if comes_back:
            other = nodes.start(second)
            assert [nodes.wait(node, LIMIT_SECONDS) for node in (survivor, other)] == [0, 0], nodes.tail()
        else:
            assert nodes.wait(survivor, LIMIT_SECONDS) == 1, nodes.tail()
        said = "".join(nodes.printed)
    if not comes_back:
        assert "ChildFailedError" in said and "exitcode" in said
        assert (out / "checkpoint-2" / "ebbtide.json").exists()
        return
    before, after = losses(out / "run-1.jsonl"), losses(out / "run.jsonl")
    began = int(next(iter(after)))
    assert 3 <= began <= STEPS and (began - 1) % 2 == 0  # after a checkpoint
    assert f"resuming from {out / f'checkpoint-{began - 1}'}" in said
    assert list(after) == [str(step) for step in range(began, STEPS + 1)]
    assert before == {step: plain["hybrid"][step] for step in before}
    assert before | after == plain["hybrid"]


def test_nodes_that_write_checkpoints_to_folders_of_their_own_are_refused(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    port = free_port()
    with Nodes() as nodes:
        for number in range(2):
            words = ["ebbtide", "sft", *flags(model, rows, tmp_path / f"out-{number}", save_steps=2)]
            nodes.start(agent(*words, port=port, first=number == 0))
        assert [nodes.wait(node, LIMIT_SECONDS) for node in range(2)] == [1, 1], nodes.tail()
        said = "".join(nodes.printed)
    assert "is not the folder of rank 0" in said and "hint: " in said
    assert not list(tmp_path.glob("out-*/checkpoint-*"))


def test_weights_that_one_node_has_are_loaded_on_both(tmp_path: Path) -> None:
    import torch
    from torch import nn

    import ebbtide

    torch.manual_seed(5)
    ebbtide.save_sharded(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]), tmp_path / "weights")
    port = free_port()
    with Nodes() as nodes:
        for number in range(2):
            nodes.start(agent("tests.integrations.nodes", str(tmp_path), port=port, first=number == 0))
        assert [nodes.wait(node, LIMIT_SECONDS) for node in range(2)] == [0, 0], nodes.tail()
    answers = sorted(path.read_text() for path in tmp_path.glob("answer-*"))
    assert answers == [f"{rank} {rank // 2} 2 6 True" for rank in range(4)]
