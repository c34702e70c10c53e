"""The model's weights as the engine knows them: which storages they are, and which have their bytes throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn.parameter import is_lazy

from ebbtide.engine.storages import storage_key, storage_keys

Ask = Callable[[], Iterable[torch.Tensor]]


class ModelWeights:
    """Distinguishes the model's parameters and buffers from activations, pass by pass.

    Args:
        ask: Returns all parameters and buffers of the model; called at the start of each pass.
        move: They have bytes only around their block's forward and backward (FSDP).
        steps: Returns how many optimizer steps there have been.
    """

    def __init__(self, ask: Ask, *, move: bool, steps: Callable[[], int]) -> None:
        self.move = move
        self.checked = not move  # a weight that was changed in place since it was saved is an error
        self._steps, self._steps_before = steps, 0
        self._ask, self._ask_lasting = ask, tuple
        self.keys: set[int] = set()  # of the storages of all parameters and buffers
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self.since = 0  # number of the first autograd node that this thread makes in this pass
        self._highest = 0  # number that a thread had reached at the end of a pass
        self._lasting: tuple[list[torch.Tensor], set[int]] | None = None

    def begin_pass(self, lasting: Ask, weights: Iterable[torch.Tensor] | None = None) -> None:
        """A forward begins.

        Args:
            lasting: Returns, where weights move, those that have their bytes through the whole forward and backward.
                Called when the first block begins: the root unit may be unsharded only then.
            weights: All parameters and buffers of the model, if the caller knows them; None: call ``ask``.
        """
        weights = list(self._ask() if weights is None else weights)
        self.keys = storage_keys(weights)
        self._versions, self._steps_before = {}, self._steps()
        self.note_versions(weights)
        # Each thread counts for itself, and a new one begins at 0: it must not take an earlier pass for its own.
        self.since = max(self._highest, torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._ask_lasting, self._lasting = lasting, None

    def note_versions(self, weights: Iterable[torch.Tensor]) -> None:
        """Remember the versions of weights that are met in this pass for the first time."""
        known = self._versions
        for weight in weights:
            lazy = type(weight) is not torch.nn.Parameter and is_lazy(weight)
            if not lazy and id(weight) not in known and not weight.is_inference():
                known[id(weight)] = weight, weight._version

    def version(self, weight: torch.Tensor) -> int | None:
        """Return the version that a weight has had since the pass began; None if it changed, or is not known.

        If it did not change, this pass computed from the value that the weight has now.
        """
        known, version = self._versions.get(id(weight), (None, None))
        unchanged = known is weight and version == weight._version and self._steps() == self._steps_before
        return version if unchanged else None

    def end_pass(self) -> None:
        """End the forward, and drop the model and its weights: unsharded ones are views, which hold a graph."""
        self._versions, self._ask_lasting = {}, tuple
        self._highest = max(self._highest, torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        if self._lasting is not None:
            self._lasting = [], self._lasting[1]

    def include(self, key: int) -> bool:
        """Whether the storage of a key is one of the model's parameters or buffers."""
        return key in self.keys or (self.move and self.lasts(key))

    def lasts(self, key: int) -> bool:
        """Whether, where weights move, the storage of a key has its bytes in every block's forward and backward."""
        return key in self._known()[1]

    def last(self, weight: torch.Tensor) -> bool:
        """Whether a weight has its bytes in every block's backward."""
        return not self.move or self.lasts(storage_key(weight.untyped_storage()))

    def lasting(self) -> list[torch.Tensor]:
        """Return, where weights move, those that have their bytes in every block's forward and backward."""
        return self._known()[0] if self.move else []

    def _known(self) -> tuple[list[torch.Tensor], set[int]]:
        if self._lasting is None:
            weights = list(self._ask_lasting())
            # FSDP1 makes views of a parameter after the pass began; they are what it was then if it did not change.
            self.note_versions(w for w in weights if w._base is not None and self.version(w._base) is not None)
            self._lasting = weights, storage_keys(weights)
        return self._lasting
