"""Names of the model and of the checkpoint: each tensor gets its own values, or an error names it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

import ebbtide
from ebbtide.base.errors import ConfigError, DataError
from tests.helpers.models import build


class Renamed(nn.Module):
    """A model of a library that renames as transformers does, and is not transformers'."""

    base_model_prefix, config = "model", None

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = nn.ModuleDict({"norm": nn.LayerNorm(4)}), nn.Linear(4, 4)


def meta(build_model: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build_model()


@pytest.mark.parametrize("library", ["transformers", "another"])
def test_two_keys_of_one_name_must_be_equal(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "another":
        monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    real = Renamed() if library == "another" else build("llama").model
    kind: Any = partial(Renamed) if library == "another" else partial(LlamaForCausalLM, real.config)
    values = {name: value.clone() for name, value in real.state_dict().items()}
    values["norm.weight"] = values["model.norm.weight"].clone()
    loaded = ebbtide.load_sharded(meta(kind), values)
    assert torch.equal(loaded.state_dict()["model.norm.weight"], values["norm.weight"])
    for other in (values["norm.weight"] + 1, torch.ones(7)):
        empty = meta(kind)
        with pytest.raises(DataError) as caught:
            ebbtide.load_sharded(empty, values | {"norm.weight": other})
        assert "model.norm.weight and norm.weight" in caught.value.found and caught.value.hint
        assert all(parameter.is_meta for parameter in empty.parameters())


class Table(nn.Module):
    def __init__(self, table: torch.Tensor, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=persistent)

    def reset_parameters(self) -> None:
        self.table.zero_()


class TwoTables(nn.Module):
    """One buffer of two modules, only one of which saves it."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        table = torch.arange(4.0)
        self.one, self.other = Table(table, persistent=first), Table(table, persistent=not first)
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("given", ["state dict", "model"])
def test_a_buffer_that_one_of_two_modules_saves_has_the_value_of_the_file(first: bool, given: str) -> None:
    real = TwoTables(first=first)
    loaded = ebbtide.load_sharded(
        meta(partial(TwoTables, first=first)), real if given == "model" else real.state_dict()
    )
    assert loaded.one.table is loaded.other.table and torch.equal(loaded.one.table, torch.arange(4.0))


class Reward(nn.Module):
    """A wrapper with names as PEFT gives them, around a model without adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.LayerNorm(4)}), "head": nn.Linear(4, 4)})
        self.norm = nn.LayerNorm(4)
        self.gate = nn.Linear(4, 4)
        self.gate.base_layer = nn.Linear(4, 4)


def randomized(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) for name, value in model.state_dict().items()}


def test_names_like_those_of_peft_are_the_models_own_without_adapters() -> None:
    values = randomized(Reward())
    loaded = ebbtide.load_sharded(meta(Reward), values).state_dict()
    assert loaded.keys() == values.keys() and all(torch.equal(loaded[name], value) for name, value in values.items())


def test_two_weights_of_an_adapted_model_with_one_name_in_the_base_are_refused() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        return peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["head"]), Reward())

    values = randomized(adapted())
    model = meta(adapted)
    with pytest.raises(ConfigError, match=r"norm\.weight") as caught:
        ebbtide.load_sharded(model, values)
    assert "base_model.model.norm.weight" in caught.value.found and caught.value.hint
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_parameter_that_has_values_and_is_missing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        body = meta(partial(nn.Linear, 4, 4))
        return nn.ModuleDict({"body": body, "head": nn.Linear(4, 2)})

    values = {f"body.{name}": value for name, value in nn.Linear(4, 4).state_dict().items()}
    with pytest.raises(DataError, match=r"2 missing: head\.weight, head\.bias"):
        ebbtide.load_sharded(model(), values)
    real = model()
    before = real.head.weight.clone()
    with caplog.at_level(logging.WARNING, "ebbtide.load"):
        loaded = ebbtide.load_sharded(real, values, missing="initialize")
    assert torch.equal(loaded.head.weight, before) and "kept as they are: head.weight, head.bias" in caplog.text


def test_only_a_key_without_a_use_is_proposed_for_a_missing_weight() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"model_norm": nn.LayerNorm(4), "head_norm": nn.LayerNorm(4)})

    values = randomized(model())
    del values["head_norm.weight"]
    for spare, hint in (({}, "missing='initialize'"), ({"hed_norm.weight": torch.ones(4)}, "did you mean 'hed_norm")):
        with pytest.raises(DataError, match=r"1 missing: head_norm\.weight") as caught:
            ebbtide.load_sharded(meta(model), values | spare)
        assert caught.value.hint.startswith(hint) and "model_norm" not in caught.value.hint


class Renamed4bit(nn.Module):
    base_model_prefix, config = "model", None

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"linear": pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 64, bias=False)})


def test_two_keys_of_a_4_bit_weight_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    values = {"model.linear.weight": torch.ones(64, 64), "linear.weight": torch.zeros(64, 64)}
    with pytest.raises(DataError, match=r"from model\.linear\.weight and linear\.weight") as caught:
        ebbtide.load_sharded(meta(Renamed4bit), values)
    assert caught.value.hint
    del values["linear.weight"]
    assert ebbtide.load_sharded(meta(Renamed4bit), values).model.linear.weight.bnb_quantized


def test_experts_in_one_tensor_and_one_by_one_must_be_equal(tmp_path: Path) -> None:
    real = build("qwen3_moe").model
    real.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    name = next(name for name in real.state_dict() if name.endswith("experts.gate_up_proj"))
    assert name not in values
    stacked = real.state_dict()[name].clone()
    loaded = ebbtide.load_sharded(meta(partial(type(real), real.config)), values | {name: stacked})
    assert torch.equal(loaded.state_dict()[name], stacked)
    with pytest.raises(DataError, match="differ in the checkpoint") as caught:
        ebbtide.load_sharded(meta(partial(type(real), real.config)), values | {name: stacked + 1})
    assert name in caught.value.found


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_that_a_wrapper_added_is_named(prefix: str) -> None:
    values = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).state_dict()
    wrapped = {prefix + name: value for name, value in values.items()}
    with pytest.raises(DataError) as caught:
        ebbtide.load_sharded(meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))), wrapped)
    assert f"the checkpoint's names begin with {prefix!r}" in caught.value.hint
    with pytest.raises(DataError) as caught:
        ebbtide.load_sharded(meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))), values)
    assert caught.value.hint == "the model's names begin with '0.': load the module inside, model.0"


class Unused(nn.Linear):
    """A model of a library that names what its checkpoints hold and it does not use, as diffusers does."""

    _keys_to_ignore_on_load_unexpected = ("norm_added_q",)


def test_what_the_models_library_declares_unused_is_left_out() -> None:
    values = randomized(Unused(2, 2))
    spare = {"norm_added_q.weight": torch.ones(2)}
    loaded = ebbtide.load_sharded(meta(partial(Unused, 2, 2)), values | spare)
    assert torch.equal(loaded.weight, values["weight"])
    with pytest.raises(DataError, match=r"1 unexpected: rotary_emb\.inv_freq"):  # transformers' alone
        ebbtide.load_sharded(meta(partial(Unused, 2, 2)), values | spare | {"rotary_emb.inv_freq": torch.ones(2)})
