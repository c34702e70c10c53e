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
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn

_PARAMETERS, _BUFFERS = map(operator.attrgetter, ("_parameters", "_buffers"))
_REQUIRES_GRAD, _TRAINING = map(operator.attrgetter, ("requires_grad", "training"))
_REGISTRIES = operator.attrgetter("_modules", "_parameters", "_buffers")


class Modules:
    """Modules and their classes, to be compared with later ones. The modules are held weakly.

    Attributes:
        held: Weak references to the modules.
    """

    def __init__(self, modules: Sequence[nn.Module] = ()) -> None:
        self.held = [weakref.ref(module) for module in modules]
        self._classes = list(map(type, modules))

    def alive(self) -> list[nn.Module]:
        """Return those that were not deleted."""
        return [module for module in map(operator.call, self.held) if module is not None]

    def same(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are the same modules, and of the same classes."""
        return (
            list(map(type, modules)) == self._classes
            and len(modules) == len(self.held)
            and all(map(operator.is_, map(operator.call, self.held), modules))
        )


class Tree:
    """The current modules and weights of a model. See [Note: the tree].

    Attributes:
        version: Incremented by each walk.
    """

    def __init__(self, model: nn.Module) -> None:
        self.version = 0
        self._model = weakref.ref(model)
        self._modules = Modules()
        self._exchanges = 0  # walks that found other modules, or other classes
        self._identities: list[int] = []
        self._kinds: list[type] = []

    def look(self) -> int:
        """Walk the tree if it has changed; return ``version``."""
        if not self.version or not self._is_as_it_was():
            self._walk()
        return self.version

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and then the buffers of the modules as of the last check, each once."""
        modules = self._modules.alive()
        found = chain(_all_of(map(_PARAMETERS, modules)), _all_of(map(_BUFFERS, modules)))
        return list({id(weight): weight for weight in found if weight is not None}.values())

    def trains(self) -> bytes:
        """Return which parameters are trained and which modules are in training: what they save depends on it.

        It differs, too, once modules were exchanged.
        """
        modules = self._modules.alive()
        weights = [weight for weight in _all_of(map(_PARAMETERS, modules)) if weight is not None]
        trained, training = map(_REQUIRES_GRAD, weights), map(operator.truth, map(_TRAINING, modules))
        return bytes(trained) + bytes(training) + str(self._exchanges).encode()

    def _is_as_it_was(self) -> bool:
        modules: list[Any] = list(map(operator.call, self._modules.held))
        if NoneType in map(type, modules):  # one was deleted
            return False
        entries = _entries(modules)
        return list(map(id, entries)) == self._identities and list(map(type, entries)) == self._kinds

    def _walk(self) -> None:
        model = self._model()
        modules = [] if model is None else list(model.modules())
        entries = _entries(modules)
        self._exchanges += not self._modules.same(modules)
        self._modules = Modules(modules)
        self._identities, self._kinds = list(map(id, entries)), list(map(type, entries))
        self.version += 1


def _entries(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the model, and the modules, parameters and buffers that modules have; None for those left out."""
    return [*modules[:1], *_all_of(chain.from_iterable(map(_REGISTRIES, modules)))]


def _all_of(registries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(operator.methodcaller("values"), registries))
