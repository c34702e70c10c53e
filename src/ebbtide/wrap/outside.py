"""What a block's forward can change outside of its modules.

[Note: outside]
A second forward restores what the modules can reach, and no more: a list of losses at the top of a file, or the owner
of a forward hook, would be written twice, and nothing that is compared would show it. So the containers, tensors and
hooks' owners that the functions of a block name are looked at around its first forwards. A kind of block that changes
them twice is not checkpointed; once may be a cache that was filled.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ebbtide.wrap.state import Role, role, values_named_in

LOOKS = 4
"""Forwards of a kind of block around which is looked."""


class Outside:
    """The contents, now, of what the functions of a block's modules name outside of them.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module) -> None:
        self._contents = [(value, _contents(value)) for value in _named(module)]

    @property
    def changed(self) -> bool:
        """Whether something has changed since."""
        return not all(_alike(_contents(value), before) for value, before in self._contents)


def _named(module: nn.Module) -> list[Any]:
    """Return what can change among what functions and hooks of a block name; each once."""
    own, found = set(map(id, module.modules())), dict[int, Any]()
    for part in module.modules():
        functions: list[Any] = []
        if not type(part).__module__.startswith("torch."):
            functions += [getattr(value, "__wrapped__", value) for value in vars(type(part)).values()]
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            while isinstance(hook, functools.partial):
                functions += [*hook.args, *hook.keywords.values()]
                hook = hook.func
            functions += [hook, getattr(hook, "__self__", None)]
        for function in functions:
            function = getattr(function, "__func__", function)
            named = values_named_in(function) if isinstance(function, types.FunctionType) else (function,)
            for value in named:
                kinds = (Role.TENSOR, Role.DICT, Role.CONTAINER, *([Role.OBJECT] if value is function else []))
                if role(type(value)) in kinds and id(value) not in own and not isinstance(value, nn.Parameter):
                    found[id(value)] = value
    return list(found.values())


def _contents(value: Any) -> tuple[list[Any], list[int]]:
    """Return what is inside of a value, one level deep, and the versions of the tensors among it."""
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, torch.Tensor):
        inside = [value]
    elif role(type(value)) is Role.CONTAINER:
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values())
    return inside, list(_versions(inside))


def _versions(inside: list[Any]) -> Iterator[int]:
    for value in inside:
        yield value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _alike(one: tuple[list[Any], list[int]], other: tuple[list[Any], list[int]]) -> bool:
    return len(one[0]) == len(other[0]) and one[1] == other[1] and all(map(operator.is_, one[0], other[0]))
