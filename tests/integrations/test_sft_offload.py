"""The recipe with ebbtide on: bitwise the losses of ordinary training, and a record of the savings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ebbtide
from ebbtide.base.errors import EbbtideError
from ebbtide.integrations import transformers
from ebbtide_recipes.sft.recipe import main
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import sft_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 256 tokens, for storages that are worth moving (64 KiB and more)."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


def train(model: Path, folder: Path, /, **changes: object) -> dict:
    main(sft_config(model, folder, **{"dataset": ("builtin:pydoc#60",), "max_length": 256, **changes}))
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    losses = [event["loss"] for event in events if event["event"] == "step"]
    return {"events": events, "summary": summary, "losses": losses}


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return train(model, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": "offload"},
        {"policy": "inputs"},
        {"policy": "keep"},
        {"policy": "minimal", "verify": True},
        {"gradient_checkpointing": True},
    ],
    ids=lambda changes: "-".join(changes) + str(changes.get("policy", "")) or "auto",
)
def test_the_losses_are_those_of_plain_training(plain: dict, model: Path, tmp_path: Path, changes: dict) -> None:
    run = train(model, tmp_path, activation_cpu_offload=True, **changes)
    assert run["losses"] == plain["losses"]
    assert run["summary"]["mode"] == "ebbtide"
    stats = [event for event in run["events"] if event["event"] == "stats"]
    assert [event["step"] for event in stats] == [1, 2, 3]
    assert stats[-1]["unique_bytes"] > 0
    kept = changes.get("policy") == "keep"
    assert (stats[-1]["memory_saved_bytes"] > 0) is not kept
    assert stats[-1]["live_tickets"] == stats[-1]["store_bytes"] == 0  # the step is over


def test_both_flags_mean_minimal_and_one_means_auto(model: Path, tmp_path: Path) -> None:
    both = train(model, tmp_path / "both", activation_cpu_offload=True, gradient_checkpointing=True, max_steps=1)
    one = train(model, tmp_path / "one", activation_cpu_offload=True, max_steps=1)
    assert [run["summary"]["plan"]["name"] for run in (both, one)] == ["minimal", "auto"]


def test_the_trainers_own_checkpointing_stays_off(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = ebbtide.enable_activation_offloading

    def spy(network: object, *args: object, **kwargs: object) -> object:
        seen.append(getattr(network, "is_activation_checkpointing", network.is_gradient_checkpointing))
        return real(network, *args, **kwargs)

    monkeypatch.setattr(transformers, "enable_activation_offloading", spy)
    train(model, tmp_path, activation_cpu_offload=True, gradient_checkpointing=True, max_steps=1)
    assert seen == [False]


def test_lora_trains_the_same_with_ebbtide(model: Path, tmp_path: Path) -> None:
    options = {"train_type": "lora", "lora_rank": 2}
    with_it = train(model, tmp_path / "on", activation_cpu_offload=True, **options)
    without = train(model, tmp_path / "off", **options)
    assert with_it["losses"] == without["losses"]
    assert with_it["summary"]["memory_saved_bytes"] > 0


def test_the_saving_is_logged_at_the_end(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, activation_cpu_offload=True, max_steps=2)
    log = (tmp_path / "training.log").read_text()
    assert "Enabling activation offloading for single-device strategy" in log
    assert (
        len(re.findall(r"Memory saved: \d+\.\d\d GiB of the \d+\.\d\d GiB that blocks save for the backward pass", log))
        == 1
    )
    figures = [json.loads(line[line.index("{") :]) for line in log.splitlines() if " step " in line]
    assert all(line["memory_saved(GiB)"] > 0 and line["stall(s)"] >= 0 for line in figures)


def test_hooks_are_removed_afterwards(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = []
    real = ebbtide.enable_activation_offloading
    monkeypatch.setattr(
        transformers, "enable_activation_offloading", lambda *a, **k: handles.append(real(*a, **k)) or handles[-1]
    )
    train(model, tmp_path, activation_cpu_offload=True, max_steps=1)
    assert [handle.enabled for handle in handles] == [False]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"disk_path": "/no/such/folder"}, "/no/such/folder"),
        ({"offload_target": "host"}, "hint:"),
    ],
)
def test_a_place_that_cannot_serve_is_refused_before_the_first_step(
    model: Path, tmp_path: Path, changes: dict, said: str
) -> None:
    with pytest.raises(EbbtideError, match=said):
        train(model, tmp_path, activation_cpu_offload=True, **changes)
    assert not (tmp_path / "run.jsonl").exists()


def test_flags_without_effect_are_warned_of_once(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, verify=True, max_steps=1)
    log = (tmp_path / "training.log").read_text()
    assert (
        log.count("WARNING ebbtide.recipes: --verify has no effect here; hint: add --activation_cpu_offload true") == 1
    )
    assert " 1 step done; " in log


def test_steps_that_round_to_nothing_are_warned_of_once(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, torch_dtype="bfloat16", learning_rate=1e-5, max_steps=1)
    log = (tmp_path / "training.log").read_text()
    assert log.count("at a learning rate of 1e-05 most steps round to nothing; hint: ") == 1


def test_a_budget_that_holds_everything_keeps_everything(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, activation_cpu_offload=True, memory_budget="1TiB", max_steps=5, log_level="debug")
    log = (tmp_path / "training.log").read_text()
    assert "plan made (memory_budget='1TiB': the fastest step that fits)" in log


def test_a_budget_that_cannot_be_kept_is_warned_of_once_and_says_what_could(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, activation_cpu_offload=True, memory_budget="1MiB", max_steps=5)
    log = (tmp_path / "training.log").read_text()
    assert log.count("no plan fits, so the plan with the least memory is executed: memory_budget is 1.0 MiB") == 1
