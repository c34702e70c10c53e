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


class Table(nn.Module):
    def __init__(self, table: torch.Tensor, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=persistent)

    def reset_parameters(self) -> None:
        self.table.zero_()


class TwoTables(nn.Module):
    """One buffer of two modules, only one of which saves it."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        table = torch.arange(4.0)
        self.one, self.other = Table(table, persistent=first), Table(table, persistent=not first)
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("given", ["state dict", "model"])
def test_a_buffer_that_one_of_two_modules_saves_has_the_value_of_the_file(first: bool, given: str) -> None:
    real = TwoTables(first=first)
    loaded = ebbtide.load_sharded(
        meta(partial(TwoTables, first=first)), real if given == "model" else real.state_dict()
    )
    assert loaded.one.table is loaded.other.table and torch.equal(loaded.one.table, torch.arange(4.0))
