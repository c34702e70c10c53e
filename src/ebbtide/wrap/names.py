"""Objects that a block's functions name: globals, variables of enclosing functions, and those they are bound to."""

from __future__ import annotations

import dis
import functools
import inspect
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ebbtide.wrap.forward import StandIn
from ebbtide.wrap.roles import VALUES, draws

_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_CALLED = (types.FunctionType, functools.partial, *_BOUND)

_STATELESS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, type(None))
"""Classes of what a function may name and still compute the same: None is what functions of torch are bound to."""

_OUTSIDE_FORWARD = frozenset(
    ("__init__", "__new__", "__repr__", "extra_repr", "reset_parameters")
    + ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
    + ("get_extra_state", "set_extra_state", "__getstate__", "__setstate__", "__deepcopy__")
)
"""Methods of a module that its forward does not call: a layer may get its number from an iterator in ``__init__``."""


def generators_of(module: nn.Module) -> list[Any]:
    """Return the generators and iterators that a block's functions name in closures and in globals, or are bound to.

    Those that its modules reach are found with their state: ``State.generators``.
    """
    functions, owners = functions_of(list(module.modules()))
    values = [*owners, *(value for function in functions for value in values_named_in(function))]
    restored = _restored_generators()
    return [v for value in values for v in _inside(value) if draws(type(v)) and id(v) not in restored]


def functions_of(modules: Iterable[nn.Module]) -> tuple[list[types.FunctionType], list[Any]]:
    """Return the functions that modules may call, except torch's own, and the objects that these are bound to.

    Functions of their classes, hooks, and functions, methods and partial functions in their attributes.
    """
    modules = list(modules)
    functions = list(_methods_of(modules))
    owners: list[Any] = []
    for called in _held_by(modules):
        while isinstance(called, functools.partial):
            owners += [*called.args, *called.keywords.values()]
            called = called.func
        owner = getattr(called, "__self__", None)
        owners.append(called if owner is None and not isinstance(called, types.FunctionType) else owner)
        functions += _unwrapped(getattr(called, "__func__", called))
    return list(dict.fromkeys(functions)), owners


def classes_of(modules: Iterable[nn.Module]) -> list[type]:
    """Return the classes of modules, and what those inherit from, but for torch's own."""
    kinds = {base for kind in set(map(type, modules)) for base in inspect.getmro(kind)}
    return [kind for kind in kinds if kind is not object and not kind.__module__.startswith("torch.")]


def values_named_in(function: types.FunctionType) -> Iterator[Any]:
    """Yield the globals and the variables of enclosing functions that a function names, or a function inside it.

    Also its default values: ``def forward(self, x, seen=[])`` has one list for all calls.
    """
    yield from _defaults_of(function)
    yield from _variables_of(function)


def is_stateless(function: types.FunctionType | types.BuiltinFunctionType) -> bool:
    """Whether a function computes the same in each call: it names only modules, classes and such functions.

    A number that it names may be another one in backward: the variable of a loop. Its default values are its own.
    """
    found: list[Any] = [function]
    for one in found:  # and those that are found on the way
        if isinstance(one, types.BuiltinFunctionType):
            named = [one.__self__]
        elif one.__module__ is not None and _is_torchs(one.__module__) and _is_torchs(one.__globals__["__name__"]):
            continue  # both, because ``functools.wraps`` copies the former to code of others
        elif all(isinstance(value, (*_STATELESS, *VALUES)) for value in _defaults_of(one)):
            named = [*vars(one).values(), *_variables_of(one)]
        else:
            return False
        if not all(isinstance(value, _STATELESS) for value in named):
            return False
        found += [value for value in named if isinstance(value, _STATELESS[:2]) and value not in found]
    return True


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _defaults_of(function: types.FunctionType) -> Iterator[Any]:
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _variables_of(function: types.FunctionType) -> Iterator[Any]:
    for name in _globals_in(function.__code__):
        if name in function.__globals__:
            yield from _with_owner(function.__globals__[name])
    for cell in function.__closure__ or ():
        try:
            yield from _with_owner(cell.cell_contents)
        except ValueError:  # an unbound name
            continue


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function's code reads, and that of functions inside of it; no attributes."""
    found = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys([*found, *(name for part in inner for name in _globals_in(part))]))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in that of functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _methods_of(modules: Iterable[nn.Module]) -> Iterator[types.FunctionType]:
    """Yield the functions of modules' classes that a forward may call."""
    for kind in classes_of(modules):
        for name, value in vars(kind).items():
            if name in _OUTSIDE_FORWARD:
                continue
            sort = type(value)  # ``isinstance`` asks the value, which raises if it is a proxy of a dead object
            if issubclass(sort, property):
                value = value.fget
            elif issubclass(sort, (staticmethod, classmethod)):
                value = value.__func__
            elif issubclass(sort, functools.cached_property):
                value = value.func
            yield from _unwrapped(value)


def _unwrapped(function: Any) -> Iterator[types.FunctionType]:
    """Yield a function and those that it wraps, except torch's own and ours."""
    seen: set[int] = set()
    while issubclass(type(function), types.FunctionType) and id(function) not in seen:
        seen.add(id(function))
        if not str(function.__globals__.get("__name__")).startswith(("torch.", "ebbtide.wrap.")):
            yield function
        function = getattr(function, "__wrapped__", None)


def _held_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the hooks of modules, and what can be called in their attributes: also a forward that we stand in for."""
    for part in modules:
        yield from (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        yield from (value for value in StandIn.left_out(vars(part)).values() if issubclass(type(value), _CALLED))


def _with_owner(value: Any) -> Iterator[Any]:
    yield value
    if issubclass(type(value), _BOUND):
        yield value.__self__


def _restored_generators() -> set[int]:
    """Return the ids of the generators of Python and numpy whose states a second forward gets."""
    own = [getattr(random.random, "__self__", None)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        own.append(getattr(numpy.random.rand, "__self__", None))
    return set(map(id, own))


def _inside(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in (list, tuple, set):
        yield from value
    elif type(value) is dict:
        yield from value.values()
