"""Initial values of tensors without a checkpoint: by the model's own functions, equal for any number of ranks.

[Note: values that do not depend on the world size]
Functions that initialise (``_init_weights`` of transformers, ``reset_parameters`` of torch and of adapters) draw from
one stream of random numbers, so a parameter's values would depend on earlier draws. Here each call has its own seed,
made of the run's seed and the call's name; its tensors are made whole, initialised, cut and dropped before the next
call. Which call writes which tensors is found out before, see [Note: what a call writes]. A tensor that several calls
write is passed to all of them, in their order.

This happens on a copy of the model on meta from before it was sharded, where names and modules are still plain. All of
the copy is on meta: real tensors are in memory once, and calls that read or write some of them get copies of those.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConfigError, DataError, few
from ebbtide.load.fourbit import is_four_bit
from ebbtide.load.initialisers import ADD_FIRST, InitialCall, WriteWatch, calls_in, check_adapters
from ebbtide.load.names import adapters_of, is_copy
from ebbtide.load.targets import Owner, owners_of

_Kept = tuple[str, Owner, torch.Tensor, torch.Tensor]
"""A tensor's first name, its owner, itself, and another view of its storage."""


class Initialiser:
    """Computes initial values of parameters and buffers.

    Args:
        model: On meta, not yet sharded; it is copied, unless everything on meta is in ``sourced``.
        init: Gives one module its values, called for every module, children first; ``None``: the modules' own.
        seed: Of the run; the same on all ranks.
        sourced: Names of tensors whose values come from elsewhere, which are not requested here.

    Raises:
        ConfigError: The model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        init: Callable[[nn.Module], object] | None,
        *,
        seed: int,
        sourced: Collection[str] = (),
    ) -> None:
        self.names = {name for name, owner in owners_of(model).items() if owner.tensor.is_meta}
        """What had no values before the model was sharded."""
        lacking = [name for name in self.names if name not in sourced]
        self._model = _copied(model, lacking) if lacking else nn.Module()
        self._init, self._seed = init, seed
        self._owners = owners_of(self._model)
        first: dict[int, str] = {}
        self._first = {n: first.setdefault(id(owner.tensor), n) for n, owner in self._owners.items()}
        """By name, the first name of the same tensor."""
        self._adapters = {name for name in adapters_of(self._model) if not is_copy(name)}
        self.has_drawn = False
        """Whether values were drawn at random."""
        before = {self._first[name]: owner.tensor for name, owner in owners_of(model).items() if lacking}
        copied = {name: self._owners[name].tensor for name in before}
        self._valued = {name: t for name, t in before.items() if not t.is_meta and copied[name].is_meta}
        """What calls need of the values that are in the model: wrappers drop the rest."""
        if self._valued:
            needed = {name for call in self._calls for name in call.needs}
            self._valued = {name: tensor for name, tensor in self._valued.items() if name in needed}

    def values(self, names: Collection[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole initialised tensors, few at a time.

        Args:
            names: The wanted tensors; any name of a tied one.
            device: Of the values; a device has its own random numbers.

        Raises:
            DataError: Nothing in the model initialises some of them.
        """
        check_adapters(self._model, names)
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            groups.setdefault(self._calls_of(name), []).append(name)
        if unknown := groups.pop((), []):
            if added := [name for name in unknown if name in self._adapters]:
                raise ConfigError(
                    f"no initializer found for adapters: {few(added)}",
                    expected="adapters of LoRA, or first values that init= or the checkpoint has",
                    hint=ADD_FIRST,
                )
            raise DataError(
                f"no initializer found for {', '.join(unknown)}",
                expected="a module with reset_parameters, or a model with _init_weights, that sets them",
                hint="build the model under accelerate.init_empty_weights(), which keeps buffers off meta, or pass "
                "init=, a function that gives a module its values",
            )
        for indices, members in groups.items():
            self.has_drawn |= any(self._calls[i].draws for i in indices)
            yield from self._made([self._calls[i] for i in indices], members, device).items()

    def _made(self, calls: Sequence[InitialCall], names: list[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Make calls on real memory, and return tensors that they set: all of each, and not from what has no values."""
        needed = {name for call in calls for name in call.needs}
        complete = {name for call in calls for name, is_complete in call.writes.items() if is_complete}
        unset = {name for call in calls for name in call.writes} - complete - needed

        def run(*, again: bool = False) -> dict[str, torch.Tensor]:
            real: dict[str, torch.Tensor] = {}
            with self._placed(needed | complete | unset, device, real), torch.no_grad():
                for name in needed:
                    real[name].copy_(self._valued[name])
                for name in unset:
                    real[name].fill_(_unset(real[name].dtype, again=again))
                for call in calls:
                    self._call(call, device)
                # A call may have replaced the tensor that it got.
                return {name: self._owners[self._first[name]].tensor.detach() for name in names}

        made = run()
        halves = [name for name, tensor in made.items() if tensor.is_meta]
        if unset and not halves:
            marks = {name: _marked(tensor) for name, tensor in made.items()}
            halves = [name for name, marked in marks.items() if marked.any()]
            if halves:  # or it sets what marks: the values are the same with other marks
                others = run(again=True)
                halves = [name for name in halves if (marks[name] & _marked(others[name], again=True)).any()]
        if halves:
            raise DataError(
                f"{few(halves)}: the initializer sets only a part, or computes it from tensors without values",
                expected="an initializer that sets all of a tensor: on meta, values of the constructor are lost",
                hint="set all of it in reset_parameters, or pass init=, a function that gives a module its values",
            )
        return made

    def _call(self, call: InitialCall, device: torch.device) -> None:
        """Make a call with its own seed."""
        cards = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(cards, device_type="cuda" if device.type == "cpu" else device.type):
            digest = hashlib.sha256(f"{self._seed} {call.name}".encode()).digest()
            # torch.manual_seed seeds accelerators too; without one here, nothing would restore their state.
            seed = torch.manual_seed if cards else torch.default_generator.manual_seed
            seed(int.from_bytes(digest[:7], "little"))
            call.run()

    @contextlib.contextmanager
    def _placed(self, names: Iterable[str], device: torch.device, real: dict[str, torch.Tensor]) -> Generator[None]:
        """Replace tensors on meta by real memory, wherever they are tied, while the context is open."""
        put: list[tuple[Owner, torch.Tensor]] = []
        wanted = set(names)
        try:
            for name, owner in self._owners.items():
                if (first := self._first[name]) not in wanted:
                    continue
                old = owner.tensor
                if first not in real:
                    place = self._valued[first].device if first in self._valued else device
                    empty = torch.empty(old.shape, dtype=old.dtype, device=place)
                    real[first] = nn.Parameter(empty, requires_grad=False) if not owner.is_buffer else empty
                put.append((owner, old))
                owner.slots[owner.name] = real[first]
            yield
        finally:
            for owner, old in put:
                owner.slots[owner.name] = old

    def _calls_of(self, name: str) -> tuple[int, ...]:
        """Return the calls that matter for a tensor: from the last that writes all of it on."""
        plain, name = name not in self._adapters, self._first.get(name, name)
        calls = [(i, call) for i, call in enumerate(self._calls) if plain or call.adapts]
        writing = [(i, call.writes[name]) for i, call in calls if name in call.writes]
        last = max((at for at, (_, complete) in enumerate(writing) if complete), default=0)
        return tuple(i for i, _ in writing[last:])

    @cached_property
    def _calls(self) -> list[InitialCall]:
        """The calls that write something; each was run once on meta, see [Note: what a call writes]."""
        names, numels, kept = dict[int, str](), dict[str, int](), dict[nn.Module, list[_Kept]]()
        for name, owner in self._owners.items():
            tensor, first = owner.tensor, self._first[name]
            if tensor.is_meta:
                names[tensor.untyped_storage()._cdata], numels[first] = first, tensor.numel()
                kept.setdefault(owner.module, []).append((first, owner, tensor, tensor.detach()))
        calls = list(calls_in(self._model, self._init))
        for call in calls:
            watch = WriteWatch(names, numels)
            failed = self._fails(call, watch)
            if failed and (inside := self._valued_in(call.module)):  # it may need their values
                real: dict[str, torch.Tensor] = {}
                with self._placed(inside, torch.device("cpu"), real), torch.no_grad():
                    for name, tensor in real.items():
                        tensor.copy_(self._valued[name])
                    failed = self._fails(call, watch)
                call.needs |= inside
            call.writes, call.draws = watch.writes, watch.draws or failed
            call.needs |= watch.used & self._valued.keys()
            for part in call.module.modules():
                for name, owner, tensor, before in kept.get(part, ()):
                    now = owner.slots.get(owner.name)
                    if now is not tensor or tensor.untyped_storage()._cdata != before.untyped_storage()._cdata:
                        tensor.data, owner.slots[owner.name] = before, tensor
                        call.writes.setdefault(name, False)
            if failed:  # it may need values: assume that it writes what its module has
                for name, *_ in kept.get(call.module, ()):
                    call.writes.setdefault(name, False)
        return [call for call in calls if call.writes]

    def _fails(self, call: InitialCall, watch: WriteWatch) -> bool:
        with torch.random.fork_rng([]), torch.no_grad(), watch, contextlib.suppress(Exception):
            call.act()
            return False
        return True

    def _valued_in(self, module: nn.Module) -> set[str]:
        parts = set(module.modules())
        return {self._first[n] for n, owner in self._owners.items() if owner.module in parts} & self._valued.keys()


def _copied(model: nn.Module, lacking: Iterable[str]) -> nn.Module:
    """Return a copy of a model whose tensors of these names are to be initialised."""
    # Those that hooks compute from parameters cannot be copied, and are computed in each forward.
    attributes = [value for module in model.modules() for value in vars(module).values()]
    memo: dict[int, Any] = {id(v): v.detach() for v in attributes if isinstance(v, torch.Tensor) and not v.is_leaf}
    # Those of bitsandbytes cannot be copied on meta, and are never initialised.
    memo |= {id(p): nn.Parameter(p.detach(), False) for p in model.parameters() if is_four_bit(p)}
    # Real ones would be in memory twice.
    tensors = [t for t in (*model.parameters(), *model.buffers()) if type(t) in (nn.Parameter, torch.Tensor)]
    memo |= {id(tensor): _on_meta(tensor) for tensor in tensors if not tensor.is_meta}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and {few(sorted(map(repr, lacking)))} "
            "would get first values in a copy",
            expected="a model that copy.deepcopy copies and that is not sharded yet, or a checkpoint with all values",
            hint="shard it in the function passed as shard=, and give locks and process groups to it after loading",
        ) from error


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _unset(dtype: torch.dtype, *, again: bool = False) -> complex | int:
    """Return the value that marks an element as not set; ``again``: another one, where dtypes have only real values."""
    if dtype.is_complex:
        return complex(math.nan, math.nan)
    if dtype.is_floating_point:
        return math.nan
    return not again if dtype == torch.bool else torch.iinfo(dtype).max - again


def _marked(tensor: torch.Tensor, *, again: bool = False) -> torch.Tensor:
    number = _unset(tensor.dtype, again=again)
    return tensor.isnan() if number != number else tensor == number
