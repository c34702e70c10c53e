"""The blocks' share of the bytes that autograd saves, and blocks chosen by it.

[Note: coverage]
Tensors saved inside blocks are counted in the pack hook. Tensors saved outside are read from the graph, once, after the
first forward with gradients: every node reachable from the outputs exposes its saved tensors. No hooks are opened for
this, because any hook, even the identity, changes autograd's checks and lifetimes. A node's sequence number identifies
the module that saved a tensor: in this pass, module hooks record the numbers at the start and end of each forward.
Nodes with lower numbers are those of another model, which computed this one's inputs. Not counted are tensors that the
store does not take, inside as outside (those of a model that is still on the CPU), tensors already freed by backward,
and nodes of C++ extensions, which expose none. A torch that does not show what nodes saved (before 2.10) counts
nothing: the coverage stays unknown, and no block is chosen by it.

[Note: blocks by what they save]
Modules outside of the blocks found by structure that save more than ``LARGE_SHARE`` of the bytes, or the layers in
these, become blocks from the second pass on: the stem of a convolutional network saves as much as several of its
blocks. If the blocks were not a stack and still hold less than ``LOW_PERCENT``, the model becomes one block. This is
done once, and only in single-process training: ranks must have the same blocks, but their batches differ.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.base.actions import Action
from ebbtide.base.units import format_size
from ebbtide.engine import Block, Engine
from ebbtide.engine.inputs import node_of
from ebbtide.engine.layout import Layout, has_layout
from ebbtide.engine.slots import packed_in, readable
from ebbtide.engine.stats import Coverage
from ebbtide.engine.storages import plain_tensors, storage_key
from ebbtide.engine.weights import is_parameter
from ebbtide.wrap.blocks import ENTIRE_MODEL, blocks_of, entire_model, has_forward, layers_in, paths_in, stacks_in
from ebbtide.wrap.collectives import is_distributed
from ebbtide.wrap.foreign_checkpoints import name_checkpoints
from ebbtide.wrap.forward import encoder_layers, is_compiled, is_scripted
from ebbtide.wrap.scope import ModuleHook

logger = logging.getLogger("ebbtide.wrap")

LOW_PERCENT = 50.0
"""A lower share of the saved bytes is logged as a warning."""

LARGE_SHARE = 0.1
"""A module outside of the blocks becomes a block if it saves this share of the bytes."""

_SLOT = "_raw_saved_"

Blocks = list[tuple[nn.Module, Block]]


class Watch:
    """Measures the coverage in the first pass, and chooses further blocks by it. See [Note: coverage].

    Args:
        engine: Receives the coverage.
        chosen: The user named the blocks: none are added.
        then: Called after the first pass that saved something.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, *, chosen: bool, then: Callable[[Engine], None] | None = None
    ) -> None:
        self._model, self._engine = model, engine
        self._may_choose, self._done, self._then = not chosen, False, then
        self._outside: Counter[str] | None = None
        self._added = ""

    def call(self, blocks: Blocks, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward; in the first pass, count the bytes saved outside of the blocks."""
        if self._done or not readable():
            return forward(*args, **kwargs)
        marks = _Marks()
        try:
            marks.follow(self._model, [module for module, _ in blocks])
            output = forward(*args, **kwargs)
        finally:
            marks.remove()
        self._outside = _outside_bytes(output, self._engine, marks)
        return output

    def pass_ends(self, blocks: Blocks, before: Block | None = None) -> Blocks | None:
        """Account for a pass; return different blocks for the next one, or None.

        Args:
            before: Its latest block that ran without gradients, if that was in an autograd function.
        """
        outside, self._outside = self._outside, None
        last = self._engine.current_pass
        tally = last.tally
        if tally.packs and self._then is not None:
            then, self._then = self._then, None
            then(self._engine)
        if outside is None or not (tally.packs or sum(outside.values())):
            return None
        self._done = True
        own = sum(count for (_, action), (count, _) in last.sites.items() if action is Action.CHECKPOINT)
        coverage = self._engine.coverage = Coverage(
            inside_bytes=tally.unique + tally.small_bytes, outside=outside, checkpointed=last.checkpointed - own
        )
        trained = any(p.requires_grad for module, block in blocks if block is before for p in module.parameters())
        if trained and before is not None and not coverage.checkpointed and _is_low(coverage):
            name_checkpoints(set(), before.name, known=False)
            return None
        better = self._better(blocks, coverage)
        if better is not None:
            self._may_choose = self._done = False  # the next pass is measured as well, but chooses nothing
            names = [block.name for _, block in better if block.name not in {b.name for _, b in blocks}]
            self._added = f"in the first pass {coverage}; these became blocks: {', '.join(names)}"
            logger.info("%s", self._added)
            return better
        self._report(coverage)
        return None

    def explain(self) -> list[str]:
        """Return lines on the coverage, and on blocks that were chosen by it; none before the first pass."""
        coverage = "" if self._engine.coverage is None else str(self._engine.coverage)
        measured = coverage if coverage not in self._added else ""  # until the second pass it is that of the first
        return [line for line in (self._added, measured) if line]

    def _report(self, coverage: Coverage) -> None:
        if coverage.checkpointed:
            logger.info("%s (%d blocks are checkpointed and save their inputs)", coverage, coverage.checkpointed)
        elif not _is_low(coverage):
            logger.info("%s", coverage)
        else:
            outside = coverage.total_bytes - coverage.inside_bytes
            own = 2 * coverage.outside.get("", 0) > outside
            logger.warning(
                "%s (%s), which stays on the device; hint: %s", coverage, format_size(outside),
                "what the model's own forward saves belongs to no module: `with ebbtide.offload_saved_tensors():` "
                "around the step offloads it" if own
                else "blocks=[...] names the modules to offload, such as those that save most",
            )  # fmt: skip

    def _better(self, blocks: Blocks, coverage: Coverage) -> Blocks | None:
        """Return blocks that hold more of the bytes, in single-process training; else None."""
        alone = not is_distributed() or dist.get_world_size() <= 1
        if not (self._may_choose and alone) or coverage.checkpointed:
            return None
        names = [block.name for _, block in blocks]
        if names == [ENTIRE_MODEL]:
            return None
        added = list(_savers(self._model, [module for module, _ in blocks], coverage))
        saved = sum(_below(path, coverage.outside) for path, _ in added)
        paths = paths_in(self._model)
        found = [(paths[module], module) for module, _ in blocks]
        still_low = 100 * (coverage.inside_bytes + saved) < LOW_PERCENT * coverage.total_bytes
        if still_low and not stacks_in("", self._model):
            return blocks_of(self._model, entire_model(self._model))
        return blocks_of(self._model, found + added) if added else None


class _Marks:
    """Records autograd's sequence numbers at the start and end of modules outside of the blocks."""

    def __init__(self) -> None:
        self._numbers: list[int] = [_next_number()]
        self._paths: list[str] = [""]
        self._running: list[str] = [""]
        self._undo: list[Callable[[], None]] = []

    def follow(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Hook all modules except blocks, compiled modules, and modules inside these; see [Note: fused layers]."""
        layers = encoder_layers(model)
        for path, module in _outside_of(model, blocks):
            layer = layers[id(module)]() if id(module) in layers else None
            if path and (layer is None or layer.training):
                before = module.register_forward_pre_hook(ModuleHook(self._entered, path))
                after = module.register_forward_hook(ModuleHook(self._left))
                self._undo += [before.remove, after.remove]

    @property
    def began(self) -> int:
        """The sequence number of the first node that the model's forward makes."""
        return self._numbers[0]

    def path_at(self, number: int) -> str:
        """Return the path of the innermost module that ran when a node of this sequence number was made."""
        return self._paths[bisect_right(self._numbers, number) - 1]

    def remove(self) -> None:
        """Remove the module hooks."""
        while self._undo:
            self._undo.pop()()

    def _entered(self, path: str, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._running.append(path)
            self._mark()

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and len(self._running) > 1:
            self._running.pop()
            self._mark()

    def _mark(self) -> None:
        self._numbers.append(_next_number())
        self._paths.append(self._running[-1])


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _outside_of(model: nn.Module, blocks: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that are not, and are not inside, a block or a compiled module."""
    inside = {id(module) for module in blocks}
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if id(module) in inside or is_compiled(module) or is_scripted(module):
            continue
        yield path, module
        pending += [(f"{path}.{k}" if path else k, c) for k, c in reversed(list(module.named_children()))]


def _is_low(coverage: Coverage) -> bool:
    return coverage.percent is not None and coverage.percent < LOW_PERCENT


def _savers(model: nn.Module, blocks: list[nn.Module], coverage: Coverage) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that hold no block and save a large share of the bytes.

    Of one that holds stacks, their blocks; of one whose lists of layers save most of its bytes, these layers: a module
    that is one block is planned as a whole, and may not gain anything.
    """
    inside, taken = {id(module) for module in blocks}, ""
    for path, module in _outside_of(model, blocks):
        holds_blocks = any(id(m) in inside for m in module.modules())
        if holds_blocks or (taken and path.startswith(taken)):
            continue
        saved = _below(path, coverage.outside)
        if saved < LARGE_SHARE * coverage.total_bytes:
            continue
        layers = layers_in(path, module)
        most = 2 * sum(_below(layer, coverage.outside) for layer, _ in layers) > saved
        itself = [(path, module)] if has_forward(module) else []
        if found := stacks_in(path, module) or (layers if most else itself):
            taken = path + "."
            yield from found


def _below(path: str, outside: Mapping[str, int]) -> int:
    """Return the bytes that a module and its submodules save outside of the blocks."""
    return sum(n for p, n in outside.items() if p == path or p.startswith(path + "."))


def _outside_bytes(output: Any, engine: Engine, marks: _Marks) -> Counter[str]:
    """Return module → bytes of the distinct storages in a forward's graph that no block saved."""
    found: Counter[str] = Counter()
    counted: dict[int, torch.UntypedStorage] = {}
    names: dict[type, list[str]] = {}
    pending: list[Any] = [node_of(t) for t in tensors_in(output)]
    nodes: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in nodes or node._sequence_nr() < marks.began:
            continue
        nodes.add(node)
        pending += [function for function, _ in node.next_functions]
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(kind) if name.startswith(_SLOT)]
        for tensor in plain_tensors(t for name in names[kind] for t in _saved(node, name)):
            storage = tensor.untyped_storage() if has_layout(tensor) else None
            if storage is None or id(storage) in counted or not storage.nbytes() or not engine.tier.owns(tensor):
                continue
            counted[id(storage)] = storage
            layout = Layout.of(tensor)
            known = engine.index.find(storage, tensor._version, layout.first, layout.last)
            if known is None and not engine.weights.include(storage_key(storage)):
                found[marks.path_at(node._sequence_nr())] += storage.nbytes()
    return found


def _saved(node: Any, name: str) -> Iterator[torch.Tensor]:
    """Yield the tensors in a slot of a node, without weights and without tensors packed by hooks."""
    try:
        slot = getattr(node, name)
        slots = slot if isinstance(slot, (tuple, list)) else [slot]
        packed = [packed_in(saved) for saved in slots if saved is not None]
    except RuntimeError:
        return  # already freed by a backward
    for tensor in packed:
        if isinstance(tensor, torch.Tensor):
            base = tensor if tensor._base is None else tensor._base
            if not is_parameter(tensor) and not is_parameter(base):
                yield tensor


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a forward's output."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(dict(leaf))  # pyright: ignore[reportUnknownArgumentType]
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            found += [t for t in tree_leaves(dict(vars(leaf))) if isinstance(t, torch.Tensor)]
    return found
