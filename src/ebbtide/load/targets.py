"""This rank's part of a model: boxes of tensors, and how the loaded memory becomes its parameters.

[Note: one description of every wrapper]
Under FSDP2, tensor parallelism or both, a parameter is a DTensor whose placements give the boxes of this rank. Under
FSDP1 it is a range of a flat parameter, which is a few boxes of a row-major tensor too. Without a wrapper it is one
box. The rest of the code needs no knowledge of wrappers. Memory is made apart from the model and put into it at the
very end: until then its parameters stay on meta, even after an error.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from ebbtide.base.errors import ConfigError
from ebbtide.load.attributes import plain_name, rename
from ebbtide.load.layout import Box

_Memory = Callable[[torch.Tensor, torch.device], torch.Tensor]


class Owner(NamedTuple):
    """The module that has a parameter or buffer, and its name there."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def slots(self) -> dict[str, Any]:
        """The module's parameters or buffers."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint has it: not a buffer that is not persistent."""
        return not (self.is_buffer and self.name in self.module._non_persistent_buffers_set)

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer that the module has now.

        Raises:
            ConfigError: It was removed.
        """
        found = self.slots[self.name]
        if found is None:
            raise ConfigError(
                f"{self.name!r} is no longer in the model",
                expected="all parameters and buffers that it had",
                hint="a function passed as shard= or init= must not remove any",
            )
        return found


@dataclass(kw_only=True, eq=False)
class Target:
    """A parameter or buffer of this rank.

    Args:
        name: Its name in the model as if nothing were wrapped.
        old: What is in the model now; ``None`` for a part of a flat parameter.
        local: Memory of this rank's part.
        boxes: The boxes of the whole, each with the view of ``local`` that takes it.
        shape: Of the whole.
        shared: Other ranks hold the same bytes.
        writes: This is the first rank of those that hold them, as far as the wrapper shows.
        gathered: The dtype in which FSDP gathers the whole; ``None``: that of ``local``.
    """

    name: str
    old: torch.Tensor | None
    local: torch.Tensor
    boxes: list[tuple[Box, torch.Tensor]]
    shape: torch.Size
    shared: bool
    writes: bool = True
    gathered: torch.dtype | None = None
    owners: list[Owner] = field(default_factory=list[Owner])

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy this rank's part from a whole tensor."""
        for box, view in self.boxes:
            view.copy_(box.of(tensor))


def owners_of(model: nn.Module) -> dict[str, Owner]:
    """Return the owner of every parameter and buffer by plain name."""
    found: dict[str, Owner] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for names, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in names.items():
                if tensor is not None:
                    found[plain_name(f"{prefix}.{name}" if prefix else name)] = Owner(module, name, is_buffer)
    return found


def names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and buffer, by its identity; tied ones have several."""
    names_of: dict[int, list[str]] = {}
    for name, owner in owners_of(model).items():
        names_of.setdefault(id(owner.tensor), []).append(name)
    return names_of


def targets_of(model: nn.Module, device: torch.device | None) -> dict[str, Target]:
    """Return this rank's parameters and buffers, with memory, by plain name; tied ones once, by their first name.

    Args:
        model: After it was sharded, on meta.
        device: Where memory is made; ``None``: the device of the mesh, or the accelerator if there is one.

    Raises:
        ConfigError: A parameter has a placement without slices.
    """
    return _held(model, lambda local, device: torch.empty_like(local, device=device, requires_grad=False), device)


def held_by(model: nn.Module) -> dict[str, Target]:
    """Return this rank's part of a loaded model, by plain name; tied ones once, by the first name that is saved."""
    saved = {id(owner.tensor): name for name, owner in reversed(owners_of(model).items()) if owner.is_saved}
    found: dict[str, Target] = {}
    for name, target in _held(model, lambda local, _: local.detach(), None).items():
        if target.old is None:
            found[name] = target
        elif id(target.old) in saved:
            target.name = saved[id(target.old)]
            found[target.name] = target
    return found


def _held(model: nn.Module, memory: _Memory, device: torch.device | None) -> dict[str, Target]:
    found = {target.name: target for target in _flat_targets(model)}
    handles = [unit._handle for unit in _flat_units(model)]
    flat = {id(handle.flat_param) for handle in handles}
    tied = {(id(i.module), i.param_name) for handle in handles for i in handle.flat_param._shared_param_infos}
    sharded = {id(param.sharded_param): param for param in fsdp2_params(model)}
    by_tensor: dict[int, Target] = {}
    for name, owner in owners_of(model).items():
        tensor = owner.tensor
        if name in found or id(tensor) in flat or (id(owner.module), owner.name) in tied:
            continue
        if id(tensor) in by_tensor:
            by_tensor[id(tensor)].owners.append(owner)
            continue
        param = sharded.get(id(tensor))
        place = torch.device("cpu") if param is not None and param.offload_to_cpu else device
        found[name] = by_tensor[id(tensor)] = _target(name, tensor, memory, place)
        found[name].gathered = None if param is None else param.mp_policy.param_dtype
        found[name].owners.append(owner)
    return found


def _target(name: str, tensor: torch.Tensor, memory: _Memory, device: torch.device | None) -> Target:
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        local = memory(tensor, device or default_device())
        boxes = [(Box.full(tensor.shape), local)]
        return Target(name=name, old=tensor, local=local, boxes=boxes, shape=tensor.shape, shared=True)
    spec: Any = tensor
    placed = _placed(name, tensor.shape, mesh, spec.placements)
    local = memory(spec._local_tensor, device or default_device(mesh.device_type))
    boxes = [(box, Box(start=at, size=box.size).of(local)) for box, at in placed]
    places = mesh.get_coordinate() or ()
    copies = [at for at, n, p in zip(places, mesh.shape, spec.placements, strict=False) if n > 1 and p.is_replicate()]
    return Target(
        name=name,
        old=tensor,
        local=local,
        boxes=boxes,
        shape=tensor.shape,
        shared=bool(copies),
        writes=not any(copies),
    )


def default_device(kind: str | None = None) -> torch.device:
    """Return the current device of a kind; ``None``: of the accelerator, or the CPU without one."""
    if kind is None:
        kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # pyright: ignore[reportOptionalMemberAccess]
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _placed(name: str, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of this rank, each with where it begins in the local tensor."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    runs = [[(0, 0, length)] for length in shape]
    for position, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            continue
        dim: int | None = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise ConfigError(
                f"{name!r} is placed as {placement}", expected="shards or replicas", hint="check the shard function"
            )
        dim = dim % len(shape)
        runs[dim] = list(_dealt(placement, runs[dim], count, position))
    return [
        (Box(start=tuple(g for g, _, _ in one), size=tuple(n for _, _, n in one)), tuple(at for _, at, _ in one))
        for one in itertools.product(*runs)
    ]


def _dealt(
    placement: Any, runs: Sequence[tuple[int, int, int]], count: int, position: int
) -> Iterator[tuple[int, int, int]]:
    """Yield what a placement deals to one of ``count`` positions: runs as those of ``_runs``, of the same dimension."""
    # By the placement's own function, so that uneven and strided shards are those of run time.
    if hasattr(placement, "split_factor"):  # its parts lie apart, and are not views
        remaining = torch.cat([torch.arange(0), *(torch.arange(first, first + n) for first, _, n in runs)])
        own = type(placement)(0, split_factor=placement.split_factor)
        yield from _runs(own._split_tensor(remaining, count, with_padding=False, contiguous=True)[0][position])
        return
    # A view on meta shows its place without the memory of a long dimension, such as a column of 4-bit weights.
    remaining = torch.empty(sum(n for _, _, n in runs), device="meta")
    part = type(placement)(0)._split_tensor(remaining, count, with_padding=False, contiguous=False)[0][position]
    begin, end = part.storage_offset(), part.storage_offset() + part.numel()
    for first, at, length in runs:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            yield first + low - at, low - begin, high - low


def _runs(indices: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the first index, its position and the length of each run of indices that follow each other."""
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    begin = 0
    for end in [*breaks.tolist(), indices.numel()] if indices.numel() else []:
        yield int(indices[begin]), begin, end - begin
        begin = end


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes that a range of a row-major tensor's elements is, each with its first element's number."""
    if begin >= end:
        return
    if not shape:
        yield Box(start=(), size=()), 0
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if begin % row == 0 and end % row == 0:
        rest = tuple(shape[1:])
        yield Box(start=(first, *[0] * len(rest)), size=(last - first + 1, *rest)), begin
    elif first == last:
        for box, at in boxes_of_range(shape[1:], begin - first * row, end - first * row):
            yield Box(start=(first, *box.start), size=(1, *box.size)), at + first * row
    else:
        middle, tail = -(-begin // row) * row, end // row * row
        for low, high in ((begin, middle), (middle, tail), (tail, end)):
            yield from boxes_of_range(shape, low, high)


def _units(model: nn.Module, kind: str) -> Iterator[Any]:
    """Yield the units of FSDP1 or FSDP2; there are none while torch's class of this name is not imported."""
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), kind, ())
    return (module for module in model.modules() if isinstance(module, fsdp))


def _flat_units(model: nn.Module) -> Iterator[Any]:
    return (unit for unit in _units(model, "FullyShardedDataParallel") if getattr(unit, "_handle", None) is not None)


def _flat_targets(model: nn.Module) -> Iterator[Target]:
    """Yield the parameters that FSDP1 holds as ranges of flat parameters."""
    names = {id(module): plain_name(prefix) for prefix, module in model.named_modules()}
    for unit in _flat_units(model):
        handle = unit._handle
        flat: Any = handle.flat_param
        prefix = names[id(unit)]
        replicas = getattr(unit, "_inter_node_pg", None)
        local: torch.Tensor = flat.data
        offsets = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        starts = [first for (first, _), is_padding in offsets if not is_padding]
        for index, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
            span, at = (0, math.prod(shape)), starts[index]
            if handle.uses_sharded_strategy:
                info = flat._shard_param_infos[index]
                span = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
                at = info.offset_in_shard if info.in_shard else 0
            view = local.detach()
            boxes = [
                (box, view[at + first - span[0] :][: box.numel].view(box.size))
                for box, first in boxes_of_range(shape, *span)
            ]
            name = plain_name(f"{prefix}.{fqn}" if prefix else fqn)
            yield Target(
                name=name,
                old=None,
                local=view,
                boxes=boxes,
                shape=torch.Size(shape),
                shared=replicas is not None or not handle.uses_sharded_strategy,
                writes=(replicas is None or replicas.rank() == 0)
                and (handle.uses_sharded_strategy or handle.process_group.rank() == 0),
                gathered=handle._fwd_bwd_param_dtype,
            )


def fsdp2_params(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's own record of each parameter that it shards."""
    for unit in _units(model, "FSDPModule"):
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # one group per unit, before torch 2.10
            groups = [g for g in [state._fsdp_param_group] if g is not None]
        for group in groups:
            yield from group.fsdp_params


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put its shards into the model again: after a forward alone, whole parameters may be there."""
    for unit in _units(model, "FSDPModule"):
        unit.reshard()


def empty_module(device: torch.device | str) -> Callable[[nn.Module], nn.Module]:
    """Return a ``param_init_fn`` for FSDP1: gives a module on meta memory without values; what is tied stays tied.

    Args:
        device: Where the memory is made.
    """
    # The old one is kept: its identity is the key. The new one is not, or each wrapped parameter would stay whole.
    made: dict[int, tuple[torch.Tensor, TensorWeakRef]] = {}

    def empty(module: nn.Module) -> nn.Module:
        for slots in (module._parameters, module._buffers):
            for name, old in slots.items():
                if old is None or not old.is_meta:
                    continue
                new = made[id(old)][1]() if id(old) in made else None
                if new is None:
                    new = torch.empty_like(old, device=device)
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = (old, TensorWeakRef(new))
                slots[name] = new  # pyright: ignore[reportArgumentType]
        return module  # accelerate inspects it, and ties its weights again

    return empty


def attach(model: nn.Module, targets: Sequence[Target]) -> None:
    """Put loaded memory into the model."""
    attached: dict[int, torch.Tensor] = {}
    target_of: dict[int, Target] = {}
    for target in targets:
        if target.old is None:
            continue  # a flat parameter's memory was written in place
        value: Any = _like(target.old, target.local)
        if isinstance(target.old, nn.Parameter):
            if nn.Parameter in type(target.old).__mro__:  # its library's own class, too
                value = torch.Tensor._make_subclass(type(target.old), value, target.old.requires_grad)
            else:
                value = nn.Parameter(value, requires_grad=target.old.requires_grad)
            value.__dict__.update(target.old.__dict__)
        for owner in target.owners:
            owner.slots[owner.name] = value
        attached[id(target.old)], target_of[id(value)] = value, target
    rename(model, attached)
    with torch.no_grad():
        for unit in _flat_units(model):
            # accelerate (1.x) widens a flat parameter into new memory; the first forward would write the old one back.
            if unit._handle._use_orig_params:
                unit._handle._use_sharded_views()
        for param in fsdp2_params(model):
            param.reset_sharded_param()  # it may pad or pin a copy: only one shard at a time is there twice
            if (target := target_of.get(id(param.sharded_param))) is not None:
                target.local, target.boxes = param.sharded_param._local_tensor, []


def _like(old: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the local memory in the form of ``old``: a plain tensor, or a shard of a larger one."""
    spec: Any = getattr(old, "_spec", None)
    if spec is None:
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # from_local would move it to the mesh's device, and units with host offload keep their shards in host memory.
    meta = TensorMeta(shape=old.shape, stride=old.stride(), dtype=local.dtype)
    return DTensor(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)  # pyright: ignore[reportCallIssue]
