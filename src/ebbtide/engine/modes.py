"""Dispatch modes of other code: what ebbtide computes is not for them.

[Note: modes]
A ``TorchDispatchMode`` sees every operator: it counts them, logs them, or returns another result (a lower precision
that it emulates). One that is open in forward may be closed in backward. Under it a recipe would be found equal that
gives another value in backward, two sums over the same bytes would differ, and the counts of a mode would include our
recomputes. So recipes and sums over bytes are evaluated outside of modes, and no block is checkpointed in one: its
second forward would need the mode. Modes that define what a tensor is (``is_infra_mode``, such as torch's fake tensors)
stay, and all that are open with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

P = ParamSpec("P")
T = TypeVar("T")

modes_open: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns how many dispatch modes are open. Checked, like the names above, with torch 2.13."""


def names_of_modes() -> tuple[str, ...]:
    """Return the classes of the dispatch modes that are open, outermost first."""
    kinds = map(type, _get_current_dispatch_mode_stack())
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def foreign_modes() -> int:
    """Return how many dispatch modes are open, if none of them defines what a tensor is."""
    count = modes_open()
    return 0 if count and any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()) else count


def outside_modes(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``work`` outside of dispatch modes. See [Note: modes]."""
    count = foreign_modes()
    if not count:
        return work(*args, **kwargs)
    modes: list[Any] = []
    try:
        while len(modes) < count:
            modes.append(_pop_mode())
        return work(*args, **kwargs)
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
