"""``python -m ebbtide_recipes.language.convert MODEL.gguf FOLDER``: turn the built-in model's file into a folder.

transformers reads GGUF, too, but parses the file four times (100 s against under 10 here), and whether weights stay
packed depends on its release. This reads it once, for one model: Llama's blocks, GPT-2's tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.base.errors import DataError

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

_CONTROL = 3
"""The type of tokens that no text contains."""


def convert(source: Path, folder: Path) -> None:
    """Dequantise a GGUF model to float32 and save it with its tokenizer.

    Args:
        source: The ``.gguf`` file.
        folder: Where the model goes; made here.

    Raises:
        DataError: It is not a GGUF file.
    """
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
    from transformers import LlamaForCausalLM

    try:
        file = GGUFReader(source)
    except ValueError as error:
        raise DataError(f"{source}: {error}", expected="a GGUF file", hint="fetch the file again") from error
    metadata = {name: field.contents() for name, field in file.fields.items()}
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(metadata)).to(torch.float32)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, len(model.model.layers))
    tensors = {tensor.name: tensor for tensor in file.tensors}
    weights: dict[str, torch.Tensor] = {}
    for name, _ in model.model.named_parameters(prefix="model"):
        tensor = tensors[names.get_name(name, try_suffixes=(".weight",))]
        # A copy, because unquantised tensors are in the file's read-only pages.
        weights[name] = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] = _halves_apart(weights[name], head=model.config.head_dim)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer_of(metadata).save_pretrained(folder)


def config_of(metadata: dict[str, Any]) -> LlamaConfig:
    """Return the model's config as a file's metadata describes it."""
    from transformers import LlamaConfig

    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    tokens = {name: metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding", "unknown")}
    return LlamaConfig(
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        head_dim=llama["rope.dimension_count"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=llama["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=tokens["bos"],
        eos_token_id=tokens["eos"],
        pad_token_id=tokens["padding"],
        dtype="float32",
    )


def tokenizer_of(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a file's metadata describes: byte pairs, as GPT-2 has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    own = {key.removeprefix("tokenizer."): v for key, v in metadata.items() if key.startswith("tokenizer.")}
    tokens: list[str] = own["ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in own["ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    control = [token for token, kind in zip(tokens, own["ggml.token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=own["chat_template"],
        **{f"{ours}_token": tokens[own[f"ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
    )


def _halves_apart(weight: torch.Tensor, *, head: int) -> torch.Tensor:
    """Undo ggml's order of a head's rows, in which the two halves that rotary embedding turns are interleaved."""
    return weight.view(-1, head // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
