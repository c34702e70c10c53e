"""What a block's functions name: globals, and variables of the functions around them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ebbtide.wrap.state import State, draws


def generators_of(module: nn.Module) -> list[Any]:
    """Return the generators that a block's forwards can advance and that are not restored.

    Random generators in attributes, closures and referenced globals; iterators in the modules' own attributes.
    """
    modules = list(module.modules())
    found = State(modules).generators
    found += [value for m in modules for value in vars(m).values() if isinstance(value, Iterator)]
    for function in functions_of(modules):
        found += [v for v in values_named_in(function) for v in _inside(v) if draws(type(v))]
    return found


def functions_of(modules: Iterable[nn.Module]) -> Iterator[types.FunctionType]:
    """Yield the functions of modules' classes, and of what those inherit from, but for torch's own."""
    kinds = {base for kind in set(map(type, modules)) for base in inspect.getmro(kind)}
    for kind in kinds:
        if kind is not object and not kind.__module__.startswith("torch."):
            for function in vars(kind).values():
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, types.FunctionType):
                    yield function


def values_named_in(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals and the variables of enclosing functions that a function names."""
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an unbound name
            continue


def _inside(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in (list, tuple, set):
        yield from value
    elif type(value) is dict:
        yield from value.values()
