"""A model's modules and weights, walked again only after a change.

[Note: the tree] Each forward needs the model's weights and its wrappers. Walking the modules takes milliseconds of
Python before the first kernel, and there is no notification of changes: a parameter may be swapped by writing into a
module's dictionaries. So the entries of these dictionaries are compared by identity and class, in a few calls that
Python runs without a frame for each entry. The tree is walked again if a weight, buffer or module was added, replaced
or removed, or a class was changed (``fully_shard``). Modules are held weakly, for an address may be reused. Weights
are not held: a replaced one must not be kept alive, and ``torch.utils.swap_tensors``, by which ``Module.to`` replaces
the contents of a DTensor, refuses tensors with weak references. A weight of the same class at the address of its
predecessor therefore goes unnoticed; nothing derived from ``version`` depends on it, and ``weights`` returns it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn

_MODULES, _PARAMETERS, _BUFFERS = map(operator.attrgetter, ("_modules", "_parameters", "_buffers"))
_REQUIRES_GRAD, _TRAINING = map(operator.attrgetter, ("requires_grad", "training"))
_REGISTRIES = (_MODULES, _PARAMETERS, _BUFFERS)


class Tree:
    """The current modules and weights of a model. See [Note: the tree].

    Attributes:
        version: Incremented by each walk.
    """

    def __init__(self, model: nn.Module) -> None:
        self.version = 0
        self._model = weakref.ref(model)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._identities: list[int] = []
        self._kinds: list[type] = []

    def look(self) -> int:
        """Walk the tree if it has changed; return ``version``."""
        if not self.version or not self._is_as_it_was():
            self._walk()
        return self.version

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and then the buffers of the modules as of the last check, each once."""
        modules = [module for module in map(operator.call, self._modules) if module is not None]
        found = chain(_values(_PARAMETERS, modules), _values(_BUFFERS, modules))
        return list({id(weight): weight for weight in found if weight is not None}.values())

    def trains(self) -> bytes:
        """Return which parameters are trained and which modules are in training: what they save depends on it."""
        modules = [module for module in map(operator.call, self._modules) if module is not None]
        weights = [weight for weight in _values(_PARAMETERS, modules) if weight is not None]
        return bytes(map(_REQUIRES_GRAD, weights)) + bytes(map(operator.truth, map(_TRAINING, modules)))

    def _is_as_it_was(self) -> bool:
        modules: list[Any] = list(map(operator.call, self._modules))
        if NoneType in map(type, modules):  # one was deleted
            return False
        entries = _entries(modules)
        return list(map(id, entries)) == self._identities and list(map(type, entries)) == self._kinds

    def _walk(self) -> None:
        model = self._model()
        modules = [] if model is None else list(model.modules())
        entries = _entries(modules)
        self._modules = [weakref.ref(module) for module in modules]
        self._identities, self._kinds = list(map(id, entries)), list(map(type, entries))
        self.version += 1


def _entries(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the model, and the modules, parameters and buffers that modules have; None for those left out."""
    return [*modules[:1], *(chain.from_iterable(_values(registry, modules) for registry in _REGISTRIES))]


def _values(registry: Callable[[Any], dict[str, Any]], modules: Iterable[nn.Module]) -> Iterator[Any]:
    return chain.from_iterable(map(operator.methodcaller("values"), map(registry, modules)))
