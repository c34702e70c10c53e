"""Saved tensors that consist of other tensors.

[Note: wrapper subclasses]
A ``DTensor`` or a jagged nested tensor has no memory of its own (its storage reports bytes that are not there); its
class names the tensors inside (``__tensor_flatten__``). Each of those is packed like any saved tensor and the ticket
puts them together again. A change in place counts on the outer tensor only, so the tickets of the inner ones carry a
probe of the outer one. Inner tensors know no ``grad_fn``: they are offloaded, never recomputed. A ``DTensor`` gets its
own spec back: its ``__tensor_unflatten__`` refuses that of a split sequence that was flattened (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ebbtide.engine.inputs import name_of
from ebbtide.engine.tickets import Place, modified_error


class Outer(NamedTuple):
    """What an inner tensor takes from the saved tensor around it.

    Attributes:
        probe: Shares the version counter of the saved tensor and none of its memory.
        version: Its version when it was saved.
        node: Name of its autograd node, for the site.
        owner: The inner tensor, in its place, of what the saved tensor is a view of; itself if it is no view.
    """

    probe: torch.Tensor
    version: int
    node: str
    owner: torch.Tensor


class WrapperTicket:
    """A saved tensor of a wrapper subclass.

    Args:
        tensor: The saved tensor.
        probe: Shares its version counter and none of its memory.
        context: What its class needs in addition to the inner tensors.
        moving: Tickets of inner tensors, by name.
        staying: Whatever else is inside and stays as it is, by name.
        place: The module and the block that saved it, as errors name them.
    """

    __slots__ = (
        "context", "dtype", "kind", "moving", "place", "probe", "size", "spec", "staying", "stride", "version",
    )  # fmt: skip

    def __init__(
        self,
        tensor: torch.Tensor,
        probe: torch.Tensor,
        context: Any,
        moving: dict[str, Any],
        staying: dict[str, Any],
        place: Place,
    ) -> None:
        self.place = place
        self.kind, self.context, self.moving, self.staying = type(tensor), context, moving, staying
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.probe, self.version = probe, tensor._version
        self.spec = getattr(tensor, "_spec", None) if "_local_tensor" in moving else None

    def read(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return the saved tensor, its inner tensors unpacked.

        Raises:
            ModifiedInPlaceError: It was changed in place since it was saved.
        """
        if self.probe._version != self.version:
            where = "{} of block {!r}".format(*self.place)
            raise modified_error(self.dtype, tuple(self.size), self.probe._version, self.version, where)
        inner = {**self.staying, **{name: unpack(ticket) for name, ticket in self.moving.items()}}
        kind: Any = self.kind
        with torch.no_grad():
            if self.spec is not None:
                return kind(inner["_local_tensor"], self.spec, requires_grad=False)
            return kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


def pack_wrapper(
    tensor: torch.Tensor,
    pack: Callable[[torch.Tensor, Outer], Any],
    empty: Callable[[torch.Tensor], torch.Tensor],
    place: Place,
) -> Any:
    """Return the ticket of a saved tensor of a wrapper subclass; None if it is of another kind and stays.

    Args:
        tensor: The saved tensor.
        pack: Returns the ticket of an inner tensor.
        empty: Returns a tensor of no bytes on the device of its argument.
        place: The module and the block that save it.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    wait = getattr(tensor, "trigger_wait", None)
    node = name_of(tensor.grad_fn)
    if wait is not None:  # the result of a collective: what consumes it takes the tensor inside
        arrived = wait()
        probe: Any = tensor.detach()
        probe.elem = empty(arrived)
        return pack(arrived, Outer(probe, tensor._version, node, arrived))
    names, context = tensor.__tensor_flatten__()
    staying = {name: getattr(tensor, name) for name in names}
    inner = {name: staying.pop(name) for name in names if _may_move(tensor, staying[name])}
    if not inner:
        return None
    with torch.no_grad():
        probe = tensor.detach()
    try:
        for name, part in inner.items():
            setattr(probe, name, empty(part))
    except AttributeError:  # a class that keeps what it flattens to itself
        return None
    base = tensor._base if type(tensor._base) is type(tensor) else tensor
    moving = {n: pack(p, Outer(probe, tensor._version, node, getattr(base, n))) for n, p in inner.items()}
    return WrapperTicket(tensor, probe, context, moving, staying, place)


def _may_move(tensor: torch.Tensor, part: Any) -> bool:
    # The offsets of a jagged tensor are known by identity: another tensor of the same numbers is another ragged size;
    # and its tensors without elements say something by their shape. A DTensor's mesh is no tensor at all.
    if not isinstance(part, torch.Tensor) or not part.numel():
        return False
    return part.is_floating_point() or part.is_complex() or not tensor.is_nested
