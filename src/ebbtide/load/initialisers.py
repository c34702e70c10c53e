"""The calls that give a model its first values, and what each of them reads, writes and draws.

[Note: what a call writes]
A call is run once on meta, where writing costs nothing. Operators name the tensors that they write, and read the other
ones: views do neither. Who assigns another tensor (``weight.data = ...``, ``self.table = ...``) runs no operator on the
old one, so afterwards the module's tensors are compared with those from before, which are put back.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide.base.errors import ConfigError, DataError

_SETTING = ("normal_", "uniform_", "zero_", "fill_")
_OVERWRITING = (*_SETTING, "copy_")

ADD_FIRST = "add the adapter to a model in memory, save it, and load that"
"""The hint for adapters that cannot be initialised on meta."""


@dataclass(kw_only=True)
class InitialCall:
    """A call that initialises; ``writes``: the tensors it writes, and whether all of one, before reading it.

    ``needs``: the tensors with values in the model that it reads or writes. ``draws``: it draws random numbers.
    """

    name: str
    module: nn.Module
    act: Callable[[], object]
    adapts: bool = False  # it knows adapters; other functions take their layers for the model's own
    writes: dict[str, bool] = field(default_factory=dict[str, bool])
    needs: set[str] = field(default_factory=set[str])
    draws: bool = False

    def run(self) -> None:
        """Make the call.

        Raises:
            DataError: It failed.
        """
        try:
            self.act()
        except Exception as error:
            raise DataError(
                f"the initializer {self.name.lstrip('.')} failed ({type(error).__name__}: {error})",
                expected="a function that reads and sets tensors of its own module",
                hint="init= is called with every module: return for those that it does not know"
                if self.name.endswith(".init")
                else "give the module its values in another function, and pass it as init=",
            ) from error


class WriteWatch(TorchDispatchMode):
    """Notes which of some tensors are used and written, and whether random numbers are drawn.

    Args:
        names: By storage.
        numels: By name.
    """

    def __init__(self, names: dict[int, str], numels: dict[str, int]) -> None:
        super().__init__()
        self._names, self._numels = names, numels
        self._read: set[str] = set()
        self.used: set[str] = set()
        self.writes: dict[str, bool] = {}
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; note the arguments that its schema says are read and written."""
        operator, arguments = func._schema.name.split("::")[1], func._schema.arguments
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        written: dict[str, bool] = {}
        for argument in arguments:
            for value in tree_leaves(values.get(argument.name)):
                name = self._names.get(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None
                if name is None:
                    continue
                self.used.add(name)
                if argument.alias_info is None:
                    self._read.add(name)
                elif argument.alias_info.is_write:
                    overwrites = argument.is_out or operator in _OVERWRITING
                    written[name] = overwrites and value.numel() == self._numels[name]
        for name, complete in written.items():
            self.writes.setdefault(name, complete and name not in self._read)
        if operator in _SETTING and args[0].is_meta:  # it only checks arguments, in Python and for milliseconds
            return args[0]
        return func(*args, **(kwargs or {}))


def calls_in(model: nn.Module, init: Callable[[nn.Module], object] | None) -> Iterator[InitialCall]:
    """Yield the calls that initialise a model, in the model's order; then, as on a model that is built, the user's."""
    order: list[tuple[str, nn.Module, Any]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str, root: Any) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if _takes(getattr(module, "_init_weights", None), module):
            root = module  # a model inside a model brings its own function
        for name, child in module.named_children():
            visit(child, f"{prefix}.{name}" if prefix else name, root)
        order.append((prefix, module, root))

    visit(model, "", None)
    for prefix, module, root in order:
        for method in ("_reset_parameters", "reset_parameters"):
            act: Any = getattr(module, method, None)
            if _takes(act):
                yield InitialCall(name=f"{prefix}.{method}", module=module, act=act)
                break
        if root is not None:
            yield InitialCall(name=f"{prefix}._init_weights", module=module, act=partial(root._init_weights, module))
        yield from _adapter_calls(model, module, prefix)
    if init is not None:
        for prefix, module, _ in order:
            yield InitialCall(name=f"{prefix}.init", module=module, act=partial(init, module), adapts=True)


def _takes(function: Any, *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False  # no function, or one of the same name for something else
    return True


def check_adapters(model: Any, names: Iterable[str]) -> None:
    """Refuse names of adapters that start from the base's weights or from data.

    Raises:
        ConfigError: One of them does.
    """
    methods = {name: getattr(c, "init_lora_weights", True) for name, c in getattr(model, "peft_config", {}).items()}
    other = {name: how for name, how in methods.items() if not _is_random(how)}
    for name in names:
        for adapter, how in other.items():
            if re.search(rf"\.lora_\w+\.{re.escape(adapter)}(\.|$)", name):
                raise ConfigError(
                    f"init_lora_weights is {how!r} and {name!r} has no values yet",
                    expected="True, False or 'gaussian' for adapters that are added on meta",
                    hint=ADD_FIRST,
                )


def _is_random(how: object) -> bool:
    """Whether adapters that begin so need nothing but random numbers."""
    return isinstance(how, bool) or (isinstance(how, str) and how.lower() == "gaussian")


def _adapter_calls(model: Any, module: Any, prefix: str) -> Iterator[InitialCall]:
    """Yield the calls that initialise adapters, except those computed from base weights."""
    if callable(reset := getattr(module, "reset_lora_parameters", None)):
        for adapter, config in getattr(model, "peft_config", {}).items():
            how = getattr(config, "init_lora_weights", True)
            if _is_random(how):
                act = partial(reset, adapter, how) if how else partial(_reset_as_torch, module, adapter)
                yield InitialCall(name=f"{prefix}.{adapter}", module=module, act=act, adapts=True)


def _reset_as_torch(module: Any, adapter: str) -> None:
    for layers in (module.lora_A, module.lora_B):
        if adapter in layers:
            layers[adapter].reset_parameters()
