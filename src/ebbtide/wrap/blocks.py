"""Finding blocks by structure.

[Note: blocks]
A *stack* is a container whose children are mostly of one class and are modules with parts of their own; its children
are the blocks. Stacks inside a block are not looked at, so a transformer layer is a block and its experts are not.
Nothing is known by name: a model nobody has seen before is found like any other.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn

from ebbtide.base.errors import BlocksError, ConflictError, nearest
from ebbtide.engine import Block
from ebbtide.wrap.strategy import is_ddp, is_fsdp1, is_fsdp2

SMALL_STACK = 0.02
"""A stack that holds less than this share of the model's parameters is no place to save memory."""

WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Names under which wrappers hold a module; DDP's, ``module``, may be a model's own."""


def find_blocks(model: nn.Module, globs: Sequence[str] | str | None = None) -> list[tuple[nn.Module, Block]]:
    """Return the model's blocks, each with the module whose ``forward`` the hooks go around.

    Args:
        model: Any module, wrapped or not.
        globs: Paths of blocks, such as ``"model.layers.*"``, with or without what wrappers put into them; None: find
            them by structure.

    Raises:
        BlocksError: The model has no repeated blocks, or a glob matches no module.
        ConflictError: A block is in torch's ``offload_wrapper``.
    """
    globs = [globs] if isinstance(globs, str) else globs
    found = _by_globs(model, globs) if globs is not None else _by_structure(model)
    if not found:
        raise BlocksError(
            f"{type(model).__name__} has no list of repeated blocks",
            expected="a ModuleList or Sequential of at least two modules of one class that have parts of their own",
            hint="name them: blocks=['encoder', 'decoder.*'] (paths from named_modules()), "
            "or use `with ebbtide.offload_saved_tensors():` around the forward",
        )
    blocks: list[tuple[nn.Module, Block]] = []
    indices: Counter[str] = Counter()
    for name, module in found:
        inner = under_fsdp1(module)
        _refuse_offloaded(name, inner)
        stack = name.rpartition(".")[0]
        block = Block(
            name=name, kind=_kind(inner), index=indices[stack], count=len(found), weights=partial(weights_of, inner)
        )
        indices[stack] += 1
        blocks.append((inner, block))
    return blocks


def _refuse_offloaded(name: str, module: nn.Module) -> None:
    """Raise if a block's own saved tensors go elsewhere: hooks inside ours would see them, ours would not."""
    loaded = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if loaded is not None and isinstance(module, loaded.OffloadWrapper):
        raise ConflictError(
            f"block {name!r} is wrapped by torch's offload_wrapper",
            expected="one offloader on a model",
            hint="leave that wrapper out (accelerate: activation_checkpointing_offload=False); "
            "a checkpoint_wrapper may stay, and what it keeps is offloaded",
        )


def _by_structure(model: nn.Module) -> list[tuple[str, nn.Module]]:
    size = _tensors if any(is_fsdp1(m) for m in model.modules()) else _numbers
    total = max(size(model), 1)
    found: list[tuple[str, nn.Module]] = []
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        name, module = pending.pop()
        children = [(f"{name}.{k}" if name else k, c) for k, c in module.named_children()]
        stack = [(n, c) for n, c in children if size(c)]
        if _is_stack(module, [c for _, c in stack]) and size(module) >= SMALL_STACK * total:
            found.extend(stack)
        else:
            pending.extend(reversed(children))
    return found


def _is_stack(container: nn.Module, children: list[nn.Module]) -> bool:
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or len(children) < 2:
        return False
    kinds = Counter(_kind(c) for c in children)
    kind, count = kinds.most_common(1)[0]
    composed = all(any(True for _ in _behind(c).children()) for c in children if _kind(c) == kind)
    return count >= 2 and 2 * count >= len(children) and composed


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
    return [(n, names[n]) for n in names if n in outermost]


def _own_name(model: nn.Module, name: str) -> str:
    """Return the path of a module as it was before the model was wrapped, compiled or checkpointed."""
    parts = [p for p in name.split(".") if p not in WRAPPED]
    return ".".join(parts[1:] if is_ddp(model) and parts[0] == "module" else parts)


def _kind(module: nn.Module) -> str:
    """Return the name of a block's class, which is the same before and after the model is wrapped."""
    inner = _behind(module)
    own = type(inner).__mro__[2] if is_fsdp2(inner) else type(inner)  # FSDP2 puts a class of its own before it
    return own.__name__


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _tensors(module: nn.Module) -> int:
    """Count weights: in FSDP1's shards one may have all numbers on another rank, or be no parameter of its module."""
    return sum(1 for _ in module.parameters()) + sum(1 for m in module.modules() for _ in _flattened(m))


def under_fsdp1(module: nn.Module) -> nn.Module:
    """Return the module that an FSDP1 wrapper holds: its forward runs after the unshard."""
    while is_fsdp1(module):
        module = module._fsdp_wrapped_module  # pyright: ignore[reportAssignmentType]
    return module


def _behind(module: nn.Module) -> nn.Module:
    """Return the module behind an FSDP1 wrapper and behind ``torch.compile(module)``."""
    module = under_fsdp1(module)
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights of ``module`` and of what is below it, down to the next FSDP units.

    These have bytes in the forward and in the backward of ``module``. A unit nested below it is resharded again while
    the backward of ``module`` remakes, so its weights do not count.
    """
    pending = [module]
    while pending:
        inner = pending.pop()
        yield from inner.parameters(recurse=False)
        yield from inner.buffers(recurse=False)
        yield from (w for w in _flattened(inner) if w.untyped_storage().nbytes())  # else a view of what was let go
        pending.extend(c for c in inner.children() if not is_fsdp2(c) and not is_fsdp1(c))


def _flattened(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that FSDP1 with ``use_orig_params=False`` keeps as plain attributes, views of a parameter."""
    yield from (t for t in vars(module).values() if type(t) is torch.Tensor and isinstance(t._base, nn.Parameter))
