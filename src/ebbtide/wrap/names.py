"""What a block's functions name: globals, and variables of the functions around them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ebbtide.wrap.state import State, draws

_CALLED = (types.FunctionType, types.MethodType, functools.partial)


def generators_of(module: nn.Module) -> list[Any]:
    """Return the generators and iterators that a block's forwards can advance and that are not restored.

    Those in what the modules can reach, in closures and in globals.
    """
    modules = list(module.modules())
    found = State(modules).generators
    for function in functions_of(modules):
        found += [v for v in values_named_in(function) for v in _inside(v) if draws(type(v))]
    return found


def functions_of(modules: Iterable[nn.Module]) -> Iterator[types.FunctionType]:
    """Yield the functions of modules' classes, and of what those inherit from, but for torch's own."""
    for kind in classes_of(modules):
        for function in vars(kind).values():
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType):
                yield function


def classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """Return the classes of modules, and what those inherit from, but for torch's own."""
    kinds = {base for kind in set(map(type, modules)) for base in inspect.getmro(kind)}
    return [kind for kind in kinds if kind is not object and not kind.__module__.startswith("torch.")]


def values_named_in(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals and the variables of enclosing functions that a function names, or one inside of it."""
    for name in names_in(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an unbound name
            continue


def functions_held(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the hooks of modules, and the functions, methods and partial functions in their attributes."""
    for part in modules:
        yield from (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        yield from (value for value in vars(part).values() if isinstance(value, _CALLED))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in that of functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _inside(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in (list, tuple, set):
        yield from value
    elif type(value) is dict:
        yield from value.values()
