"""Tickets and entries.

[Note: a ticket's life]
The pack hook returns a ticket; autograd holds it and hands it to the unpack hook. A ticket lives exactly as long as
somebody holds it: autograd (one ticket per saved tensor), or a recipe (its operands). A ``Ticket`` holds an ``Entry``,
one per storage and version; when the last ticket of an entry dies, the entry dies and gives its slot back. There are
no counters, no first-call flags and nothing to clear: a dropped graph, a retained graph and a second backward are the
same case as the textbook step.

[Note: version probe]
Any saved-tensor hook switches off autograd's own check that a saved tensor was not changed in place. So each ticket
carries a *probe*: a detached alias whose data was replaced by nothing. It shares the version counter of the saved
tensor and none of its memory, so the read can compare versions even after the source is gone.

[Note: leaves]
Ordinary autograd saves a leaf itself, and what needs no gradient is one. If somebody assigns ``leaf.data``, backward
reads what was assigned, and no version tells. If a function returns it as the gradient of a parameter, autograd finds
that somebody else holds it, and copies it into ``parameter.grad``; a tensor that nobody else holds becomes that
gradient, and what changes the gradient changes its memory. So the ticket of a leaf knows it by a weak reference, and
the read returns it if it is alive; else the ticket holds what the read returned until the backward ends. For what needs
a gradient, torch makes another tensor of what a hook returns, and nobody can hold that one.
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ebbtide.base.actions import Action, Site
from ebbtide.base.errors import ModifiedInPlaceError
from ebbtide.engine.fingerprint import Fingerprint, Sample
from ebbtide.engine.guard import Watched
from ebbtide.engine.layout import Layout, storage_bytes
from ebbtide.engine.numerics import Numerics
from ebbtide.engine.passes import RunRecord
from ebbtide.schedule import LiveCount
from ebbtide.store.device import StreamHandle
from ebbtide.store.protocol import Slot

Place = tuple[str, str]
"""Path of a module within its block, and the block's name."""

Version = int | tuple[int, int]
"""At which version a storage was saved; inside a wrapper: the wrapper's and its own."""

UNCHECKED = -1
"""Version of a light ticket whose storage FSDP rewrites between forward and backward: no comparison."""


class LightTicket:
    """A saved tensor that stays, and the version it had.

    A leaf is held itself, for that is what ordinary autograd reads in backward, whatever ``leaf.data`` is by then; so
    is what needs no gradient, with its class and the attributes that somebody gave it. Of a tensor in the graph a
    detached alias is held: an operator that saves its own output would else keep itself alive for ever.

    Args:
        tensor: The saved tensor.
        weight: It is a weight, or lies in the storage of one.
        checked: Its version is compared when it is read.
        place: The module and the block that saved it, as errors name them.
    """

    __slots__ = ("place", "tensor", "version", "weight")

    def __init__(
        self, tensor: torch.Tensor, *, weight: bool = False, checked: bool = True, place: Place | None = None
    ) -> None:
        self.tensor, self.place = tensor if tensor.is_leaf else tensor.detach(), place
        self.version = UNCHECKED if not checked or tensor.is_inference() else tensor._version
        self.weight = weight

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since it was saved."""
        return self.version != UNCHECKED and self.tensor._version != self.version

    @property
    def description(self) -> str:
        """What errors call it."""
        return f"a {list(self.tensor.shape)} tensor"

    def read(self) -> torch.Tensor:
        """Return the tensor. Raises ModifiedInPlaceError when the tensor was changed in place since."""
        if self.version != UNCHECKED and self.tensor._version != self.version:
            where = "" if self.place is None else "{} of block {!r} (keep)".format(*self.place)
            raise modified_error(self.tensor.dtype, tuple(self.tensor.shape), self.tensor._version, self.version, where)
        return self.tensor


class KeptStorage(weakref.ref[torch.UntypedStorage]):
    """A reference to a storage that the plan keeps and that has no entry; as long as its tickets. See [Note: memo].

    Attributes:
        nbytes: Its size.
        site: Where it was saved first.
    """

    __slots__ = ("__weakref__", "nbytes", "site")
    __eq__, __hash__ = object.__eq__, object.__hash__  # not those of the storage

    nbytes: int
    site: Site


class KeptTicket(LightTicket):
    """A saved tensor of a kept storage.

    Args:
        tensor: The saved tensor.
        run: The block that saved it.
        kept: Its storage.
    """

    __slots__ = ("kept", "leaf", "run")

    def __init__(self, tensor: torch.Tensor, run: RunRecord, kept: KeptStorage) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self.leaf = weakref.ref(tensor) if tensor.is_leaf else None  # [Note: leaves]
        self.run, self.kept, self.place, self.weight = run, kept, None, False

    @property
    def description(self) -> str:
        """What errors call it."""
        return str(self.kept.site)

    def read(self) -> torch.Tensor:
        """Return the tensor. Raises ModifiedInPlaceError when the tensor was changed in place since it was saved."""
        found = self.tensor._version
        if found != self.version:
            size, hint = tuple(self.tensor.shape), AGAIN_HINT if self.run.checkpointed else PLAIN_HINT
            raise modified_error(self.tensor.dtype, size, found, self.version, str(self.kept.site), hint)
        return self.tensor

    def over(self, layout: Layout) -> KeptTicket:
        """Return the ticket of another view of the storage."""
        other = KeptTicket(self.tensor, self.run, self.kept)
        other.tensor.data = layout.over(storage_bytes(self.tensor), 0)
        other.version = self.version
        return other


class Residence(enum.Enum):
    """Where the bytes of an entry are; a reader tries these in order."""

    RESIDENT = enum.auto()
    """On the device: kept, or not copied out, or their copy runs."""
    RESTORED = enum.auto()
    """On the device: copied in or recomputed for a backward that still runs."""
    ELSEWHERE = enum.auto()
    """On the device, in the storage that was saved, which somebody else keeps."""
    STORED = enum.auto()
    """In the store; a prefetch may run."""
    RECOMPUTABLE = enum.auto()
    """Nowhere; a recipe recomputes them."""
    LOST = enum.auto()
    """Nowhere: the storage was changed in place before they were copied, or nothing was kept of them."""


class Entry:
    """One storage at one version: where its bytes are now and how to restore them."""

    __slots__ = (
        "__weakref__", "action", "at", "base_layout", "checksum", "empty", "fingerprint", "first", "kept", "last",
        "mark", "nbytes", "numerics", "part_only", "probe", "recipe", "restored", "restored_on", "site", "slot",
        "source", "storage_ref", "tainted", "version",
    )  # fmt: skip

    def __init__(
        self,
        empty: torch.Tensor,
        *,
        site: Site,
        region: tuple[int, int],
        base_layout: Layout,
        at: Version,
        live: LiveCount,
    ) -> None:
        self.mark = live.mark  # [Note: counted while alive]
        self.slot: Slot | None = None  # gives its place in the store back when it is dropped
        self.site = site
        self.empty = empty
        self.first, self.last = region
        self.nbytes = self.last - self.first  # of the region of the storage that this entry stands for
        self.at, self.version = at, at if isinstance(at, int) else at[0]
        self.base_layout = base_layout
        self.action = Action.KEEP
        self.kept: torch.UntypedStorage | None = None  # what the plan keeps on the device
        self.source: torch.Tensor | None = None
        self.storage_ref: weakref.ref[torch.UntypedStorage] | None = None
        self.recipe: Expr | None = None
        self.restored: torch.Tensor | None = None
        self.restored_on: StreamHandle | None = None  # the stream that waited for it
        self.checksum: tuple[int, int] | None = None
        self.fingerprint: Fingerprint | Sample | None = None  # of what was dropped, if it is to be recomputed
        self.numerics: Numerics | None = None  # what its kernels ran under, if they are to run again
        self.probe: torch.Tensor | None = None
        self.tainted = False
        self.part_only = False  # read in the backward of a part of its block only: in no recipe

    @property
    def residence(self) -> Residence:
        """Where the bytes are now."""
        changed = self.probe is not None and self.probe._version != self.version
        on_device = self.source is not None or self.kept is not None
        if not changed:
            if on_device:
                return Residence.RESIDENT
            if self.restored is not None:
                return Residence.RESTORED
            reference = self.storage_ref
            storage = None if reference is None else reference()
            if storage is not None and storage.nbytes() >= self.last:
                return Residence.ELSEWHERE
        elif on_device or self.tainted:
            return Residence.LOST
        if self.slot is not None:
            return Residence.STORED
        return Residence.LOST if self.recipe is None else Residence.RECOMPUTABLE

    @property
    def changed(self) -> bool:
        """Whether the storage was changed in place since it was saved."""
        return self.probe is not None and self.probe._version != self.version


class Ticket:
    """A saved tensor whose storage has an entry."""

    __slots__ = ("__weakref__", "alias", "entry", "layout", "leaf", "mark", "probe", "restored", "run", "version")

    def __init__(
        self, entry: Entry, layout: Layout, run: RunRecord, probe: torch.Tensor, version: int, *, alias: bool = False
    ) -> None:
        self.leaf: weakref.ref[torch.Tensor] | None = None  # [Note: leaves]
        self.restored: torch.Tensor | None = None
        self.mark = run.live_tickets.mark  # [Note: counted while alive]
        self.entry, self.layout, self.run = entry, layout, run
        self.probe, self.version = probe, version  # [Note: version probe]
        self.alias = alias  # the probe has its memory still, which the entry keeps: it is the saved tensor
        if entry.probe is None and entry.version == self.version:
            entry.probe = self.probe

    @property
    def changed(self) -> bool:
        """Whether the saved tensor was changed in place since it was saved."""
        return self.probe._version != self.version

    def check(self) -> None:
        """Raise ModifiedInPlaceError when the saved tensor was changed in place since it was saved."""
        if self.changed:
            site, layout = str(self.entry.site), self.layout
            hint = AGAIN_HINT if self.run.checkpointed else PLAIN_HINT
            raise modified_error(layout.dtype, layout.size, self.probe._version, self.version, site, hint)


MIXED: Any = object()


def _field(index: int | slice) -> Any:
    return property(operator.itemgetter(index))


class Expr(tuple[Any, ...]):
    """A function and its operands: one object for all, because thousands are alive from forward to backward."""

    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__

    depth: int = _field(0)  # of the longest chain that must be recomputed before the value is there
    under: Numerics | None = _field(1)  # of what must be recomputed for it; ``MIXED``: of several
    linear: bool = _field(2)  # no expression in it can have two readers
    flops: float = _field(3)  # with that of the expressions in it
    structure: int = _field(4)
    fn: Callable[..., torch.Tensor] = _field(5)
    dtype: torch.dtype | None = _field(6)
    loose: bool = _field(7)
    own_flops: float = _field(8)
    operands: tuple[Operand, ...] = _field(slice(9, None))

    def __new__(
        cls,
        fn: Callable[..., torch.Tensor],
        operands: tuple[Operand, ...],
        *,
        key: tuple[Any, ...],
        flops: float = 0.0,
        dtype: torch.dtype | None = None,
        loose: bool = False,
    ) -> Expr:
        """Make the expression.

        Args:
            fn: Called with the operands' values; must be exact, repeatable and free of side effects.
            operands: Tickets, light tickets, watched weights or expressions.
            key: Which function it is; hashable. Part of the structure that a verdict of trust is bound to, so it holds
                no numbers and sizes that change from step to step.
            flops: Multiply-add work in FLOP; 0 for element-wise work.
            loose: The value may lie in memory in another order than the original; few rules take it as an operand.
            dtype: What the value is rounded to, if ``fn`` may compute it in another type: an operator in place rounds
                to the type of what it changes (bfloat16 += float32 stays bfloat16).
        """
        own_flops, depth, parts, branches, linear, under = flops, 0, [key], 0, True, None
        for operand in operands:
            if isinstance(operand, Expr):
                flops += operand.flops
                deep, part = operand.depth, (operand.structure,)
                branches += bool(operand.operands)
                linear = linear and operand.linear
                at = operand.under
            elif isinstance(operand, Ticket):
                recipe, layout = operand.entry.recipe, operand.layout
                deep, part = 0 if recipe is None else recipe.depth, (layout.dtype, len(layout.size), torch.strided)
                at = None if recipe is None else operand.entry.numerics
            else:
                at = None
                deep, part = 0, (operand.tensor.dtype, operand.tensor.ndim, operand.tensor.layout)
            if at is not None:
                under = at if under is None or under == at else MIXED
            depth = max(depth, deep)
            parts.append(part)
        linear = linear and branches <= 1
        if not linear and flops != own_flops:  # something that has work may have two readers
            flops = own_flops + sum(inner.own_flops for inner in expressions_in(operands))
        structure = hash(tuple(parts))
        return tuple.__new__(cls, (1 + depth, under, linear, flops, structure, fn, dtype, loose, own_flops, *operands))

    def tickets(self) -> Iterator[Ticket]:
        """Yield the tickets that the expression, and those in it, read."""
        return (o for expression in expressions_in((self,)) for o in expression.operands if isinstance(o, Ticket))


Operand = Expr | Ticket | LightTicket | Watched


def expressions_in(operands: Iterable[Operand]) -> Iterator[Expr]:
    """Yield the expressions among operands, and those in them, each once."""
    pending, seen = list(operands), set[int]()
    for operand in pending:  # which grows meanwhile
        if isinstance(operand, Expr) and id(operand) not in seen:
            seen.add(id(operand))
            yield operand
            pending += operand.operands


def weights_read(recipe: Expr | None) -> Iterator[Watched]:
    """Yield the weights that a recipe, and those whose results it needs, read."""
    pending: list[Operand | None] = [recipe]
    seen: set[int] = set()
    while pending:
        operand = pending.pop()
        if isinstance(operand, Watched):
            yield operand
        if isinstance(operand, Ticket):
            operand = operand.entry.recipe
        if isinstance(operand, Expr) and id(operand) not in seen:
            seen.add(id(operand))
            pending += operand.operands


def version_probe(tensor: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the version counter of ``tensor`` and the memory of ``empty``. See [Note: version probe]."""
    probe = tensor.detach()
    probe.data = empty
    return probe


def operand_error(what: str) -> ModifiedInPlaceError:
    """Return the error for a tensor that a recipe needs and that was changed: plain training may have allowed it."""
    return ModifiedInPlaceError(
        f"{what} is needed to recompute another tensor and was changed in place after it was saved",
        expected="operands of recipes that are unchanged until their backward",
        hint="pass keep_filter=... to keep the tensors made of it, or use policy 'offload', which recomputes nothing",
    )


PLAIN_HINT = "the same step fails without ebbtide; torch.autograd.set_detect_anomaly(True) names the operation"
AGAIN_HINT = (
    "a checkpointed block needs its inputs until its backward, as with activation checkpointing; do not "
    "change them in place, or use policy 'offload', which recomputes nothing"
)


def modified_error(
    dtype: torch.dtype, size: tuple[int, ...], found: int, expected: int, where: str, hint: str = PLAIN_HINT
) -> ModifiedInPlaceError:
    """Return the error that plain autograd's in-place check would have raised, in its words."""
    kind = str(dtype).removeprefix("torch.")
    saved_at = f" saved at {where}" if where else ""
    return ModifiedInPlaceError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(size)}]{saved_at} is at version {found}",
        expected=f"version {expected} instead",
        hint=hint,
    )
