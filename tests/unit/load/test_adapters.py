"""Adapters of PEFT on meta: which parameters come from the base's checkpoint, and which get initial values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import ebbtide
from ebbtide.base.errors import ConfigError
from tests.helpers.models import build

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def saved(tmp_path: Path) -> LlamaForCausalLM:
    model = build("llama").model
    model.save_pretrained(tmp_path)
    return model


def adapted(**options: Any) -> Any:
    config = build("llama").model.config
    with torch.device("meta"):
        return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj"], **options))


def test_trained_copies_begin_as_the_base(saved: LlamaForCausalLM, tmp_path: Path) -> None:
    model = ebbtide.load_sharded(adapted(modules_to_save=["lm_head"]), tmp_path)
    head = model.base_model.model.lm_head
    assert torch.equal(head.original_module.weight, saved.lm_head.weight)
    assert torch.equal(head.modules_to_save["default"].weight, saved.lm_head.weight)
    assert head.modules_to_save["default"].weight is not head.original_module.weight


def test_a_checkpoint_of_the_adapted_model_has_its_own_copies(saved: LlamaForCausalLM, tmp_path: Path) -> None:
    values = peft.get_peft_model(saved, peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"]))
    with torch.no_grad():
        values.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    model = ebbtide.load_sharded(adapted(modules_to_save=["lm_head"]), values.state_dict())
    head = model.base_model.model.lm_head
    assert torch.equal(head.modules_to_save["default"].weight, head.original_module.weight + 1)


def test_files_with_the_names_of_peft_are_reported(
    saved: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = peft.get_peft_model(saved, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    ebbtide.save_sharded(model, tmp_path / "adapted")
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "merge_and_unload" in warning and "save_pretrained" in warning
    caplog.clear()
    ebbtide.save_sharded(model.merge_and_unload(), tmp_path)  # from_pretrained knows these names
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight, saved.lm_head.weight)


@pytest.mark.parametrize("how", [True, "gaussian", "Gaussian"])
def test_first_values_of_adapters_change_nothing(saved: LlamaForCausalLM, tmp_path: Path, how: object) -> None:
    model = ebbtide.load_sharded(adapted(init_lora_weights=how), tmp_path)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert bool(parameter.any()) is ("lora_A" in name), name


@pytest.mark.parametrize("how", ["eva", "orthogonal"])
def test_adapters_that_begin_in_another_way_are_refused(saved: LlamaForCausalLM, tmp_path: Path, how: str) -> None:
    model = adapted()
    model.peft_config["default"].init_lora_weights = how  # PEFT computes some of them when they are added
    with pytest.raises(ConfigError, match=f"init_lora_weights is '{how}'.*\n.*\n?hint: "):
        ebbtide.load_sharded(model, tmp_path)


@pytest.mark.parametrize("kind", ["LilyConfig", "PeanutConfig", "IA3Config"])
def test_adapters_whose_first_values_peft_computes_are_refused(
    saved: LlamaForCausalLM, tmp_path: Path, kind: str
) -> None:
    """Functions of the base model would mistake their layers for its own, so the new model would not be the base."""
    options: dict[str, Any] = {"feedforward_modules": []} if kind == "IA3Config" else {}
    config = getattr(peft, kind)(target_modules=["q_proj", "v_proj"], **options)
    with torch.device("meta"):
        model = peft.get_peft_model(LlamaForCausalLM(saved.config), config)
    with pytest.raises(ConfigError, match="no initializer found for adapters: .*q_proj"):
        ebbtide.load_sharded(model, tmp_path)
    assert next(model.parameters()).is_meta


@pytest.mark.parametrize("layers", [[[1, 2], [0, 1]], [[0, 2], [0, 2]]], ids=["reordered", "replicated"])
def test_layers_are_replicated_in_a_loaded_model(
    saved: LlamaForCausalLM, tmp_path: Path, layers: list[list[int]]
) -> None:
    with pytest.raises(ConfigError, match="layer_replication of PEFT, on meta.*\n?.*\nhint: load the model itself"):
        ebbtide.load_sharded(adapted(layer_replication=layers), tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], layer_replication=layers)
    first = saved.model.layers[layers[0][0]].mlp.up_proj.weight
    loaded = ebbtide.load_sharded(peft.get_peft_model(saved, config))
    assert torch.equal(loaded.base_model.model.model.layers[0].mlp.up_proj.weight, first)


def test_trained_prompts_are_added_to_a_loaded_model(saved: LlamaForCausalLM, tmp_path: Path) -> None:
    def prompted(model: LlamaForCausalLM) -> Any:
        return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))

    with torch.device("meta"):
        model = prompted(LlamaForCausalLM(saved.config))
    with pytest.raises(ConfigError, match="trained prompts of PEFT, on meta.*\n?.*\nhint: load the model itself"):
        ebbtide.load_sharded(model, tmp_path)
    loaded = ebbtide.load_sharded(prompted(saved)).base_model
    assert not loaded.lm_head.weight.is_meta and loaded.lm_head.weight is saved.lm_head.weight


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_tuned_norms_begin_as_the_base(tmp_path: Path) -> None:
    values = build("llama").model
    with torch.no_grad():
        values.model.layers[0].input_layernorm.weight.uniform_(0.5, 2)  # as after training
    with torch.device("meta"):
        config = peft.LNTuningConfig(target_modules=["input_layernorm"])
        model = peft.get_peft_model(LlamaForCausalLM(values.config), config)
    norm = ebbtide.load_sharded(model, values).base_model.model.model.layers[0].input_layernorm
    assert torch.equal(norm.ln_tuning_layers["default"].weight, values.model.layers[0].input_layernorm.weight)


def test_adapters_without_peft_s_first_values_have_those_of_their_modules(
    saved: LlamaForCausalLM, tmp_path: Path
) -> None:
    model = ebbtide.load_sharded(adapted(init_lora_weights=False), tmp_path)
    found = {n: p for n, p in model.named_parameters() if "lora_" in n}
    for name, parameter in found.items():
        limit = parameter.shape[1] ** -0.5  # of torch.nn.Linear
        assert 0.5 * limit < parameter.abs().max() <= limit, name
