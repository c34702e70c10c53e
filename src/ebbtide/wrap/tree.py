"""A model's modules and weights, walked again only after a change.

[Note: the tree] Each forward needs the model's weights and its wrappers. Walking the modules takes milliseconds of
Python before the first kernel, and there is no notification of changes: a parameter may be swapped by writing into a
module's dictionaries. So these dictionaries are compared, entry by entry and by identity, in a few calls that Python
runs without a frame for each entry. The tree is walked again if a weight, buffer or module was added, replaced or
removed, or a module's class was changed (``fully_shard``). Entries are held weakly: an address may be reused, and a
replaced weight must not be kept alive.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn

_REGISTRIES = operator.attrgetter("_modules", "_parameters", "_buffers")


class Tree:
    """The current modules and weights of a model. See [Note: the tree].

    Attributes:
        version: Incremented by each walk.
    """

    def __init__(self, model: nn.Module) -> None:
        self.version = 0
        self._model = weakref.ref(model)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._kinds: list[type] = []
        self._entries: list[Callable[[], Any]] = []
        self._weights: list[weakref.ref[torch.Tensor]] = []

    def look(self) -> int:
        """Walk the tree if it has changed; return ``version``."""
        if not self.version or not self._is_as_it_was():
            self._walk()
        return self.version

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and then the buffers as of the last check, each once."""
        return [weight for weight in map(operator.call, self._weights) if weight is not None]

    def _is_as_it_was(self) -> bool:
        modules: list[Any] = list(map(operator.call, self._modules))
        if not all(map(operator.is_, map(type, modules), self._kinds)):  # including None for deleted modules
            return False
        entries = list(_entries(modules))
        same = map(operator.is_, entries, map(operator.call, self._entries))
        return len(entries) == len(self._entries) and all(same)

    def _walk(self) -> None:
        model = self._model()
        modules = [] if model is None else list(model.modules())
        weights = [] if model is None else [*model.parameters(), *model.buffers()]
        self._modules, self._kinds = [weakref.ref(module) for module in modules], [type(m) for m in modules]
        self._weights = [weakref.ref(weight) for weight in weights]
        self._entries = [NoneType if entry is None else weakref.ref(entry) for entry in _entries(modules)]
        self.version += 1


def _entries(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Return the modules, parameters and buffers that modules have, None for those that were left out."""
    registries: Iterator[dict[str, Any]] = chain.from_iterable(map(_REGISTRIES, modules))
    return chain.from_iterable(map(operator.methodcaller("values"), registries))
