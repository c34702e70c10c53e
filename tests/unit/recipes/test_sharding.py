"""FSDP's settings from flags, words and other trainers' files."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import sharding
from ebbtide_recipes.skeleton.sharding import check_classes, resolved, trainer_settings

NESTED = {
    "_description": "as ms-swift writes it",
    "_param_docs": {"fsdp": "words"},
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
        "activation_checkpointing": False,
        "activation_cpu_offload": True,
    },
}


def test_the_page_that_hints_name_lists_the_settings() -> None:
    page = Path(__file__).parents[3] / sharding._GUIDE.split()[0]
    known = {*sharding._PASSED_ON, *sharding._OURS, *sharding._RENAMED}
    assert {name for name in known if f"`{name}`" not in page.read_text(encoding="utf-8")} == set()


def written(folder: Path, content: object) -> str:
    path = folder / "fsdp.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("word", ["native_fsdp", "accelerate"])
def test_the_words_of_twinkle_are_full_shard(word: str) -> None:
    config = resolved(SftConfig(fsdp_strategy=word))
    assert (config.fsdp_strategy, config.fsdp_version) == ("full_shard", 2)
    assert trainer_settings(config)["fsdp_config"]["reshard_after_forward"] is True


@pytest.mark.parametrize(("word", "version"), [("fsdp", 1), ("fsdp2", 2)])
def test_the_words_of_verl_are_versions(word: str, version: int) -> None:
    config = resolved(SftConfig(fsdp_strategy=word))
    assert (config.fsdp_strategy, config.fsdp_version) == ("full_shard", version)
    assert resolved(SftConfig(fsdp_strategy=word, fsdp_config={"version": 3 - version})).fsdp_version == version
    with pytest.raises(ConfigError, match="fsdp_strategy is 'fsdp2' with fsdp_version 1"):
        resolved(SftConfig(fsdp_strategy="fsdp2", fsdp_version=1))


@pytest.mark.parametrize("flag", ["fsdp_config", "fsdp"])
@pytest.mark.parametrize("given", [NESTED, json.dumps(NESTED)])
def test_settings_are_taken_as_a_mapping_or_as_json(flag: str, given: object) -> None:
    config = resolved(SftConfig(**{flag: given}))
    assert (config.fsdp_strategy, config.fsdp_version, config.mode) == ("full_shard", 2, "ebbtide")
    with pytest.raises(DataError, match=f"{flag} is not JSON"):
        resolved(SftConfig(**{flag: '{"fsdp_version": 2'}))
    with pytest.raises(ConfigError, match=f"unknown setting 'vresion' in {flag}; .*\nhint: did you mean 'version'"):
        resolved(SftConfig(**{flag: {"vresion": 2}}))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_accelerates_word_for_loading_is_ours_but_for_four_bits_under_fsdp1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train_type: str, version: int
) -> None:
    file = written(tmp_path, {"fsdp_cpu_ram_efficient_loading": True, "fsdp_version": version})
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        config = resolved(SftConfig(fsdp=file, train_type=train_type))
    no_effect = (train_type, version) == ("qlora", 1)
    assert config.memory_efficient_init is not no_effect
    assert ("cpu_ram_efficient_loading has no effect" in caplog.text) is no_effect
    assert "cpu_ram_efficient_loading" not in trainer_settings(config)["fsdp_config"]


def test_nothing_is_sent_where_each_rank_reads(tmp_path: Path) -> None:
    config = SftConfig(fsdp_strategy="full_shard", fsdp_version=1)
    assert trainer_settings(config)["fsdp_config"]["sync_module_states"] is False
    asked = dataclasses.replace(config, fsdp_config=written(tmp_path, {"sync_module_states": True}))
    assert trainer_settings(asked)["fsdp_config"]["sync_module_states"] is True
    parts = dataclasses.replace(asked, memory_efficient_init=True)
    assert trainer_settings(parts)["fsdp_config"]["sync_module_states"] is False


@pytest.mark.parametrize("flag", ["fsdp_config", "fsdp"])
def test_the_file_of_ms_swift_turns_fsdp2_and_offloading_on(tmp_path: Path, flag: str) -> None:
    config = resolved(SftConfig(**{flag: written(tmp_path, NESTED)}))
    assert (config.fsdp_strategy, config.fsdp_version, config.mode) == ("full_shard", 2, "ebbtide")
    assert config.gradient_checkpointing is False
    settings = trainer_settings(config)
    assert settings["fsdp"] is True
    assert settings["fsdp_config"] == {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    assert config.memory_efficient_init is True  # accelerate's name for it


@pytest.mark.parametrize(
    ("content", "strategy", "version", "mode"),
    [
        ({}, "full_shard", 2, "plain"),
        ({"version": 1}, "full_shard", 1, "plain"),
        ({"fsdp_version": "1", "fsdp_reshard_after_forward": "HYBRID_SHARD"}, "hybrid_shard", 1, "plain"),
        ({"reshard_after_forward": False}, "shard_grad_op", 2, "plain"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "shard_grad_op", 2, "plain"),
        ({"activation_checkpointing": True}, "full_shard", 2, "checkpointing"),
        ({"activation_checkpointing": "true", "activation_cpu_offload": "true"}, "full_shard", 2, "ebbtide"),
        ({"fsdp": "shard_grad_op offload"}, "shard_grad_op", 2, "plain"),
        ({"fsdp": ["full_shard", "auto_wrap"]}, "full_shard", 2, "plain"),
        ({"fsdp": True, "fsdp_config": {"offload_params": True}}, "full_shard", 2, "plain"),
        ({"activation_cpu_offload": None, "reshard_after_forward": None}, "full_shard", 2, "plain"),
        ({"activation_cpu_offload": "yes", "activation_checkpointing": 0}, "full_shard", 2, "ebbtide"),
    ],
)
def test_what_a_file_says_is_what_the_flags_say(
    tmp_path: Path, content: dict, strategy: str, version: int, mode: str
) -> None:
    config = resolved(SftConfig(fsdp_config=written(tmp_path, content)))
    assert (config.fsdp_strategy, config.fsdp_version, config.mode) == (strategy, version, mode)


def test_checkpointing_in_the_file_beside_offloading_means_minimal(tmp_path: Path) -> None:
    both = {"activation_checkpointing": True, "activation_cpu_offload": True}
    config = resolved(SftConfig(fsdp_config=written(tmp_path, both)))
    assert (config.activation_cpu_offload, config.gradient_checkpointing) == (True, True)


def test_a_flag_overrides_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, {"version": 2, "reshard_after_forward": True})
    config = resolved(SftConfig(fsdp_config=file, fsdp_strategy="shard_grad_op", fsdp_version=1))
    assert (config.fsdp_strategy, config.fsdp_version) == ("shard_grad_op", 1)
    assert trainer_settings(config)["fsdp_config"]["reshard_after_forward"] == "shard_grad_op"


@pytest.mark.parametrize(
    ("words", "strategy", "version"),
    [
        ("fsdp2", "full_shard", 2),
        ("fsdp1 shard_grad_op", "shard_grad_op", 1),
        ("full_shard auto_wrap", "full_shard", 2),
    ],
)
def test_words_are_read(words: str, strategy: str, version: int) -> None:
    config = resolved(SftConfig(fsdp=words))
    assert (config.fsdp_strategy, config.fsdp_version) == (strategy, version)


@pytest.mark.parametrize(
    ("words", "expected"), [("fsdp1 fsdp2", "one of fsdp2, fsdp1"), ("shard_grad_op full_shard", "one of full_shard")]
)
def test_words_that_contradict_each_other_are_refused(words: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(SftConfig(fsdp=words))
    assert expected in str(caught.value)


@pytest.mark.parametrize("words", ["none", "false", "no", "Off"])
def test_words_that_ask_for_nothing_leave_everything_as_it_is(words: str) -> None:
    config = SftConfig(fsdp=words)
    assert resolved(config) is config
    assert trainer_settings(config) == {}


def test_settings_of_fsdp1_are_dropped_from_fsdp2_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path, {"use_orig_params": True, "sync_module_states": False})
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        settings = trainer_settings(resolved(SftConfig(fsdp_config=file)))["fsdp_config"]
    assert not {"use_orig_params", "sync_module_states"} & set(settings)
    assert caplog.messages == ["use_orig_params has no effect with FSDP2: it is a setting of FSDP1"]
    assert trainer_settings(resolved(SftConfig(fsdp_config=file, fsdp_version=1)))["fsdp_config"]["use_orig_params"]


@pytest.mark.parametrize(
    ("content", "passed_on"),
    [
        ({"fsdp_offload_params": "false"}, {"cpu_offload": False}),
        ({"cpu_offload": "True"}, {"cpu_offload": True}),
        ({"cpu_offload": None, "transformer_layer_cls_to_wrap": []}, {}),
        (
            {"use_orig_params": "false", "backward_prefetch": "backward_pre"},
            {"use_orig_params": False, "backward_prefetch": "BACKWARD_PRE"},
        ),
        ({"fsdp_state_dict_type": "full_state_dict"}, {"state_dict_type": "FULL_STATE_DICT"}),
        (
            {"auto_wrap_policy": "size_based_wrap", "min_num_params": "100"},
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100},
        ),
        ({"transformer_cls_names_to_wrap": "A, B"}, {"transformer_layer_cls_to_wrap": ["A", "B"]}),
        ({"transformer_layer_cls_to_wrap": ["A", "B"]}, {"transformer_layer_cls_to_wrap": ["A", "B"]}),
    ],
)
def test_settings_for_transformers_have_its_values(content: dict, passed_on: dict) -> None:
    settings = trainer_settings(resolved(SftConfig(fsdp_config={"version": 1, **content})))["fsdp_config"]
    always = {"auto_wrap_policy", "state_dict_type", "sync_module_states", "version", "reshard_after_forward"}
    assert {name: value for name, value in settings.items() if name in passed_on or name not in always} == passed_on


class Block(nn.Module):
    """A block to shard by."""


@pytest.mark.parametrize("recipe", ["sft", "grpo", "video"])
def test_a_class_that_the_model_lacks_is_refused_before_the_trainer_is_made(recipe: str) -> None:
    build = importlib.import_module(f"ebbtide_recipes.{recipe}.trainer").build
    model: Any = nn.Sequential(Block())
    model._no_split_modules = ["Block"]
    config = resolved(SftConfig(fsdp_config={"transformer_layer_cls_to_wrap": "Block,Blok"}))
    with pytest.raises(ConfigError, match="names 'Blok', and builtin:smollm2 has no .*\nhint: did you mean 'Block'"):
        build(config, model, *([[0], None, None] if recipe == "video" else [None, [], []]))
    config = resolved(SftConfig(fsdp_config={"transformer_layer_cls_to_wrap": ["Block"]}))
    check_classes(config, model)
    check_classes(SftConfig(), model)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (
            {"auto_wrap_policy": "X"},
            ConfigError,
            "auto_wrap_policy in .* is 'X'; expected one of TRANSFORMER_BASED_WRAP",
        ),
        ({"state_dict_type": "FUL_STATE_DICT"}, ConfigError, "hint: did you mean 'FULL_STATE_DICT'"),
        ({"backward_prefetch": 7}, ConfigError, "backward_prefetch in .* is 7; expected one of NO_PREFETCH"),
        ({"offload_params": "maybe"}, ConfigError, "cpu_offload in .* is 'maybe'; expected true or false"),
        (
            {"min_num_params": "1e8"},
            ConfigError,
            "min_num_params in .* is '1e8'; expected a number of parameters\nhint",
        ),
        ({"activation_cpu_ofload": True}, ConfigError, "unknown setting 'activation_cpu_ofload'.*\nhint: did you mean"),
        ({"activation_cpu_offload": "maybe"}, ConfigError, "activation_cpu_offload in .* is 'maybe'; expected true"),
        ({"version": 3}, ConfigError, "version in .* is 3; expected 1 or 2"),
        ({"reshard_after_forward": "ful_shard"}, ConfigError, "hint: did you mean 'full_shard'"),
        ({"fsdp": "no_shard"}, ConfigError, "hint: --fsdp_strategy none is DDP"),
        ({"fsdp_config": []}, ConfigError, "expected an object of settings"),
        ([1], DataError, "expected a JSON object"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        resolved(SftConfig(fsdp_config=written(tmp_path, content)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fsdp2.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        resolved(SftConfig(fsdp_config=str(tmp_path / "fsdp2.json")))
    with pytest.raises(DataError, match="cannot be read .*\nhint: did you mean 'fsdp2.json'"):
        resolved(SftConfig(fsdp=str(tmp_path / "fsdp.json")))
    with pytest.raises(
        ConfigError, match="fsdp is 'ful_shard'; expected a JSON file.*\nhint: did you mean 'full_shard'"
    ):
        resolved(SftConfig(fsdp="ful_shard"))
