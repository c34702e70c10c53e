"""A second run of a block's forward, under what the first one ran under.

[Note: a second run]
Gradients are right only if the second run computes what the first did. Torch's checkpoint brings back autocast and the
default random generators. What it does not is brought back here: Python's and numpy's random state, plain attributes
of the block's modules (``training``, counters, scales), the numerics and the chosen attention kernels. Weights and
buffers are not brought back; one that was changed in place since is an error, as a saved tensor would be.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.engine.numerics import NumericsChange, current_numerics

_PLAIN = (bool, int, float, str, type(None))

_SDPA = ("flash", "mem_efficient", "math", "cudnn")


class Moment:
    """What a block's forward ran under.

    Args:
        module: The block.
        block: Its name, for errors.
        weights: Those that must not change before the second run.
    """

    def __init__(self, module: nn.Module, block: str, weights: Iterable[torch.Tensor]) -> None:
        self._block = block
        self._weights = [(w, w._version) for w in weights if not w.is_inference()]
        self._attributes = [(vars(m), _plain(vars(m))) for m in module.modules()]
        self._random = _random_states()
        self._numerics, self._kernels = current_numerics(), _attention_kernels()

    @contextmanager
    def back(self) -> Generator[None]:
        """Bring it back for the second run, and what is now afterwards.

        Raises:
            ModifiedInPlaceError: A weight was changed in place since.
        """
        self._check_weights()
        now = [_plain(own) for own, _ in self._attributes]
        randoms, kernels, numerics = _random_states(), _attention_kernels(), NumericsChange()
        try:
            for own, then in self._attributes:
                own.update(then)
            _set_random(self._random)
            _set_attention_kernels(self._kernels)
            numerics.apply(self._numerics)
            yield
        finally:
            for (own, _), kept in zip(self._attributes, now, strict=True):
                for name in _plain(own).keys() - kept.keys():  # set by the second run alone
                    del own[name]
                own.update(kept)
            _set_random(randoms)
            _set_attention_kernels(kernels)
            numerics.undo()

    def _check_weights(self) -> None:
        changed = next((w for w, version in self._weights if w._version != version), None)
        if changed is not None:
            raise ModifiedInPlaceError(
                f"a {list(changed.shape)} weight or buffer of block {self._block!r} was changed in place between the "
                "forward and the backward that runs the block again",
                expected="weights and buffers of blocks that are re-run whole as they were in forward",
                hint="change them after backward, or pass policy='offload', which re-runs nothing",
            )


def run_again(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], moment: Callable[[], Moment]
) -> Any:
    """Run a block whose backward runs it again. What it is given is saved, and offloaded by the hooks that are open.

    Tensors are handed over one by one: what a checkpoint is given by name, or inside a list, it would hold itself. The
    first run gets what the caller gave; lists and dictionaries of the second are copies.

    Args:
        forward: The block's.
        args: What it is called with.
        kwargs: What it is called with, by name.
        moment: Returns what it runs under now.
    """
    leaves, spec = tree_flatten((args, kwargs))
    given_first, then = [(args, kwargs)], moment()

    def flat(*given: Any) -> Any:
        if given_first:
            first_args, first_kwargs = given_first.pop()
            return forward(*first_args, **first_kwargs)
        again_args, again_kwargs = tree_unflatten(list(given), spec)
        with then.back():
            return forward(*again_args, **again_kwargs)

    return checkpoint(flat, *leaves, use_reentrant=False)


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, _PLAIN)}


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def _attention_kernels() -> tuple[bool, ...]:
    cuda: Any = torch.backends.cuda
    return tuple(getattr(cuda, f"{kernel}_sdp_enabled")() for kernel in _SDPA)


def _set_attention_kernels(kernels: tuple[bool, ...]) -> None:
    cuda: Any = torch.backends.cuda
    for kernel, on in zip(_SDPA, kernels, strict=True):
        if getattr(cuda, f"{kernel}_sdp_enabled")() != on:
            getattr(cuda, f"enable_{kernel}_sdp")(on)
