"""The meaning of combined flags, and refused values."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.cli.arguments import read_arguments
from ebbtide.config import Auto, Inputs, Keep, Minimal, Offload
from ebbtide_recipes.sft import config as config_module
from ebbtide_recipes.sft.config import ALIASES, UNSUPPORTED, SftConfig
from ebbtide_recipes.skeleton.config import OFFLOADING
from ebbtide_recipes.skeleton.run import _offloading, offload_options
from ebbtide_recipes.skeleton.sharding import resolved
from tests.unit.planner.test_table import plan as table

PROMISED = (
    "model", "dataset", "train_type", "fsdp_strategy", "fsdp_version", "activation_cpu_offload",
    "gradient_checkpointing", "memory_budget", "max_slowdown", "memory_efficient_init",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "learning_rate", "max_length", "attn_impl", "torch_dtype", "output_dir", "resume_from_checkpoint",
    "logging_steps", "report_to", "fsdp_config", "lora_rank", "lora_alpha", "target_modules", "freeze_vit",
    "bf16", "fp16", "log_level", "deepspeed", "nproc_per_node",
)  # fmt: skip
"""The flags that users of ms-swift and TRL are promised."""


FILTER = "def tensor_filter(tensor): return tensor.numel() > 1000\ndef other(tensor): return False\n"


def test_the_settings_of_the_function_are_flags_and_keys(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(FILTER)
    flags = [
        "--activation_cpu_offload", "true", "--min_bytes", "1MiB", "--host_budget", "2GiB", "--window", "64MiB",
        "--blocks", "model.layers.*", "lm_head", "--synchronous", "--tensor_filter", f"{tmp_path}/plugin.py:other",
    ]  # fmt: skip
    (tmp_path / "run.yaml").write_text(
        "activation_cpu_offload: true\nmin_bytes: 1MiB\nhost_budget: 2GiB\nwindow: 64MiB\n"
        f"blocks: [model.layers.*, lm_head]\nsynchronous: true\ntensor_filter: {tmp_path}/plugin.py:other\n"
    )
    for argv in (flags, [str(tmp_path / "run.yaml")]):
        callback = _offloading(read_arguments(SftConfig, argv, prog="ebbtide sft"))
        assert callback is not None
        options = {name: callback.options[name] for name in ("min_bytes", "host_budget", "window", "synchronous")}
        assert options == {"min_bytes": 1 << 20, "host_budget": 2 << 30, "window": 64 << 20, "synchronous": True}
        assert callback.options["blocks"] == ("model.layers.*", "lm_head")
        assert callback.options["tensor_filter"].__name__ == "other"


def test_a_plugin_of_ms_swift_is_a_filter(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(FILTER.replace("tensor_filter", "custom_tensor_filter"))
    argv = ["--activation_cpu_offload", "true", "--external_plugins", f"{tmp_path}/plugin.py"]
    callback = _offloading(read_arguments(SftConfig, argv, prog="ebbtide sft"))
    assert callback is not None and callback.options["tensor_filter"].__name__ == "custom_tensor_filter"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tensor_filter": "plugni.py"},
            r"there is no file '.*plugni.py' with a filter.*\nhint: did you mean 'plugin.py'",
        ),
        ({"tensor_filter": "plugin.py:othr"}, "has no function 'othr'; expected one of .*\nhint: did you mean 'other'"),
        ({"tensor_filter": "empty.py"}, "has no function 'tensor_filter' or 'custom_tensor_filter'"),
        ({"min_bytes": "lots"}, "min_bytes is 'lots'"),
        ({"window": "0"}, "window is '0'"),
        ({"host_budget": "-1"}, "host_budget is '-1'"),
    ],
)
def test_settings_that_cannot_be_are_refused_first(tmp_path: Path, changes: dict, said: str) -> None:
    (tmp_path / "plugin.py").write_text(FILTER)
    (tmp_path / "empty.py").write_text("")
    changes = {name: f"{tmp_path}/{value}" if ".py" in value else value for name, value in changes.items()}
    with pytest.raises(ConfigError, match=said):
        offload_options(SftConfig(**changes))


def test_sizes_become_bytes_once() -> None:
    config = SftConfig(min_bytes="1MiB", host_budget="2GiB", memory_budget="3 KB")
    assert offload_options(config) == {"min_bytes": 1 << 20, "host_budget": 2 << 30}
    assert offload_options(SftConfig(min_bytes="0", window="1GiB")) == {"min_bytes": 0, "window": 1 << 30}
    assert config.chosen_policy() == Auto(memory_budget="3 KB")
    assert Auto(memory_budget="3 KB").budget_bytes == 3000 and Auto().budget_bytes is None


def test_keys_of_verl_are_known_in_every_form() -> None:
    argv = [
        "actor_rollout_ref.model.path=m", "actor_rollout_ref.model.enable_activation_offload=True",
        "actor_rollout_ref.actor.strategy=fsdp2", "critic.model.enable_activation_offload=False",
        "data.train_files=rows.parquet", "trainer.total_epochs=3", "trainer.logger=['console']",
    ]  # fmt: skip
    config = read_arguments(SftConfig, argv, prog="ebbtide sft")
    assert config is not None
    assert (config.model, config.dataset, config.num_train_epochs) == ("m", ("rows.parquet",), 3.0)
    assert (config.activation_cpu_offload, config.fsdp_strategy) == (True, "fsdp2")
    with pytest.raises(ConfigError, match="critic.model.enable_activation_offload True .*\nhint: one model is trained"):
        read_arguments(SftConfig, ["critic.model.enable_activation_offload=True"], prog="ebbtide sft")


@pytest.mark.parametrize(
    ("offload", "checkpoint", "mode", "options"),
    [
        ("false", "false", "plain", None),
        ("false", "true", "checkpointing", None),
        ("true", "false", "ebbtide", {"enable_ckpt": False, "policy": Auto()}),
        ("true", "true", "ebbtide", {"enable_ckpt": True, "policy": None}),
    ],
)
def test_the_table_of_the_two_flags_as_they_are_typed(
    offload: str, checkpoint: str, mode: str, options: dict[str, object] | None
) -> None:
    argv = ["--activation_cpu_offload", offload, "--gradient-checkpointing", checkpoint]
    config = read_arguments(SftConfig, argv, prog="ebbtide sft")
    assert config is not None and config.mode == mode
    callback = _offloading(config)
    assert (callback is None) is (options is None)
    if callback is not None and options is not None:
        assert {name: callback.options[name] for name in options} == options


@pytest.mark.parametrize(
    ("argv", "strategy"),
    [
        (["--deepspeed", "zero2"], None),
        (["--deepspeed", "zero3", "--activation_cpu_offload", "true"], None),
        (["--deepspeed", "none"], "none"),
        (["--deepspeed", "zero2", "--fsdp_strategy", "full_shard"], "full_shard"),
        (["--deepspeed", "zero2", "--fsdp", "fsdp2"], "full_shard"),
        (["--deepspeed", "zero2", "--strategy", "accelerate"], "full_shard"),
    ],
)
def test_the_table_of_deepspeed_beside_fsdp_as_they_are_typed(argv: list[str], strategy: str | None) -> None:
    config = read_arguments(SftConfig, argv, prog="ebbtide sft")
    assert config is not None
    if strategy is None:
        with pytest.raises(ConfigError, match="without FSDP.*\nhint: --fsdp_strategy shard_grad_op is like ZeRO-2"):
            resolved(config)
    else:
        assert resolved(config).fsdp_strategy == strategy


def test_every_flag_is_there_and_read_by_the_recipe() -> None:
    fields = [field.name for field in dataclasses.fields(SftConfig)]
    assert set(PROMISED) <= set(fields)
    rooms = Path(config_module.__file__).parents[1]
    modules = [path for room in ("skeleton", "language", "sft") for path in sorted((rooms / room).glob("*.py"))]
    # Checks only validate a value.
    recipe = "".join(path.read_text() for path in modules if path.name not in ("config.py", "rules.py"))
    properties = "".join(path.read_text().partition("@property")[2] for path in modules if path.name == "config.py")
    unread = [n for n in fields if not re.search(rf"config\.{n}\b", recipe) and f"self.{n}" not in properties]
    assert set(unread) <= set(OFFLOADING)  # which are read by name


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, ebbtide.cli as c; c.main(['sft', '--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "--activation_cpu_offload" in result.stdout.replace("-cpu-", "_cpu_")
    assert not {"torch", "transformers", "trl", "peft", "datasets"} & set(result.stderr.split())


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


def test_the_file_of_a_plan_may_be_named(tmp_path: Path) -> None:
    saved, path = table(), tmp_path / "plan.json"
    saved.save(path)
    config = SftConfig(activation_cpu_offload=True, policy=str(path))
    assert config.chosen_policy() == saved
    for more in ({"max_slowdown": 0.1}, {"gradient_checkpointing": True}):
        with pytest.raises(ConfigError, match=r"plan\.json'"):
            SftConfig(activation_cpu_offload=True, policy=str(path), **more)
    with pytest.raises(DataError, match="cannot be read"):
        SftConfig(activation_cpu_offload=True, policy=str(tmp_path / "other.json"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train_type": "adapter"},
            "'adapter'.*--adapter_config.*\nhint: --adapter_config boft",
        ),
        ({"adapter_config": "boft"}, "adapter_config .*train_type full.*\nhint: --train_type adapter"),
        (
            {"train_type": "adapter", "adapter_config": "boft", "adapters": "x"},
            "adapter_config .*adapters.*\nhint: leave --adapter_config out",
        ),
        ({"adapters": "x"}, "adapters is set with train_type full.*\nhint: --train_type lora"),
        ({"train_type": "lora", "adapters": " "}, "adapters is empty"),
        (
            {"train_type": "qlora", "memory_efficient_init": True, "fsdp_strategy": "full_shard", "fsdp_version": 1},
            "memory_efficient_init is true with train_type qlora and FSDP1.*\nhint: leave --fsdp_version out",
        ),
        ({"max_steps": 0}, "max_steps is 0; expected 1 or more, or -1\nhint: "),
        ({"max_steps": -2}, "max_steps is -2"),
        ({"max_length": 1}, "max_length is 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a number above zero\nhint: leave it out"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"num_train_epochs": -1.0}, "num_train_epochs is -1.0"),
        ({"lora_rank": 0}, "lora_rank is 0; expected 1 or more\nhint: "),
        ({"logging_steps": -5}, "logging_steps is -5; expected 1 or more\nhint: "),
        ({"save_steps": 0}, "save_steps is 0; expected 1 or more\nhint: leave it out to write no checkpoints"),
        ({"nproc_per_node": 0}, "nproc_per_node is 0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0; expected a share from 0 to below 1"),
        ({"split_dataset_ratio": -0.1}, "split_dataset_ratio is -0.1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; expected 0 or more"),
        ({"fsdp_version": 3}, "fsdp_version is 3; expected 1 or 2"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"fp16": True, "torch_dtype": "bfloat16"}, "fp16 is true with torch_dtype bfloat16"),
        ({"fp16": True, "train_type": "qlora"}, "fp16 is true with train_type qlora.*\nhint: leave --fp16 out"),
        ({"fsdp": "fsdp2", "fsdp_config": "x.json"}, "fsdp and fsdp_config are both set"),
        ({"eval_dataset": ("a",), "split_dataset_ratio": 0.1}, "eval_dataset and split_dataset_ratio are both set"),
        ({"eval_dataset": ()}, "eval_dataset is empty"),
        ({"system": " "}, "system is empty"),
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
        ({"policy": "minmal"}, "policy is 'minmal'; expected .*, or a plan file.*\nhint: did you mean 'minimal'"),
        ({"memory_budget": "abc"}, "memory_budget is 'abc'; expected a size above zero"),
        ({"max_slowdown": -1.0}, "max_slowdown is -1.0"),
        ({"max_slowdown": 5.0}, "max_slowdown is 5.0"),
        ({"max_slowdown": 0.1, "memory_budget": "4GiB"}, "max_slowdown is 0.1 and memory_budget is '4GiB'"),
        ({"gradient_checkpointing": True, "memory_budget": "abc"}, "memory_budget is 'abc'"),
        ({"activation_cpu_offload": True, "max_slowdown": -1.0}, "max_slowdown is -1.0"),
        ({"activation_cpu_offload": True, "memory_budget": "0"}, "memory_budget is '0'"),
        ({"activation_cpu_offload": True, "memory_budget": "-1"}, "memory_budget is '-1'"),
        ({"activation_cpu_offload": True, "policy": "offload", "max_slowdown": 0.1}, "policy 'offload'"),
        (
            {"activation_cpu_offload": True, "gradient_checkpointing": True, "policy": "offload"},
            "policy is 'offload' with gradient_checkpointing true",
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
    kind = SftConfig(train_type="adapter", adapter_config="boft", lora_rank=4, target_modules=("q_proj",))
    assert kind.without_effect() == ["lora_rank"]
    going_on = SftConfig(train_type="lora", adapters="x", lora_rank=4, target_modules=("q_proj",))
    assert going_on.without_effect() == ["lora_rank", "target_modules"]
    assert SftConfig(fsdp_version=1).without_effect() == ["fsdp_version"]
    assert SftConfig(fsdp_version=1, fsdp_strategy="full_shard").without_effect() == []
    both = SftConfig(activation_cpu_offload=True, gradient_checkpointing=True, max_slowdown=0.1)
    assert both.without_effect() == ["max_slowdown"]


def test_the_learning_rate_follows_the_training_type() -> None:
    assert SftConfig().peak_learning_rate == 1e-5
    assert SftConfig(train_type="lora").peak_learning_rate == 1e-4
    assert SftConfig(learning_rate=3e-4).peak_learning_rate == 3e-4


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_flags_of_later_releases_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} 2 is not supported in this release; expected .*\nhint: "):
        read_arguments(SftConfig, [f"--{name}", "2"], prog="ebbtide sft")


def test_no_flag_is_both_supported_and_refused() -> None:
    fields = set(SftConfig.__dataclass_fields__)
    assert not set(UNSUPPORTED) & fields
    assert set(ALIASES.values()) <= fields
    assert not set(ALIASES) & (fields | set(UNSUPPORTED))


@pytest.mark.parametrize(
    ("content", "changes"),
    [
        ("tuner_type: lora\n", {"train_type": "lora"}),
        ("enable_activation_offload: true\nenable_gradient_checkpointing: true\n", {"mode": "ebbtide"}),
        (
            "actor_rollout_ref:\n  model:\n    path: some/model\n    enable_activation_offload: true\n",
            {"mode": "ebbtide", "model": "some/model"},
        ),
        ("model:\n  enable_gradient_checkpointing: true\n", {"mode": "checkpointing"}),
        ("strategy: native_fsdp\nmemory_efficient_init: true\n", {"memory_efficient_init": True}),
    ],
)
def test_keys_of_other_trainers_are_read(tmp_path: Path, content: str, changes: dict) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    config = read_arguments(SftConfig, [str(file)], prog="ebbtide sft")
    assert config is not None
    assert {name: getattr(config, name) for name in changes} == changes


def test_a_wrong_key_in_a_section_is_named_whole(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref:\n  model:\n    enable_activation_offloading: true\n")
    with pytest.raises(ConfigError, match="unknown key 'actor_rollout_ref.model.enable_activation_offloading'"):
        read_arguments(SftConfig, [str(file)], prog="ebbtide sft")


@pytest.mark.parametrize(
    ("changes", "pads"),
    [
        ({}, False),
        ({"per_device_train_batch_size": 2}, True),
        ({"per_device_train_batch_size": 2, "packing": True}, False),
        ({"per_device_eval_batch_size": 2}, False),
        ({"per_device_eval_batch_size": 2, "packing": True, "split_dataset_ratio": 0.1}, True),
    ],
)
def test_batches_are_padded_where_their_sequences_differ_in_length(changes: dict, pads: bool) -> None:
    assert SftConfig(**changes).pads is pads
