"""The arguments of a block, flattened and put into new containers."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from ebbtide.wrap.called import Called, unflatten

_Pair = namedtuple("_Pair", ("left", "right"))
X, Y = torch.ones(1), torch.zeros(1)


class _Triple(tuple[Any, ...]):
    """A tuple of a class of its own, which torch takes for a leaf."""


@pytest.mark.parametrize(
    "value",
    [
        X,
        None,
        (X, Y),
        [X, {"y": Y, 3: [X]}, ()],
        {},
        _Pair(X, [Y]),
        _Triple((X, Y)),
        OrderedDict(y=Y, x=X),
        deque([X, Y], maxlen=3),
        torch.sort(torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_are_flattened_as_torch_does_and_get_new_containers(value: Any) -> None:
    called = Called(print, (X, value), {"value": value, "last": Y})
    assert list(map(id, called.tensors)) == [id(x) for x in called.leaves if isinstance(x, torch.Tensor)]
    theirs, _ = tree_flatten((called.args, called.kwargs))
    assert list(map(type, called.leaves)) == list(map(type, theirs)) and len(called.tensors) >= 2
    assert all(a is b for a, b in zip(called.leaves, theirs, strict=True) if isinstance(b, torch.Tensor))
    args, kwargs = unflatten(iter(called.leaves), called.spec)
    assert [*kwargs] == ["value", "last"] and args[0] is X and kwargs["last"] is Y
    for again in (args[1], kwargs["value"]):
        assert type(again) is type(value)
        assert _same(tree_flatten(again), tree_flatten(value))
        if isinstance(value, (list, dict, deque)):
            assert again is not value


def test_a_size_stays_one() -> None:
    called = Called(print, (torch.Size((2, 3)),), {})
    assert called.leaves == [torch.Size((2, 3))]
    assert unflatten(iter(called.leaves), called.spec)[0][0] is called.args[0]


@pytest.mark.parametrize("change", [lambda v: v.append(X), lambda v: v[1].update(z=X), lambda v: v[1].pop("y")])
def test_a_change_of_a_container_is_another_spec(change: Any) -> None:
    value = [X, {"y": Y}]
    called = Called(print, (value,), {})
    assert called.flatten()[1] == called.spec
    change(value)
    assert called.flatten()[1] != called.spec


def _same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    return one[1] == other[1] and all(a is b or a == b for a, b in zip(one[0], other[0], strict=True))
