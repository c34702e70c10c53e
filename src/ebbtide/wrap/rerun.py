"""Running a block again, whole: CHECKPOINT.

[Note: what may be run again]
A second run must compute what the first did and leave nothing behind. A block that is given something that it may
change, such as a key-value cache, or that changes its own buffers (batch norm's running statistics, spectral norm's
vectors) is treated tensor by tensor instead. Which buffers change is seen while blocks of the kind run: the first one
always runs tensor by tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger("ebbtide.wrap")

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, Enum)
"""What a block can be given and cannot change behind our back (tensors carry versions)."""


class Reruns:
    """Knows which kinds of blocks may be run again."""

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}  # kind → why not, as it was told

    def allowed(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a block of this kind may be run again with these arguments."""
        changeable = next((x for x in tree_leaves((args, kwargs)) if not isinstance(x, _PLAIN)), None)
        if changeable is not None:
            given = type(changeable).__name__
            self._refuse(kind, f"are given a {given}, which a second run would find changed", "use_cache=False")
        return kind not in self._refused

    @contextmanager
    def watched(self, kind: str, block: nn.Module) -> Generator[None]:
        """See whether a forward of the block changes its buffers."""
        before = _versions(block)
        try:
            yield
        finally:
            changed = [name for name, version in _versions(block).items() if before.get(name) != version]
            if changed:
                self._refuse(kind, f"change their own buffers ({changed[0]}), which a second run would change again")

    def _refuse(self, kind: str, why: str, switch: str = "") -> None:
        if kind not in self._refused:
            self._refused[kind] = why
            hint = f" (for a key-value cache, set {switch})" if switch else ""
            logger.warning(
                "%s blocks are not re-run whole: they %s; their tensors are treated one by one%s", kind, why, hint
            )


def run_again(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block whose backward runs it again. What it is given is saved, and offloaded by the hooks that are open.

    Tensors are handed over one by one: what a checkpoint is given by name, or inside a list, it would hold itself.
    """
    leaves, spec = tree_flatten((args, kwargs))

    def flat(*given: Any) -> Any:
        again_args, again_kwargs = tree_unflatten(list(given), spec)
        return forward(*again_args, **again_kwargs)

    return checkpoint(flat, *leaves, use_reentrant=False)


def _versions(block: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(b), b._version) for name, b in block.named_buffers() if not b.is_inference()}
