"""Decoders: dense, with parallel branches, with linear attention; mixtures of experts, separate and grouped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.sizes import VOCABULARY, Built, Maker, Size, from_config

Fields = Callable[[Size], dict[str, Any]]


def causal(class_name: str, blocks: str, fields: Fields) -> Maker:
    """A decoder: tokens in, next-token loss."""

    def make(size: Size, changes: dict[str, Any]) -> Built:
        given: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, **fields(size), **changes}
        ids = size.text()
        return from_config("transformers", class_name, **given), {"input_ids": ids, "labels": ids.clone()}, blocks

    return make


def llama_like(size: Size) -> dict[str, Any]:
    """Return the fields that have the same name in most decoders."""
    return {
        "hidden_size": size.width,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": max(64, size.tokens),
    }


def without_groups(size: Size) -> dict[str, Any]:
    """Return the fields of a model in which each head has its own keys and values."""
    return {k: v for k, v in llama_like(size).items() if k != "num_key_value_heads"}


def _with(**more: Any) -> Fields:
    return lambda size: llama_like(size) | more


def _gpt2(size: Size) -> dict[str, Any]:
    return {
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_positions": max(64, size.tokens),
    }


def _gpt_neox(size: Size) -> dict[str, Any]:
    return without_groups(size) | {"use_parallel_residual": True}


_MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN3_MOE: dict[str, Any] = {"head_dim": 16, **_MIXTURE}
_QWEN3_NEXT: dict[str, Any] = {
    **_QWEN3_MOE,
    "num_hidden_layers": 4,  # the fourth has full attention, the others linear attention
    "shared_expert_intermediate_size": 40,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EAGER, _GROUPED = {"experts_implementation": "eager"}, {"experts_implementation": "grouped_mm"}


def _layers(class_name: str, **more: Any) -> Maker:
    return causal(class_name, "model.layers", _with(**more))


DECODERS: dict[str, Maker] = {
    "llama": _layers("LlamaForCausalLM"),
    "qwen3": _layers("Qwen3ForCausalLM", head_dim=16),
    "gemma3": _layers("Gemma3ForCausalLM", head_dim=16, sliding_window=8),
    "gpt2": causal("GPT2LMHeadModel", "transformer.h", _gpt2),
    "phi": _layers("PhiForCausalLM", resid_pdrop=0.1),
    "gpt_neox": causal("GPTNeoXForCausalLM", "gpt_neox.layers", _gpt_neox),
    "cohere": _layers("CohereForCausalLM"),
    "qwen3_next": _layers("Qwen3NextForCausalLM", **_QWEN3_NEXT),
    "mixtral": _layers("MixtralForCausalLM", **_MIXTRAL, **_GROUPED),
    "mixtral_eager": _layers("MixtralForCausalLM", **_MIXTRAL, **_EAGER),
    "qwen3_moe": _layers("Qwen3MoeForCausalLM", **_QWEN3_MOE, **_GROUPED),
    "qwen3_moe_eager": _layers("Qwen3MoeForCausalLM", **_QWEN3_MOE, **_EAGER),
    "deepseek_v3": _layers("DeepseekV3ForCausalLM", **_DEEPSEEK, **_GROUPED),
    "deepseek_v3_eager": _layers("DeepseekV3ForCausalLM", **_DEEPSEEK, **_EAGER),
    "gpt_oss": _layers("GptOssForCausalLM", head_dim=16, sliding_window=8, **_MIXTRAL),
}
