"""The recipe on two ranks: FSDP2 and DDP in every mode, and the saved files."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spawn import CaseResult, run_cases
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import recipe_case, sft_config

pytestmark = pytest.mark.slow

FULL = {"fsdp_strategy": "full_shard"}
OURS = {"activation_cpu_offload": True}
LORA = {"train_type": "lora", "lora_rank": 2}

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {**FULL, "save": True},
    "fsdp2 checkpointing": {**FULL, "gradient_checkpointing": True},
    "fsdp2 auto": {**FULL, **OURS},
    "fsdp2 minimal": {**FULL, **OURS, "gradient_checkpointing": True},
    "fsdp2 weights stay": {"fsdp_strategy": "shard_grad_op", **OURS},
    "fsdp2 lora": {**FULL, **LORA},
    "fsdp2 lora auto": {**FULL, **LORA, **OURS, "save": True, "overwrite_output_dir": True},
    "ddp": {"max_steps": 4, "save_steps": 2},
    "ddp auto": {**OURS, "max_steps": 4},
    "saving": {**FULL, **OURS, "max_steps": 4, "save_steps": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(model: Path, folder: Path) -> dict[str, CaseResult]:
    cases = {name: (recipe_case, (str(model), str(folder / name), changes)) for name, changes in CASES.items()}
    shutil.copytree(model, folder / "fsdp2 lora auto")  # of an earlier run, which this one overwrites
    going_on = {**CASES["saving"], "resume_from_checkpoint": str(folder / "saving" / "checkpoint-2")}
    cases["going on"] = (recipe_case, (str(model), str(folder / "going on"), going_on))
    return run_cases(cases, 2, timeout_seconds=90)


@pytest.mark.parametrize(
    ("name", "like", "wrapped"),
    [
        ("fsdp2 checkpointing", "fsdp2", "fsdp2"),
        ("fsdp2 auto", "fsdp2", "fsdp2"),
        ("fsdp2 minimal", "fsdp2", "fsdp2"),
        ("fsdp2 weights stay", "fsdp2", "fsdp2"),
        ("fsdp2 lora auto", "fsdp2 lora", "fsdp2"),
        ("ddp auto", "ddp", "ddp"),
    ],
)
def test_the_losses_are_those_of_plain_training(
    results: dict[str, CaseResult], name: str, like: str, wrapped: str
) -> None:
    ours, plain = results[name].values(), results[like].values()
    assert [rank["wrapped"] for rank in (*ours, *plain)] == [wrapped] * 4
    assert ours[0]["losses"] == plain[0]["losses"]
    assert len(set(ours[0]["losses"].values())) == CASES[name].get("max_steps", 3)
    assert set(ours[0]["tokens"]) == {512}  # one sequence of 256 tokens per rank
    if CASES[name].get("activation_cpu_offload"):
        assert ours[0]["saved"] > 0


def test_a_run_that_goes_on_repeats_the_run_that_did_not_stop(results: dict[str, CaseResult]) -> None:
    whole, rest = (results[name].values()[0]["losses"] for name in ("saving", "going on"))
    assert rest == {step: whole[step] for step in (3, 4)}


def test_sharded_weights_are_saved_whole(results: dict[str, CaseResult], model: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    results["fsdp2"].values()
    before, after = (AutoModelForCausalLM.from_pretrained(place) for place in (model, folder / "fsdp2"))
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    assert all(a.shape == b.shape and not a.equal(b) for a, b in pairs)


def test_sharded_adapters_are_saved_alone(results: dict[str, CaseResult], folder: Path) -> None:
    from safetensors import safe_open

    results["fsdp2 lora auto"].values()
    with safe_open(folder / "fsdp2 lora auto" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
        assert names and all("lora_" in name for name in names)
        assert any(file.get_tensor(name).abs().sum() > 0 for name in names if "lora_B" in name)
    assert not {"model.safetensors", "config.json"} & {path.name for path in (folder / "fsdp2 lora auto").iterdir()}


def test_only_the_main_rank_writes_the_record(results: dict[str, CaseResult], folder: Path) -> None:
    begin = results["fsdp2 auto"].values()[0]["begin"]
    assert begin["world_size"] == 2
    seal = json.loads((folder / "saving" / "checkpoint-4" / "ebbtide.json").read_text())
    assert (seal["world_size"], seal["sharding"], seal["step"]) == (2, "fsdp2", 4)


def test_another_number_of_ranks_goes_on_and_says_so(
    results: dict[str, CaseResult], model: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ebbtide_recipes.sft.recipe import main

    results["ddp"].values()
    checkpoint = folder / "ddp" / "checkpoint-2"
    changes = {"dataset": ("builtin:pydoc#60",), "max_steps": 4, "max_length": 256}
    config = sft_config(model, tmp_path / "out", **changes, resume_from_checkpoint=str(checkpoint))
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        main(config)
    assert f"{checkpoint} was written with processes 2, " in caplog.text
    events = [json.loads(line) for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [3, 4]
