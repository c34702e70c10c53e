"""``grpo`` on two ranks: FSDP2, FSDP1 and DDP, with a reference, with adapters, with several updates a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spawn import CaseResult, run_cases
from tests.integrations import rewards
from tests.integrations.conftest import make_tiny_model, write_jsonl
from tests.integrations.ranks import grpo_case

pytestmark = pytest.mark.slow

OURS = {"activation_cpu_offload": True}
REFERENCE = {"beta": 0.04, "num_iterations": 2, "max_steps": 4}
LORA = {"train_type": "lora", "lora_rank": 2}

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_strategy": "fsdp2", **REFERENCE, "save": True},
    "fsdp2 auto": {"fsdp_strategy": "fsdp2", **REFERENCE, **OURS},
    "fsdp2 minimal": {"fsdp_strategy": "fsdp2", **REFERENCE, **OURS, "gradient_checkpointing": True},
    "fsdp2 lora": {"fsdp_strategy": "fsdp2", **LORA, **REFERENCE},
    "fsdp2 lora auto": {"fsdp_strategy": "fsdp2", **LORA, **REFERENCE, **OURS},
    "fsdp2 unpadded": {"fsdp_strategy": "fsdp2", "padding_free": True},
    "fsdp2 unpadded auto": {"fsdp_strategy": "fsdp2", "padding_free": True, **OURS},
    "fsdp2 divergence": {"fsdp_strategy": "fsdp2", "kl_reward_coef": 0.1, "num_iterations": 2},
    "fsdp2 divergence auto": {"fsdp_strategy": "fsdp2", "kl_reward_coef": 0.1, "num_iterations": 2, **OURS},
    "fsdp1": {"fsdp_strategy": "fsdp", "beta": 0.04},
    "fsdp1 auto": {"fsdp_strategy": "fsdp", "beta": 0.04, **OURS},
    "ddp": {**REFERENCE},
    "ddp auto": {**REFERENCE, **OURS},
    "saving": {"fsdp_strategy": "fsdp2", **REFERENCE, **OURS, "num_iterations": 4, "max_steps": 6, "save_steps": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo-ranks")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, CaseResult]:
    model = str(make_tiny_model(folder / "model"))
    cases = {name: (grpo_case, (model, str(folder / name), changes)) for name, changes in CASES.items()}
    going_on = {**CASES["saving"], "resume_from_checkpoint": str(folder / "saving" / "checkpoint-3")}
    cases["going on"] = (grpo_case, (model, str(folder / "going on"), going_on))
    rows = write_jsonl(folder / "rows.jsonl", [{"prompt": f"{n} + 1 =", "mark": 2**n} for n in range(11)])
    marked = {"dataset": (rows,), "eval_dataset": (rows,), "reward_funcs": (f"{rewards.__file__}:marked",)}
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 2, "max_steps": 1}
    cases["evaluation"] = (grpo_case, (model, str(folder / "evaluation"), {**marked, **sizes}))
    return run_cases(cases, 2, timeout_seconds=180)


@pytest.mark.parametrize(
    ("name", "like", "wrapped"),
    [
        ("fsdp2 auto", "fsdp2", "fsdp2"),
        ("fsdp2 minimal", "fsdp2", "fsdp2"),
        ("fsdp2 lora auto", "fsdp2 lora", "fsdp2"),
        ("fsdp2 unpadded auto", "fsdp2 unpadded", "fsdp2"),
        ("fsdp2 divergence auto", "fsdp2 divergence", "fsdp2"),
        ("fsdp1 auto", "fsdp1", "fsdp"),
        ("ddp auto", "ddp", "ddp"),
    ],
)
def test_losses_and_rewards_are_those_of_plain_training(
    results: dict[str, CaseResult], name: str, like: str, wrapped: str
) -> None:
    ours, plain = results[name].values(), results[like].values()
    assert [rank["wrapped"] for rank in (*ours, *plain)] == [wrapped] * 4
    assert ours[0]["losses"] == plain[0]["losses"]
    assert ours[0]["rewards"] == plain[0]["rewards"]
    assert len(set(ours[0]["losses"].values())) == CASES[name].get("max_steps", 3)
    assert ours[0]["saved"] > 0


@pytest.mark.parametrize(("name", "together"), [("fsdp2", True), ("fsdp2 lora", True), ("fsdp1", True), ("ddp", False)])
def test_ranks_that_share_weights_generate_until_the_last_is_done(
    results: dict[str, CaseResult], name: str, together: bool
) -> None:
    assert all(rank["together"] == {together} for rank in results[name].values())


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1"])
def test_the_blocks_of_the_reference_are_gathered_one_by_one(results: dict[str, CaseResult], name: str) -> None:
    of_model, of_reference = results[name].values()[0]["blocks"]
    assert of_reference == of_model and len(of_model) > 1


def test_the_reward_of_an_evaluation_is_the_mean_of_its_rows(results: dict[str, CaseResult]) -> None:
    assert results["evaluation"].values()[0]["evaluations"] == [pytest.approx((2**11 - 1) / 11, rel=1e-6)]


def test_the_phases_of_a_rollout_are_marked(results: dict[str, CaseResult]) -> None:
    phases = results["fsdp2 auto"].values()[0]["phases"]
    assert {"generation", "reward", "log-probabilities", "forward", "backward", "optimizer"} <= set(phases)


def test_a_run_that_goes_on_in_the_middle_of_a_rollout_repeats_the_run_that_did_not_stop(
    results: dict[str, CaseResult],
) -> None:
    whole, rest = (results[name].values()[0] for name in ("saving", "going on"))
    for figure in ("losses", "rewards"):
        assert rest[figure] == {step: whole[figure][step] for step in (4, 5, 6)}


def test_sharded_weights_are_saved_whole(results: dict[str, CaseResult], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    results["fsdp2"].values()
    assert AutoModelForCausalLM.from_pretrained(folder / "fsdp2").num_parameters() > 0
