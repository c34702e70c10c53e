"""The built-in model's file: read and dequantised value by value as in its format, and saved as a model folder."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ebbtide.base.errors import DataError
from ebbtide_recipes.language import convert

HIDDEN, INNER, HEADS, VOCABULARY = 64, 96, 2, 5
TOKENS = ["<s>", "</s>", "a", "b", "ab"]
METADATA = {
    "llama.vocab_size": VOCABULARY, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER,
    "llama.block_count": 1, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": 1,
    "llama.rope.dimension_count": HIDDEN // HEADS, "llama.context_length": 128, "llama.rope.freq_base": 1e4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 1, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.chat_template": "{{ x }}",
}  # fmt: skip
SHAPES = {
    "token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN // 2, HIDDEN), "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_gate": (INNER, HIDDEN),
    "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(content: object) -> bytes:
    if isinstance(content, str):
        return struct.pack("<I", 8) + string(content)
    if isinstance(content, list):
        kind = 8 if isinstance(content[0], str) else 5
        items = [string(item) if kind == 8 else struct.pack("<i", item) for item in content]
        return struct.pack("<IIQ", 9, kind, len(content)) + b"".join(items)
    return struct.pack("<If", 6, content) if isinstance(content, float) else struct.pack("<II", 4, content)


def blocks(kind: int, count: int, random: np.random.Generator) -> tuple[bytes, list[np.float32]]:
    """Return random blocks of a type, and their values computed one by one."""
    if kind == 0:
        values = random.standard_normal(count, dtype=np.float32)
        return values.tobytes(), list(values)
    packed, values = b"", []
    for _ in range(count // 32):
        scale, least = random.standard_normal(2).astype(np.float16)
        if kind == 8:
            levels = random.integers(-128, 128, 32, dtype=np.int8)
            packed += scale.tobytes() + levels.tobytes()
            values += [np.float32(scale) * np.float32(level) for level in levels]
            continue
        levels = random.integers(0, 16, 32, dtype=np.uint8)
        packed += scale.tobytes() + least.tobytes() + bytes(levels[:16] | (levels[16:] << 4))
        values += [np.float32(np.float32(scale) * np.float32(level)) + np.float32(least) for level in levels]
    return packed, values


def write(path: Path, kinds: dict[str, int]) -> dict[str, torch.Tensor]:
    """Write a model's file; return the values of its tensors."""
    random, data, table = np.random.default_rng(0), b"", b""
    expected: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        kind = kinds.get(name, 0)
        packed, values = blocks(kind, int(np.prod(shape)), random)
        table += string(f"{name}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        table += struct.pack("<IQ", kind, len(data))
        data += packed + b"\0" * (-len(packed) % 32)
        expected[f"{name}.weight"] = torch.tensor(np.array(values, dtype=np.float32)).view(shape)
    pairs = b"".join(string(key) + value(content) for key, content in METADATA.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(SHAPES), len(METADATA)) + pairs + table
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return expected


def test_the_folder_holds_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = write(tmp_path / "model.gguf", {"blk.0.attn_q": 3, "blk.0.ffn_up": 3, "token_embd": 8})
    convert.convert(tmp_path / "model.gguf", tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    block = model.model.layers[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, expected["token_embd.weight"])
    assert torch.equal(block.mlp.up_proj.weight, expected["blk.0.ffn_up.weight"])
    # In the file a head's rows are 0, half, 1, half + 1, ...
    half, ours, theirs = HIDDEN // HEADS // 2, block.self_attn.q_proj.weight, expected["blk.0.attn_q.weight"]
    for head in range(HEADS):
        for row in range(half):
            begin = head * 2 * half
            assert torch.equal(ours[begin + row], theirs[begin + 2 * row])
            assert torch.equal(ours[begin + half + row], theirs[begin + 2 * row + 1])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer("ab</s>a")["input_ids"] == [4, 1, 2]
    assert (tokenizer.bos_token, tokenizer.pad_token, tokenizer.chat_template) == ("<s>", "</s>", "{{ x }}")


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(60))
    with pytest.raises(DataError, match="(?s)model.gguf: .*; expected a GGUF file\nhint: fetch"):
        convert.convert(path, tmp_path / "made")
    assert not (tmp_path / "made").exists()
