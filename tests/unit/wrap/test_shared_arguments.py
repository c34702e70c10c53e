"""Blocks that are called with one list or dictionary, which some of them write: a second forward gets it as it was."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbtide.base.actions import Action, Candidate
from ebbtide.wrap.state import State
from tests.helpers.twice import Block, Stack, check, difference, hard, sgd, step_of, train

squares = step_of(lambda model: model(torch.randn(8, 16)).square().mean())


class Shared(UserDict[str, Any]):
    """A dictionary with a class and a method of its own, as transformers shares the keys of attention."""

    def to(self, device: str) -> Shared:
        return self


class Labelled(UserDict[str, Any]):
    """A dictionary with an attribute, which a copy would not have or share."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "x"


class Notes(Block):
    """Does something with the container of its call, and then reads what it finds there."""

    def __init__(self, do: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        found = self.do(notes, hard(self.up(x)))
        return super().forward(x if found is None else x + hard(found))


class Notebook(Stack):
    """Calls its blocks with a new container in each forward."""

    def __init__(self, make: Callable[[], Any], *doings: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__(*map(Notes, doings))
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        notes = self.make()
        for block in self.blocks:
            x = block(x, notes)
        return x


def write(notes: Any, x: Tensor) -> None:
    notes["k"] = x, x * 2


def read(notes: Any, x: Tensor) -> Tensor:
    return notes["k"][0] * notes["k"][1]


def rewrite(notes: Any, x: Tensor) -> Tensor:
    found = notes.pop("k")[0]
    notes["k"] = x, found * 3
    return found


def clear(notes: Any, x: Tensor) -> Tensor:
    found = read(notes, x)
    notes.clear()
    return found


def append(notes: list[Tensor], x: Tensor) -> Tensor:
    notes.append(x)
    return sum(notes) / len(notes)  # type: ignore[return-value]


def take(notes: list[Tensor], x: Tensor) -> Tensor:
    return notes.pop(0)


@pytest.mark.parametrize("make", [dict, Shared, UserDict, OrderedDict], ids=lambda make: make.__name__)
@pytest.mark.parametrize("verify", [False, True])
def test_a_dictionary_that_blocks_share_is_read_as_it_was(make: Callable[[], Any], verify: bool) -> None:
    def model() -> nn.Module:
        return sgd(Notebook(make, write, read, rewrite, read, clear))

    check(model, squares, policies=("minimal", "auto", "offload"), verify=verify)
    assert train(model, squares, 3, policy="minimal", verify=verify)[1].checkpointed_blocks == 5


def test_a_list_that_blocks_extend_is_read_as_it_was() -> None:
    def model() -> nn.Module:
        return sgd(Notebook(list, append, append, take, append))

    check(model, squares, policies=("minimal", "auto"))
    assert train(model, squares, 3, policy="minimal")[1].checkpointed_blocks == 4


class Owner(Notes):
    """Reads, by its own attribute, the container that it is called with."""

    def __init__(self) -> None:
        super().__init__(lambda notes, x: None)
        self.own: Any = None

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        notes["k"] = hard(self.up(x))
        return Block.forward(self, x + hard(self.own["k"]))


class Owners(Notebook):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self.blocks = nn.ModuleList([Owner(), Owner(), Owner()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.own = notes = self.make()
            x = block(x, notes)
        return x


class Twice(Notes):
    """Writes one of two arguments, and reads the other, which is the same."""

    def forward(self, x: Tensor, notes: Any, again: Any = None) -> Tensor:
        notes["k"] = hard(self.up(x))
        return Block.forward(self, x + hard(again["k"]))


class Twices(Notebook):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self.blocks = nn.ModuleList([Twice(read), Twice(read), Twice(read)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            notes = self.make()
            x = block(x, notes, again=notes)
        return x


@pytest.mark.parametrize("kind", [Owners, Twices])
@pytest.mark.parametrize("make", [dict, Shared], ids=lambda make: make.__name__)
def test_a_dictionary_with_two_names_is_not_copied(kind: Callable[[Any], nn.Module], make: Callable[[], Any]) -> None:
    def model() -> nn.Module:
        return sgd(kind(make))

    check(model, squares, policies=("minimal", "auto"))
    assert train(model, squares, 3, policy="minimal")[1].checkpointed_blocks == 0


def scale(notes: Any, x: Tensor) -> None:
    if "k" in notes:
        notes["k"][0].mul_(1)
    else:
        notes["k"] = (x.detach().clone(),)


@pytest.mark.parametrize(
    ("make", "do"),
    [(Labelled, write), (UserList, append), (dict, scale)],
    ids=["an attribute", "a list of a class", "in place"],
)
def test_containers_that_a_second_forward_cannot_get_as_they_were_end_checkpointing(make: Any, do: Any) -> None:
    def model() -> nn.Module:
        return sgd(Notebook(make, do, do, do))

    check(model, squares, policies=("minimal", "auto"))
    assert train(model, squares, 3, policy="minimal")[1].checkpointed_blocks == 0


class Checkpoints:
    """A plan that checkpoints every block."""

    name, recomputes = "checkpoints", False

    def choose(self, candidate: Candidate) -> Action:
        return Action.OFFLOAD

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.CHECKPOINT

    def explain(self) -> str:
        return "every block is checkpointed"


@pytest.mark.parametrize("verify", [False, True])
def test_layers_that_share_keys_and_values_are_checkpointed(verify: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=16, num_kv_shared_layers=3, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64, sliding_window=4, use_cache=False,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip

    def make() -> nn.Module:
        return sgd(transformers.Gemma4ForCausalLM(config).train())

    def loss(model: Any) -> Tensor:
        tokens = torch.randint(64, (2, 12))
        return model(input_ids=tokens, labels=tokens).loss

    plain, _ = train(make, step_of(loss), 3)
    got, stats = train(make, step_of(loss), 3, policy=Checkpoints(), verify=verify)
    assert difference(plain, got) == ""
    assert stats.checkpointed_blocks == 6


def test_a_state_knows_the_containers_in_whose_place_it_has_copies() -> None:
    module, other = nn.Module(), {"k": torch.ones(1)}
    module.own = {"k": nn.Linear(1, 1)(torch.ones(1))}  # type: ignore[assignment]
    state = State(module.modules())
    assert state.leave_graphs()
    assert state.holds([other, module.own])
    assert not state.holds([other])
