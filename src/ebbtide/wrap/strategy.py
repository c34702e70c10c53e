"""Detect how the model is wrapped: not at all, DDP, FSDP1, FSDP2 or DeepSpeed.

[Note: ZeRO-3]
DeepSpeed's ZeRO-3 shards each parameter over the ranks: hooks of the innermost modules gather its bytes (replacing its
``data``) before their forward and before their backward, and release them afterwards. So a weight has no bytes when a
block begins, nor when the block recomputes another module's tensor; and a second forward of a block repeats the
gathering, in which all ranks must take part. Small parameters stay gathered (``ds_persist``). Checked with DeepSpeed
0.19.8.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConfigError, StrategyError, nearest
from ebbtide.config import STRATEGIES

STRATEGY_NAMES = {"single": "single-device", "ddp": "DDP", "fsdp": "FSDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}

_WRAPPERS = {
    "fsdp2": ("torch.distributed.fsdp", "FSDPModule"),
    "fsdp": ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    "ddp": ("torch.nn.parallel", "DistributedDataParallel"),
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
}


def _wrapper_class(strategy: str) -> type | tuple[()]:
    """Return a wrapper's class, for ``isinstance``: an empty tuple if it was not imported, and so wraps nothing."""
    module, name = _WRAPPERS[strategy]
    return getattr(sys.modules.get(module), name, ())


def found_strategy(model: nn.Module) -> str:
    """Return ``"fsdp2"``, ``"fsdp"``, ``"ddp"``, ``"deepspeed"`` or ``"single"``: how ``model`` is wrapped now."""
    types = {type(module) for module in model.modules()}
    for strategy in _WRAPPERS:
        wrapper = _wrapper_class(strategy)
        if any(issubclass(t, wrapper) for t in types):
            return strategy
    return "deepspeed" if any(is_partitioned(p) for p in model.parameters()) else "single"


def is_partitioned(weight: torch.Tensor) -> bool:
    """Whether a parameter has bytes only while its own module runs. See [Note: ZeRO-3]."""
    return hasattr(weight, "ds_id") and not getattr(weight, "ds_persist", False)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether ``module`` is an FSDP2 unit of its own."""
    return isinstance(module, _wrapper_class("fsdp2"))


def is_fsdp1(module: nn.Module) -> bool:
    """Whether ``module`` is an FSDP1 wrapper."""
    return isinstance(module, _wrapper_class("fsdp"))


def is_ddp(module: nn.Module) -> bool:
    """Whether ``module`` is a DDP wrapper."""
    return isinstance(module, _wrapper_class("ddp"))


def is_engine(module: nn.Module) -> bool:
    """Whether ``module`` is an engine of DeepSpeed."""
    return isinstance(module, _wrapper_class("deepspeed"))


def running_ddp() -> nn.Module | None:
    """Return the DDP wrapper whose forward is running."""
    return getattr(_wrapper_class("ddp"), "_active_ddp_module", None)


def ddp_around(model: nn.Module) -> nn.Module | None:
    """Return the running DDP wrapper around ``model``; the model has no reference to it."""
    active = running_ddp()
    return active if active is not None and any(m is model for m in active.modules()) else None


def unit_meshes(model: nn.Module) -> list[Any]:
    """Return the meshes of the model's FSDP2 units; unsharded weights do not have theirs."""
    units: list[Any] = [m for m in model.modules() if is_fsdp2(m)]
    states = [unit._get_fsdp_state() for unit in units]
    shards = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if g]
    return [g.mesh_info.mesh for g in shards]


def weights_move(model: nn.Module) -> bool:
    """Whether parameters have bytes only around their block's forward and backward; checked in each pass."""
    wrappers = tuple(wrapper for name in ("fsdp2", "fsdp") if (wrapper := _wrapper_class(name)))
    if wrappers and any(isinstance(module, wrappers) for module in model.modules()):
        return True
    return bool(_wrapper_class("deepspeed")) and any(is_partitioned(p) for p in model.parameters())


def check_strategy_name(strategy: str) -> None:
    """Raise if there is no such strategy.

    Raises:
        ConfigError: There is none.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"strategy is {strategy!r:.80}",
            expected="one of " + ", ".join(STRATEGIES),
            hint=nearest(str(strategy), STRATEGIES) or "'auto' accepts the model as it is wrapped",
        )


def check_strategy(model: nn.Module, strategy: str) -> str:
    """Return the model's strategy; raise if it is not the requested one.

    Raises:
        ConfigError: There is no such strategy.
        StrategyError: The model is wrapped differently.
    """
    check_strategy_name(strategy)
    _refuse_replicas(model)
    found = found_strategy(model)
    if strategy not in ("auto", found):
        how = {
            "fsdp2": "torch.distributed.fsdp.fully_shard(model)",
            "fsdp": "FullyShardedDataParallel(model)",
            "ddp": "DistributedDataParallel(model)",
            "single": "no wrapper",
        }
        raise StrategyError(
            f"strategy is {strategy!r} and the model is wrapped as {found!r}",
            expected=f"a model wrapped by {how[strategy]}",
            hint="wrap the model first, or pass strategy='auto'",
        )
    return found


def _refuse_replicas(model: nn.Module) -> None:
    """Raise for ``DataParallel`` over several devices: its replicas are copies with the original's forward.

    Raises:
        StrategyError: The model is or contains one.
    """
    replicated = next((m for m in model.modules() if isinstance(m, nn.DataParallel) and len(m.device_ids) > 1), None)
    if replicated is not None:
        raise StrategyError(
            f"the model is in DataParallel over {len(replicated.device_ids)} devices",
            expected="DistributedDataParallel, FSDP, or one device",
            hint="start one process per device with torchrun and wrap the model in DistributedDataParallel",
        )
