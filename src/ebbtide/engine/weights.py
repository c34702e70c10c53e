"""A block's weights while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebbtide.engine.fingerprint import can_be_taken, is_cast_of
from ebbtide.engine.inputs import CAST, AccumulateGrad, node_of
from ebbtide.engine.model import ModelWeights
from ebbtide.engine.modules import Running, computes_as_configured
from ebbtide.engine.storages import storage_key, storage_keys, storages
from ebbtide.engine.tickets import Expr, weights_read


class Weights:
    """Distinguishes a block's weights, their views and their copies from activations.

    Args:
        model: Knows the model's weights, and which have bytes through the whole forward and backward.
        own: Returns the parameters and buffers of the block whose bytes are there in its forward and in its backward.
            Not called where the weights of the model are known since the pass began and do not move.
    """

    def __init__(self, model: ModelWeights, own: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.model = model
        weights = list(own()) if model.move or not model.keys else []
        model.note_versions(weights)
        self._own = storage_keys(weights)
        self.keys = None if model.move else self._own or model.keys
        """Keys of all storages of weights; None where weights move: ``hold`` knows them."""
        self._passing: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that have bytes only while a part of the block runs. They may die, and others get their keys."""
        self.gathered: Callable[[], list[torch.Tensor]] | None = None
        """Returns weights that got their bytes unseen since its last call. Called for each storage that is unknown."""
        self._nodes: dict[int, tuple[Any, torch.Tensor]] = {}  # of weights that are views: FSDP1's, unsharded
        if model.move:
            self._note_nodes([*weights, *model.lasting()])

    def see(self, weights: Iterable[torch.Tensor]) -> None:
        """Learn weights that have bytes only now, while a part of the block runs: never moved, in no recipe."""
        weights = list(weights)
        self.model.note_versions(weights)
        for storage in storages(weights):
            if (key := storage_key(storage)) not in self._own:
                self._passing[key] = weakref.ref(storage)
        self._note_nodes(weights)

    def forget(self) -> None:
        """Release what only the block's forward needed."""
        self.gathered = None
        self._nodes.clear()

    def include(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a weight, a view of one, or lies in the storage of one."""
        # As ``is_parameter`` does, without the calls: this runs for every saved tensor.
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            return True
        base = tensor._base
        if base is not None and type(base) is not torch.Tensor and isinstance(base, torch.nn.Parameter):
            return True
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        return self.hold(tensor.untyped_storage())

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is that of a weight."""
        key, model = storage._cdata, self.model
        if key in model.keys or key in self._own or (model.move and model.lasts(key)):
            return True
        if key in self._passing and self._passes(storage):
            return True
        if self.gathered is None or not (weights := self.gathered()):
            return False
        self.see(weights)
        return self._passes(storage)

    def _passes(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is that of a weight that has bytes only while a part of the block runs."""
        passing = self._passing.get(storage_key(storage))
        return passing is not None and passing() is storage

    def usable(self, weight: torch.Tensor) -> bool:
        """Whether a weight has its bytes when the block's backward recomputes."""
        return self.model.last(weight) or storage_key(weight.untyped_storage()) in self._own

    def can_recompute(self, recipe: Expr | None) -> bool:
        """Whether all weights that a recipe reads have their bytes in this block's backward."""
        return all(self.usable(watched.tensor) for watched in weights_read(recipe))

    def copied(self, tensor: torch.Tensor, running: Running | None) -> torch.Tensor | None:
        """Return the weight that a tensor is, beyond doubt, autocast's copy of: it is cast again, not moved.

        A copy from before this pass (autocast's cache outlives an optimizer step) and one of a weight that changed
        since are tensors like any other.

        Where a part of the block is an FSDP unit of its own, its weights have bytes again when the part's backward
        reads the copy, but not yet when the block recomputes other tensors: see ``Entry.part_only``.

        Args:
            tensor: A saved tensor.
            running: The innermost module that runs.
        """
        node, weight = tensor.grad_fn, None
        if node is not None and type(node).name(node) == CAST and self.model.since <= node._sequence_nr():
            source = node.next_functions[0][0]
            leaf = source.variable if type(source) is AccumulateGrad else self._nodes.get(id(source), (None, None))[1]
            weight = leaf if leaf is not None and self.include(leaf) else None
        elif node is None and running is not None and running.casts_to is tensor.dtype:  # frozen: the module shows it
            weight = self._frozen(running.module, tensor)
        if weight is None or weight.device != tensor.device or self.model.version(weight) is None:
            return None
        if self.usable(weight):
            return weight
        return weight if self._passes(weight.untyped_storage()) else None

    @staticmethod
    def _frozen(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a layer's frozen weight if ``tensor`` is its copy in another type.

        The layer must be one of torch's that computes from ``weight``, and that must be its parameter: not what a hook
        computes from others before each forward, as weight normalisation and pruning do.
        """
        weight = module._parameters.get("weight")
        if weight is None or weight.requires_grad or weight.shape != tensor.shape or weight.dtype == tensor.dtype:
            return None
        if not computes_as_configured(module) or not (can_be_taken(weight) and can_be_taken(tensor)):
            return None
        readable = type(tensor) is torch.Tensor and tensor.device.type == "cpu"  # without waiting for a device
        return None if readable and not is_cast_of(tensor, weight) else weight

    def _note_nodes(self, weights: Iterable[torch.Tensor]) -> None:
        for weight in weights:
            # None also for a view that FSDP1 made in an earlier step, of what an optimizer has changed since.
            if (node := node_of(weight)) is not None:
                self._nodes[id(node)] = node, weight


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ``nn.Parameter``."""
    # Asking Parameter's own check costs ten times as much, and a plain tensor never passes it.
    return type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
