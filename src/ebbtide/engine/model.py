"""The model's weights as the engine knows them: which storages they are, and which have their bytes throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn.parameter import is_lazy

from ebbtide.engine.wrappers import plain_tensors

Ask = Callable[[], Iterable[torch.Tensor]]


class ModelWeights:
    """Tells the model's parameters and buffers from activations, pass by pass.

    Args:
        ask: Returns all parameters and buffers of the model; asked at the start of each pass.
        move: They have bytes only around their block's forward and backward (FSDP).
    """

    def __init__(self, ask: Ask, *, move: bool) -> None:
        self.move = move
        self._ask, self._ask_lasting = ask, tuple
        self._keys: set[int] = set()
        self._lasting: tuple[list[torch.Tensor], set[int]] | None = None

    @property
    def checked(self) -> bool:
        """Whether a weight that was changed in place since it was saved is an error."""
        return not self.move

    def begin_pass(self, lasting: Ask) -> None:
        """A forward begins.

        Args:
            lasting: Returns, where weights move, those that have their bytes through the whole forward and backward.
                Asked when the first block begins: the root unit may be unsharded only then.
        """
        self._keys = storage_keys(self._ask())
        self._ask_lasting, self._lasting = lasting, None

    def end_pass(self) -> None:
        """The forward is over: unsharded weights are views, which hold a graph."""
        if self._lasting is not None:
            self._lasting = [], self._lasting[1]

    def include(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is one of the model's parameters or buffers."""
        key = storage_key(storage)
        return key in self._keys or (self.move and key in self._known()[1])

    def last(self, weight: torch.Tensor) -> bool:
        """Whether a weight has its bytes in every block's backward."""
        return not self.move or storage_key(weight.untyped_storage()) in self._known()[1]

    def lasting(self) -> list[torch.Tensor]:
        """Return, where weights move, those that have their bytes in every block's forward and backward."""
        return self._known()[0] if self.move else []

    def _known(self) -> tuple[list[torch.Tensor], set[int]]:
        if self._lasting is None:
            weights = list(self._ask_lasting())
            self._lasting = weights, storage_keys(weights)
        return self._lasting


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that names a storage while it lives: for weights, which the model holds."""
    return storage._cdata


def storage_keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the keys of the storages that have bytes now."""
    keys: set[int] = set()
    for tensor in plain_tensors(tensors):
        if is_lazy(tensor):  # has no memory yet
            continue
        if tensor.layout == torch.strided and (storage := tensor.untyped_storage()).nbytes():
            keys.add(storage_key(storage))
    return keys
