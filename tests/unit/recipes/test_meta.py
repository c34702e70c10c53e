"""Stand-ins for weights on meta, and refused models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.language import adapters, meta
from ebbtide_recipes.sft.config import SftConfig

# PEFT asks a transformers model by the name that transformers 5.2x deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            tie_word_embeddings=tied,
        )
    )  # fmt: skip


def empty(*, tied: bool = False) -> LlamaForCausalLM:
    with torch.device("meta"):
        return llama(tied=tied)


def test_adapters_on_meta_have_the_values_they_have_on_the_loaded_model() -> None:
    made = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    loaded_model = llama()
    set_seed(3)
    loaded = dict(get_peft_model(loaded_model, made).named_parameters())
    model = empty()
    set_seed(3)
    with meta.standing_in(model):
        adapted = get_peft_model(model, made)
    wrapped = dict(adapted.named_parameters())
    assert loaded.keys() == wrapped.keys()
    for name, p in wrapped.items():
        assert p.requires_grad is loaded[name].requires_grad is ("lora_" in name)
        assert p.equal(loaded[name]) if "lora_" in name else p.is_meta


def test_weights_that_are_trained_beside_adapters_go_back_to_meta() -> None:
    made = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with meta.standing_in(model := empty()):
        wrapped = get_peft_model(model, made)
    kept = {name: p for name, p in wrapped.named_parameters() if "lm_head" in name}
    assert len(kept) == 2 and all(p.is_meta and p.shape == (64, 32) for p in kept.values())
    assert sorted(p.requires_grad for p in kept.values()) == [False, True]


def test_tied_weights_stay_tied() -> None:
    model = empty(tied=True)
    with meta.standing_in(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.device.type == "cpu"
        assert model.lm_head.weight.untyped_storage().nbytes() == 4  # of one element, whatever the shape
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_meta


def test_a_model_with_its_weights_is_left_alone() -> None:
    model = llama()
    before = dict(model.named_parameters())
    with meta.standing_in(model):
        assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}]
)
def test_adapters_made_of_the_weights_are_refused(settings: dict[str, Any]) -> None:
    model = empty()
    with (
        pytest.raises(ConfigError, match="the model's weights.*\nhint: leave --memory_efficient_init out"),
        meta.standing_in(model),
    ):
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **settings))
    assert all(p.is_meta for name, p in model.named_parameters() if "lora_" not in name)  # also when it failed


def test_weights_are_read_into_the_model_and_beside_its_adapters(tmp_path: Path) -> None:
    saved = llama()
    saved.save_pretrained(tmp_path)
    config = SftConfig(train_type="lora", lora_rank=2)
    model = empty()
    wrapped = adapters.put_on(model, adapters.chosen(config, empty()), config)
    meta.fill(wrapped, str(tmp_path))
    weights = dict(saved.named_parameters())
    for name, p in wrapped.named_parameters():
        assert not p.is_meta
        if "lora_" not in name:
            assert p.equal(weights[name.removeprefix("base_model.model.").replace(".base_layer", "")])
