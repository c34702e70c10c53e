"""``grpo`` with and without padding: the log-probabilities are those of each sequence alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from ebbtide_recipes.grpo import unpadded
from ebbtide_recipes.grpo.recipe import RECIPE
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import grpo_config


@pytest.mark.parametrize("seed", range(4))
def test_experts_whose_products_round_by_their_rows_keep_sequences_apart(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, masking_utils

    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=64, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(seed)
    experts = Qwen3MoeForCausalLM(config)
    add_fused_lm_head(experts)
    assert unpadded.separates(experts, torch.device("cpu"))
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    assert not unpadded.separates(experts, torch.device("cpu"))


def test_a_model_that_mixes_a_little_is_refused() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"], vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    short_convolutions = Lfm2ForCausalLM(config)
    add_fused_lm_head(short_convolutions)
    assert not unpadded.separates(short_convolutions, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("adapters", [False, True])
def test_learned_positions_count_from_the_first_token_and_not_from_the_padding(tmp_path: Path, adapters: bool) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "llama"))
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=len(tokenizer), **ends)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    changes = {"train_type": "lora", "target_modules": ("c_fc",)} if adapters else {}
    trainer = RECIPE.prepare(grpo_config(tmp_path / "gpt2", tmp_path / "run", beta=0.1, **changes))
    ids = torch.randint(5, 200, (2, 14))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    for model in (trainer.model, trainer.ref_model or trainer.model):
        with torch.no_grad():
            padded = trainer._get_per_token_logps_and_entropies(model, ids, mask, 5)[0][1]
            alone = model(input_ids=ids[1:, 6:]).logits[0, -6:-1].log_softmax(-1).gather(-1, ids[1, -5:, None])[:, 0]
        torch.testing.assert_close(padded, alone)
