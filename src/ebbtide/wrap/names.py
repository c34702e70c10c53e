"""Objects that a block's functions name: globals, variables of enclosing functions, and those they are bound to."""

from __future__ import annotations

import dis
import functools
import inspect
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ebbtide.wrap.forward import StandIn
from ebbtide.wrap.roles import VALUES, draws

_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_CALLED = (types.FunctionType, functools.partial, *_BOUND)

_STATELESS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, type(None))
"""Classes of what a function may name and still compute the same: None is what functions of torch are bound to."""

_LIBRARIES = sys.stdlib_module_names | {"torch", "ebbtide", "numpy"}
"""Packages whose functions and classes keep nothing that belongs to a program."""

_UNNAMED = ("__call__", "__enter__", "__exit__", "forward")
"""Methods that code calls without their names; the last one by a module, or by ``apply`` of a custom function."""

MOST_REACHED = 200
"""Most functions that are followed from one block, the nearest first."""

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
    restored = restored_generators()
    return [v for value in values for v in _inside(value) if draws(type(v)) and id(v) not in restored]


def functions_of(modules: Iterable[nn.Module]) -> tuple[list[types.FunctionType], list[Any]]:
    """Return the functions that modules may call, except torch's own, and the objects that these are bound to.

    Functions of their classes, hooks, and functions, methods and partial functions in their attributes.
    """
    modules = list(modules)
    functions = [function for _, function in _methods_of(modules)]
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


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code, and in that of functions inside of it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(name for part in inner for name in names_in(part))]))


def _methods_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions of modules' classes that a forward may call, with their names."""
    for kind in classes_of(modules):
        for name, value in vars(kind).items():
            if name not in _OUTSIDE_FORWARD:
                yield from ((name, function) for function in _unwrapped(value))


class Reached(NamedTuple):
    """What code names, directly and through the functions that it names.

    Attributes:
        functions: The functions, the nearest first.
        values: Values that they name, also in Python modules.
        files: For each file its globals, and which names functions have for these or for attributes.
    """

    functions: list[types.FunctionType]
    values: list[Any]
    files: dict[int, tuple[dict[str, Any], set[str]]]


def reached_from(modules: Iterable[nn.Module]) -> Reached:
    """Return what the forwards of modules' classes name, and the functions that these name, and so on.

    Methods are looked up in the classes of the modules, in classes that are named, and in those of objects. Libraries
    are not followed.
    """
    methods: defaultdict[str, list[types.FunctionType]] = defaultdict(list)
    for name, function in _methods_of(modules):
        methods[name].append(function)
    found = Reached([function for name in _UNNAMED for function in methods[name]], [], {})
    known = set(found.functions)
    for one in found.functions:  # and those that are found on the way
        names, values = names_in(one.__code__), list(values_named_in(one))
        named = [value for value in values if issubclass(type(value), types.ModuleType)]
        files = [one.__globals__, *(vars(module) for module in named if not is_library(module.__name__))]
        values += [file[name] for file in files[1:] for name in names if name in file]
        for file in files:
            found.files.setdefault(id(file), (file, set()))[1].update(names)
        kinds = {base for v in values for base in inspect.getmro(v if issubclass(type(v), type) else type(v))}
        theirs = [vars(kind) for kind in kinds if not is_library(kind.__module__)]
        called = [held.get(name) for held in theirs for name in (*names, *_UNNAMED)]
        for function in chain(*(methods.get(name, ()) for name in names), *map(_unwrapped, (*values, *called))):
            libraries = is_library(function.__globals__.get("__name__"))
            if function not in known and not libraries and len(known) < MOST_REACHED:
                known.add(function)
                found.functions.append(function)
        found.values.extend(values)
    return found


def is_library(module: str | None) -> bool:
    """Whether a module belongs to torch, numpy, the standard library, or ebbtide."""
    return str(module).partition(".")[0] in _LIBRARIES


def _unwrapped(value: Any) -> Iterator[types.FunctionType]:
    """Yield the function of a method or property, and those that it wraps, except torch's own and ours."""
    sort = type(value)  # ``isinstance`` asks the value, which raises if it is a proxy of a dead object
    if issubclass(sort, property):
        value = value.fget
    elif issubclass(sort, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    elif issubclass(sort, functools.cached_property):
        value = value.func
    seen: set[int] = set()
    function: Any = value
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


def restored_generators() -> set[int]:
    """Return the ids of the generators of torch, Python and numpy whose states a second forward gets."""
    own = [torch.default_generator, *torch.cuda.default_generators, getattr(random.random, "__self__", None)]
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
