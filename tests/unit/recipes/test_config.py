"""What the flags mean together, and what is refused."""

from __future__ import annotations

import pytest

from ebbtide.base.errors import ConfigError
from ebbtide.cli.arguments import read_arguments
from ebbtide.config import Auto, Inputs, Keep, Minimal, Offload
from ebbtide_recipes.sft.config import UNSUPPORTED, SftConfig, refuse_several_processes


@pytest.mark.parametrize(
    ("offload", "checkpoint", "mode"),
    [(False, False, "plain"), (False, True, "checkpointing"), (True, False, "ebbtide"), (True, True, "ebbtide")],
)
def test_two_flags_make_a_mode(offload: bool, checkpoint: bool, mode: str) -> None:
    assert SftConfig(activation_cpu_offload=offload, gradient_checkpointing=checkpoint).mode == mode


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, Auto()),
        ({"policy": "auto"}, Auto()),
        ({"max_slowdown": 0.2}, Auto(max_slowdown=0.2)),
        ({"policy": "offload"}, Offload()),
        ({"policy": "inputs"}, Inputs()),
        ({"policy": "minimal"}, Minimal()),
        ({"policy": "keep"}, Keep()),
    ],
)
def test_the_policy_named_is_the_policy_made(changes: dict, policy: object) -> None:
    assert SftConfig(activation_cpu_offload=True, **changes).chosen_policy() == policy


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_type": "qlora"}, "expected 'full' or 'lora'"),
        ({"train_type": "adapter"}, "expected 'full' or 'lora'"),
        ({"max_steps": 0}, "max_steps is 0; expected 1 or more, or -1\nhint: -1, or leaving"),
        ({"max_steps": -2}, "max_steps is -2"),
        ({"max_length": 1}, "max_length is 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a number above zero\nhint: leave it out"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"num_train_epochs": -1.0}, "num_train_epochs is -1.0"),
        ({"lora_rank": 0}, "lora_rank is 0; expected 1 or more\nhint: "),
        ({"logging_steps": -5}, "logging_steps is -5; expected 1 or more\nhint: "),
        ({"seed": -1}, "seed is -1; expected 0 to 4294967295\nhint: "),
        ({"seed": 2**32}, "seed is 4294967296; expected 0 to 4294967295"),
        ({"seed": "7"}, "seed is '7'; expected an integer\nhint: pass the value itself, without quotes"),
        ({"max_steps": 1.5}, "max_steps is 1.5; expected an integer\nhint: "),
        ({"verify": "no"}, "verify is 'no'; expected true or false\nhint: "),
        ({"dataset": "builtin:pydoc"}, "dataset is 'builtin:pydoc'; expected a tuple of text\nhint: "),
        ({"dataset": ()}, "dataset is empty; expected a name\nhint: "),
        ({"report_to": ("",)}, "report_to is empty"),
        ({"model": None}, "model is None; expected text\nhint: "),
        ({"disk_path": " "}, "disk_path is empty; expected a name\nhint: leave disk_path out for its default"),
        ({"output_dir": ""}, "output_dir is empty"),
        ({"policy": "minmal"}, "policy is 'minmal'; expected one of auto, .*\nhint: did you mean 'minimal'"),
        ({"memory_budget": "abc"}, "memory_budget is 'abc'; expected a size above zero"),
        ({"max_slowdown": -1.0}, "max_slowdown is -1.0"),
        ({"gradient_checkpointing": True, "memory_budget": "abc"}, "memory_budget is 'abc'"),
        ({"activation_cpu_offload": True, "max_slowdown": -1.0}, "max_slowdown is -1.0"),
        ({"activation_cpu_offload": True, "memory_budget": "0"}, "memory_budget is '0'"),
        ({"activation_cpu_offload": True, "memory_budget": "-1"}, "memory_budget is '-1'"),
        ({"activation_cpu_offload": True, "memory_budget": "40GiB"}, "the planner that measures"),
        ({"activation_cpu_offload": True, "policy": "offload", "max_slowdown": 0.1}, "beside policy 'offload'"),
        (
            {"activation_cpu_offload": True, "gradient_checkpointing": True, "policy": "offload"},
            "policy is 'offload' beside gradient_checkpointing true",
        ),
    ],
)
def test_bad_values_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SftConfig(**changes)


def test_flags_without_effect_are_named() -> None:
    assert SftConfig().without_effect() == []
    plain = SftConfig(verify=True, policy="offload", disk_path="/x", lora_rank=4)
    assert plain.without_effect() == ["policy", "disk_path", "verify", "lora_rank"]
    ours = SftConfig(activation_cpu_offload=True, verify=True, train_type="lora", lora_rank=4, policy="offload")
    assert ours.without_effect() == []
    both = SftConfig(activation_cpu_offload=True, gradient_checkpointing=True, max_slowdown=0.1)
    assert both.without_effect() == ["max_slowdown"]


def test_the_learning_rate_follows_the_training_type() -> None:
    assert SftConfig().peak_learning_rate == 1e-5
    assert SftConfig(train_type="lora").peak_learning_rate == 1e-4
    assert SftConfig(learning_rate=3e-4).peak_learning_rate == 3e-4


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_flags_of_later_releases_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} 2 is not supported in this release\nhint: "):
        read_arguments(SftConfig, [f"--{name}", "2"], prog="ebbtide sft")


def test_no_flag_is_both_supported_and_refused() -> None:
    assert not set(UNSUPPORTED) & set(SftConfig.__dataclass_fields__)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "NPROC_PER_NODE"])
def test_several_processes_are_refused(name: str) -> None:
    for value in ("2", "abc"):
        with pytest.raises(ConfigError, match=f"{name} is '{value}' in the environment; expected 1.*\nhint: "):
            refuse_several_processes({name: value})
    refuse_several_processes({name: "1"})
    refuse_several_processes({})
