"""How the values that a block can reach are treated. See [Note: state] in ``ebbtide.wrap.state``."""

from __future__ import annotations

import functools
import inspect
import io
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from enum import Enum
from types import MemberDescriptorType

import torch
from torch import nn

from ebbtide.wrap.arrays import is_array

_LEFT_ALONE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)
_MACHINERY = ("torch", "ebbtide", "logging", "threading", "concurrent", "multiprocessing", "weakref", "functools")
"""Packages whose objects belong to the machinery around a block."""


class Role(Enum):
    """How a reachable value is treated."""

    PLAIN = "plain"  # skipped: it holds nothing that a forward could change
    TENSOR = "tensor"
    FILE = "file"  # a block that holds one reads or writes it; those of other objects are theirs
    GENERATOR = "generator"  # draws random numbers, or others, from its own state
    TUPLE = "tuple"
    DICT = "dict"
    CONTAINER = "container"
    ARRAY = "array"
    OBJECT = "object"  # its attributes and slots are followed


VALUES = frozenset((bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size))


@functools.lru_cache(4096)
def role(kind: type) -> Role:
    """Return the role of a class; cached, since a module reaches hundreds of values of a few dozen classes."""
    if kind in VALUES:
        return Role.PLAIN
    if issubclass(kind, torch.Tensor):
        return Role.TENSOR
    if issubclass(kind, io.IOBase):
        return Role.FILE
    if draws(kind):
        return Role.GENERATOR
    if issubclass(kind, tuple):
        return Role.TUPLE
    if issubclass(kind, nn.Module):
        return Role.OBJECT
    if issubclass(kind, _LEFT_ALONE) or is_machinery(kind):
        return Role.PLAIN
    if issubclass(kind, dict):
        return Role.DICT
    if issubclass(kind, (list, set, deque)):
        return Role.CONTAINER
    if is_array(kind):
        return Role.ARRAY
    return Role.OBJECT if has_attributes(kind) or slots_of(kind) else Role.PLAIN


@functools.lru_cache(4096)
def is_machinery(kind: type) -> bool:
    """Whether a class belongs to the machinery around a block: the attributes of its objects are not followed."""
    return kind.__module__.partition(".")[0] in _MACHINERY


@functools.lru_cache(4096)
def has_attributes(kind: type) -> bool:
    """Whether instances of a class have a dictionary of attributes."""
    return any("__dict__" in vars(base) for base in inspect.getmro(kind))


@functools.lru_cache(4096)
def slots_of(kind: type) -> tuple[MemberDescriptorType, ...]:
    """Return the slots defined by Python classes; members of C classes cannot be written."""
    own = (vars(base).values() for base in inspect.getmro(kind) if "__slots__" in vars(base))
    return tuple(member for members in own for member in members if isinstance(member, MemberDescriptorType))


def draws(kind: type) -> bool:
    """Whether instances of a class draw random numbers, or other values, from their own state."""
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    other = (io.IOBase, *weakref.ProxyTypes)  # a proxy has the methods of whatever it may stand for
    return issubclass(kind, (torch.Generator, random.Random, Iterator, *own)) and not issubclass(kind, other)
