"""Finding blocks by structure.

[Note: blocks]
A *stack* is a container whose children are mostly of one class and have submodules; its children are the blocks.
Attributes of one class whose names differ only in a number (``layer1``, ``layer2``) are a stack, too. Stacks inside a
block are ignored, so a transformer layer is a block and its experts are not; only stages are taken apart (below). If
nothing repeats, the largest modules with submodules are the blocks; if there are fewer than two (a lone LSTM, a few
linear layers), the model is one block.
Class names are never used, so unknown models work, too.

A module without a forward, such as a list, or the bare ``nn.Module()`` that holds a stage of many autoencoders, is
never called, so it is no block: what it holds is looked at in its place. A list of stages of layers is thus one stack,
and so is one of lists of a norm, an attention and a residual each: there what has submodules repeats.

Where each block of a stack consists of lists of layers, as in a U-Net, these blocks are *stages*. Backward needs what a
block saves all at once, and the model has few stages: so their layers are the blocks, and those of a layer that has a
stack. An expert is no layer: what chooses among the experts lies beside their list.

Parameter counts are ignored: in convolutional networks the small stacks save the most activations. The blocks' share of
the bytes that autograd saves is measured in the first pass: see [Note: coverage].
"""

from __future__ import annotations

import gc
import itertools
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide.base.errors import BlocksError, ConflictError, nearest
from ebbtide.engine import Block
from ebbtide.wrap.forward import is_compiled, is_compiled_wrapper
from ebbtide.wrap.strategy import is_ddp, is_engine, is_fsdp1, is_fsdp2, is_partitioned

logger = logging.getLogger("ebbtide.wrap")

LARGE_CHILD = 0.1
"""If nothing repeats, modules with at least this share of the model's parameters are blocks."""

ENTIRE_MODEL = "(model)"
"""Name of the block that is the model itself."""

WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")
"""Attributes in which wrappers hold a module, except DDP's ``module``: models use that name. The last is Fabric's."""

Found = list[tuple[str, nn.Module]]
"""Paths of blocks, with their modules."""

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NUMBERED = re.compile(r"(.*?)\d+")


def find_blocks(model: nn.Module, globs: Sequence[str] | str | None = None) -> list[tuple[nn.Module, Block]]:
    """Return the model's blocks, each with the module whose ``forward`` is hooked.

    Args:
        model: Any module, wrapped or not.
        globs: Paths of blocks, such as ``"model.layers.*"``, with or without wrappers' names; None: find them by
            structure.

    Raises:
        BlocksError: The model has no parameters, or a glob matches no module.
        ConflictError: A block is in torch's ``offload_wrapper``.
    """
    globs = [globs] if isinstance(globs, str) else globs
    found = _by_globs(model, globs) if globs is not None else _by_structure(model)
    if not found:
        raise BlocksError(
            f"{type(model).__name__} has no parameters",
            expected="a model with parameters",
            hint="use `with ebbtide.offload_saved_tensors():` around the forward",
        )
    return blocks_of(model, found)


def planned_blocks(
    model: nn.Module, found: list[tuple[nn.Module, Block]], names: Set[str]
) -> list[tuple[nn.Module, Block]]:
    """Return the blocks of a plan, which may have been chosen by what they save: see [Note: coverage].

    Args:
        found: Its blocks by structure; returned if they include those of the plan, or if the model lacks some of these.
        names: The blocks for which the plan has actions.
    """
    if names <= {block.name for _, block in found}:
        return found
    modules = {ENTIRE_MODEL: entire_model(model)[0]}
    for path, module in model.named_modules():
        modules.setdefault(_own_name(model, path), (path, module))  # the outermost wrapper
    return blocks_of(model, [modules[name] for name in modules if name in names]) if names <= modules.keys() else found


def blocks_of(model: nn.Module, found: Found) -> list[tuple[nn.Module, Block]]:
    """Return the engine's descriptions of blocks, each with the module whose ``forward`` is hooked.

    One in two places is one block. Of a block and a module inside it, found in another place, the block is one.

    Raises:
        ConflictError: A module is in torch's ``offload_wrapper``.
    """
    blocks: list[tuple[nn.Module, Block]] = []
    indices: Counter[str] = Counter()
    names: dict[nn.Module, str] = {}
    for name, module in found:
        names.setdefault(under_fsdp1(module), name)
    inside = {part for module in names for part in itertools.islice(module.modules(), 1, None)}
    names = {module: name for module, name in names.items() if module not in inside}
    for inner, name in names.items():
        _refuse_offloaded(name, inner)
        stack = name.rpartition(".")[0]
        own = _own_name(model, name)
        weights = partial(_weights_behind, weakref.ref(inner))
        block = Block(name=own, kind=_kind(inner), index=indices[stack], count=len(names), weights=weights)
        indices[stack] += 1
        blocks.append((inner, block))
    return blocks


def _refuse_offloaded(name: str, module: nn.Module) -> None:
    """Raise if hooks inside ours offload a block's saved tensors, which ours would not see."""
    loaded = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if loaded is not None and isinstance(module, loaded.OffloadWrapper):
        raise ConflictError(
            f"block {name!r} is wrapped by torch's offload_wrapper",
            expected="one offloader on a model",
            hint="leave that wrapper out (accelerate: activation_checkpointing_offload=False); "
            "a checkpoint_wrapper may stay; the tensors it keeps are offloaded",
        )


def _by_structure(model: nn.Module) -> Found:
    found = stacks_in("", model)
    if found or not any(True for _ in model.parameters()):
        return found
    return _largest(model) or entire_model(model)


def entire_model(model: nn.Module) -> Found:
    """Return the model, without its wrappers, as one block."""
    while is_ddp(model) or is_fsdp1(model):
        model = under_fsdp1(model.module if is_ddp(model) else model)  # pyright: ignore[reportArgumentType]
    return [(ENTIRE_MODEL, model)]


def stacks_in(name: str, module: nn.Module) -> Found:
    """Return the blocks of the stacks in a module; none if nothing repeats there."""
    # Two attributes are a stack only if there is no other: ``attn1`` and ``attn2`` are parts of one layer.
    return list(_stacks(name, module, 3)) or list(_stacks(name, module, 2))


def layers_in(name: str, module: nn.Module) -> Found:
    """Return what lists of layers in a module hold: all may be of different classes, or there is one, called often."""
    found: Found = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        held = _called([(path, child)])
        if isinstance(child, nn.ModuleList) and 2 * sum(_composed(layer) for _, layer in held) >= len(held) > 0:
            found += held
        else:
            found += layers_in(path, child)
    return found


def stack_of(module: nn.Module) -> nn.Module | None:
    """Return the container in which a module is one block of a stack; None for a model with more blocks of its own.

    A module does not know what holds it, so all containers of the process are searched.
    """
    containers = [found for found in gc.get_objects() if issubclass(type(found), _CONTAINERS)]
    around = [found for found in containers if any(child is module for child in found.children())]
    stack = max(around, key=len, default=None)  # a slice of it is a container, too
    blocks = [] if stack is None else [block for _, block in stacks_in("", stack)]
    alone = not any(block is module for block in blocks) or len(stacks_in("", module)) >= len(blocks)
    return None if alone else stack


def _stacks(name: str, module: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{name}.{k}" if name else k, c) for k, c in module.named_children()]
    called = _called(children)
    stack = [(n, c) for n, c in called if _composed(c) or any(True for _ in c.parameters()) or _is_flat(c)]
    judged = [c for _, c in stack if called == children or _composed(c)]
    if isinstance(module, _CONTAINERS) and _is_stack(judged):
        stages = [_layers_of_stage(path, block) for path, block in stack]
        if not all(stages):
            yield from stack
            return
        for layer in itertools.chain(*stages):
            yield from list(_stacks(*layer, least)) or [layer]
        return
    repeated = [] if isinstance(module, _CONTAINERS) else _numbered(children, least)
    for path, child in children:
        if path in repeated:
            yield path, child
        else:
            yield from _stacks(path, child, least)


def _layers_of_stage(path: str, block: nn.Module) -> Found:
    """Return the layers of a block that consists of lists of them, one of which is a stack; none for other blocks."""
    children = [(f"{path}.{k}", c) for k, c in block.named_children()]
    lists = [child for _, child in children if isinstance(child, _CONTAINERS) and not has_forward(child)]
    layers = [(n, c) for n, c in _called(children) if any(True for _ in c.parameters())]
    is_stage = len(lists) == len(children) and any(_is_stack([*found.children()]) for found in lists)
    return layers if is_stage and not is_compiled(block) and all(_composed(c) for _, c in layers) else []


def _called(children: Found) -> Found:
    """Return modules, with those that have no forward replaced by what they hold."""
    found: Found = []
    for path, child in children:
        held = [(f"{path}.{k}", c) for k, c in child.named_children()]
        found += [(path, child)] if has_forward(child) else _called(held)
    return found


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own, so that it may be called."""
    classes = type(module).__mro__  # looked up without ``getattr``, which runs TorchScript's descriptor
    return "forward" in vars(module) or any("forward" in vars(c) for c in classes[: classes.index(nn.Module)])


def _is_stack(children: list[nn.Module]) -> bool:
    if len(children) < 2:
        return False
    kind, count = Counter(map(_kind, children)).most_common(1)[0]
    return count >= 2 and 2 * count >= len(children) and all(_composed(c) for c in children if _kind(c) == kind)


def _numbered(children: Found, least: int) -> list[str]:
    """Return the paths of at least ``least`` attributes of one class whose names differ only in a number."""
    groups: dict[tuple[str, str], Found] = {}
    for path, child in children:
        match = _NUMBERED.fullmatch(path)
        contained = _kind(child) in {c.__name__ for c in _CONTAINERS} or not has_forward(child)
        if match and _composed(child) and not contained:
            groups.setdefault((match[1], _kind(child)), []).append((path, child))
    return [path for group in groups.values() if len(group) >= least for path, _ in group]


def _largest(model: nn.Module) -> Found:
    """Return the largest modules with submodules; none if there are fewer than two."""
    name, module = "", model
    while not is_compiled(module):
        children = _called([(f"{name}.{k}" if name else k, c) for k, c in module.named_children()])
        children = [(n, c) for n, c in children if _composed(c)]
        if len(children) != 1:
            least = LARGE_CHILD * _numbers(model)
            children.sort(key=lambda child: -_numbers(child[1]))
            large = children[:2] + [(path, child) for path, child in children[2:] if _numbers(child) >= least]
            chosen = {layer for path, child in large for layer, _ in _layers_or_module(path, child)}
            return [(n, m) for n, m in model.named_modules() if n in chosen] if len(large) > 1 else []
        ((name, module),) = children
    return []


def _layers_or_module(path: str, module: nn.Module) -> Found:
    """Return the layers in a module if they have most of its weights, else the module."""
    layers = layers_in(path, module)
    return layers if 2 * sum(_numbers(layer) for _, layer in layers) > _numbers(module) else [(path, module)]


def _composed(module: nn.Module) -> bool:
    """Whether a module has submodules."""
    return any(True for _ in _behind(module).children())


def _is_flat(module: nn.Module) -> bool:
    return any(True for m in module.modules() for _ in _flattened(m))


def _by_globs(model: nn.Module, globs: Sequence[str]) -> list[tuple[str, nn.Module]]:
    names = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for glob in globs:
        matches = [
            n for n in names if (own := _own_name(model, n)) and (fnmatchcase(n, glob) or fnmatchcase(own, glob))
        ]
        if not matches:
            raise BlocksError(
                f"blocks={glob!r} matches no module of {type(model).__name__}",
                expected="a path from model.named_modules(), where * matches anything",
                hint=nearest(glob.rstrip(".*"), filter(None, names))
                or f"for example {next((n for n in names if n), '')!r}",
            )
        found.update({n: names[n] for n in matches})
    outermost = [n for n in found if not any(n.startswith(o + ".") for o in found)]
    return _called([(n, names[n]) for n in names if n in outermost])


def paths_in(model: nn.Module) -> dict[nn.Module, str]:
    """Return the paths of a model's modules as it is wrapped now."""
    return {module: path for path, module in model.named_modules()}


def still_inside(model: nn.Module, known: Mapping[nn.Module, Block], named: set[str]) -> list[tuple[nn.Module, Block]]:
    """Return the blocks that are parts of the model now, also those that returned; warn of replaced ones.

    Args:
        known: All blocks; some may be out of the model for some steps, as layers that are dropped at random.
        named: Blocks that a warning has named; it names each once.
    """
    parts = paths_in(model)
    lost = {block.name: type(module) for module, block in known.items() if module not in parts}
    others = any(m not in known and (path in lost or type(m) in lost.values()) for m, path in parts.items())
    if others and (names := [name for name in lost if name not in named]):
        named.update(names)
        logger.warning(
            "%d blocks were replaced after offloading was enabled (%s), and their successors are not "
            "offloaded; hint: close the handle and call enable_activation_offloading again",
            len(names), ", ".join(names),
        )  # fmt: skip
    return [(module, block) for module, block in known.items() if module in parts]


def _own_name(model: nn.Module, name: str) -> str:
    """Return the path of a module before the model was wrapped, compiled, checkpointed or given PEFT's adapters."""
    parts = [p for p in name.split(".") if p not in WRAPPED]
    if parts[:1] == ["module"] and (is_ddp(model) or is_engine(model)):
        model, parts = model.module, parts[1:]  # pyright: ignore[reportAssignmentType]
    for wrapper in ("base_model", "model"):  # of PEFT: a prompt tuner has the first alone
        if parts[:1] != [wrapper] or not hasattr(model, "peft_config"):
            break
        model, parts = getattr(model, wrapper), parts[1:]
    return ".".join(parts)


def _kind(module: nn.Module) -> str:
    """Return the name of a block's class, independent of wrappers."""
    inner = _behind(module)
    own = type(inner)
    if is_fsdp2(inner):  # it prepends its own class, and ``replicate`` two
        own = own.__mro__[getattr(own, "_orig_cls_mro_index", 2)]
    return own.__name__


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def under_fsdp1(module: nn.Module) -> nn.Module:
    """Return the module that an FSDP1 wrapper holds: its forward runs after the unshard."""
    while is_fsdp1(module):
        module = module._fsdp_wrapped_module  # pyright: ignore[reportAssignmentType]
    return module


def _behind(module: nn.Module) -> nn.Module:
    """Return the module behind an FSDP1 wrapper and behind ``torch.compile(module)``."""
    module = under_fsdp1(module)
    inner = module._modules["_orig_mod"] if is_compiled_wrapper(module) else None
    return module if inner is None else inner


def weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of ``module`` and its submodules, down to the next FSDP units.

    These have bytes in the forward and in the backward of ``module``. A unit nested below it is resharded again while
    the backward of ``module`` recomputes, so its weights do not count; nor do those of ZeRO-3.
    """
    for inner in parts_of(module):
        yield from (p for p in inner.parameters(recurse=False) if not is_partitioned(p))
        yield from inner.buffers(recurse=False)
        yield from (w for w in _flattened(inner) if w.untyped_storage().nbytes())  # else a view of freed memory


def _weights_behind(held: weakref.ref[nn.Module]) -> Iterator[torch.Tensor]:
    """Return the weights of a module that a block's description does not keep alive; it runs, or it has none."""
    module = held()
    return iter(()) if module is None else weights_of(module)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and its submodules, down to the next FSDP units."""
    pending = [module]
    while pending:
        inner = pending.pop()
        yield inner
        pending.extend(c for c in inner.children() if not is_fsdp2(c) and not is_fsdp1(c))


def gathered_for(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that have bytes while ``module`` itself runs, and no longer. See [Note: ZeRO-3]."""
    yield from (p for p in module.parameters(recurse=False) if is_partitioned(p))


def _flattened(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that FSDP1 with ``use_orig_params=False`` keeps as plain attributes, views of a parameter."""
    yield from (t for t in vars(module).values() if type(t) is torch.Tensor and isinstance(t._base, nn.Parameter))
