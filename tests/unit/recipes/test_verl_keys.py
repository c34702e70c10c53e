"""verl's keys that set several flags, or are read together: the resulting numbers, and invalid combinations."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.cli.arguments import read_arguments
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.sft import data
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import launch
from ebbtide_recipes.skeleton.trackers import VARIABLES, project_named

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
GRPO = (
    "algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet "
    "data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 "
    f"{ACTOR}.optim.lr=1e-6 {ACTOR}.ppo_mini_batch_size=256 {ACTOR}.ppo_micro_batch_size_per_gpu=8 "
    f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.002 {ROLLOUT}.name=vllm {ROLLOUT}.n=5 "
    f"{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.temperature=0.9 {ROLLOUT}.top_p=0.8 {ROLLOUT}.top_k=-1 "
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8 {REF}.log_prob_micro_batch_size_per_gpu=8 "
    "trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 trainer.n_gpus_per_node=8 trainer.nnodes=1 "
    """trainer.logger='["console","wandb"]' trainer.project_name=gsm8k trainer.experiment_name=qwen2_7b"""
)
SFT = (
    "data.train_files=train.parquet data.val_files=test.parquet data.prompt_key=extra_info "
    "data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] "
    "data.micro_batch_size_per_gpu=4 data.train_batch_size=256 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
    "trainer.default_local_dir=out trainer.project_name=gsm8k-sft trainer.experiment_name=qwen "
    "trainer.logger=['console'] trainer.total_epochs=1 trainer.default_hdfs_dir=null model.lora_rank=32 "
    "model.lora_alpha=16 model.target_modules=all-linear"
)
RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)


def grpo(*words: str) -> GrpoConfig:
    config = read_arguments(GrpoConfig, words, prog="ebbtide grpo")
    assert config is not None
    return config


def sft(*words: str) -> SftConfig:
    config = read_arguments(SftConfig, words, prog="ebbtide sft")
    assert config is not None
    return config


def batch(train: int, mini: int, micro: int, n: int, gpus: int, *more: str) -> list[str]:
    return [
        f"data.train_batch_size={train}", f"{ACTOR}.ppo_mini_batch_size={mini}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro}", f"{ROLLOUT}.n={n}", f"trainer.n_gpus_per_node={gpus}", *more,
    ]  # fmt: skip


def test_an_example_for_grpo_is_one_run() -> None:
    config = grpo(*shlex.split(GRPO))
    assert config == GrpoConfig(
        dataset=("train.parquet",),
        eval_dataset=("test.parquet",),
        max_prompt_length=512,
        max_completion_length=1024,
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=20,  # 256 x 5 / (8 x 8)
        steps_per_generation=80,  # 1024 x 5 / (8 x 8)
        num_generations=5,
        beta=0.002,
        use_vllm=True,
        vllm_tensor_parallel_size=2,
        temperature=0.9,
        top_p=0.8,
        top_k=0,
        eval_steps=20,  # 5 rollouts of 4 updates
        num_train_epochs=15,
        nproc_per_node=8,
        nnodes=1,
        report_to=("wandb",),
        project_name="gsm8k",
        run_name="qwen2_7b",
        output_dir="checkpoints/gsm8k/qwen2_7b",
    )
    assert config.save_steps is None
    assert config.completions(8) == 1024 * 5


def test_an_example_for_fine_tuning_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(SFT.replace("['question']", "'[question]'").replace("['answer']", "'[answer]'"))
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    assert sft(*words) == SftConfig(
        dataset=("train.parquet",),
        eval_dataset=("test.parquet",),
        prompt_key="extra_info.question",
        response_key="extra_info.answer",
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=16,  # 256 / (4 x 4)
        model="Qwen/Qwen2.5-0.5B-Instruct",
        output_dir="out",
        project_name="gsm8k-sft",
        run_name="qwen",
        train_type="lora",
        lora_rank=32,
        lora_alpha=16,
    )


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (batch(1024, 256, 8, 5, 8), (20, 80)),
        (batch(64, 64, 4, 8, 2), (64, 64)),
        (batch(6, 3, 5, 5, 1), (3, 6)),
        (batch(8, 2, 4, 4, 2, "trainer.nnodes=1"), (1, 4)),
        ([f"{ACTOR}.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=1"], (4, 4)),  # 8 completions, 8 at a time
        (["data.train_batch_size=4", "trainer.n_gpus_per_node=2", "--num_generations", "4"], (1, 1)),
    ],
)
def test_prompts_become_micro_batches(words: list[str], numbers: tuple[int, int]) -> None:
    config = grpo(*words)
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == numbers


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["trainer.save_freq=20", "trainer.test_freq=5", "trainer.total_training_steps=7"], (20, 5, 7)),
        (["trainer.save_freq=20", f"{ACTOR}.ppo_epochs=3"], (60, None, -1)),
        ([*batch(8, 2, 4, 4, 2), "trainer.save_freq=3", "trainer.total_training_steps=10"], (12, None, 40)),
        ([*batch(8, 2, 4, 4, 2), f"{ACTOR}.ppo_epochs=2", "trainer.test_freq=1"], (None, 8, -1)),
        (["--gradient_accumulation_steps", "2", "--steps_per_generation", "6", "trainer.save_freq=1"], (3, None, -1)),
        (["trainer.save_freq=-1", "trainer.test_freq=-1"], (None, None, -1)),
        (["trainer.save_freq=null", "trainer.total_training_steps=null"], (None, None, -1)),
    ],
)
def test_rollouts_become_updates(words: list[str], steps: tuple[int | None, int | None, int]) -> None:
    config = grpo(*words)
    assert (config.save_steps, config.eval_steps, config.max_steps) == steps


def test_without_tests_there_is_no_evaluation() -> None:
    assert grpo("data.val_files=test.parquet").eval_dataset == ("test.parquet",)
    assert grpo("data.val_files=test.parquet", "trainer.test_freq=-1").eval_dataset is None
    assert sft("data.val_files=test.parquet", "trainer.test_freq=-1").eval_dataset == ("test.parquet",)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([f"{ACTOR}.clip_ratio=0.3"], {"epsilon": 0.3, "epsilon_high": 0.3}),
        ([f"{ACTOR}.clip_ratio_low=0.3"], {"epsilon": 0.3, "epsilon_high": 0.2}),
        ([f"{ACTOR}.clip_ratio_high=0.28"], {"epsilon": 0.2, "epsilon_high": 0.28}),
        ([f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.28"], {"epsilon": 0.1, "epsilon_high": 0.28}),
        ([f"{ACTOR}.clip_ratio_c=3.0"], {"delta": 3.0}),
        (["algorithm.use_kl_in_reward=True"], {"kl_reward_coef": 0.001, "beta": 0.0}),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"], {"kl_reward_coef": 0.1}),
        (["algorithm.use_kl_in_reward=False", "algorithm.kl_ctrl.kl_coef=0.1"], {"kl_reward_coef": 0.0}),
        ([f"{ACTOR}.clip_ratio_c=1.28", f"{ACTOR}.clip_ratio_high=0.28"], {"delta": 1.28}),
        ([f"{ACTOR}.use_kl_loss=True"], {"beta": 0.001, "use_kl_loss": True}),
        ([f"{ACTOR}.use_kl_loss=True", "--beta", "0.5"], {"beta": 0.5}),
        ([f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.kl_loss_coef=0.1"], {"beta": 0.1, "kl_coefficient": 0.0}),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], {"loss_type": "grpo"}),
        ([f"{ACTOR}.loss_agg_mode=token-mean"], {"loss_type": "dapo"}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"scale_rewards": "none"}),
        (["algorithm.norm_adv_by_std_in_grpo=True"], {"scale_rewards": "group"}),
        ([f"{ACTOR}.optim.warmup_style=constant"], {"lr_scheduler_type": "constant_with_warmup"}),
        ([f"{ACTOR}.optim.lr_scheduler_type=cosine"], {"lr_scheduler_type": "cosine"}),
        ([f"{ACTOR}.optim.lr_warmup_steps=-1", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], {"warmup_ratio": 0.1}),
        ([f"{ACTOR}.optim.lr_warmup_steps=0"], {"warmup_ratio": 0.0}),
        ([f"{ROLLOUT}.name=hf"], {"use_vllm": False}),
        (["data.shuffle=False"], {"dataset_shuffle": False}),
        ([f"{ROLLOUT}.top_k=50"], {"top_k": 50}),
        ([f"{ACTOR}.ppo_micro_batch_size=16", "trainer.n_gpus_per_node=4"], {"per_device_train_batch_size": 4}),
        (["custom_reward_function.path=r.py"], {"reward_funcs": ("r.py:compute_score",)}),
        (["custom_reward_function.path=r.py", "custom_reward_function.name=f"], {"reward_funcs": ("r.py:f",)}),
        (["actor_rollout_ref.model.lora_rank=16"], {"train_type": "lora", "lora_rank": 16}),
        (["--train_type", "qlora", "actor_rollout_ref.model.lora_rank=16"], {"train_type": "qlora", "lora_rank": 16}),
        (["actor_rollout_ref.model.lora_rank=0"], {"train_type": "full", "lora_rank": 8}),
        (["trainer.logger=console"], {"report_to": ("none",)}),
        (["trainer.logger=[console,tensorboard]"], {"report_to": ("tensorboard",)}),
        (["trainer.project_name=p"], {"project_name": "p", "output_dir": "runs/grpo"}),
        (["trainer.project_name=p", "trainer.experiment_name=e", "trainer.default_local_dir=o"], {"output_dir": "o"}),
    ],
)
def test_a_key_means_what_it_means_in_verl(words: list[str], values: dict[str, Any]) -> None:
    config = grpo(*words)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            batch(1000, 256, 8, 5, 8),
            f"data.train_batch_size is '1000' and {ACTOR}.ppo_mini_batch_size is '256'; expected a rollout of whole",
            f"data.train_batch_size=768, or {ACTOR}.ppo_mini_batch_size=250",
        ),
        (
            batch(128, 256, 8, 5, 8),
            "expected a rollout of whole updates",
            f"data.train_batch_size=256, or {ACTOR}.ppo_mini_batch_size=128",
        ),
        (
            batch(1024, 256, 48, 5, 8),
            "an update has 256 prompts x 5 completions = 1280, and 8 processes with 48 each take 384 at a time; "
            "expected an update of whole micro-batches",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=40",
        ),
        (
            batch(6, 6, 1, 5, 8),
            "an update has 6 prompts x 5 completions = 30, and 8 processes with 1 each take 8 at a time",
            f"{ACTOR}.ppo_mini_batch_size=8",
        ),
        (
            ["data.train_batch_size=8"],
            "data.train_batch_size is '8', without a number of processes; expected trainer.n_gpus_per_node",
            "trainer.n_gpus_per_node=N",
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size=6", "trainer.n_gpus_per_node=4"],
            f"{ACTOR}.ppo_micro_batch_size is '6' for 4 processes; expected a multiple of 4",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu counts",
        ),
        (
            [*batch(8, 2, 4, 4, 2), "--gradient_accumulation_steps", "3"],
            f"{ACTOR}.ppo_mini_batch_size is '2', which sets gradient_accumulation_steps to 1, and "
            "--gradient_accumulation_steps is '3'; expected one value",
            "leave one of the two out",
        ),
        (
            ["--save_steps", "5", "trainer.save_freq=-1"],
            "trainer.save_freq is '-1', and --save_steps is '5'; expected one value",
            "leave one of the two out",
        ),
        (["data.train_batch_size=many"], "data.train_batch_size is 'many'; expected 1 or more", "leave data"),
        (["trainer.save_freq=often"], "trainer.save_freq is 'often'; expected a whole number", "leave trainer"),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps is '0'; expected 1 or more", "leave tr"),
        ([f"{ACTOR}.use_kl_loss=perhaps"], "use_kl_loss is 'perhaps'; expected true or false", "=true"),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=x"], "kl_loss_coef is 'x'; expected a number", "help"),
        (["trainer.save_freq=1", "trainer.save_freq=2"], "trainer.save_freq is set twice: 1, 2", "leave one out"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(words: list[str], said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grpo(*words)
    assert said in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        (f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.use_kl_loss=True"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "--loss_type"),
        (f"{ACTOR}.optim.lr_warmup_steps=10", "--warmup_ratio"),
        (f"{ACTOR}.optim.warmup_style=wsd", "--lr_scheduler_type"),
        (f"{ROLLOUT}.name=sglang", "hf: transformers generates"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16", ": 8, or leave it out"),
        ("custom_reward_function.name=f", "custom_reward_function.path"),
        # False requests a behaviour that the recipe lacks.
        (f"{ROLLOUT}.do_sample=False", "always sampled"),
        (f"{ROLLOUT}.val_kwargs.temperature=0", "as in training"),
        ("actor_rollout_ref.hybrid_engine=False", "one set of processes"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "algorithm.use_kl_in_reward=True"),
        ("algorithm.kl_ctrl.type=adaptive", "fixed"),
        ("algorithm.kl_penalty=low_var_kl", "log p_reference"),
        # Keys of a section without any meaning here.
        ("critic.cliprange_value=0.5", "no critic"),
        ("reward_model.rollout.n=4", "--reward_funcs"),
    ],
)
def test_a_value_without_a_meaning_here_is_refused_by_its_key(word: str, hint: str) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError) as caught:
        grpo(word)
    assert caught.value.found == f"{key} {value} is not supported in this release"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("read", "word", "near"),
    [
        (grpo, f"{ACTOR}.fsdp_config.fsdp_sizes=-1", f"did you mean '{ACTOR}.fsdp_config.fsdp_size'?"),
        (grpo, f"{ROLLOUT}.prompt_length=512", "did you mean --max_prompt_length, 'data.max_prompt_length'?"),
        (grpo, "transfer_queue.storage=[1]", "not translated; docs/reference/grpo-flags.md"),
        (sft, "checkpoint.save_contents=[model]", "not translated; docs/reference/sft-flags.md"),
        (sft, "data.train_batch_sizes=8", "did you mean 'data.train_batch_size', 'data.micro_batch_size'"),
    ],
)
def test_an_unknown_key_is_reported_as_verls(read: Any, word: str, near: str) -> None:
    key, section = word.partition("=")[0], word.partition(".")[0]
    with pytest.raises(ConfigError) as caught:
        read(word)
    assert caught.value.found.startswith(f"unknown key {key!r}")
    assert caught.value.hint.startswith(f"{section} is a section of verl's keys, and this one is not translated")
    assert near in caught.value.hint


@pytest.mark.parametrize("config", [GrpoConfig, SftConfig])
def test_every_section_is_verls_and_the_page_lists_what_is_known(config: Any) -> None:
    sections = {
        key.partition(".")[0] for key in (*config.aliases, *config.translated, *config.unsupported) if "." in key
    }
    assert sections <= set(config.groups) and set(config.groups.values()) == {"verl"}
    page = (Path(__file__).parents[3] / config.page).read_text(encoding="utf-8")
    assert all(f"\n## {head}\n" in page for head in ("Names of other trainers", "Keys of verl", "Refused"))


def test_steps_without_whole_updates_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="trainer.save_freq 2 is not supported.*\nhint: .*--save_steps counts updates"
    ):
        grpo("--gradient_accumulation_steps", "2", "--steps_per_generation", "3", "trainer.save_freq=2")


def test_keys_of_a_file_and_of_flags_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data:\n  train_batch_size: 8\nactor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 4\n"
        "trainer:\n  n_gpus_per_node: 1\n  save_freq: 10\n  logger: [console, wandb]\n"
    )
    file = str(tmp_path / "run.yaml")
    config = grpo(file)
    assert (config.gradient_accumulation_steps, config.steps_per_generation, config.save_steps) == (4, 8, 20)
    assert config.report_to == ("wandb",)
    again = grpo(file, "trainer.save_freq=-1", "--trainer.logger", "console")
    assert again.save_steps is None and again.report_to == ("none",)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["data.train_batch_size=16", "trainer.n_gpus_per_node=2"], {"gradient_accumulation_steps": 8}),
        (["data.micro_batch_size=8", "trainer.n_gpus_per_node=2"], {"per_device_train_batch_size": 4}),
        (["data.prompt_key=q", "data.response_key=a"], {"prompt_key": "q", "response_key": "a"}),
        (["trainer.save_freq=10", "trainer.test_freq=4"], {"save_steps": 10, "eval_steps": 4}),
        (["trainer.save_freq=-1", "trainer.test_freq=-1"], {"save_steps": None, "eval_steps": None}),
        (["data.truncation='error'"], {"truncation": "error"}),
        (["optim.lr_scheduler=cosine"], {"lr_scheduler_type": "cosine"}),
        (["trainer.project_name=p", "trainer.experiment_name=e"], {"output_dir": "checkpoints/p/e"}),
    ],
)
def test_keys_of_verls_fine_tuning(words: list[str], values: dict[str, Any]) -> None:
    config = sft(*words)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            ["data.train_batch_size=24", "data.micro_batch_size_per_gpu=5", "trainer.n_gpus_per_node=4"],
            "data.train_batch_size is '24', and 4 processes with 5 each take 20 at a time; expected a step of whole",
            "data.micro_batch_size_per_gpu=3",
        ),
        (
            ["data.train_batch_size=10", "trainer.n_gpus_per_node=4"],
            "data.train_batch_size is '10', and 4 processes with 1 each take 4 at a time",
            "data.train_batch_size=12",
        ),
        (["data.prompt_key=q"], "prompt_key is 'q' without response_key", "--response_key"),
        (["data.prompt_dict_keys=[q]"], "data.prompt_dict_keys q is not supported", "data.prompt_key"),
        (["use_remove_padding=true"], "use_remove_padding true is not supported", "leave it out"),
        (["ulysses_sequence_parallel_size=2"], "ulysses_sequence_parallel_size 2 is not supported", "leave it out"),
        (["--seed", "1", "max_steps=2"], "'max_steps=2' is an unexpected argument", "--max_steps=2"),
        (["data.truncation=left"], "data.truncation is 'left'; expected one of right, error", "help"),
        (["data.truncation=error", "--packing"], "packing is true with truncation 'error'", "leave --truncation out"),
        (["--truncation_strategy", "raise"], "--truncation_strategy raise is not supported", "error, which is raise"),
    ],
)
def test_what_does_not_fit_in_fine_tuning_is_refused(words: list[str], said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sft(*words)
    assert said in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("pair", [("extra_info.question", "extra_info.answer"), ("q", "extra_info.answer")])
def test_questions_and_answers_are_where_the_keys_say(tmp_path: Path, pair: tuple[str, str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1+1", "messages": [], "extra_info": {"question": "1+1", "answer": "2"}}\n')
    config = SftConfig(dataset=(str(file),), prompt_key=pair[0], response_key=pair[1])
    rows = data.load_both(config, chat=True)[0].to_list()
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert rows == [{"prompt": turns[:1], "completion": turns[1:]}]


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"extra_info": {"question": "1+1", "answer": "2"}}\n')
    keys = {"prompt_key": "extra_info.question", "response_key": "extra_inf.answer"}
    with pytest.raises(DataError, match="has no 'extra_inf.answer'; its columns are extra_info") as caught:
        data.load_both(SftConfig(dataset=(str(file),), **keys), chat=True)
    assert "'extra_info'" in caught.value.hint
    file.write_text('{"q": "1", "a": "2"}\n{"q": "1"}\n')
    with pytest.raises(DataError, match="row 2 of data set .* has no 'a'"):
        data.load_both(SftConfig(dataset=(str(file),), prompt_key="q", response_key="a"), chat=True)


@pytest.mark.parametrize(
    ("changes", "environment", "said"),
    [
        ({"nproc_per_node": 8}, RANKS, "nproc_per_node is 8, and the number of processes on this node is 4"),
        ({"nnodes": 2}, RANKS, "nnodes is 2, and the number of nodes is 1"),
        ({"nnodes": 2}, {}, "nnodes is 2, and the number of nodes is 1"),
        ({"nnodes": 1}, {**RANKS, "WORLD_SIZE": "8"}, "nnodes is 1, and the number of nodes is 2"),
    ],
)
def test_ranks_that_run_are_those_of_the_keys(changes: dict, environment: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        launch.processes(GrpoConfig(**changes), environment)
    assert "torchrun --n" in caught.value.hint
    assert launch.processes(GrpoConfig(nproc_per_node=4, nnodes=1), RANKS) is None


def test_the_processes_of_all_nodes_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "2")
    config = grpo(*batch(16, 8, 4, 4, 2, "trainer.nnodes=2"))
    assert (config.gradient_accumulation_steps, config.steps_per_generation) == (2, 4)
    assert launch.total(GrpoConfig(nproc_per_node=1), {"NNODES": "2"}) == 2
    assert launch.total(GrpoConfig(), RANKS) == 4
    with pytest.raises(ConfigError, match="nnodes is 1, and the number of nodes is 2"):
        grpo(*batch(16, 8, 4, 4, 2, "trainer.nnodes=1"))


def test_trackers_get_the_project_and_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    before = dict(os.environ)
    with project_named("gsm8k"):
        assert [os.environ[variable] for variable in VARIABLES] == ["gsm8k"] * len(VARIABLES)
    assert dict(os.environ) == before
    with project_named(None):
        assert os.environ["WANDB_PROJECT"] == "mine"
        os.environ.update(dict.fromkeys(VARIABLES, "a tracker's own"))
    assert dict(os.environ) == before
