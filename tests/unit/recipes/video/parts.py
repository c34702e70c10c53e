"""Shared parts of the tests of the video recipe."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide_recipes.video.source import Source

CPU = torch.device("cpu")


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings of other packages while they load pipelines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def text_of(source: Source, batch: int = 1, words: int = 24) -> dict[str, Any]:
    """Return captions' tensors in the shapes of the family's text encoders."""
    torch.manual_seed(5)
    width = 64 if source.family.name == "cosmos" else 32  # its encoder's layers, concatenated
    made: dict[str, Any] = {"prompt_embeds": torch.randn(batch, words, width)}
    if "pooled_prompt_embeds" in source.family.text:
        made["pooled_prompt_embeds"] = torch.randn(batch, 16)
    if "prompt_attention_mask" in source.family.text:
        made["prompt_attention_mask"] = torch.ones(batch, words, dtype=torch.long)
    return made
