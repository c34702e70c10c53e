"""Guard weights that a recompute will read: they must have their value of the forward.

[Note: watched weights]
Autograd lets a weight change between forward and backward if no operator saved it, and some writes do not change the
version counter (see [Note: fingerprints]). So a weight that a recipe or a checkpointed block will read is *watched*:

- torch's optimizers announce their steps, and a step's closure announces the update that follows each of its runs. A
  watched weight that is about to change is copied first, and its readers use the copy: two losses with a step between
  their backwards, or a discriminator that is stepped before the generator's backward, train as without ebbtide. In
  ordinary training no weight is watched when the optimizer steps, and none is copied. An update within a backward
  (gradient release) changes the weights that have their gradients by then; those of blocks that are still to be read
  have none, and are not copied.
- Any other change is found when the weight is read, by version and by fingerprint, and is an error.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.base.units import format_size
from ebbtide.engine.fingerprint import Compared, Fingerprint, can_be_taken
from ebbtide.engine.layout import Layout, byte_view
from ebbtide.engine.untraced import untraced

logger = logging.getLogger("ebbtide.engine")

FULL_BYTES = 64 * 1024
"""Weights up to this size in bytes (norms, biases) are compared completely, larger ones by a sample, or by the tensors
that are computed from them."""


class Watched:
    """A weight and the value it had: an operand of recipes.

    Args:
        tensor: The weight, or a view of it.
        version: Its version when the forward read it; None: FSDP rewrites it between forward and backward.
        compared: How the memory it lies in is compared.
    """

    __slots__ = ("__weakref__", "_fingerprint", "copied", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int | None, compared: Compared) -> None:
        self.tensor, self.version, self.copied = tensor.detach(), version, False
        region = None if compared is Compared.NOT else _region(self.tensor)  # a plain tensor
        full = compared is Compared.FULL or (region is not None and region.nbytes <= FULL_BYTES)
        self._fingerprint = None if region is None else Fingerprint(region, full=full)

    @property
    def same(self) -> torch.Tensor | bool:
        """Whether the weight still has its value; on an accelerator perhaps a tensor of one boolean."""
        if not self.copied and self.version is not None and self.tensor._version != self.version:
            return False
        if self._fingerprint is None:
            return True
        region = _region(self.tensor)
        return region is not None and self._fingerprint.same(region)

    def as_it_was(self, tensor: torch.Tensor) -> bool:
        """Whether, in one call, ``same`` is true and ``replaces`` is not: of weights without a fingerprint."""
        return (
            self._fingerprint is None
            and not self.copied
            and tensor._version == self.version
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.untyped_storage()._cdata == self.tensor.untyped_storage()._cdata
        )

    def replaces(self, tensor: torch.Tensor) -> bool:
        """Whether the watched value is no longer in the memory that the weight, ``tensor``, has now."""
        plain = tensor.layout is torch.strided and not tensor.is_nested
        return plain and tensor.untyped_storage()._cdata != self.tensor.untyped_storage()._cdata

    def move_to(self, storage: torch.UntypedStorage) -> None:
        """Read a copy of the weight's storage from now on."""
        old = self.tensor
        self.tensor = old.new_empty(0).set_(storage, old.storage_offset(), old.size(), old.stride())
        self.copied = True


_guards: set[weakref.ref[WeightGuard]] = set()
"""All live guards."""

_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped, and so have made their state."""


def _live_guards() -> list[WeightGuard]:
    return [guard for reference in tuple(_guards) if (guard := reference()) is not None]


@functools.cache
def _listen_to_optimizers() -> None:
    """Have torch announce optimizer steps, once in a process.

    One permanent hook instead of one per guard: torch iterates over its hooks while an optimizer steps, and a guard
    that died then would change them.
    """

    @untraced
    def before(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        for guard in _live_guards():
            guard.before_step(_weights_of(optimizer))
        if not any(map(_is_closure, (*args[1:], *kwargs.values()))):
            return None
        stepping = weakref.ref(optimizer)  # which may keep its closure
        return (
            (args[0], *(_announcing(value, stepping) for value in args[1:])),
            {name: _announcing(value, stepping) for name, value in kwargs.items()},
        )

    @untraced
    def after(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        first = optimizer not in _stepped
        _stepped.add(optimizer)
        for guard in _live_guards():
            guard.steps += 1
            guard.optimizers += first

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _weights_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the weights that an optimizer's next update changes. See [Note: watched weights]."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if torch._C._current_graph_task_id() == -1:
        return weights
    return [weight for weight in weights if not weight.is_leaf or weight.grad is not None] or weights


def _is_closure(argument: Any) -> bool:
    """Whether an argument of an optimizer's step is a closure, whatever its name: any callable but a model or class."""
    return callable(argument) and not isinstance(argument, (type, torch.nn.Module))


def _announcing(argument: Any, stepping: weakref.ref[torch.optim.Optimizer]) -> Any:
    """Return an argument of an optimizer's step; a closure also announces the update that follows each of its runs.

    A closure (Lightning's, LBFGS's) runs forward and backward when the step has begun and been announced already.

    Args:
        argument: The argument.
        stepping: The optimizer.
    """
    if not _is_closure(argument):
        return argument

    @untraced
    @functools.wraps(argument)
    def closure(*args: Any, **kwargs: Any) -> Any:
        result = argument(*args, **kwargs)
        if (optimizer := stepping()) is not None:
            for guard in _live_guards():
                guard.steps += 1  # it may run once more in this step, after an update
                guard.before_step(_weights_of(optimizer))
        return result

    return closure


class WeightGuard:
    """Knows which weights are watched, and copies those that an optimizer is about to change.

    Args:
        lock: The engine's.
        await_comparisons: Called before an optimizer changes weights: raises if what its gradients were computed from
            was wrong.
    """

    def __init__(self, lock: RLock, await_comparisons: Callable[[], None]) -> None:
        self._lock, self._await_comparisons = lock, await_comparisons
        self._watched: set[weakref.ref[Watched]] = set()
        self._forget = self._watched.discard  # which nothing interrupts; one object for all references
        self.steps = 0  # optimizer steps of this process since the guard was made, and runs of their closures
        self.optimizers = 0  # of these, first steps
        self._logged = False
        self.renewed = WeakTensorKeyDictionary()  # weights that get new versions without a change
        _listen_to_optimizers()
        _guards.add(weakref.ref(self, _guards.discard))

    def watch(self, weight: torch.Tensor, version: int | None, *, compared: Compared) -> Watched:
        """Return a weight as an operand.

        Args:
            weight: A parameter or buffer, or a view of one, as the forward reads it now.
            version: Its version as the operator read it; None: versions are not compared.
            compared: How its bytes are compared.
        """
        watched = Watched(weight, version, compared)
        self._list([watched])
        return watched

    def watch_all(self, weights: Iterable[torch.Tensor], compared: Compared) -> list[Watched]:
        """Return the weights that a block reads now, and will read again.

        Of a large one no sample is taken: what the block computes from it is sampled, and shows more.

        Args:
            weights: Its parameters and buffers.
            compared: How their bytes are compared.
        """
        large = Compared.NOT if compared is Compared.SAMPLE else compared
        versioned = not self.renewed
        watched = [
            Watched(
                weight,
                weight._version if versioned or weight not in self.renewed else None,
                large if weight.numel() * weight.itemsize > FULL_BYTES else compared,
            )
            for weight in weights
        ]
        self._list(watched)
        return watched

    def _list(self, these: list[Watched]) -> None:
        with self._lock:
            for watched in these:
                if watched.tensor.layout is torch.strided:
                    self._watched.add(weakref.ref(watched, self._forget))

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """Do not compare versions of these weights, also of those watched already: forwards renew them."""
        with self._lock:
            self.renewed.update(dict.fromkeys(weights))
            by_storage = self._by_storage() if weights else {}
            for weight in weights:
                for watched in by_storage.get(weight.untyped_storage()._cdata, ()):
                    watched.version = None

    def await_last(self) -> None:
        """Await comparisons that no optimizer step follows; not while an exception is handled: that one comes first."""
        if sys.exc_info()[0] is None:
            with self._lock:
                self._await_comparisons()

    def before_step(self, weights: Iterable[torch.Tensor]) -> None:
        """Copy those of an optimizer's weights that are watched: it is about to change them."""
        with self._lock:
            self._await_comparisons()
            by_storage = self._by_storage()
            if not by_storage:
                return
            nbytes = 0
            for weight in weights:
                # Wrappers have no storage of their own, and watch() lists none of them.
                if weight.layout == torch.strided and not is_traceable_wrapper_subclass(weight) and not is_lazy(weight):
                    watched = by_storage.pop(weight.untyped_storage()._cdata, None)
                    nbytes += 0 if watched is None else self._copy(watched, weight)
            if nbytes and not self._logged:
                self._logged = True
                logger.info(
                    "weights of %s were copied before an optimizer step: live graphs will read their old values",
                    format_size(nbytes),
                )

    def _by_storage(self) -> dict[int, list[Watched]]:
        """Return what is watched now, by the storage it lies in."""
        found: dict[int, list[Watched]] = {}
        for reference in tuple(self._watched):
            watched = reference()
            if watched is not None:
                found.setdefault(watched.tensor.untyped_storage()._cdata, []).append(watched)
        return found

    @staticmethod
    def _copy(watched: list[Watched], weight: torch.Tensor) -> int:
        storage, unchanged = weight.untyped_storage(), [w for w in watched if w.same is not False]
        if not unchanged:
            return 0
        with torch.no_grad():
            fresh = byte_view(storage, 0, storage.nbytes(), weight.detach()).clone().untyped_storage()
        for one in unchanged:
            one.move_to(fresh)
        return fresh.nbytes()


def changed_error(what: str, shape: Sequence[int], where: str) -> ModifiedInPlaceError:
    """Return the error for a weight that changed before what reads it again."""
    return ModifiedInPlaceError(
        f"a {list(shape)} {what} changed between the forward and the backward that {where}",
        expected="unchanged weights until that backward is done; steps of torch optimizers are allowed",
        hint="change them after the backward, or use policy 'offload', which recomputes and checkpoints nothing",
    )


def _region(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory in which a weight lies, of any shape; None if there is none to look at."""
    if not can_be_taken(tensor):
        return None
    layout, storage = Layout.of(tensor), tensor.untyped_storage()
    if layout.last > storage.nbytes():  # FSDP has freed it
        return None
    return tensor if tensor.is_contiguous() else byte_view(storage, layout.first, layout.last, tensor)
