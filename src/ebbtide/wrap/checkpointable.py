"""Which blocks may be checkpointed.

[Note: what may be checkpointed]
A second forward must compute the same values without side effects: see [Note: a second forward]. So some blocks are not
checkpointed, and each of their tensors is decided instead: blocks called with a mutable object such as a key-value
cache; blocks that change their own tensors in place (batch norm's running statistics, spectral norm's vectors; see
[Note: renewed parameters]) or a tensor among their arguments, or a list or dictionary there that has another name (see
[Note: containers of a call]);
blocks that can reach a random generator or hold an iterator; and blocks with units of FSDP1, which a second forward
finds and leaves in another state (torch 2.13). Changes are observed while blocks of the kind run; the first one is
never checkpointed. Unobserved changes are found by comparison: see [Note: checked checkpoints].
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ebbtide.base.actions import BLOCK_ACTIONS, Action, NamesBlocks, Plan, checked_action
from ebbtide.base.errors import RestoreError
from ebbtide.engine import Block
from ebbtide.engine.fingerprint import Compared
from ebbtide.engine.guard import Watched
from ebbtide.engine.modes import foreign_modes
from ebbtide.engine.run import BlockRun
from ebbtide.engine.stats import Tally
from ebbtide.wrap.agreement import Vote, Votes, has_collectives
from ebbtide.wrap.arrays import is_number
from ebbtide.wrap.blocks import ENTIRE_MODEL
from ebbtide.wrap.called import Called
from ebbtide.wrap.collectives import Collectives, Ranks, is_distributed, shared_groups, uncounted
from ebbtide.wrap.names import generators_of, is_stateless
from ebbtide.wrap.outside import LOOKS, Outside, Snapshot
from ebbtide.wrap.state import State, States
from ebbtide.wrap.strategy import is_fsdp1
from ebbtide.wrap.tree import Modules
from ebbtide.wrap.unchanged import Unseen, WatchedInputs, unchanged

logger = logging.getLogger("ebbtide.wrap")

_PLAIN = (
    torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, range, slice, Enum,
)  # fmt: skip
"""Argument types that a block cannot change unnoticed (tensors have versions)."""

_READ = "torch.nn.attention.flex_attention.BlockMask"
"""An argument type that blocks only read: a mask is made once per forward."""


_VERSION, _TRAINING = map(operator.attrgetter, ("_version", "training"))

_Modes = tuple[bool, ...]
_Place = tuple[str, _Modes]
"""The path of a block, and which of its modules are in training."""

_ADVANCES = "have a generator, an iterator or a file of their own, which a second forward would advance again"
_CHANGE_OWN = "change their own tensors in place, which a second forward would change again"
_NORMS = "; hint: BatchNorm counts each batch; recipes and offloading save the memory; GroupNorm can be checkpointed"
_TOO_MUCH = "can reach more containers, elements or bytes of writeable arrays than are restored for a second forward"

_INPUT_BYTES = tuple(2**power for power in (0, 10, 20, 30, 40))
_MUST_KEEP_BYTES = 2**62
"""Sizes of blocks without any recipe: a plan that checkpoints no such block checkpoints none. Every rank tries the same
sizes, whatever its batch, because the ranks that vote must be those that may checkpoint. A process alone also follows
what the plan chooses for the sizes that it has seen."""

Varies = Callable[[str], object] | None
"""Ends the checkpointing of a kind whose second forward differs, for a reason that it takes; None: other ranks are
needed, so the third forward that would show it must not run."""

Unfinished = Callable[[bool], bool]
"""Whether a second forward must run to its end: see ``Checkpointable.ending``."""


class Checkpointable:
    """Decides which blocks are checkpointed.

    Args:
        plan: Chooses, from the bytes that blocks of the kind saved.
        votes: Lets ranks whose blocks hold collectives decide together.
    """

    def __init__(self, plan: Plan, votes: Votes) -> None:
        self._plan, self._votes, self._collectives = plan, votes, Collectives()
        self._names = plan if isinstance(plan, NamesBlocks) else None
        self._voted: Plan | None = getattr(plan, "voted", None)  # where ranks decide together
        self._refused: dict[str, str] = {}  # kind → logged reason why not
        self._states = States()
        self._planned: dict[str, bool] = {}  # path of a block → whether it is to be checkpointed, by what it saved
        self._parts: dict[str, Modules] = {}  # of blocks, by path, when the tree was last walked
        self._modes: dict[str, _Modes] = {}  # path of a block → which of its modules were in training, in its forward
        self._inputs = WatchedInputs()
        self._looked: set[_Place] = set()  # of which a forward has been watched
        self._looks: Counter[str] = Counter()  # at what is outside of the blocks of a kind
        self._in_doubt: set[str] = set()  # kinds whose latest such forward changed something, see [Note: outside]
        self._ended: set[_Place] = set()  # of which a second forward may be cut off
        self._left: set[str] = set()  # kinds that communicate, whose latest one left something changed

    def decide(
        self,
        block: Block,
        module: nn.Module,
        seen: Tally,
        called: Called,
        state: State | None,
        *,
        tried: bool,
    ) -> bool:
        """Whether this call of a block is checkpointed.

        Args:
            seen: Bytes that blocks of the kind saved when they last ran without a checkpoint.
            state: From ``before``.
            tried: Checkpoint it if this process alone may decide, to measure the time.
        """
        if self._names is not None:
            return self._names.checkpoints(block.name) and self.able(block, module, called)
        known = self._collectives.known(block, module)
        if not known and not seen.input_bytes:
            return False
        planned = _chosen(self._plan_of(block, module), block, seen.input_bytes, seen.must_keep)
        self._planned[block.name] = planned
        if not known:
            return False
        allowed = planned and self._repeatable(block.kind, called) and block.kind not in self._in_doubt
        groups = self._collectives.groups(block, module)
        # Others wait for the vote of a rank without tokens, too.
        votes = seen.input_bytes or (shared_groups() and not self._alone(block, module))
        if votes and (state is not None or self._possible(block, module)):
            doubtful = planned and block.kind in self._in_doubt and block.kind not in self._refused
            no = Vote.NO if seen.input_bytes else Vote.UNSEEN
            wish = Vote.CHECKPOINT if allowed else Vote.LATER if doubtful else Vote.NEVER if planned else no
            if self._votes.decide(block.kind, module, wish, groups):
                # A doubt ends nothing that all have decided: no other rank need have it.
                allowed = allowed or self._repeatable(block.kind, called)
                if not allowed:
                    self._stop(block.kind, module, groups)
                return allowed
        elif allowed:
            return True
        elif planned:  # it was decided with others, and nothing was seen of this kind since
            self._stop(block.kind, module, groups)
        return tried and self.able(block, module, called)

    def _stop(self, kind: str, module: nn.Module, groups: Sequence[Ranks]) -> None:
        """Notify the ranks that decided to checkpoint a kind that this one cannot, and why."""
        unnamed = "got inference tensors or cached weights, or ran in a dispatch mode"
        self._votes.stop(kind, module, groups, self._refused.get(kind, unnamed))

    def able(self, block: Block, module: nn.Module, called: Called) -> bool:
        """Whether this process alone may checkpoint a block: it was watched, and no other rank is needed."""
        watched = (block.name, self._modes[block.name]) in self._looked and block.name != ENTIRE_MODEL
        undoubted = watched and block.kind not in self._in_doubt and self._alone(block, module)
        return undoubted and self._repeatable(block.kind, called)

    def varies(self, block: Block, module: nn.Module) -> Varies:
        """Return what is called when a second forward differs: in the backward, the modules may be in another mode."""
        return partial(self._refuse, block.kind) if not shared_groups() or self._alone(block, module) else None

    def ending(self, block: Block, module: nn.Module, state: State | None) -> Unfinished | None:
        """Return what looks at a second forward that begins now and is to be cut off. See [Note: cut off].

        It is called at the last saved tensor, with False, and returns whether the forward must run to its end; and
        after the forward, with True. None: this block was found to leave nothing changed.
        """
        kind, place = block.kind, (block.name, self._modes[block.name])
        if place in self._ended:
            return None
        outside = Outside(module, () if state is None else state.large_arrays)
        alone = not shared_groups() or self._alone(block, module)

        def unfinished(after: bool) -> bool:
            if after is alone:
                return False
            if not outside.changed:
                self._ended.add(place)
                self._left.discard(kind)
                return False
            if alone:
                return True
            if kind in self._left:
                raise _left_changed(block.name)
            self._left.add(kind)
            return False

        return unfinished

    def _alone(self, block: Block, module: nn.Module) -> bool:
        return not has_collectives(module) and not self._collectives.groups(block, module)

    def before(self, block: Block, module: nn.Module) -> State | None:
        """Return the contents of a block's modules before its forward; None if that need not be watched.

        Refuses a kind that can reach a generator: also if this very forward would have been checkpointed.
        """
        parts = self._parts.get(block.name)
        modes = tuple(map(_TRAINING, module.modules() if parts is None else parts.alive()))
        if self._modes.get(block.name) != modes:  # these tell which blocks are like it
            self._modes[block.name] = modes
            self._collectives.forget(block)
        looked = (block.name, modes) in self._looked
        if not self._possible(block, module) or (looked and block.kind in self._refused):
            self._states.last.pop(module, None)  # the plan may have changed
            return None
        state = self._states.before(module)
        if not looked:
            self._inspect(block.kind, module)
        if state.generators:  # a block may get one at any time
            self._refuse(block.kind, _ADVANCES)
        if not state.leave_graphs():
            self._refuse(block.kind, "hold a tensor with its graph in an object, and with it each step before")
        if state.too_much:
            self._refuse(block.kind, _TOO_MUCH)
        return state

    @contextmanager
    def watched(self, run: BlockRun, module: nn.Module, state: State | None, called: Called) -> Generator[None]:
        """Watch whether a forward of the block changes its buffers, its arguments, or what is outside of it.

        A forward that raises does not count: the next one is watched as if it were the first.
        """
        if state is None:
            yield
            return
        block, kind = run.block, run.block.kind
        place = block.name, self._modes[block.name]
        first = place not in self._looked
        own = state.versioned()
        versions = list(map(_VERSION, own))
        before = [Watched(t, None, Compared.FULL) for t in own] if first else []
        inputs = Snapshot(called.leaves)
        unseen = Unseen(own, called) if first else None
        looks = kind not in self._refused and (first or self._looks[kind] < LOOKS or kind in self._in_doubt)
        outside = Outside(module, state.large_arrays) if looks else None
        with self._collectives.look(block, module) if first else nullcontext():
            yield
        self._looked.add(place)
        if first:
            self._inputs.add(run, called)
        if first and (backends := uncounted()):
            self._refuse(kind, f"may need other ranks: collectives of {'/'.join(backends)} groups are not counted")
        if (first or list(map(_VERSION, own)) != versions) and not unchanged(own, versions, before, run.engine.guard):
            norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
            self._refuse(kind, _CHANGE_OWN, _NORMS if norms else "")
        if unseen is not None and (why := unseen.why()) is not None:
            self._refuse(kind, why)
        if outside is not None:
            self._see_outside(kind, outside)
        if run.filtered:
            self._refuse(kind, "save tensors for which keep_filter returns False")
        if run.jagged:
            self._refuse(kind, "create jagged tensors, whose sizes a second forward would name differently")
        leaves, spec = called.flatten()
        if (spec != called.spec or not inputs.same(leaves)) and not (
            inputs.same(called.leaves) and _have_one_name(called.containers, state)
        ):
            self._refuse(kind, "change their inputs, which a second forward would read changed")
        if kind not in self._refused:
            self._states.after(module, state)

    def forget(self) -> None:
        """Drop the blocks' states, which hold references that lead back to this object."""
        self._states = States()

    def pass_ends(self) -> None:
        """Refuse kinds whose blocks got what changed after their forward."""
        self._compare_inputs()
        self._inputs.kinds.clear()

    def _compare_inputs(self) -> None:
        for kind in self._inputs.changed():
            self._refuse(kind, "have inputs that change after their forward, which a second forward would read changed")

    def compare_parts(self, block: Block, module: nn.Module) -> None:
        """Watch a block as if it were new if one of its modules was replaced, or has another class."""
        parts, known = list(module.modules()), self._parts.get(block.name)
        if known is None or not known.same(parts):
            self._parts[block.name] = Modules(parts)
            for places in (self._looked, self._ended):
                places -= {place for place in places if place[0] == block.name}
            self._collectives.forget(block)

    def _inspect(self, kind: str, module: nn.Module) -> None:
        """Refuse a kind by what its functions and modules are."""
        if generators_of(module):
            self._refuse(kind, _ADVANCES)
        if (why := _computed_otherwise(module)) is not None:
            self._refuse(kind, why)

    def _see_outside(self, kind: str, outside: Outside) -> None:
        """Refuse a kind whose forwards change what is outside of them, see [Note: outside]."""
        self._looks[kind] += 1
        if not outside.changed:
            self._in_doubt.discard(kind)
        elif kind in self._in_doubt:
            self._refuse(kind, "change objects outside of their modules, which a second forward would change again")
        else:
            self._in_doubt.add(kind)

    def _possible(self, block: Block, module: nn.Module) -> bool:
        if self._names is not None:
            return self._names.may_checkpoint(block.name)
        plan = self._plan_of(block, module)
        alone = self._planned.get(block.name, False) and not shared_groups()
        return alone or any(_chosen(plan, block, size, _MUST_KEEP_BYTES) for size in _INPUT_BYTES)

    def _plan_of(self, block: Block, module: nn.Module) -> Plan:
        """Return the plan that decides whether a block is checkpointed: one of all ranks if its forward may need them.

        Nothing is known of blocks in another mode, or with other modules, than those that have run: all ranks watch
        the first one, whatever each of them has measured.
        """
        if self._voted is None or not is_distributed() or not shared_groups():
            return self._plan
        alone = self._collectives.looked(block, module) and self._alone(block, module)
        return self._plan if alone else self._voted

    def _repeatable(self, kind: str, called: Called) -> bool:
        """Whether nothing is known that a second forward of this call would do otherwise."""
        changeable = next((x for x in called.leaves if not (isinstance(x, _PLAIN) or _is_value(x))), None)
        if changeable is not None:
            name = type(changeable).__name__
            cache = "Cache" in name
            what = f"key-value cache ({name})" if cache else name
            # The decoder of a T5 has a copy of the model's config.
            config = "get_decoder().config" if "EncoderDecoder" in name else "config.get_text_config()"
            hint = f"; hint: model.{config}.use_cache = False (prefix tuning always passes a cache)" if cache else ""
            self._refuse(kind, f"take a {what}, which a second forward would read changed", hint)
        if self._inputs.kinds:
            self._compare_inputs()
        if parametrize._cache_enabled or any(map(torch.is_inference, called.tensors)):
            return False  # weights that another block computed are no arguments; autograd saves no inference tensors
        if foreign_modes():
            return False  # one may be closed in backward, or counts what runs: see [Note: modes]
        return kind not in self._refused

    def _refuse(self, kind: str, why: str, hint: str = "") -> None:
        if kind not in self._refused:
            self._refused[kind] = why
            self._in_doubt.discard(kind)
            self.forget()  # a block of the kind that never runs again, too, would hold what its state refers to
            level = logging.WARNING if self._names is None else logging.DEBUG
            text = "%s blocks are not checkpointed: they %s; each of their tensors is planned separately%s"
            logger.log(level, text, kind, why, hint)


def _chosen(plan: Plan, block: Block, input_bytes: int, must_keep_bytes: int) -> bool:
    """Whether a plan checkpoints a block with so many bytes."""
    action = plan.block_action(block.kind, block.index, input_bytes=input_bytes, must_keep_bytes=must_keep_bytes)
    return checked_action(action, BLOCK_ACTIONS, plan, "block_action") is Action.CHECKPOINT


def _left_changed(block: str) -> RestoreError:
    return RestoreError(
        f"block {block!r} was checkpointed, and its second forward left an object outside of its modules changed",
        expected="an object that is as before, although an exception ends the forward after its last saved tensor",
        hint="change it back in `finally`, or use policy 'offload', which checkpoints nothing",
    )


def _is_value(x: Any) -> bool:
    """Whether an argument is the same in a second forward: a block cannot change it unnoticed."""
    if isinstance(x, _PLAIN) or is_number(x) or f"{type(x).__module__}.{type(x).__qualname__}" == _READ:
        return True
    if type(x) is frozenset:  # which no walk over the arguments opens: a tensor in it would go unnoticed
        return not any(isinstance(value, torch.Tensor) or not _is_value(value) for value in x)
    return isinstance(x, (FunctionType, BuiltinFunctionType)) and is_stateless(x)


def _have_one_name(containers: Sequence[Any], state: State) -> bool:
    """Whether a second forward may write copies of containers. See [Note: containers of a call]."""
    return len(set(map(id, containers))) == len(containers) and not state.holds(containers)


def _computed_otherwise(module: nn.Module) -> str | None:
    """Return why a second forward would compute otherwise, if it is known to."""
    for part in module.modules():
        if is_fsdp1(part):
            return "hold units of FSDP1, which have other weights in a backward than in a forward"
        here = next((p.device.type for p in part.parameters()), "cpu")  # a parametrization's are below the layer
        if here == "cpu":
            continue
        if isinstance(part, nn.RNNBase) and part.dropout > 0 and part.num_layers > 1:
            return "hold a recurrent layer with dropout, whose random state the library keeps to itself"
        if here == "cuda" and isinstance(part, nn.modules.conv._ConvNd) and torch.backends.cudnn.benchmark:
            return "hold a convolution, for which cudnn.benchmark=True may choose another algorithm in backward"
    return None
