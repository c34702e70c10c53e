"""The options of the hosts' callbacks, checked when a callback is made, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from ebbtide import Handle
from ebbtide.arguments import check_choosers, chosen_policy, options_of
from ebbtide.base.actions import Plan
from ebbtide.config import MIN_BYTES, Policy, Strategy, Target
from ebbtide.wrap.strategy import check_strategy_name


class CallbackOptions:
    """The settings of a callback, and the handle that it opens.

    Args: as of ``ebbtide.enable_activation_offloading``, without the model.

    Raises:
        ConfigError: A value cannot be used.
    """

    def __init__(
        self,
        *,
        strategy: Strategy = "auto",
        enable_ckpt: bool = False,
        policy: Policy | Plan | str | PathLike[str] | None = None,
        target: Target = "auto",
        blocks: Sequence[str] | None = None,
        tensor_filter: Callable[[Tensor], bool] | None = None,
        keep_filter: Callable[[Tensor], bool] | None = None,
        min_bytes: int | str = MIN_BYTES,
        host_budget: int | str | None = None,
        window: int | str | None = None,
        disk_path: str | PathLike[str] | None = None,
        verify: bool = False,
        synchronous: bool = False,
    ) -> None:
        super().__init__()
        chosen_policy(enable_ckpt, policy)
        check_strategy_name(strategy)
        check_choosers(blocks, tensor_filter=tensor_filter, keep_filter=keep_filter)
        options_of(target, min_bytes, window, disk_path, verify, host_budget, synchronous)
        self.options: dict[str, Any] = {
            "strategy": strategy, "enable_ckpt": enable_ckpt, "policy": policy, "target": target, "blocks": blocks,
            "tensor_filter": tensor_filter, "keep_filter": keep_filter, "min_bytes": min_bytes,
            "host_budget": host_budget, "window": window, "disk_path": disk_path, "verify": verify,
            "synchronous": synchronous,
        }  # fmt: skip
        self.handle: Handle | None = None

    def close(self) -> None:
        """Close the handle, after a training that raised; its figures remain. Harmless when repeated."""
        if self.handle is not None:
            self.handle.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: a copy, also of a pickled one, has no handle."""
        return {**self.__dict__, "handle": None}
