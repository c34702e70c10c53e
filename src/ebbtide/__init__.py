"""Train PyTorch models that do not fit: keep, offload or recompute every tensor that autograd saves, bitwise."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.api import Handle as Handle
    from ebbtide.api import enable_activation_offloading as enable_activation_offloading
    from ebbtide.api import make_plan as make_plan
    from ebbtide.api import offload_saved_tensors as offload_saved_tensors
    from ebbtide.api import register_recompute as register_recompute
    from ebbtide.base.actions import Action as Action
    from ebbtide.base.actions import Candidate as Candidate
    from ebbtide.base.actions import Plan as Plan
    from ebbtide.base.actions import SavablePlan as SavablePlan
    from ebbtide.base.actions import Site as Site
    from ebbtide.base.errors import BlocksError as BlocksError
    from ebbtide.base.errors import BudgetError as BudgetError
    from ebbtide.base.errors import CapError as CapError
    from ebbtide.base.errors import ConfigError as ConfigError
    from ebbtide.base.errors import ConflictError as ConflictError
    from ebbtide.base.errors import DataError as DataError
    from ebbtide.base.errors import DiskError as DiskError
    from ebbtide.base.errors import DiskFullError as DiskFullError
    from ebbtide.base.errors import DiskPathError as DiskPathError
    from ebbtide.base.errors import EbbtideError as EbbtideError
    from ebbtide.base.errors import ModifiedInPlaceError as ModifiedInPlaceError
    from ebbtide.base.errors import RestoreError as RestoreError
    from ebbtide.base.errors import StrategyError as StrategyError
    from ebbtide.base.errors import TargetError as TargetError
    from ebbtide.base.errors import TrainingError as TrainingError
    from ebbtide.config import Auto as Auto
    from ebbtide.config import Inputs as Inputs
    from ebbtide.config import Keep as Keep
    from ebbtide.config import Minimal as Minimal
    from ebbtide.config import Offload as Offload
    from ebbtide.engine import Expr as Expr
    from ebbtide.engine import NodeView as NodeView
    from ebbtide.engine import Stats as Stats
    from ebbtide.loading import load_sharded as load_sharded
    from ebbtide.loading import save_sharded as save_sharded
    from ebbtide.planner import TablePlan as TablePlan
    from ebbtide.planner.machines import Machine as Machine
    from ebbtide.track import track_memory as track_memory

__version__ = "0.1.0"

_HOMES = {
    name: module
    for module, names in {
        "ebbtide.api": "Handle enable_activation_offloading make_plan offload_saved_tensors register_recompute",
        "ebbtide.base.actions": "Action Candidate Plan SavablePlan Site",
        "ebbtide.base.errors": (
            "BlocksError BudgetError CapError ConfigError ConflictError DataError DiskError DiskFullError "
            "DiskPathError EbbtideError ModifiedInPlaceError RestoreError StrategyError TargetError "
            "TrainingError"
        ),
        "ebbtide.config": "Auto Inputs Keep Minimal Offload",
        "ebbtide.engine": "Expr NodeView Stats",
        "ebbtide.loading": "load_sharded save_sharded",
        "ebbtide.planner": "TablePlan",
        "ebbtide.planner.machines": "Machine",
        "ebbtide.track": "track_memory",
    }.items()
    for name in names.split()
}
"""Public name → module, imported at first use: the command line's help needs no torch."""

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
