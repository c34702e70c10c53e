"""Fills this rank's memory from a source: slices, conversions of whole tensors, initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.load.fourbit import FourBit
from ebbtide.load.header import CheckpointEntry
from ebbtide.load.initialise import Initialiser
from ebbtide.load.layout import Box, Conversion, Piece, SourceLayout
from ebbtide.load.names import Match, NameMap
from ebbtide.load.targets import Target

_PART = 1024**2
"""Most elements in memory while a weight is compared with another tensor of the checkpoint that it is, or rounded."""


class SliceSource(Protocol):
    """A source of pieces: files, memory, or another rank."""

    def read(self, pieces: Iterable[Piece], done: Callable[[int], None] = ...) -> None:
        """Read pieces into their views; ``done`` receives the bytes of each finished one."""


class Values:
    """Pieces of tensors that are in memory, by key.

    Args:
        values: The tensors.
        others: Has the tensors that are not among them.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], others: SliceSource | None = None) -> None:
        self._values, self._others = values, others

    def read(self, pieces: Iterable[Piece], done: Callable[[int], None] = lambda nbytes: None) -> None:
        """Copy pieces into their views."""
        left: list[Piece] = []
        for piece in pieces:
            if self._others is not None and piece.key not in self._values:
                left.append(piece)
                continue
            value = self._values[piece.key].detach()
            piece.into.copy_(piece.box.of(value))
            done(piece.box.numel * value.dtype.itemsize)
        if self._others is not None:
            self._others.read(left, done)


def check_ties(ties: Iterable[Sequence[str]], targets: Mapping[str, Target]) -> None:
    """Raise if a wrapper made several tensors of one.

    Args:
        ties: The names that each tensor had before the model was sharded.
        targets: Of the sharded model.

    Raises:
        ConfigError: A tied tensor is several now, which would be trained apart.
    """
    for names in ties:
        held = {id(targets[name]): targets[name] for name in names if name in targets}
        if len(held) > 1:
            modules = ", ".join(dict.fromkeys(f"model.{name.rpartition('.')[0]}".rstrip(".") for name in names))
            raise ConfigError(
                f"{' and '.join(names)} were tied and are separate after wrapping",
                expected="tied parameters that stay tied",
                hint="FSDP1 materializes parameters module by module: "
                "pass it param_init_fn=ebbtide.load.empty_module(device)"
                if any(target.old is None for target in held.values())
                else f"shard their modules in one unit, fully_shard([{modules}]), or leave both to the whole model's "
                "unit; after parallelize_module, tie them again in the function passed as shard=",
            )


class Filling:
    """The reads for a rank's targets."""

    def __init__(
        self, plan: NameMap, targets: Mapping[str, Target], entries: Mapping[str, CheckpointEntry], four: FourBit
    ) -> None:
        self._entries, self._four = entries, four
        self._quantised: list[tuple[SourceLayout, Target]] = []
        self._scaled: list[Target] = []
        self._sliced: list[tuple[SourceLayout, Target]] = []
        self._twins: list[tuple[Match, SourceLayout, Target]] = []
        self._before: dict[str, torch.dtype] = {}
        self._conversions: dict[int, tuple[Conversion, list[tuple[str, Target]]]] = {}
        for name, match in plan.matches.items():
            source = match.source
            target = next((targets[n] for n in match.names if n in targets), None)
            if target is not None and name in four:  # its scales are needed where no part of the column is
                if four.scales_of(name):
                    self._scaled.append(target)
                elif isinstance(source, SourceLayout):
                    self._quantised.append((source, target))
                    continue
            elif target is None or not target.boxes:
                continue  # another rank holds it
            else:
                self._before[target.name] = match.dtype
            if isinstance(source, SourceLayout):
                self._sliced.append((source, target))
                self._twins += [(match, twin, target) for twin in match.twins]
            else:
                self._conversions.setdefault(id(source), (source, []))[1].append((match.base, target))
        self._all_sliced = [*self._sliced, *((twin, target) for _, twin, target in self._twins)]
        self._unsliced_keys = [key for conversion, _ in self._conversions.values() for key in conversion.keys]
        self._unsliced_keys += [key for target in self._scaled for key in four.scales_of(target.name).values()]

    @property
    def total_bytes(self) -> int:
        """Bytes of the checkpoint that are to be read."""
        sliced = sum(box.numel * layout.dtype.itemsize for layout, t in self._all_sliced for box, _ in t.boxes)
        sliced += sum(layout.numel() * layout.dtype.itemsize for layout, _ in self._quantised)
        return sliced + sum(self._entries[key].nbytes for key in self._unsliced_keys)

    def shared_keys(self) -> set[str]:
        """Return the tensors of which other ranks read the same bytes."""
        keys = {key for layout, target in self._all_sliced if target.shared for key in layout.keys}
        return keys.union(self._unsliced_keys, *(layout.keys for layout, _ in self._quantised))

    def fill(self, source: SliceSource, done: Callable[[int], None]) -> None:
        """Read everything: slices first, then conversions of whole tensors, one after the other.

        Raises:
            DataError: The source cannot be read, a weight has two values there, or a conversion fails.
        """
        source.read(self._pieces(), done)
        for layout, target in self._sliced:
            self._round(target, layout.dtype)
        for match, twin, target in self._twins:
            dtype = self._passed(target, twin.dtype)
            for part, view in _parts(target):
                other = torch.empty(view.shape, dtype=dtype, device=view.device)
                source.read(twin.pieces(part, other), done)
                if not torch.allclose(other.to(view.dtype), view, rtol=0, atol=0, equal_nan=True):
                    raise _two_values(match, twin)
        for layout, target in self._quantised:
            tensor = self._four.empty(target.name)
            source.read(layout.pieces(Box.full(tensor.shape), tensor), done)
            self._four.quantise(target, tensor)
        for target in self._scaled:
            keys = self._four.scales_of(target.name)
            scales = self._read_tensors(source, keys.values(), done)
            self._four.restore(target, {kind: scales[key] for kind, key in keys.items()})
        for conversion, targets in self._conversions.values():
            tensors = self._read_tensors(source, conversion.keys, done)
            try:
                made = conversion.convert(tensors)
            except Exception as error:
                names, cause = ", ".join(name for name, _ in targets), f"{type(error).__name__}: {error}"
                raise DataError(
                    f"{names} cannot be made of {len(tensors)} tensors ({cause})",
                    expected="tensors that the model's library can convert",
                    hint="check that the checkpoint belongs to this type of model",
                ) from error
            for name, target in targets:
                if target.name in self._four:
                    self._four.quantise(target, self._four.empty(target.name).copy_(made[name]))
                else:
                    target.fill(made[name])
                    self._round(target, made[name].dtype)

    def _passed(self, target: Target, found: torch.dtype) -> torch.dtype:
        """Return the dtype that values pass through: the model's, if it cannot hold them and ``shard`` widened it."""
        before, now = self._before.get(target.name, found), target.local.dtype
        widened = before.is_floating_point and before.itemsize < now.itemsize
        return before if widened and found != before and found.itemsize >= before.itemsize else now

    def _round(self, target: Target, found: torch.dtype) -> None:
        """Round a target's values as ``from_pretrained`` does before a model is sharded."""
        if (dtype := self._passed(target, found)) != target.local.dtype:
            for _, view in _parts(target):
                view.copy_(view.to(dtype))

    def _read_tensors(
        self, source: SliceSource, keys: Iterable[str], done: Callable[[int], None]
    ) -> dict[str, torch.Tensor]:
        tensors = {k: torch.empty(self._entries[k].shape, dtype=self._entries[k].dtype) for k in keys}
        source.read((Piece(key=k, box=Box.full(t.shape), into=t) for k, t in tensors.items()), done)
        return tensors

    def _pieces(self) -> Iterator[Piece]:
        """Yield what to read, in the order of the files: what is read ahead follows it, too."""

        def place(sliced: tuple[SourceLayout, Target]) -> tuple[str, int]:
            entry = self._entries[sliced[0].keys[0]]
            return entry.file, entry.offset_bytes

        for layout, target in sorted(self._sliced, key=place):
            for box, view in target.boxes:
                yield from layout.pieces(box, view)


def _parts(target: Target) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield small boxes of a tensor that are this rank's, with their views."""
    return ((part, part.of(view, origin=box.start)) for box, view in target.boxes for part in box.parts(_PART))


def first_values(targets: Mapping[str, Target], plan: NameMap, initialiser: Initialiser) -> None:
    """Fill tensors missing in the checkpoint: from real values of the model, else from its initialisation.

    Raises:
        DataError: Nothing initialises some of them.
    """
    sourced = plan.sourced
    computed: dict[str, Target] = {}
    for name, target in targets.items():
        old: Any = target.old
        if name in sourced or not target.shape.numel():
            continue
        if name in initialiser.names:
            computed[name] = target
        elif old is not None:  # FSDP1 took what was there into its flat parameter
            target.local.copy_(getattr(old, "_local_tensor", old))
    if computed:
        for name, tensor in initialiser.values(computed, next(iter(computed.values())).local.device):
            computed[name].fill(tensor)


def _two_values(match: Match, twin: SourceLayout) -> DataError:
    tied, remove = len(match.names) > 1, "take the unused one out of the checkpoint"
    one, other, what = ", ".join(match.source.keys), ", ".join(twin.keys), "one tied weight" if tied else "one weight"
    return DataError(
        f"{one} and {other} differ in the checkpoint and are {what} in the model",
        expected="equal values of one weight, or only one of them",
        hint=f"build the model with tie_word_embeddings=False, or {remove}" if tied else remove,
    )
