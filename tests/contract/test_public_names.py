"""The public names: adding one is a decision, removing one breaks users."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import ebbtide
from ebbtide.base import errors

PUBLIC = {
    "Action",
    "Auto",
    "BlocksError",
    "BudgetError",
    "Candidate",
    "CapError",
    "ConfigError",
    "ConflictError",
    "DataError",
    "DiskError",
    "DiskFullError",
    "DiskPathError",
    "EbbtideError",
    "Expr",
    "Handle",
    "Inputs",
    "Keep",
    "Machine",
    "Minimal",
    "ModifiedInPlaceError",
    "NodeView",
    "Offload",
    "Plan",
    "RestoreError",
    "SavablePlan",
    "Site",
    "Stats",
    "StrategyError",
    "TablePlan",
    "TargetError",
    "TrainingError",
    "__version__",
    "enable_activation_offloading",
    "load_sharded",
    "make_plan",
    "offload_saved_tensors",
    "register_recompute",
    "save_sharded",
    "track_memory",
}
ENABLE_PARAMETERS = ("model", "strategy", "enable_ckpt")


def test_public_names_are_these() -> None:
    assert set(ebbtide.__all__) == PUBLIC
    assert len(ebbtide.__all__) == len(PUBLIC)


def test_public_names_are_there_and_documented() -> None:
    for name in sorted(PUBLIC - {"__version__"}):
        assert inspect.getdoc(getattr(ebbtide, name)), f"{name} has no docstring"


def test_every_error_is_public() -> None:
    tree = {n for n, x in vars(errors).items() if isinstance(x, type) and issubclass(x, errors.EbbtideError)}
    assert len(tree) == 15 and tree <= PUBLIC


def test_enable_begins_with_the_parameters_that_other_frameworks_call() -> None:
    # verl and ms-swift pass these three to theirs by position: only the import line changes for their users.
    parameters = inspect.signature(ebbtide.enable_activation_offloading).parameters
    assert tuple(parameters)[:3] == ENABLE_PARAMETERS
    assert parameters["strategy"].default == "auto"
    assert parameters["enable_ckpt"].default is False
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(parameters.values())[3:])


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert ebbtide.__version__ == project["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", ebbtide.__version__)
