"""The public functions of offloading."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ContextDecorator
from os import PathLike
from threading import get_ident
from typing import Any, cast

import torch
from torch import nn

from ebbtide.arguments import accelerator_of, check_choosers, chosen_policy, options_of, policy_of, refuse_budget
from ebbtide.base.actions import Plan, SavablePlan
from ebbtide.base.errors import ConfigError, undone_on_error
from ebbtide.base.events import BUS
from ebbtide.base.extras import check_version
from ebbtide.config import MIN_BYTES, Keep, Offload, Options, Policy, Strategy, Target
from ebbtide.engine import Engine, Rule, Stats
from ebbtide.engine.contexts import CONTEXT, ContextRun
from ebbtide.engine.idle import IdleEngines, idle_engines
from ebbtide.engine.rules import check_rule, rule_table
from ebbtide.planner import TablePlan, plan_for
from ebbtide.planner.machines import Machine, machine_named
from ebbtide.planner.table import table_plan
from ebbtide.profiling.hardware import measured_machine
from ebbtide.profiling.loaded import let_kept_blocks_run_plain, warn_of_unplanned
from ebbtide.profiling.plans import measured_plan
from ebbtide.profiling.simulated import Job, simulate_model
from ebbtide.profiling.solutions import solution_for
from ebbtide.recorded import log_saved, plan_fields, provide, warn_of_idle, warn_of_torch
from ebbtide.store import capture_query, open_tier
from ebbtide.wrap import STRATEGY_NAMES, Attachment, check_strategy, find_blocks, weights_move
from ebbtide.wrap.blocks import planned_blocks
from ebbtide.wrap.coverage import Watch
from ebbtide.wrap.forward import GRAPH_CAPTURE
from ebbtide.wrap.hooks import offloading

logger = logging.getLogger("ebbtide")

_custom_rules: dict[str, Rule] = {}
_idle_engines: dict[Hashable, IdleEngines] = {}
"""Idle engines of ``offload_saved_tensors``, by settings."""


class Handle:
    """Activation offloading on one model, until ``close()`` or the end of a ``with``; may be switched at any step."""

    def __init__(self, engine: Engine, attachment: Attachment, model: nn.Module) -> None:
        self._engine, self._attachment = engine, attachment
        self._covered: list[str] = []  # the attachment's lines; a closed handle has none, and does not hold the model
        attachment.handle = self
        self._unlist = provide(engine, model)

    @property
    def plan(self) -> SavablePlan:
        """The current plan: ``print`` it, ``save("plan.json")`` it. A plan of your own is returned as it is."""
        return cast("SavablePlan", self._engine.plan)

    @property
    def enabled(self) -> bool:
        """Whether the next forward is offloaded."""
        return self._attachment is not None and self._attachment.enabled

    @property
    def blocks(self) -> list[str]:
        """Paths of the blocks: those found by structure, until the first pass chooses others. None once closed."""
        return [] if self._attachment is None else self._attachment.block_names

    def stats(self) -> Stats:
        """Return the figures of the latest pass and the totals; ``print`` shows ten lines."""
        return self._engine.stats()

    def explain(self) -> str:
        """Return the plan, then a line for each action at each site of the latest pass, with bytes and storages.

        The bytes of an action add up to those of ``stats()``; checkpointed blocks count as recomputed. Then follow
        small storages, the coverage, sites that are no longer recomputed and why, the store, and the longest stalls.
        """
        lines = [self.plan.explain(), *self._engine.last_pass.explain(self._engine.options.min_bytes)]
        lines += self._covered if self._attachment is None else self._attachment.explain()
        lines += [f"not recomputed: {site}: {reason}" for site, reason in list(self._engine.trust.demoted.items())]
        return "\n".join(lines + self.stats().details())

    def disable(self) -> None:
        """Stop offloading from the next forward on. Live graphs still restore their saved tensors."""
        if self._attachment is not None:
            self._attachment.enabled = False

    def enable(self) -> None:
        """Offload again from the next forward on.

        Raises:
            ConfigError: The handle was closed.
        """
        if self._attachment is None:
            raise ConfigError("this handle is closed", expected="an open one", hint="call enable_activation_offloading")
        self._attachment.enabled = True

    def close(self) -> None:
        """Remove the hooks and close the store: at once or, if a graph needs it, after that graph's backward.

        With a graph that is dropped, the store's memory is freed, and its disk in seconds. May be called repeatedly.
        A failed comparison that no optimizer step has awaited, one of an accelerator's last, raises ``RestoreError``.
        """
        attachment = self._attachment
        if attachment is not None:
            attachment.remove()
            self._attachment, self._covered = None, attachment.explain()  # not before: a repeat removes the rest
            self._unlist()
        self._engine.close()
        if attachment is not None:
            log_saved(self._engine, attachment.calls)
        self._engine.guard.await_last()

    def __repr__(self) -> str:
        state = "closed" if self._attachment is None else "enabled" if self.enabled else "disabled"
        return f"<Handle: {self.plan.name}, {state}; stats() and explain() show more>"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or unpickled model has no offloading: a handle that it holds is None there."""
        return type(None), ()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def enable_activation_offloading(
    model: nn.Module,
    strategy: Strategy = "auto",
    enable_ckpt: bool = False,
    *,
    policy: Policy | Plan | str | PathLike[str] | None = None,
    target: Target = "auto",
    blocks: Sequence[str] | None = None,
    tensor_filter: Callable[[torch.Tensor], bool] | None = None,
    keep_filter: Callable[[torch.Tensor], bool] | None = None,
    min_bytes: int | str = MIN_BYTES,
    host_budget: int | str | None = None,
    window: int | str | None = None,
    disk_path: str | PathLike[str] | None = None,
    synchronous: bool = False,
    verify: bool = False,
) -> Handle:
    """Keep, offload or recompute every tensor that the model's blocks save for backward.

    Hooks see each tensor that autograd saves in a block. The policy's plan decides: KEEP it, OFFLOAD it (copied out
    while later blocks run, prefetched before backward reads it), RECOMPUTE it from other tensors, or CHECKPOINT the
    block. Gradients are bitwise those of ordinary training, or an error is raised. Use it when activations (tokens x
    hidden size x layers) do not fit. Weights never move; an input ``[B, S, H]`` moves ``B * S * H * itemsize`` bytes.

    Example::

        model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(3)])
        with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
            model(torch.randn(2, 16, 64)).sum().backward()  # [B, S, H]
            print(handle.stats())

    Args:
        model: Any module, before or after FSDP, DDP or compilation of its blocks.
        strategy: ``"auto"``, or the wrapper that the model must have.
        enable_ckpt: The memory of activation checkpointing: policy ``Minimal()``.
        policy: A policy (default: ``Auto()``), its name, a plan, a plan file, or an object with ``Plan``'s methods.
        target: ``"host"``: host memory, for tensors of an accelerator; ``"disk"``: for tensors in RAM; ``"auto"``:
            host memory with an accelerator, disk without.
        blocks: Paths of blocks, with ``*``; default: found by structure, and by the first forward's saved bytes.
        tensor_filter: False for a saved tensor that is never offloaded; it may be recomputed.
        keep_filter: False for a saved tensor that is neither offloaded nor recomputed, nor its block checkpointed.
        min_bytes: Smaller storages stay, in bytes or as ``"64KiB"``; 0: every storage is treated.
        host_budget: Largest host memory for offloaded bytes, in bytes or as ``"40GiB"``; default: the rank's share of
            what is free on the node. Bytes beyond it go to disk.
        window: Bytes allowed in flight each way; default: follows the model's largest block.
        disk_path: Directory for the disk tier; default: the first of the temporary directory, /var/tmp and
            ~/.cache/ebbtide that is on a disk.
        synchronous: Copy in order with compute: for devices with unreliable asynchronous copies.
        verify: Compare every restored and recomputed tensor with the original; slow.

    Returns:
        A handle: ``stats() explain() plan blocks disable() enable() close()``.

    Raises:
        ConfigError: A value cannot be used; DataError: the plan file cannot be read.
        StrategyError: The model is not wrapped as ``strategy`` says; TargetError: the machine has no such target.
        BlocksError: The model has no parameters, or a glob matches nothing; DiskError: the path is unusable.
        ConflictError: The model is already offloaded; EbbtideError: torch is older than the tested versions.

    Source: recomputing from saved operands: Checkmate, arXiv:1910.02653; offloading them: SSDTrain, arXiv:2408.10013.
    """
    check_version("torch")
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"model is {kind}", expected="a torch.nn.Module", hint="pass the model itself")
    chosen = chosen_policy(enable_ckpt, policy)
    check_choosers(blocks, tensor_filter=tensor_filter, keep_filter=keep_filter)
    options = options_of(target, min_bytes, window, disk_path, verify, host_budget, synchronous)
    found = check_strategy(model, strategy)
    pairs = find_blocks(model, blocks)
    if isinstance(chosen, TablePlan):
        if blocks is None:
            pairs = planned_blocks(model, pairs, {name for name, _ in chosen.actions})
        chosen.check_blocks((block.name, block.kind) for _, block in pairs)
    home, filters = accelerator_of(model), {"tensor_filter": tensor_filter, "keep_filter": keep_filter}
    engine = _open_engine(chosen, options, home, weights_move=weights_move(model), lasts=True, **filters)
    let_kept_blocks_run_plain(engine)
    with undone_on_error(engine.tier.close):
        watch = Watch(model, engine, chosen=blocks is not None, then=warn_of_unplanned)
        attachment = Attachment(model, pairs, engine, watch)
    handle = Handle(engine, attachment, model)
    warn_of_idle(engine, model, host_budget=host_budget)
    warn_of_torch(engine)
    logger.info("Enabling activation offloading for %s strategy", STRATEGY_NAMES[found])
    logger.info("blocks: %d, to %s; %s: %s", len(pairs), engine.tier.name, engine.plan.name, engine.plan.explain())
    BUS.emit("plan", **plan_fields(engine.plan))
    return handle


def make_plan(
    model: nn.Module,
    batch: Any,
    *,
    policy: Policy | str | None = None,
    machine: Machine | str | PathLike[str] | None = None,
    shards: int = 1,
    ranks: int | None = None,
    optimizer_state: float = 2.0,
    loss: Callable[[Any], torch.Tensor] | None = None,
    blocks: Sequence[str] | None = None,
    min_bytes: int | str = MIN_BYTES,
    window: int | str | None = None,
) -> TablePlan:
    """Predict a step on a machine and plan it, without running it.

    The model's own code runs once on fake tensors; each operator takes its FLOP or bytes at the machine's rates (a
    roofline model). Use it before renting a machine, or to start training without measured steps.

    Example::

        with torch.device("meta"):
            model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(3)])
            batch = torch.randn(2, 16, 64)  # [B, S, H]
        print(ebbtide.make_plan(model, [batch], machine="h200").explain())

    Args:
        model: A module that is neither wrapped nor sharded nor quantised; it is not changed.
        batch: Arguments of its forward: a dict of names, a list, or one tensor. Floating-point tensors may be on meta;
            integers (tokens, positions) need values if the model reads them.
        policy: ``Auto(...)`` (the default) or another policy, or its name. No block is checkpointed.
        machine: ``"h200"``, ``"a10g"`` or another name that ``ebbtide plan --gpu`` takes, a JSON file, or a
            ``Machine``; default: this one, measured now (seconds).
        shards: Ranks over which weights, gradients and optimizer state are divided.
        ranks: Ranks that share the host's memory rate; default: the shards that one node holds.
        optimizer_state: Bytes of state per byte of trained weights: 2 for Adam, 1 for momentum, 0 for none.
        loss: Returns the loss from what forward returns; default: its ``loss``, or the mean square of its first tensor.
        blocks: Paths of blocks, with ``*``; default: found by structure.
        min_bytes: Storages below this size stay.
        window: Bytes allowed in flight each way; default: follows the model's largest block.

    Returns:
        The plan: ``explain() predicted save(path)``; pass it as ``policy=`` to ``enable_activation_offloading``.

    Raises:
        ConfigError: A value cannot be used, or the model branches on values that fake tensors lack.
        BlocksError: The model has no parameters, or a glob matches nothing; DataError: the machine file cannot be read.
        BudgetError: No plan fits the memory budget, or the machine's memory.
    """
    check_version("torch")
    chosen = policy_of(policy)
    if not isinstance(chosen, Policy):
        raise ConfigError("policy is a plan", expected="a policy to plan for", hint="such as policy='auto'")
    check_choosers(blocks)
    target_machine = measured_machine() if machine is None else machine_named(machine)
    profile = simulate_model(
        model, batch, target_machine, job=Job(shards=shards, ranks=ranks, optimizer_state=optimizer_state), loss=loss,
        blocks=blocks, options=options_of("auto", min_bytes, window, None, False),
        rules={**rule_table(), **_custom_rules},
    )  # fmt: skip
    return table_plan(solution_for(chosen, profile, target_machine.memory_bytes), plan_for(chosen).name)


class offload_saved_tensors(ContextDecorator):
    """Offload the tensors saved inside a context: replaces ``torch.autograd.graph.save_on_cpu(...)``.

    Leave out its arguments, ``pin_memory`` and ``device_type``: host memory is pinned for any accelerator.
    Use it for code without blocks. It knows no model, so only parameters count as weights. Default: ``Offload()``.
    It may stay open around whole steps, or decorate one: what is saved after a backward is another pass.

    Example::

        x = torch.randn(64, 1024, requires_grad=True)
        with ebbtide.offload_saved_tensors() as offloaded:
            loss = x.exp().sum()
        loss.backward()
        print(offloaded.stats())

    Args:
        policy: ``Offload()`` (the default), another policy, its name, a plan or its file; on disk without a budget.
        target: ``"host"``, ``"disk"`` or ``"auto"``, as for ``enable_activation_offloading``.
        min_bytes: Storages below this size stay, in bytes or as ``"64KiB"``; 0: every storage is treated.
        window: Bytes in flight each way; default: of the largest context an eighth out, half of it in; at least 16 MiB.
        disk_path: Directory for the disk tier.
        verify: Compare every restored and every recomputed tensor with what was saved; slow.

    Raises:
        ConfigError: A value cannot be used; DataError: the plan file cannot be read.
        TargetError, EbbtideError: No such target, or an old torch; raised when the context is entered.
    """

    def __init__(
        self,
        *,
        policy: Policy | Plan | str | PathLike[str] | None = None,
        target: Target = "auto",
        min_bytes: int | str = MIN_BYTES,
        window: int | str | None = None,
        disk_path: str | PathLike[str] | None = None,
        verify: bool = False,
    ) -> None:
        self._options = options_of(target, min_bytes, window, disk_path, verify)
        self._policy = policy_of(policy) if policy is not None else Offload()
        # Per thread, since several may run one decorated function; reentrant.
        self._entered: defaultdict[int, list[list[tuple[Engine, offloading, IdleEngines]]]] = defaultdict(list)
        self._latest: Engine | None = None
        self._kept: dict[Hashable, IdleEngines] = {}  # idle engines of a plan, which lives no longer than this

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: a copied or unpickled context has no engine yet, and is not entered."""
        return {**self.__dict__, "_entered": defaultdict(list), "_latest": None, "_kept": {}}

    def stats(self) -> Stats:
        """Return the figures of the latest pass; the totals may include earlier contexts with the same settings."""
        return Stats() if self._latest is None else self._latest.stats()

    def __enter__(self) -> offload_saved_tensors:
        check_version("torch")
        if capture_query()():  # before an engine is opened, which synchronizes
            logger.warning("nothing is offloaded inside %s", GRAPH_CAPTURE)
            self._entered[get_ident()].append([])
            return self
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            pass  # torch.func refuses hooks: before an engine is opened, or forgets the figures of its latest pass
        idle = self._idle()
        if (engine := idle.take()) is None:
            engine = _open_engine(self._policy, self._options)
            refuse_budget(self._policy, engine.tier)
        hooks = offloading(engine, CONTEXT, [], kind=ContextRun)
        engine.begin_pass()
        self._entered[get_ident()].append([(engine, hooks, idle)])
        with undone_on_error(self.__exit__):
            hooks.__enter__()
        self._latest = engine
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        for engine, hooks, idle in self._entered[get_ident()].pop():
            hooks.close(error)
            idle.add(engine)  # of the settings and device at the time it was entered

    def _idle(self) -> IdleEngines:
        shared = isinstance(self._policy, Policy)  # a plan file makes another plan at each read
        index = torch.accelerator.is_available() and torch.accelerator.current_device_index()  # its engines pin there
        settings = (self._options, self._policy if shared else None, tuple(_custom_rules.items()), os.getpid(), index)
        return idle_engines(_idle_engines if shared else self._kept, settings)


def register_recompute(name: str, rule: Rule) -> None:
    """Register how the output of an autograd node is recomputed.

    Without a rule, a ``torch.autograd.Function``'s output is offloaded or kept. See docs/guides/custom-operators.md.

    Args:
        name: The node's name, such as ``"MyFunctionBackward"`` (``tensor.grad_fn.name()``).
        rule: Takes an ``ebbtide.NodeView``, returns an ``ebbtide.Expr``, or None if an operand is missing. Its
            first result at each site is compared bitwise with the real tensor.

    Raises:
        ConfigError: The name is not a string, or the rule is not callable.
    """
    check_rule(name, rule)
    _custom_rules[name] = rule
    _idle_engines.clear()  # they have the rules of before


def _open_engine(policy: Policy | Plan, options: Options, home: torch.device | None = None, **settings: Any) -> Engine:
    tier = open_tier(
        "auto" if isinstance(policy, Keep) else options.target, disk_path=options.disk_path,
        host_budget_bytes=options.host_budget_bytes, synchronous=options.synchronous, home=home)  # fmt: skip
    measured = measured_plan(policy, tier, options.window_bytes)
    plan = measured or (plan_for(policy) if isinstance(policy, Policy) else policy)
    engine = Engine(plan, tier, options, BUS, rules={**rule_table(), **_custom_rules}, **settings)
    if measured is not None:
        with undone_on_error(tier.close):
            measured.watch(engine)
    return engine
