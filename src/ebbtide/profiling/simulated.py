"""Plans without a step: simulate the model once. See [Note: a simulated step] in ``faketensors.py``."""

from __future__ import annotations

import copy
import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from ebbtide.base.actions import Action
from ebbtide.base.errors import ConfigError
from ebbtide.base.events import Bus
from ebbtide.base.units import format_size
from ebbtide.config import Auto, Options
from ebbtide.engine import Engine
from ebbtide.engine.rules import rule_table
from ebbtide.engine.tickets import Entry
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.trust import Trust
from ebbtide.planner import plan_for
from ebbtide.planner.machines import Machine
from ebbtide.planner.profile import BlockProfile, Profile, Rates
from ebbtide.profiling.attention import FusedAttention
from ebbtide.profiling.faketensors import NEEDS_VALUES, TENSOR_TYPES, FakeMachine, FakeTensorTier, without_bytes
from ebbtide.profiling.repeats import Marks, NotAlike, Repeats
from ebbtide.profiling.step_profile import profile_of
from ebbtide.store.share import share_of
from ebbtide.wrap import Attachment, find_blocks

logger = logging.getLogger("ebbtide")

AT_ONCE = Rates(out_bytes_per_second=1e30, in_bytes_per_second=1e30)
NO_WINDOW = 1
"""Copy rates and window while a simulated step is recorded; the copies of a plan are simulated later."""


class NothingSaved(ConfigError):
    """Blocks save nothing that is large enough to be offloaded."""


class _UnverifiedTrust(Trust):
    """Verification without bytes: a recipe passes if it runs and has the right shape.

    It takes no simulated time, because a measured step verifies before it is measured.
    """

    def __init__(self, bus: Bus, machine: FakeMachine) -> None:
        super().__init__(bus)
        self._machine, self.fingerprints = machine, False

    def _compare(self, entry: Entry, base: torch.Tensor, run: Callable[[], torch.Tensor]) -> bool | torch.Tensor:
        with self._machine.unseen():
            return super()._compare(entry, base, run)

    def same_bytes(self, value: torch.Tensor, base: torch.Tensor) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Ranks, optimizer and precision of the training around a forward and a backward.

    Attributes:
        shards: Ranks that share weights, gradients and optimizer state (fully sharded data parallel).
        ranks: Ranks of one node that copy at once; None: as many as there are shards, or as the node has devices.
        optimizer_state: Bytes of state per byte of trained weights: 2 for Adam, 1 for momentum.
        micro_batches: Of a step. Above 1 a later one is simulated: the gradients of earlier ones are there, on each
            rank those of all weights, because transformers lets FSDP reduce them only in the last.
        autocast: Whether the forward computes in bfloat16 where that is safe, on weights of another type.
    """

    shards: int = 1
    ranks: int | None = None
    optimizer_state: float = 2.0
    micro_batches: int = 1
    autocast: bool = False

    def __post_init__(self) -> None:
        for name, least in (("shards", 1), ("ranks", 1), ("optimizer_state", 0)):
            value = getattr(self, name)
            number = isinstance(value, int if least else (int, float)) and not isinstance(value, bool)
            if not (number and least <= value < math.inf) and not (name == "ranks" and value is None):
                raise ConfigError(
                    f"{name} is {value!r}",
                    expected=f"a {'whole number' if least else 'number'}, {least} or more",
                    hint="2 is Adam's state: twice the bytes of what is trained" if not least else "1 is one device",
                )


def simulate_model(
    model: nn.Module,
    batch: Any,
    machine: Machine,
    *,
    job: Job | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    blocks: Sequence[str] | None = None,
    options: Options | None = None,
    rules: dict[str, Any] | None = None,
) -> Profile:
    """Simulate one step and return its profile.

    Args:
        model: On meta or not; it is copied without its bytes and not changed.
        batch: Arguments of its forward: a mapping of names, a sequence, or one tensor. Real or on meta.
        machine: What operators and copies cost.
        job: Ranks and optimizer; default: one rank, Adam.
        loss: Returns the loss from the output of forward; default: its ``loss``, or the mean square of
            the first tensor.
        blocks: As for ``enable_activation_offloading``.
        options: Likewise.
        rules: Recompute rules; default: the built-in ones.

    Raises:
        ConfigError: The model is sharded or quantised, or its code reads values that fake tensors lack.
        NothingSaved: Blocks save nothing of ``min_bytes`` or more.
        BlocksError: The model has no parameters, or a glob matches nothing.
    """
    task = _Task(model, batch, machine, job or Job(), loss, blocks, options or Options(), rules or rule_table())
    try:
        return task.profile(every_block=False)
    except NotAlike as error:
        logger.debug("blocks are simulated one by one: %s", str(error))
        return task.profile(every_block=True)


@dataclass(frozen=True, slots=True)
class _Task:
    """The arguments of ``simulate_model``."""

    model: nn.Module
    batch: Any
    machine: Machine
    job: Job
    loss: Callable[[Any], torch.Tensor] | None
    blocks: Sequence[str] | None
    options: Options
    rules: dict[str, Any]

    def profile(self, *, every_block: bool) -> Profile:
        """Simulate one step, of every block or as in [Note: repeated blocks].

        Raises:
            NotAlike: Blocks that were left out are not like those that ran.
        """
        mode, found = without_bytes(), list[TimedStep]()
        with mode:
            twin, arguments = _without_bytes(self.model, self.job), tree_map(_fake_argument, self.batch)
        pairs = find_blocks(twin, self.blocks)
        modules = [module for module, _ in pairs]
        inputs = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        simulated = FakeMachine(self.machine, _base_bytes(twin, modules, self.job) + _nbytes(inputs))
        bus = Bus()
        engine = Engine(
            plan_for(Auto()), FakeTensorTier(), replace(self.options, window_bytes=NO_WINDOW), bus,
            rules=self.rules, tensor_types=TENSOR_TYPES, model_weights=lambda: (*twin.parameters(), *twin.buffers()),
            trust=_UnverifiedTrust(bus, simulated),
        )  # fmt: skip
        timer = Marks(simulated, lambda step: bool(found.append(step)), waited=dict[str, float], memory=True)
        engine.timer = timer
        timer.want()
        repeats = None if every_block else Repeats(pairs, self.job.shards)
        attachment = Attachment(twin, pairs, engine)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng(devices=[]))  # small random tensors are real
                stack.enter_context(warnings.catch_warnings())  # torch to 2.10, of experts that ask where weights lie
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor is deprecated")
                stack.enter_context(mode)
                stack.callback(_shard_gradients(modules, self.job))
                stack.enter_context(simulated)
                if not self.machine.stores_on_disk:
                    stack.enter_context(FusedAttention())
                simulated.ignore([*twin.parameters(), *twin.buffers(), *_gradients(twin), *inputs])
                loss = self._loss(twin, arguments)  # the output is dropped before backward, as in most loops
                torch.autograd.backward(get_gradient_edge(loss))  # of a tensor it would run without function modes
                timer.hand_over()
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"the model's code reads a tensor's values ({type(error).__name__}: {error.func})",
                expected="a forward whose control flow does not depend on values of weights and activations",
                hint="train a few steps instead: Auto measures them, and handle.plan.save(path) writes the plan",
            ) from error
        except NotAlike:
            raise
        except Exception as error:
            error.add_note("(while one step of the model was simulated, to make a plan)")
            raise
        finally:
            attachment.remove()
        if not found:
            raise NothingSaved(
                f"no block saved anything of {format_size(self.options.min_bytes)} or more that the backward read",
                expected="a batch of the trained size, and a loss that depends on the outputs of the blocks",
                hint="pass the real batch, `loss=` if forward returns several things, `blocks=` if others are repeated",
            )
        step = found[0] if repeats is None or not repeats.some else repeats.complete(found[0], timer)
        profile = self._profile_of(step, twin, simulated.seconds(0.0, timer.began or 0.0))
        return _with_checkpoint_bases(profile, step, timer.backward)

    def _loss(self, twin: nn.Module, arguments: Any) -> torch.Tensor:
        found = torch.accelerator.current_accelerator()
        around = torch.is_autocast_enabled("cpu") or (found is not None and torch.is_autocast_enabled(found.type))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.job.autocast or around):
            return _loss_of(_call(twin, arguments), self.loss)

    def _profile_of(self, step: TimedStep, twin: nn.Module, prologue: float) -> Profile:
        job, machine, host_bytes = self.job, self.machine, self.machine.host_memory_bytes
        ranks = job.ranks or max(1, min(job.shards, machine.devices))
        profile = profile_of(step, machine.rates(ranks), self.options.window_bytes, ran=(AT_ONCE, NO_WINDOW))
        epilogue = profile.epilogue_seconds + _update_seconds(twin, job, machine) / job.micro_batches
        store_bytes = None if machine.stores_on_disk else share_of(host_bytes, host_bytes, ranks)
        return replace(profile, prologue_seconds=prologue, epilogue_seconds=epilogue, store_bytes=store_bytes)


def _with_checkpoint_bases(profile: Profile, step: TimedStep, begins: dict[str, int]) -> Profile:
    """Return the profile with the base of each block if it is checkpointed.

    The heuristic's step frees what it recomputed before it recomputes more; a checkpointed block has all at once, and
    what was on the device at the beginning of its backward. An operator then holds the gradient of its result and makes
    that of its input, each at most as large as the largest saved tensor.
    """
    blocks, kept = list[BlockProfile](), 0
    for block, timed in zip(profile.blocks, step.blocks, strict=True):
        kept += sum(unit.nbytes for unit in timed.units if unit.action is Action.KEEP)
        work = 2 * max((unit.nbytes for unit in block.units), default=0)
        base = max(begins.get(block.name, 0) - kept, 0) + work
        blocks.append(replace(block, checkpoint_base_bytes=base))
    return replace(profile, blocks=tuple(blocks))


def _loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """Return the tensor that backward begins with."""
    if loss is not None:
        return loss(output)
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if value is None:
        value = next((x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad), None)
    if value is None:
        raise ConfigError(
            f"forward returned {type(output).__name__}, and there is nothing to begin a backward with",
            expected="a `loss`, or a tensor that requires gradients",
            hint="is every weight frozen? otherwise pass loss=, a function of what forward returns",
        )
    return value if value.ndim == 0 else value.float().square().mean()


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the shape, strides and dtype of another; it reports host memory as its device."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _fake_argument(value: Any) -> Any:
    """Return a fake argument of the forward; integers with values stay real, because the model may branch on them."""
    if not isinstance(value, torch.Tensor):
        return value
    if not (value.is_floating_point() or value.is_meta):
        with unset_fake_temporarily():
            return value.cpu()  # the device that fake tensors report
    return _fake(value).requires_grad_(value.requires_grad)


def _without_bytes(model: nn.Module, job: Job) -> nn.Module:
    """Return a copy of a model whose weights, and gradients of earlier micro-batches, are fake tensors."""
    memo: dict[int, Any] = {}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        kind = type(weight)
        if kind not in (nn.Parameter, torch.Tensor, nn.Buffer):
            raise ConfigError(
                f"{name} is a {kind.__name__}",
                expected="plain weights: sharding is passed as a number, and quantised weights are not supported",
                hint="make the plan of the model before it is wrapped or quantised",
            )
        twin = _fake(weight)
        memo[id(weight)] = nn.Parameter(twin, requires_grad=weight.requires_grad) if kind is nn.Parameter else twin
        if weight.requires_grad and job.micro_batches > 1:
            memo[id(weight)].grad = _fake(weight)
    return copy.deepcopy(model, memo)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.itemsize for x in tensors)


def _base_bytes(model: nn.Module, blocks: list[nn.Module], job: Job) -> int:
    """Return the base: weights, optimizer state, earlier gradients, and gathered weights if they are sharded.

    Two blocks are gathered at a time, because FSDP prefetches the next; weights outside of blocks always are.
    """
    weights, unsharded = _nbytes(model.parameters()), _nbytes(model.buffers()) + _nbytes(_gradients(model))
    inside = {parameter for block in blocks for parameter in block.parameters()}
    state = job.optimizer_state * _nbytes(p for p in model.parameters() if p.requires_grad)
    if job.shards == 1:
        return int(weights + unsharded + state)
    twice = 2 * max(_nbytes(block.parameters()) for block in blocks)
    gathered = weights - _nbytes(inside) + min(_nbytes(inside), twice)
    return int((weights + state) / job.shards + gathered + unsharded)


def _shard_gradients(blocks: list[nn.Module], job: Job) -> Callable[[], None]:
    """Reduce a block's gradients to shards once another block's arrive; gradients outside of blocks stay whole.

    Those of a micro-batch before the last stay whole, too.

    Returns:
        A function that removes this.
    """
    kept: list[torch.Tensor] = []
    finished: dict[int, list[torch.Tensor]] = {}  # by block, the parameters whose gradients are whole

    def arrived(place: int, parameter: torch.Tensor) -> None:
        for other in [known for known in finished if known != place]:
            for shrinking in finished.pop(other):
                grad, shrinking.grad = shrinking.grad, None
                if grad is not None:
                    kept.append(torch.empty(math.ceil(grad.numel() / job.shards), dtype=grad.dtype, device=grad.device))
        finished.setdefault(place, []).append(parameter)

    handles = [
        parameter.register_post_accumulate_grad_hook(functools.partial(arrived, place))
        for place, block in enumerate(blocks)
        for parameter in block.parameters()
        if parameter.requires_grad and job.shards > 1 and job.micro_batches == 1
    ]

    def undo() -> None:
        kept.clear()
        finished.clear()
        for handle in handles:
            handle.remove()

    return undo


def _update_seconds(model: nn.Module, job: Job, machine: Machine) -> float:
    """Return the time of the optimizer's step, which reads and writes weights and state, and reads gradients."""
    trained = _nbytes(p for p in model.parameters() if p.requires_grad) / job.shards
    return trained * (3 + 2 * job.optimizer_state) / machine.memory_bytes_per_second
