"""Parse and check the arguments of the public functions: policies, sizes, paths, filters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn

from ebbtide.base.actions import Plan
from ebbtide.base.checks import check_path, check_value
from ebbtide.base.errors import ConfigError
from ebbtide.base.units import parse_size
from ebbtide.config import Auto, Minimal, Options, Policy, Target, policy_named
from ebbtide.planner import load_plan
from ebbtide.profiling.auto import AutoPlan
from ebbtide.store.protocol import Tier


def policy_of(policy: Policy | Plan | str | PathLike[str] | None) -> Policy | Plan:
    """Convert ``policy=``: a policy or its name, a plan or its file, or None (``Auto()``).

    Raises:
        ConfigError: It is none of these, or a plan that is not complete yet.
        DataError: The plan file cannot be read.
    """
    if policy is None:
        return Auto()
    if isinstance(policy, PathLike) or (isinstance(policy, str) and policy.endswith(".json")):
        return load_plan(fspath(policy))
    if isinstance(policy, str):
        return policy_named(policy)
    if isinstance(policy, AutoPlan):
        return policy.made()
    if isinstance(policy, Policy):
        return policy
    if hasattr(policy, "choose") and not isinstance(policy, type):
        _check_plan(policy)
        return policy
    name = policy.__name__ if isinstance(policy, type) else ""
    raise ConfigError(
        f"policy is {policy!r:.80}",
        expected="Auto(...), Offload(), Inputs(), Minimal(), Keep(), a name, a plan, or a plan file",
        hint=f"call the class: {name}(), not {name}" if name else "such as policy='minimal'",
    )


def accelerator_of(model: nn.Module) -> torch.device | None:
    """Return the accelerator of a model's first parameter on one, which need not be the current one; None: none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return next((p.device for p in model.parameters() if found is not None and p.device.type == found.type), None)


def _check_plan(plan: Plan) -> None:
    """Raise unless a user's plan has the members of ``Plan``, and its methods take the arguments of these."""
    calls: dict[str, tuple[Any, ...]] = {"choose": (None,), "block_action": ("", 0), "explain": ()}
    kind, hint = type(plan).__name__, "docs/concepts/planning.md shows a plan of your own"
    lacks = [name for name in ("name", "recomputes", *calls) if not hasattr(plan, name)]
    if lacks:
        raise ConfigError(f"{kind} lacks {', '.join(lacks)}", expected="the members of ebbtide.Plan", hint=hint)
    check_value(f"{kind}.name", plan.name, str)
    for name, arguments in calls.items():
        named = {"input_bytes": 0, "must_keep_bytes": 0} if name == "block_action" else {}
        try:
            inspect.signature(getattr(plan, name)).bind(*arguments, **named)
        except (TypeError, ValueError) as error:  # the latter of a callable whose parameters are unknown
            parameters = list(inspect.signature(getattr(Plan, name)).parameters.values())[1:]
            taken = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
            raise ConfigError(
                f"{kind}.{name} does not take the arguments of ebbtide.Plan ({error})",
                expected=f"{name}{taken}",
                hint=hint,
            ) from error


def chosen_policy(enable_ckpt: bool, policy: Policy | Plan | str | PathLike[str] | None) -> Policy | Plan:
    """Combine ``enable_ckpt`` and ``policy`` into one policy."""
    check_value("enable_ckpt", enable_ckpt, bool)
    if enable_ckpt and policy is not None and policy_of(policy) != Minimal():
        raise ConfigError(
            f"enable_ckpt=True and policy={policy!r}",
            expected="one of the two",
            hint="enable_ckpt means policy=Minimal()",
        )
    return Minimal() if enable_ckpt else policy_of(policy)


def refuse_budget(policy: Policy | Plan, tier: Tier) -> None:
    """Raise for a memory budget in a context on disk, and close the tier: its engine may end before it is planned.

    Raises:
        ConfigError: There is one.
    """
    if isinstance(policy, Auto) and policy.memory_budget is not None and tier.name == "disk":
        tier.close()
        raise ConfigError(
            f"policy is Auto(memory_budget={policy.memory_budget!r}) in a context that offloads to disk",
            expected="a policy without a budget: such a context may end before it is planned",
            hint="enable_activation_offloading(model, policy=...) plans a model for a budget; or leave policy out",
        )


def check_choosers(blocks: Sequence[str] | None, **filters: Callable[[torch.Tensor], bool] | None) -> None:
    """Check the arguments that select blocks and tensors, before any forward."""
    paths = [blocks] if isinstance(blocks, str) else blocks
    if paths is not None and not (
        isinstance(paths, Sequence) and len(paths) > 0 and all(isinstance(path, str) for path in paths)
    ):
        raise ConfigError(
            f"blocks is {blocks!r:.80}",
            expected="a list of paths from model.named_modules(), as text",
            hint="such as blocks=['encoder', 'decoder.*']; leave it out to find them by structure",
        )
    for name, function in filters.items():
        if function is not None and not callable(function):
            raise ConfigError(
                f"{name} is {function!r:.80}",
                expected="a function of a tensor that returns true or false",
                hint=f"such as {name}=lambda t: t.numel() > 1000",
            )


def options_of(
    target: Target,
    min_bytes: int | str,
    window: int | str | None,
    disk_path: str | PathLike[str] | None,
    verify: bool,
    host_budget: int | str | None = None,
    synchronous: bool = False,
) -> Options:
    """Parse sizes and paths into options."""
    if disk_path is not None:
        check_path("disk_path", disk_path, hint="such as disk_path='some/folder'")
    return Options(
        target=target,
        min_bytes=parse_size(min_bytes, name="min_bytes", least=0),
        window_bytes=None if window is None else parse_size(window, name="window"),
        host_budget_bytes=None if host_budget is None else parse_size(host_budget, name="host_budget"),
        disk_path=None if disk_path is None else fspath(disk_path),
        synchronous=synchronous,
        verify=verify,
    )
