"""Install the hooks around the blocks, and remove them.

[Note: where the hooks stand] A block's ``forward`` is replaced on the instance. That is inside module hooks, so FSDP
unshards before and reshards after (not of compiled blocks: see [Note: compiled units]); and it is outside a ``forward``
that checkpoints itself, so the checkpoint's hooks are innermost and ours see its inputs. Hooks opened *inside* a
checkpointed function would silently cancel the checkpoint, so none are opened there: see [Note: checkpoints around
blocks]. Hooks are never open while ``backward()`` runs.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ebbtide.base.units import format_size
from ebbtide.engine import Block, Engine
from ebbtide.engine.run import BlockRun, begin_block
from ebbtide.engine.slots import readable
from ebbtide.engine.stats import Tally
from ebbtide.wrap.agreement import Agreement, Votes
from ebbtide.wrap.blocks import ENTIRE_MODEL, paths_in, still_inside, under_fsdp1, weights_of
from ebbtide.wrap.called import Called
from ebbtide.wrap.checkpointable import Checkpointable
from ebbtide.wrap.checkpointed import REQUIRES_GRAD, ForwardContext
from ebbtide.wrap.checkpointedcall import is_checkpoint_hook
from ebbtide.wrap.coverage import Blocks, Watch
from ebbtide.wrap.foreign_checkpoints import (
    Kept,
    checkpoint_around,
    checkpoint_before,
    in_reentrant_checkpoint,
    innermost_hooks,
    name_checkpoints,
)
from ebbtide.wrap.forward import (
    GRAPH_CAPTURE,
    INSIDE,
    TORCH_EXPORT,
    StandIn,
    called_attribute,
    in_backward,
    is_compiled,
    refuse_compiled_around,
    replays_graphs,
    running_transform,
)
from ebbtide.wrap.hooks import offloading
from ebbtide.wrap.other_offloaders import attached, refuse_around, refuse_attached, refuse_compiled
from ebbtide.wrap.plain import PlainBlocks
from ebbtide.wrap.rest import Rest
from ebbtide.wrap.scope import Scope
from ebbtide.wrap.state import State
from ebbtide.wrap.strategy import weights_move
from ebbtide.wrap.threads import SerialCalls, serially
from ebbtide.wrap.tree import Tree

logger = logging.getLogger("ebbtide.wrap")


class Attachment:
    """The hooks of one handle on one model.

    Args:
        model: The model; its forward delimits a pass.
        blocks: Modules, each with its description for the engine.
        engine: Executes the plan.
        watch: Measures the blocks' share of the bytes that autograd saves.

    Raises:
        ConflictError: A block is already offloaded by another handle, or is a part of a compiled module.
        ConfigError: Ranks that train the same part of the model have different settings.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, engine: Engine, watch: Watch | None = None) -> None:
        refuse_attached(blocks)
        paths = paths_in(model)
        for module, _ in blocks:
            if module is not model:
                refuse_compiled_around(model, paths[module])
        refuse_compiled(blocks)
        self.engine, self.enabled = engine, True
        self.handle: Any = None  # while attached; the hooks hold it, so that a lost handle can be closed
        self._model, self._blocks = model, blocks
        self._known = weakref.WeakKeyDictionary(blocks)  # in their order, also those that are not inside for a while
        self._tree, self._moves = Tree(model), (0, False)  # version of the tree → whether weights move
        self._agreement = Agreement(model, engine, self._tree)
        self._agreement.reach(blocks)
        self._undo: list[Callable[[], object]] = []
        self.calls = SerialCalls(model)
        self._watch, self._depth, self._room_checked = watch, 0, False
        self._ran: set[str] = set()
        self._before: Block | None = None  # the latest one without gradients in this pass, if in a checkpoint
        self._logged: set[str] = set()  # already logged reasons for offloading nothing
        self._checkpointable = Checkpointable(engine.plan, Votes(self._agreement.voting))
        self._plain = PlainBlocks(engine)
        self._rest = Rest(engine, self._plain)
        self._seen: dict[str, Tally] = {}  # block kind → what it saved when it last ran without a checkpoint
        self._seen_at: dict[str, Tally] = {}  # path of a block → the same
        self._scopes: list[Scope] = []
        self._own: Scope | None = None  # of a model that is its own single block
        name = called_attribute(model)  # see [Note: compiled blocks]
        try:
            self._undo.append(StandIn(model, self._model_call, name, traced=self._compiled_away).remove)
            self._install(blocks)
        except BaseException:  # Ctrl-C too
            self.remove()
            raise

    @property
    def block_names(self) -> list[str]:
        """Paths of the blocks."""
        return [block.name for _, block in self._blocks]

    def remove(self) -> None:
        """Remove all hooks. May be called repeatedly; a repeat finishes an interrupted removal."""
        self.enabled = False  # for a replaced forward that stays because somebody has wrapped it since
        self._install([])
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.handle = None

    def explain(self) -> list[str]:
        """Return lines on the blocks' share of the bytes that autograd saves."""
        return [] if self._watch is None else self._watch.explain()

    # Replaced forwards

    @serially
    def _model_call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        off = not self.enabled or not torch.is_grad_enabled()
        if off or self._depth or in_backward() or self._transformed() or self._in_block():
            return forward(*args, **kwargs)
        self._agreement.reach(self._blocks)
        version, trains = self._look()
        if self._rest.prepare(self._scopes, self._put_on, trains, args, kwargs):
            return forward(*args, **kwargs)
        self._depth += 1
        try:
            self._ran.clear()
            self._stand_around_compiled()  # blocks may have been compiled after the handle was made
            self._begin_pass(version, trains)
            self._rest.pass_begins()
            if self._own is not None:
                forward = functools.partial(self._own_call, self._own, forward)
            if self._watch is None:
                return forward(*args, **kwargs)
            return self._watch.call(self._blocks, forward, args, kwargs)
        except BaseException:
            if self.engine.timer is not None:
                self.engine.timer.forget()
            raise
        finally:
            self._depth -= 1
            self._checkpointable.pass_ends()
            self.engine.end_pass()
            better = None if self._watch is None else self._watch.pass_ends(self._blocks, self._before)
            if better is not None and self._undo:  # not closed meanwhile
                self._known = weakref.WeakKeyDictionary(better)
                self._install(better)

    def _own_call(self, scope: Scope, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a model that is its own single block, inside a pass."""
        return self._block_call(scope, forward, args, kwargs)

    def _look(self) -> tuple[int, bytes]:
        """Return the tree's version, and the state of training, for plans by which blocks may run without hooks."""
        return self._tree.look(), b"" if self.engine.timer is None else self._tree.trains()

    def _begin_pass(self, version: int, trains: bytes) -> None:
        self._before = None
        self._plain.begin_pass(trains)
        known, moves = self._moves
        if version != known:  # FSDP may be applied after the handle
            moves = weights_move(self._model)
            self._moves = version, moves
            if (inside := still_inside(self._model, self._known, self._logged)) != self._blocks:
                self._install(inside)
            for scope in self._scopes:
                scope.forget_parts()
                self._checkpointable.compare_parts(scope.block, scope.module)
        self.engine.weights.move = moves
        lasting = functools.partial(weights_of, under_fsdp1(self._model)) if moves else tuple
        self.engine.begin_pass(lasting, self._tree.weights())
        self.engine.bus.emit("pass_begin")

    def _in_block(self) -> bool:
        """Whether a block runs that was called without the model's forward: what it calls is of the same pass."""
        return True in [scope.open for scope in self._scopes]  # a generator would be a call for each

    @serially
    def _block_call(
        self, scope: Scope, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            if self._depth and self.enabled and not in_backward():
                self._leave_to_reentrant(scope, Called(forward, args, kwargs).tensors)
            return forward(*args, **kwargs)
        self.engine.current_pass.called = True
        if not self.enabled or scope.open or in_backward() or self._transformed() or self._graphed(scope.module):
            return forward(*args, **kwargs)
        block, pack = scope.block, innermost_hooks()
        if is_checkpoint_hook(pack):  # called by a checkpointed block, which saves nothing inside it
            return forward(*args, **kwargs)
        if not self._depth and not self._in_block():
            # Blocks called without the model's forward: a repeat begins a new pass.
            if not self._ran or block.name in self._ran:
                self._agreement.reach(self._blocks)
                self._ran.clear()
                self._rest.pass_begins_without_model(self._scopes, self._put_on)
                self._begin_pass(*self._look())
            self._ran.add(block.name)
        called = Called(forward, args, kwargs)
        if (kept := checkpoint_around(pack)) is not None:
            self._leave_to_checkpoint(kept, block, called.tensors)
            return called.run()
        refuse_around(block.name, pack)
        if self.engine.timer is not None:
            self.engine.timer.hand_over()  # a new plan may let this block run plain, or no longer
        if (seen := self._plain.wanted(block, called.tensors)) is not None:
            scope.open = True
            try:
                return self._plain.call(block, called, seen)
            finally:
                scope.open = False
        return self._offloaded_call(scope, called)

    def _offloaded_call(self, scope: Scope, called: Called) -> Any:
        """Run a block's forward under the hooks, or checkpointed."""
        engine, block = self.engine, scope.block
        seen = self._seen.get(block.kind) or Tally()
        measured = engine.timer is not None and engine.timer.wanted
        tried = engine.timer is not None and engine.timer.tries(block.name)
        state = self._checkpointable.before(block, scope.module)
        checkpointed = block.name != ENTIRE_MODEL and self._checkpointable.decide(
            block, scope.module, seen, called, state, tried=tried
        )
        if checkpointed and not any(map(REQUIRES_GRAD, called.tensors)):
            # Without one that takes a gradient its output takes none.
            checkpointed = any(map(REQUIRES_GRAD, (state or State(scope.module.modules())).tensors))
        self._check_room()
        hooks = offloading(engine, block, called.tensors, checkpointed=checkpointed)
        try:
            # A compiled call that falls back to eager code must not open hooks a second time.
            scope.open = True
            with hooks as run:
                with self._checkpointable.watched(run, scope.module, state, called):
                    if checkpointed:
                        context = ForwardContext(scope.module, run, called.tensors, state, self._checkpointable)
                        output = context.call(called, self._seen_at.get(block.name, seen).unique_for(run.tally))
                    else:
                        output = self._followed_call(scope, run, called)
                if measured and not checkpointed:
                    run.checkpointable = self._checkpointable.able(block, scope.module, called)
            if not checkpointed:
                self._plain.saw(run, called.tensors)
            self._plain.mark(run, called.tensors, output)
            return output
        finally:
            scope.open = False
            hooks.close()  # an interrupt may have left them open
            self._leave_compiled_parts(scope)

    def _followed_call(self, scope: Scope, run: BlockRun, called: Called) -> Any:
        """Run a block's forward under the hooks of its modules."""
        try:
            scope.begin(run)
            output = called.run()
            scope.others.check(scope.block.name, run)
            if scope.others.checkpointed:
                name_checkpoints(self._logged, scope.block.name)
            return output
        finally:
            scope.end()
            scope.others.forget()
            self._seen[scope.block.kind] = self._seen_at[scope.block.name] = run.tally

    def _leave_to_checkpoint(self, kept: Kept, block: Block, inputs: list[torch.Tensor]) -> None:
        """Offload the tensors that a checkpoint around a block keeps. See [Note: checkpoints around blocks].

        Raises:
            ConflictError: Another offloader already holds it.
        """
        name_checkpoints(self._logged, block.name)
        run = begin_block(self.engine, block, kept.tensors() if readable() else inputs)
        try:
            theirs = kept.hook((run.pack, self.engine.unpack))
        finally:
            self.engine.end_block(run, checkpointed=True)
        refuse_around(block.name, theirs)

    def _leave_to_reentrant(self, scope: Scope, inputs: list[torch.Tensor]) -> None:
        """Offload the tensors that a reentrant checkpoint around the previous block keeps."""
        before, self._before = self._before, scope.block if in_reentrant_checkpoint() else None
        kept = None if before is None else checkpoint_before(inputs)
        if before is not None and kept is not None:
            self._leave_to_checkpoint(kept, before, [])  # its inputs are no longer known

    def _compiled_away(self) -> None:
        """Warn that the model, or a module around its blocks, is compiled, so that our hooks do not run."""
        if self.enabled and torch.compiler.is_exporting():
            self._warn_once(INSIDE % TORCH_EXPORT)
        elif self.enabled:
            self._warn_once(
                "nothing is offloaded in code that is being compiled: hooks inside it would break its graph; "
                "compile the blocks instead: `for block in model.layers: block.compile()`"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)

    def _transformed(self) -> bool:
        """Whether a torch transform runs the model, under which autograd refuses hooks or saves no real tensors."""
        transform = running_transform() or (GRAPH_CAPTURE if self.engine.tier.capturing() else None)
        if transform is not None:
            self._warn_once(INSIDE % transform)
        return transform is not None

    def _graphed(self, module: nn.Module) -> bool:
        """Whether a compiled block is replayed from device graphs. See [Note: device graphs]."""
        graphed = is_compiled(module) and replays_graphs()
        if graphed:
            self._warn_once(
                "nothing is offloaded in compiled blocks that torch replays from device graphs "
                "(mode='reduce-overhead'): their saved tensors are in the graphs' memory; "
                "hint: compile the blocks with mode='max-autotune-no-cudagraphs' or the default mode"
            )
        return graphed

    def _check_room(self) -> None:
        """After the first block, announce to the store what all blocks need if they are alike; warn if it has no room.

        The store itself raises when it is full: the blocks of a pyramid may get smaller.
        """
        if self._room_checked or not self._seen:
            return
        self._room_checked = True
        tier, seen = self.engine.tier, next(iter(self._seen.values()))
        needed, free = seen.offloaded * (len(self._blocks) - 1), tier.free_bytes
        tier.expect(needed)
        if tier.name == "disk" and free is not None and needed > free:
            logger.warning(
                "the disk tier can hold %s more, and %d more blocks like the first would offload %s; "
                "hint: free some space, name another disk_path, or use policy 'minimal', which offloads far less",
                format_size(free), len(self._blocks) - 1, format_size(needed),
            )  # fmt: skip

    # Installing

    def _install(self, blocks: Blocks) -> None:
        """Put hooks around the blocks, and remove them from modules that are no longer blocks."""
        modules, self._blocks = {id(module) for module, _ in blocks}, blocks
        for scope in [scope for scope in self._scopes if id(scope.module) not in modules]:
            scope.open = True  # for a replaced forward that stays because somebody has wrapped it since
            scope.leave()
            attached.pop(scope.module, None)
            self._checkpointable.forget()
            self._scopes.remove(scope)  # the last step, so that an interrupted removal can be repeated
        known = {id(scope.module): scope for scope in self._scopes}
        for module, block in blocks:
            if (scope := known.get(id(module))) is not None:
                scope.block = block
            else:
                attached[module], scope = weakref.ref(self), Scope(block, module)
                self._scopes.append(scope)
                self._put_on(scope)
        self._stand_around_compiled()

    def _put_on(self, scope: Scope) -> None:
        if scope.module is self._model:
            self._own = scope
        else:
            call = functools.partial(self._block_call, scope)
            scope.inside.append(StandIn(scope.module, call, traced=self._compiled_away).remove)

    def _stand_around_compiled(self) -> None:
        """Install the hooks around compiled blocks. See [Note: compiled blocks]."""
        refuse_compiled(self._blocks)
        for scope in self._scopes:
            compiled = scope.module._compiled_call_impl
            if compiled is not None and not isinstance(compiled, StandIn):
                scope.leave()
                call = functools.partial(self._block_call, scope)
                scope.inside.append(StandIn(scope.module, call, "_compiled_call_impl").remove)

    def _leave_compiled_parts(self, scope: Scope) -> None:
        """Remove the hooks from modules that run in compiled code inside eager blocks. See [Note: compiled blocks]."""
        if scope.compiled:
            for other in self._scopes:
                if other.block.kind == scope.block.kind:
                    other.leave_parts(scope.compiled)
            scope.compiled.clear()
