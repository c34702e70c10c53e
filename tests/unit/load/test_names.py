"""Names of the model and of the checkpoint: each tensor gets its own values, or an error names it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import ebbtide
from ebbtide.base.errors import DataError
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
