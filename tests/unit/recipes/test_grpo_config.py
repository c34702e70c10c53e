"""The flags of ``grpo``: verl's keys have their meaning or are refused by name; impossible numbers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbtide.base.errors import ConfigError
from ebbtide.cli.arguments import read_arguments
from ebbtide_recipes.grpo import rewards, verl
from ebbtide_recipes.grpo.config import ALIASES, UNSUPPORTED, GrpoConfig
from ebbtide_recipes.skeleton.sharding import resolved

ROOT = Path(__file__).parents[3]
RUN = """
data:
  train_files: [train.parquet, more.parquet]
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  hybrid_engine: true
  model:
    path: Qwen/Qwen2-7B-Instruct
    use_remove_padding: true
    enable_activation_offload: true
    enable_gradient_checkpointing: true
  actor:
    strategy: fsdp2
    optim:
      lr: 1.0e-6
    ppo_epochs: 2
    ppo_micro_batch_size_per_gpu: 16
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
    fsdp_config:
      param_offload: false
  ref:
    fsdp_config:
      param_offload: false
  rollout:
    n: 4
    temperature: 0.9
algorithm:
  adv_estimator: grpo
  use_kl_in_reward: false
trainer:
  total_epochs: 15
  save_freq: 20
  test_freq: 5
  n_gpus_per_node: 8
  nnodes: 1
"""


def read(*flags: str) -> GrpoConfig:
    config = read_arguments(GrpoConfig, flags, prog="ebbtide grpo")
    assert config is not None
    return config


def test_a_file_of_verls_is_one_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    config = read(str(file))
    assert config == GrpoConfig(
        dataset=("train.parquet", "more.parquet"),
        max_prompt_length=512,
        max_completion_length=1024,
        model="Qwen/Qwen2-7B-Instruct",
        padding_free=True,
        activation_cpu_offload=True,
        gradient_checkpointing=True,
        fsdp_strategy="fsdp2",
        learning_rate=1e-6,
        num_iterations=2,
        per_device_train_batch_size=16,
        beta=0.001,
        num_generations=4,
        temperature=0.9,
        num_train_epochs=15,
        save_steps=40,  # 20 rollouts of two updates
        eval_steps=10,
        nproc_per_node=8,
        nnodes=1,
    )
    config = resolved(config)
    assert (config.fsdp_strategy, config.fsdp_version) == ("full_shard", 2)


def test_verls_keys_are_flags_too() -> None:
    config = read("--actor_rollout_ref.actor.strategy", "fsdp", "--actor_rollout_ref.rollout.n", "5")
    sharded = resolved(config)
    assert (sharded.fsdp_strategy, sharded.fsdp_version, config.num_generations) == ("full_shard", 1, 5)
    assert resolved(read("--strategy", "fsdp2")).fsdp_version == 2


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_has_no_twin_is_refused_by_its_name_with_a_hint(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} .* is not supported in this release") as caught:
        read(f"--{name}", "something")
    assert caught.value.hint == UNSUPPORTED[name]


def test_sections_without_any_twin_are_refused_by_name_in_files(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("critic:\n  model:\n    enable_activation_offload: true\n")
    with pytest.raises(ConfigError, match=r"critic\.model\.enable_activation_offload in .* True is not supported"):
        read(str(file))


def test_names_and_values_belong_to_something() -> None:
    fields = set(GrpoConfig.__dataclass_fields__)
    assert set(ALIASES.values()) <= fields
    assert not set(ALIASES) & (fields | set(UNSUPPORTED))
    assert not set(UNSUPPORTED) & fields
    assert set(verl.GRANTED) <= set(UNSUPPORTED)
    for name, values in verl.GRANTED.items():
        for value in values:
            read(f"--{name}", value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--strategy", "megatron"), "--strategy is 'megatron'; expected .*fsdp.*fsdp2"),
        (("--strategy", "fsdp", "--fsdp_strategy", "shard_grad_op"), "fsdp_strategy is set twice: fsdp, shard_grad_op"),
        (("--num_generations", "1"), "num_generations is 1; expected 2 or more"),
        (("--max_completion_length", "0"), "max_completion_length is 0; expected 1 or more"),
        (("--temperature", "0"), "temperature is 0.0; expected a number above 0"),
        (("--top_p", "1.5"), "top_p is 1.5; expected above 0, at most 1"),
        (("--beta", "-1"), "beta is -1.0; expected 0 or more"),
        (("--kl_reward_coef", "-1"), "kl_reward_coef is -1.0; expected 0 or more"),
        (("--epsilon", "nan"), "epsilon is nan"),
        (("--delta", "1.2", "--epsilon_high", "0.28"), "delta is 1.2; expected 1 \\+ epsilon_high, 1.28, or more"),
        (("--delta", "1.1"), "delta is 1.1; expected 1 \\+ epsilon_high, 1.2, or more"),
        (("--delta", "inf"), "delta is inf"),
        (("--delta", "nan"), "delta is nan"),
        (("--reward_funcs", "accuracy", "format", "--reward_weights", "1", "2", "3"), "reward_weights has 3 numbers"),
        (("--reward_weights", "nan"), "reward_weights is nan; expected finite numbers"),
        (("--reward_funcs", "accuracy", "format", "--reward_weights", "1", "inf"), "reward_weights is inf"),
        (("--reward_weights=-inf",), "reward_weights is -inf"),
        (("--loss_type", "ppo"), "--loss_type is 'ppo'"),
        (("--vllm_server_port", "70000"), "vllm_server_port is 70000; expected a port, 1 to 65535"),
        (("--vllm_group_port", "0"), "vllm_group_port is 0; expected a port, 1 to 65535"),
        (("--vllm_server_timeout", "0"), "vllm_server_timeout is 0.0; expected seconds, above 0"),
        (("--vllm_server_base_url", "node7:8000"), "vllm_server_base_url is 'node7:8000'; expected an address"),
        (
            ("--vllm_server_base_url", "http://node7:8000", "--vllm_server_port", "8001"),
            "vllm_server_base_url and vllm_server_port are set; expected one address",
        ),
        (("--reward_functions", "accuracy"), "hint: did you mean 'reward_funcs'"),
    ],
)
def test_values_that_make_no_run_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(*flags)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("values", "processes", "completions"),
    [({}, 1, 8), ({"steps_per_generation": 4}, 2, 64), ({"gradient_accumulation_steps": 3}, 1, 24)],
)
def test_a_rollout_is_whole_groups(values: dict[str, Any], processes: int, completions: int) -> None:
    assert GrpoConfig(**values).completions(processes) == completions


def test_a_rollout_of_part_of_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="a rollout has 12 completions .* expected a multiple of num_generations, 8"):
        GrpoConfig(per_device_train_batch_size=6).completions(2)
    evaluating = GrpoConfig(split_dataset_ratio=0.1, num_generations_eval=3)
    with pytest.raises(ConfigError, match="a batch of the evaluation has 8 completions"):
        evaluating.completions(1)


def test_the_learning_rate_and_the_divergence_have_their_defaults() -> None:
    assert GrpoConfig().peak_learning_rate == 1e-6
    assert GrpoConfig(train_type="lora").peak_learning_rate == 1e-5
    assert GrpoConfig(beta=0.1, use_kl_loss=False).kl_coefficient == 0.0
    assert GrpoConfig(reward_funcs=("accuracy", "format")).weights == (1.0, 1.0)


def test_flags_of_vllm_act_in_their_mode() -> None:
    colocate = {"vllm_gpu_memory_utilization": 0.5, "vllm_tensor_parallel_size": 2}
    server = {
        "vllm_server_host": "node7",
        "vllm_server_port": 8001,
        "vllm_server_timeout": 9.0,
        "vllm_group_port": 51217,
    }
    address = {"vllm_server_base_url": "http://node7:8001"}

    def idle(**values: Any) -> set[str]:
        return set(GrpoConfig(**values).without_effect())

    assert idle(use_vllm=True, vllm_mode="server", **server, **colocate) == {*colocate}
    assert idle(use_vllm=True, vllm_mode="server", **address) == set()
    assert idle(use_vllm=True, **server, **colocate) == {*server}
    assert idle(use_vllm=True, **address) == {*address}
    assert idle(vllm_mode="server", **server, **colocate) == {"vllm_mode", *server, *colocate}


def test_the_trainer_has_the_address_of_the_server(tmp_path: Path) -> None:
    from ebbtide_recipes.grpo.trainer import arguments

    here = {"output_dir": str(tmp_path)}
    default = arguments(GrpoConfig(**here))
    config = GrpoConfig(use_vllm=True, vllm_mode="server", vllm_server_host="node7", vllm_group_port=51217, **here)
    found = arguments(config)
    assert (found.vllm_mode, found.vllm_server_host, found.vllm_group_port) == ("server", "node7", 51217)
    assert found.vllm_server_base_url is None
    assert (found.vllm_server_port, found.vllm_server_timeout) == (
        default.vllm_server_port,
        default.vllm_server_timeout,
    )


@pytest.mark.parametrize(
    ("changes", "corrected"), [({}, True), ({"top_p": 0.9}, False), ({"top_k": 20}, False)], ids=str
)
def test_vllm_reserves_for_a_completion_and_its_loss_is_corrected_if_all_tokens_are_sampled(
    tmp_path: Path, changes: dict[str, Any], corrected: bool
) -> None:
    from ebbtide_recipes.grpo.trainer import arguments

    found = arguments(GrpoConfig(output_dir=str(tmp_path), use_vllm=True, max_prompt_length=100, **changes))
    assert found.vllm_importance_sampling_correction is corrected
    assert found.vllm_max_model_length == 100 + 256
    assert found.model_init_kwargs is None
    found = arguments(GrpoConfig(output_dir=str(tmp_path), beta=0.1))
    assert found.model_init_kwargs == {"device_map": None}  # the reference is on this process's device alone


@pytest.mark.parametrize(
    ("train_type", "strategy", "words"),
    [("lora", "fsdp", "FSDP1.*\nhint: --fsdp_version 2"), ("qlora", "fsdp2", "4-bit weights.*\nhint: leave the shard")],
)
def test_vllm_gets_no_adapters_from_shards_that_cannot_be_merged(
    train_type: Any, strategy: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide_recipes.grpo import recipe

    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda name: object())
    config = GrpoConfig(use_vllm=True, train_type=train_type, fsdp_strategy=strategy)
    with pytest.raises(ConfigError, match=f"use_vllm is true with adapters and {words}"):
        recipe.RECIPE.check(resolved(config))


@pytest.mark.parametrize("preset", sorted((ROOT / "examples" / "grpo").glob("*.yaml")), ids=lambda path: path.name)
def test_a_preset_makes_a_run_with_ebbtide(preset: Path) -> None:
    config = read(str(preset))
    assert config.mode == "ebbtide" and config.without_effect() == []
    assert config.completions(1) % config.num_generations == 0
    rewards.load(config.reward_funcs)


def test_the_guides_file_of_verls_is_one_run(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "grpo.md").read_text()
    file = tmp_path / "run.yaml"
    file.write_text(guide.split("```yaml")[1].split("```")[0])
    config = read(str(file), "--reward_funcs", "accuracy")
    assert (config.fsdp_strategy, config.num_generations, config.padding_free) == ("fsdp2", 4, True)
    assert config.completions(8) == 128
