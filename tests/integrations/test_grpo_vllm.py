"""``grpo`` with a stub for vLLM: the weights that it gets, and unchanged state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from ebbtide.base.events import BUS
from ebbtide_recipes.grpo.recipe import RECIPE
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import grpo_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-vllm"))


class Root(FSDPModule):
    """The root of a sharded model that records calls."""

    def __init__(self, calls: list[str]) -> None:
        self.unshard = lambda: calls.append("unshard")
        self.reshard = lambda: calls.append("reshard")


def test_vllm_gets_weights_from_their_shards(model: Path, tmp_path: Path) -> None:
    trainer = RECIPE.prepare(grpo_config(model, tmp_path))
    calls: list[str] = []
    trainer.model_wrapped = object.__new__(Root)
    trainer.model_wrapped.__init__(calls)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(
        sync_weights=lambda: calls.append("sync"), generate=lambda **_: (None, [[5]], [[[0.0]]], None)
    )
    trainer.model.train()
    remove = BUS.subscribe(lambda kind, fields: calls.append(f"{fields['name']} {fields['edge']}"))
    try:
        trainer._generate_single_turn([[3, 4]], None, {}, 1)
    finally:
        remove()
    assert calls == ["generation begin", "sync", "generation end"]
    assert trainer.vllm_generation.model is trainer.model  # FSDP1 wraps the model that TRL took


def test_adapters_merged_for_vllm_leave_the_base_as_it_was(model: Path, tmp_path: Path) -> None:
    changes = {"train_type": "lora", "lora_rank": 2, "torch_dtype": "bfloat16"}
    trainer = RECIPE.prepare(grpo_config(model, tmp_path, **changes))
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    merged: list[bool] = []

    def sync() -> None:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_" in name:
                    parameter += 0.01 * torch.randn_like(parameter)
        trainer.model.merge_adapter()
        merged.append(any(not p.equal(base[name]) for name, p in trainer.model.named_parameters() if name in base))
        trainer.model.unmerge_adapter()

    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=sync, generate=lambda **_: (None, [[5]], [[[0.0]]], None))
    for step in range(3):
        trainer.state.global_step = step
        trainer._generate_single_turn([[3, 4]], None, {}, 1)
    assert merged == [True] * 3
    assert all(p.equal(base[name]) for name, p in trainer.model.named_parameters() if name in base)


@pytest.mark.filterwarnings("ignore:(Merge|Unmerge) lora module to 4-bit")
def test_weights_in_4_bits_are_those_of_before_the_merge(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    changes = {"train_type": "qlora", "lora_rank": 2}
    trainer = RECIPE.prepare(grpo_config(model, tmp_path, **changes))
    before = {name: p for name, p in trainer.model.named_parameters() if hasattr(p, "bnb_quantized")}
    assert before

    def sync() -> None:
        trainer.model.merge_adapter()
        trainer.model.unmerge_adapter()

    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=sync, generate=lambda **_: (None, [[5]], [[[0.0]]], None))
    trainer._generate_single_turn([[3, 4]], None, {}, 1)
    after = dict(trainer.model.named_parameters())
    assert all(after[name] is p and p.bnb_quantized for name, p in before.items())
