"""Text families other than attention decoders: encoders, encoder-decoders, state spaces and recurrence."""

from __future__ import annotations

from typing import Any

from tests.helpers.decoder_families import Fields, causal, llama_like, without_groups
from tests.helpers.sizes import VOCABULARY, Built, Maker, Size, from_config


def seq2seq(class_name: str, blocks: str, fields: Fields) -> Maker:
    """Tokens in, other tokens out: encoder-decoders, and encoders with a loss over their input."""

    def make(size: Size, changes: dict[str, Any]) -> Built:
        batch = {"input_ids": size.text(), "labels": size.text()}
        return from_config("transformers", class_name, vocab_size=VOCABULARY, **(fields(size) | changes)), batch, blocks

    return make


def two_sides(size: Size) -> dict[str, Any]:
    """Return the fields of encoder and decoder that Bart and Whisper have in common."""
    half = {"layers": 2, "attention_heads": size.heads, "ffn_dim": size.inner}
    return {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in half.items()}


def _modernbert(size: Size) -> dict[str, Any]:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    return without_groups(size) | special | {"local_attention": 8}


def _t5(size: Size) -> dict[str, Any]:
    return {
        "d_model": size.width,
        "d_kv": size.width // size.heads,
        "d_ff": size.inner,
        "num_layers": 2,
        "num_heads": size.heads,
        "decoder_start_token_id": 0,
    }


def _bart(size: Size) -> dict[str, Any]:
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return {"d_model": size.width, "max_position_embeddings": max(64, size.tokens), **two_sides(size), **special}


def _mamba(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": min(size.layers, 3),
        "state_size": 8,
        "time_step_rank": 4,
    }


def _chunk(size: Size) -> int:
    return 4 if size.tokens < 64 else 32


def _mamba2(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 2 * size.width // 16,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": _chunk(size),
    }


def _bamba(size: Size) -> dict[str, Any]:
    return llama_like(size) | {
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 2 * size.width // 16,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": _chunk(size),
    }


def _rwkv(size: Size) -> dict[str, Any]:
    return {"hidden_size": size.width, "num_hidden_layers": 2, "context_length": max(64, size.tokens)}


def _recurrent_gemma(size: Size) -> dict[str, Any]:
    return llama_like(size) | {
        "num_hidden_layers": 3,  # two recurrent ones, one with attention
        "num_key_value_heads": 1,
        "head_dim": size.width // size.heads,
        "lru_width": size.width,
        "attention_window_size": 8,
    }


def _xlstm(size: Size) -> dict[str, Any]:
    return {"hidden_size": size.width, "num_hidden_layers": 2, "num_heads": size.heads, "chunk_size": 256}


ENCODERS: dict[str, Maker] = {
    "bert": seq2seq("BertForMaskedLM", "bert.encoder.layer", without_groups),
    "modernbert": seq2seq("ModernBertForMaskedLM", "model.layers", _modernbert),
    "t5": seq2seq("T5ForConditionalGeneration", "encoder.block", _t5),
    "bart": seq2seq("BartForConditionalGeneration", "model.encoder.layers", _bart),
}
RECURRENT: dict[str, Maker] = {
    "mamba": causal("MambaForCausalLM", "backbone.layers", _mamba),
    "mamba2": causal("Mamba2ForCausalLM", "backbone.layers", _mamba2),
    "bamba": causal("BambaForCausalLM", "model.layers", _bamba),
    "rwkv": causal("RwkvForCausalLM", "rwkv.blocks", _rwkv),
    "recurrent_gemma": causal("RecurrentGemmaForCausalLM", "model.layers", _recurrent_gemma),
    "xlstm": causal("xLSTMForCausalLM", "backbone.blocks", _xlstm),
}
