"""Engines that no forward uses now."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import cast

from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from ebbtide.base.actions import Plan
from ebbtide.config import Policy
from ebbtide.engine.engine import Engine


class IdleEngines:
    """Engines with the same settings, for the next forward; their live graphs may still restore saved tensors.

    Pinned memory is expensive to register, so an engine of host memory is kept. On disk it would keep its file and its
    threads: such an engine lasts only as long as others hold it, as each of its live graphs does.
    """

    def __init__(self) -> None:
        self._found: list[Callable[[], Engine | None]] = []  # as many as forwards ran at once, at most

    def add(self, engine: Engine) -> None:
        """Add an engine whose forward has ended."""
        self._found.append(weakref.ref(engine) if engine.tier.name == "disk" else lambda: engine)

    def take(self) -> Engine | None:
        """Remove and return an engine; None if there is none. Forgets those that it finds dead."""
        with contextlib.suppress(IndexError):  # no check before it: another thread may take the last one
            while True:
                if (engine := self._found.pop()()) is not None:
                    return engine
        return None


of_plans: MutableMapping[Policy | Plan, dict[Hashable, IdleEngines]] = WeakIdKeyDictionary(ref_type=WeakIdRef)
"""Idle engines of each plan of a user's, by settings."""


def engines_for(
    policy: Policy | Plan, of_policies: dict[Hashable, IdleEngines]
) -> tuple[Policy | Plan, dict[Hashable, IdleEngines]]:
    """Return what is passed to new engines, and the idle ones by settings; those of a plan last no longer than it."""
    if isinstance(policy, Policy):
        return policy, of_policies
    try:
        return cast("Plan", weakref.proxy(policy)), of_plans.setdefault(policy, {})
    except TypeError:  # its class has slots, and none for weak references
        return policy, {}
