"""``grpo`` in one process: bitwise in every mode, learns, resumes, evaluates, and reports errors."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.base.errors import ConfigError, DataError, TrainingError
from ebbtide.base.events import BUS
from ebbtide_recipes.grpo.recipe import RECIPE
from ebbtide_recipes.skeleton import run
from tests.helpers.pairs import all_pairs
from tests.integrations import rewards
from tests.integrations.conftest import make_tiny_model, write_jsonl
from tests.integrations.ranks import grpo_config

OURS = {"activation_cpu_offload": True}
MODES: dict[str, dict[str, Any]] = {
    "auto": OURS,
    "minimal": {**OURS, "gradient_checkpointing": True},
    "offload": {**OURS, "policy": "offload", "verify": True},  # to disk, with an accelerator to host memory
    "checkpointing": {"gradient_checkpointing": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"beta": 0.04, "num_iterations": 2, "max_steps": 4},
    "accumulation": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
        "max_completion_length": 48,  # smaller batches need longer sequences for storages worth moving
    },
    "lora": {"train_type": "lora", "lora_rank": 2, "beta": 0.04, "num_iterations": 2},
    "unpadded": {"padding_free": True, "num_iterations": 2},
    "evaluation": {"split_dataset_ratio": 0.002, "eval_steps": 2},
    "divergence in the reward": {"kl_reward_coef": 0.1, "split_dataset_ratio": 0.002, "eval_steps": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-grpo"), layers=3)


def train(model: Path, folder: Path, /, **changes: Any) -> dict[str, Any]:
    run.main(RECIPE, grpo_config(model, folder, **changes))
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    return {
        "steps": {event["step"]: (event["loss"], event["reward"], event["tokens"]) for event in steps},
        "evaluations": [(e["loss"], e["reward"]) for e in events if e["event"] == "evaluation"],
        "stats": [event for event in events if event["event"] == "stats"],
        "summary": json.loads((folder / "summary.json").read_text()),
        "log": (folder / "training.log").read_text(),
    }


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("grpo-plain")
    return {way: train(model, folder / way, **changes) for way, changes in WAYS.items()}


@pytest.mark.parametrize(
    ("way", "mode"), [*product(["full"], MODES), *all_pairs([w for w in WAYS if w != "full"], MODES)]
)
def test_losses_and_rewards_are_those_of_plain_training(
    plain: dict[str, dict[str, Any]], model: Path, tmp_path: Path, way: str, mode: str
) -> None:
    ours = train(model, tmp_path, **WAYS[way], **MODES[mode])
    assert ours["steps"] == plain[way]["steps"]
    assert ours["evaluations"] == plain[way]["evaluations"]
    # Complete steps: the loss alone is near 0 if the advantages of a batch cancel.
    assert len(set(ours["steps"].values())) == len(ours["steps"])
    if mode != "checkpointing":
        stats = ours["stats"][-1]
        if mode == "auto":  # only the last pass of a step is recorded: a measured one may keep everything
            assert stats["total_copy_out_bytes"] > 0
        else:
            assert any(s["memory_saved_bytes"] >= 0.75 * s["unique_bytes"] > 0 for s in ours["stats"])
        assert stats["live_tickets"] == stats["store_bytes"] == 0


def test_the_summary_names_the_phases_and_the_rewards(plain: dict[str, dict[str, Any]]) -> None:
    summary = plain["full"]["summary"]
    names = ["load", "generation", "reward", "log-probabilities", "forward", "backward", "optimizer"]
    assert sorted(summary["phases"]) == sorted(names)
    assert all(figures["peak_bytes"] > 0 for figures in summary["phases"].values())
    assert summary["reward"] == [reward for _, reward, _ in plain["full"]["steps"].values()]


def test_no_pass_without_gradients_is_recorded(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, **WAYS["full"], **OURS)
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    passes = [event for event in events if event["event"] == "pass_end"]
    assert len(passes) == 4  # one forward with gradients per step; generation and log-probabilities have none


def test_two_updates_of_a_rollout_share_its_reward(plain: dict[str, dict[str, Any]]) -> None:
    rewards_ = [reward for _, reward, _ in plain["full"]["steps"].values()]
    assert rewards_[0] == rewards_[1] != rewards_[2] == rewards_[3]


def test_the_reference_is_the_model_as_it_was(plain: dict[str, dict[str, Any]], model: Path, tmp_path: Path) -> None:
    without = train(model, tmp_path, **{**WAYS["lora"], "beta": 0.0})
    first, second, *_ = plain["lora"]["steps"].values()
    # Before the first update the weights are the reference's: the divergence is zero, and nonzero afterwards.
    assert without["steps"][1][0] == first[0]
    assert without["steps"][2][0] != second[0]


def test_unpadded_log_probabilities_are_the_padded_ones(
    plain: dict[str, dict[str, Any]], model: Path, tmp_path: Path
) -> None:
    padded = train(model, tmp_path, **{**WAYS["unpadded"], "padding_free": False})
    (loss, reward, tokens), (other, same, as_many) = plain["unpadded"]["steps"][1], padded["steps"][1]
    assert (reward, tokens) == (same, as_many)
    assert abs(loss - other) < 1e-5  # two orders of summation, the only tolerance here


@pytest.mark.slow
def test_experts_are_balanced_without_padding_too(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer), num_experts=4, num_experts_per_tok=2,
        router_aux_loss_coef=0.1, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    losses = [
        train(tmp_path / "moe", tmp_path / str(free), **{**WAYS["unpadded"], "padding_free": free})["steps"][1][0]
        for free in (False, True)
    ]
    assert abs(losses[0] - losses[1]) < 1e-3 and losses[1] != 0.0


def test_a_model_that_mixes_sequences_in_a_row_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(ConfigError, match="padding_free is true, and LlamaForCausalLM mixes sequences"):
        train(model, tmp_path, padding_free=True)


def training_flags(model: torch.nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("unpadded", [False, True])
def test_a_rollout_has_no_dropout_and_the_update_has(model: Path, tmp_path: Path, unpadded: bool) -> None:
    changes = {"train_type": "lora", "lora_dropout": 0.5, "num_iterations": 2, "padding_free": unpadded, "beta": 0.1}
    trainer = RECIPE.prepare(grpo_config(model, tmp_path, **changes))
    seen: list[tuple[bool, bool, bool]] = []
    for name, module in trainer.model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_pre_hook(
                lambda module, _: seen.append((torch.is_grad_enabled(), module.training, trainer.model.training))
            )
        if name.endswith("lora_B.default"):
            torch.nn.init.normal_(module.weight)  # at first adapters change nothing
    trainer.model.train()
    trainer.model.get_submodule("base_model.model.model.layers.0").eval()  # stays unchanged
    flags = training_flags(trainer.model)
    made = trainer._generate_and_score_completions([trainer.train_dataset[0] for _ in range(4)])
    assert set(seen) == {(False, False, True)}
    assert training_flags(trainer.model) == flags
    ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
    inputs = (ids, torch.ones_like(ids), made["completion_ids"].shape[1])
    with torch.no_grad():
        first, again = (trainer._get_per_token_logps_and_entropies(trainer.model, *inputs)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(trainer._get_per_token_logps_and_entropies(trainer.model, *inputs)[0], first)


# Resuming


@pytest.mark.parametrize("way", ["full", "lora"])
def test_a_run_that_goes_on_in_the_middle_of_a_rollout_repeats_the_run_that_did_not_stop(
    model: Path, tmp_path: Path, way: str
) -> None:
    changes = {**WAYS[way], **OURS, "num_iterations": 4, "save_steps": 3, "max_steps": 7}
    whole = train(model, tmp_path / "whole", **changes)
    rest = train(model, tmp_path / "rest", **changes, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert rest["steps"] == {step: whole["steps"][step] for step in (4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, [3, 4]),
        ({"num_iterations": 2}, [3, 4, 6]),
    ],
)
def test_a_rollout_of_other_sizes_is_dropped_and_a_new_one_starts(
    model: Path, tmp_path: Path, changes: dict[str, Any], starts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = {"num_iterations": 4, "save_steps": 3, "max_steps": 7}
    train(model, tmp_path / "whole", **before)
    began: list[int] = []

    def note(kind: str, fields: dict[str, Any]) -> None:
        if kind == "phase" and (fields["name"], fields["edge"]) == ("generation", "begin"):
            began.append(fields["step"] - 1)

    remove = BUS.subscribe(note)
    try:
        checkpoint = str(tmp_path / "whole" / "checkpoint-3")
        rest = train(model, tmp_path / "rest", **{**before, **changes}, resume_from_checkpoint=checkpoint)
    finally:
        remove()
    assert list(rest["steps"]) == [4, 5, 6, 7] and began == starts
    assert "the order of rows changes from here on" in caplog.text
    assert "checkpoint-3 is not used (" in caplog.text and "a new one starts" in caplog.text


def test_a_rollout_without_the_reference_is_dropped_once_there_is_one(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"num_iterations": 4, "save_steps": 3, "max_steps": 4}
    train(model, tmp_path / "first", **changes)
    checkpoint = str(tmp_path / "first" / "checkpoint-3")
    rest = train(model, tmp_path / "rest", **changes, beta=0.04, resume_from_checkpoint=checkpoint)
    assert list(rest["steps"]) == [4]
    assert "checkpoint-3 is not used (reference 0, now 1): a new one starts" in caplog.text


def test_a_run_that_goes_on_in_a_later_epoch_draws_that_epochs_order(model: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(6)])
    changes = {"dataset": (file,), "num_train_epochs": 3.0, "max_steps": -1, "save_steps": 4}
    whole = train(model, tmp_path / "whole", **changes)
    assert len(whole["steps"]) == 9  # six prompts, two per step, three epochs
    rest = train(model, tmp_path / "rest", **changes, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert rest["steps"] == {step: whole["steps"][step] for step in range(5, 10)}


# Bad input


def reward_file(function: str) -> str:
    return f"{Path(rewards.__file__)}:{function}"


def test_a_reward_function_that_raises_stops_the_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="'rewards:broken' raised ZeroDivisionError"):
        train(model, tmp_path, reward_funcs=(reward_file("broken"),))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "error"


def test_equal_rewards_are_logged_once_and_then_rarely(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide_recipes.grpo import trainer

    monkeypatch.setattr(trainer, "REPEAT", 3)
    log = train(model, tmp_path, reward_funcs=(reward_file("nothing"),), max_steps=4)["log"]
    lines = [line for line in log.splitlines() if "all rewards are equal" in line]
    assert len(lines) == 2
    assert "(mean reward 0.5): it gives no gradient" in lines[0]
    assert lines[1].endswith("(seen 3 times)")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_that_are_equal_in_each_group_alone_are_named(model: Path, tmp_path: Path, scale: str) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n} + 1 =", "mark": n} for n in range(8)])
    changes = {"dataset": (file,), "reward_funcs": (reward_file("marked"),), "max_steps": 1}
    log = train(model, tmp_path / "run", **changes, scale_rewards=scale)["log"]
    assert log.count("all rewards are equal in every group") == 1


@pytest.mark.parametrize("completions", [1, 2])
def test_the_reward_of_an_evaluation_is_the_mean_of_its_rows(model: Path, tmp_path: Path, completions: int) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n} + 1 =", "mark": 2**n} for n in range(9)])
    rewards_ = {"dataset": (file,), "reward_funcs": (reward_file("marked"),)}
    changes = {"eval_dataset": (file,), "num_generations_eval": completions, "eval_steps": 1, "max_steps": 2}
    found = train(model, tmp_path / "run", **rewards_, **changes)["evaluations"]
    assert [reward for _, reward in found] == pytest.approx([(2**9 - 1) / 9] * 2, rel=1e-6)


def test_rollouts_that_no_function_judges_are_named(model: Path, tmp_path: Path) -> None:
    run.main(RECIPE, grpo_config(model, tmp_path, reward_funcs=(reward_file("none"),), max_steps=1))
    assert (tmp_path / "training.log").read_text().count("no completion of a rollout is judged") == 1
    (step,) = [e for e in map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines()) if e["event"] == "step"]
    assert "reward" not in step


@pytest.mark.parametrize(("reward", "answer"), [("accuracy", None), ("closeness", "Paris")])
def test_a_data_set_that_no_function_judges_is_refused(model: Path, tmp_path: Path, reward: str, answer: Any) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n} + 1 =", "answer": answer} for n in range(6)])
    with pytest.raises(DataError, match="no row of .*rows.jsonl has an answer that a reward function judges by"):
        train(model, tmp_path / "out", dataset=(file,), reward_funcs=(reward,))
    assert train(model, tmp_path / "both", dataset=(file,), reward_funcs=(reward, "format"), max_steps=1)


def test_long_prompts_are_left_out_and_counted_or_refused(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1 =" + " again" * (20 if n % 3 == 0 else 0), "answer": str(n + 1)} for n in range(9)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    said = f"3 of the 9 prompts of {file} are longer than 32 tokens"
    log = train(model, tmp_path / "kept", dataset=(file,), max_steps=1)["log"]
    assert f"{said}: they are left out; no prompt is cut" in log
    with pytest.raises(DataError, match=said):
        train(model, tmp_path / "refused", dataset=(file,), filter_overlong_prompts=False)
    with pytest.raises(DataError, match="9 of the 9 prompts"):
        train(model, tmp_path / "none", dataset=(file,), max_prompt_length=1)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"per_device_train_batch_size": 6}, ConfigError, "a rollout has 6 completions .* expected a multiple of"),
        ({"use_vllm": True}, ConfigError, "use_vllm is true, and vllm is not installed"),
        ({"reward_funcs": ("acuracy",)}, ConfigError, "there is no reward function 'acuracy'"),
        ({"dataset": ("builtin:arithmetic#1",)}, DataError, "has 1 prompts; expected 2 or more"),
        ({"max_prompt_length": 500}, ConfigError, "max_prompt_length is 500 and max_completion_length is 16"),
    ],
)
def test_what_makes_no_run_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        train(model, tmp_path, **changes)
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("flag", ["beta", "kl_reward_coef"])
def test_a_reference_whose_biases_are_trained_is_refused(model: Path, tmp_path: Path, flag: str) -> None:
    file = tmp_path / "biases.json"
    file.write_text(json.dumps({"peft_type": "LORA", "bias": "all"}))
    changes = {"train_type": "adapter", "adapter_config": str(file)}
    with pytest.raises(ConfigError, match='train the model\'s biases, .*\nhint: "bias": "none"'):
        train(model, tmp_path / "run", **changes, **{flag: 0.1})
    assert RECIPE.prepare(grpo_config(model, tmp_path / "without", **changes))


def test_questions_of_gsm8k_are_asked_as_chats(model: Path, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is {n} + {n}.\n#### {2 * n}"} for n in range(4)]
    file = write_jsonl(tmp_path / "gsm.jsonl", rows)
    changes = {"dataset": (file,), "reward_funcs": ("accuracy", "format", rewards.NAME)}
    assert len(train(model, tmp_path / "run", **changes, reward_weights=(1.0, 0.5, 2.0))["steps"]) == 3


def test_a_reward_far_from_random_is_learned(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    steps = train(model, tmp_path, reward_funcs=(rewards.NAME,), max_steps=24, max_completion_length=8)["steps"]
    values = [reward for _, reward, _ in steps.values()]
    assert sum(values[-6:]) > sum(values[:6])


@pytest.mark.parametrize("shuffled", [False, True])
def test_prompts_come_in_the_order_of_the_data_unless_they_are_shuffled(
    model: Path, tmp_path: Path, shuffled: bool
) -> None:
    trainer = RECIPE.prepare(grpo_config(model, tmp_path, dataset_shuffle=shuffled))
    order = list(dict.fromkeys(trainer._get_train_sampler()))
    assert len(order) > 2
    assert (order == sorted(order)) is not shuffled
