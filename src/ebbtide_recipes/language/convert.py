"""``python -m ebbtide_recipes.language.convert MODEL.gguf FOLDER``: turn a GGUF file into a model folder."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, folder: Path) -> None:
    """Dequantise a GGUF model to float32 and save it with its tokenizer.

    Args:
        source: The ``.gguf`` file.
        folder: Where the model goes; made here.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place, name = str(source.parent), source.name
    # transformers 5.2x can keep the weights packed, and refuses to save what it loaded from GGUF either way: the
    # weights go into a fresh model, whose strict load says so if any of them is still packed.
    packed = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": packed(dequantize=True)} if packed is not None else {}
    loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32, **options)
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
