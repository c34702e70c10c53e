"""Which blocks count as equal, with and without other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from torch import nn

from ebbtide.engine import Block
from ebbtide.wrap import collectives as module
from ebbtide.wrap.collectives import Collectives


class Layer(nn.Module):
    def __init__(self, *, gated: bool = False, number: int = 0) -> None:
        super().__init__()
        self.linear, self.gated, self.number = nn.Linear(2, 2), gated, number


@dataclass
class Spec:
    width: int


class Kind(Spec, Enum):
    """Its members do not hash."""

    A = 1
    B = 2


def test_switches_that_do_not_hash_tell_blocks_apart() -> None:
    seen, (first, alike, other) = Collectives(), (Layer() for _ in range(3))
    first.kind, alike.kind, other.kind = Kind.A, Kind.A, Kind.B  # pyright: ignore[reportAttributeAccessIssue]
    with seen.look(block("0"), first):
        pass
    assert seen.known(block("1"), alike) and not seen.known(block("2"), other)


def test_a_block_is_known_in_the_mode_it_ran_in_and_only_if_it_ended() -> None:
    seen, layer = Collectives(), Layer()
    with pytest.raises(RuntimeError), seen.look(block("0"), layer):
        raise RuntimeError
    assert not seen.known(block("0"), layer)
    with seen.look(block("0"), layer):
        pass
    assert seen.known(block("0"), layer) and not seen.known(block("0"), layer.eval())


def test_a_group_that_is_made_in_the_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[Any, list[int]] = {object(): [3]}
    monkeypatch.setattr(module, "shared_groups", lambda: [*counts])
    monkeypatch.setattr(module, "_counts", lambda: dict(counts))
    monkeypatch.setattr(module, "ranks_in", lambda group: (0, 1) if group == "used" else (0, 2))
    seen, layer = Collectives(), Layer()
    with seen.look(block("0"), layer):
        counts |= {"used": [1], "not used": [0]}
    assert seen.groups(block("0"), layer) == [(0, 1)]


def test_one_group_that_does_not_count_among_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Any = object()
    groups: list[Any] = [counted]
    monkeypatch.setattr(module, "shared_groups", lambda: groups)
    monkeypatch.setattr(module, "_counts", lambda: {counted: [3]})
    monkeypatch.setattr(module.dist, "get_backend", lambda group: "gloo" if group is counted else "mpi")
    assert module.uncounted() == []
    groups += [object(), object()]
    assert module.uncounted() == ["mpi"]


def block(name: str) -> Block:
    return Block(name=name, kind="Layer", index=0, count=3, weights=tuple)


@pytest.mark.parametrize(("ranks", "calls", "known"), [(False, 0, False), (True, 0, False), (True, 1, True)])
def test_a_switch_tells_blocks_apart_unless_they_need_other_ranks(
    ranks: bool, calls: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch may depend on the rank: ranks that decide differently would wait for each other."""
    group: Any = object()
    count = [0]
    monkeypatch.setattr(module, "shared_groups", lambda: [group] if ranks else [])
    monkeypatch.setattr(module, "_counts", lambda: {group: [count[0]]} if ranks else {})
    monkeypatch.setattr(module, "ranks_in", lambda group: (0, 1))
    seen, first, alike, other = Collectives(), Layer(), Layer(number=1), Layer(gated=True)
    assert not seen.known(block("0"), first)
    with seen.look(block("0"), first):
        count[0] += calls
    assert seen.known(block("0"), first) and seen.known(block("1"), alike)
    assert seen.known(block("2"), other) is known
    assert seen.groups(block("2"), other) == ([(0, 1)] if calls else [])
