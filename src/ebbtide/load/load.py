"""``load_sharded``: from a model on meta to a loaded one, each rank's part only."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ebbtide.base.checks import check_fields
from ebbtide.base.errors import ConfigError, DataError, few, note_place
from ebbtide.base.events import BUS
from ebbtide.base.units import format_size
from ebbtide.load.ahead import ReadAhead
from ebbtide.load.attributes import on_meta, rename
from ebbtide.load.checkpoint import Checkpoint, checkpoint_of, is_present, open_checkpoint
from ebbtide.load.filling import Filling, SliceSource, Values, check_ties, first_values
from ebbtide.load.fourbit import FourBit
from ebbtide.load.header import CheckpointEntry
from ebbtide.load.initialise import Initialiser
from ebbtide.load.names import SHOWN, NameMap, check_names, match_names, values_of, wanted_of, word
from ebbtide.load.optimizers import Rebinding
from ebbtide.load.prepare import check_attributes, check_model, empty, is_loaded, set_dtype
from ebbtide.load.reader import SliceReader
from ebbtide.load.relay import Client, send_slices, servers_of, signals_held
from ebbtide.load.targets import Target, attach, names_by_tensor, owners_of, targets_of
from ebbtide.load.together import SAME_TENSORS, Ranks, by_rank, same_on_all_ranks
from ebbtide.store.pages import use_huge_pages

logger = logging.getLogger("ebbtide.load")

_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How weights are loaded; ``ebbtide.load_sharded`` documents each option."""

    source: Literal["auto", "slices", "broadcast", "initialize"] = "auto"
    missing: Literal["error", "initialize"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


Weights = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, torch.Tensor] | nn.Module | None


class Loading:
    """One load, from the checks to the last byte.

    Args:
        model: On meta.
        weights: Their source, as this rank's argument.
        options: How to load.
        ranks: Those that load together.
        init: Gives a module its first values; ``None``: the module's own.
        progress: Called with bytes read and bytes to read by this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        options: LoadOptions,
        ranks: Ranks,
        *,
        init: Callable[[nn.Module], object] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self.model, self.options, self.ranks = model, options, ranks
        self._weights, self._init, self._progress = weights, init, progress
        self.checkpoint: Checkpoint | None = None
        self.plan = NameMap()
        self._done_bytes = self._total_bytes = 0
        self._undo = contextlib.ExitStack()  # restores the model's parameters and dtypes

    def run(
        self,
        shard: Callable[[nn.Module], nn.Module | None] | None,
        *,
        dtype: torch.dtype | None,
        device: torch.device | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> nn.Module:
        """Load, and return the sharded model.

        Raises:
            EbbtideError: As ``ebbtide.load_sharded``; the same on all ranks.
        """
        started = time.monotonic()
        found: list[tuple[nn.Module, dict[str, Target]]] = []

        def act() -> dict[str, Any]:
            ties = names_by_tensor(self.model).values()
            with self._reading_ahead():
                sharded = self._sharded(shard)
                self._rebinding.check(sharded)
                targets = targets_of(sharded, device)
                self._four.check(targets)
                check_ties(ties, targets)
                first_values(targets, self.plan, self._initialiser)
            self._read(targets)
            found.append((sharded, targets))
            return {"drawn": self._initialiser.has_drawn}

        try:
            self._agree(dtype, optimizer)
            self._emit("begin", None)
            answers = self.ranks.run_on_all_ranks("read its weights", lambda: self._serving(act))
        except BaseException:
            self._undo.close()
            raise
        if any(answer["drawn"] for answer in answers):
            _draw_seed()  # or the next model would be the same; on all ranks, for the first one's seed is used
        (sharded, targets) = found[0]
        attach(sharded, list(targets.values()))
        self._four.finish()
        self._rebinding.rebind(sharded)
        seconds = time.monotonic() - started
        figures = (format_size(self._done_bytes), self.ranks.me, self.path, seconds)
        logger.info("loaded %s on rank %d by %s in %.1f s", *figures)
        self._emit("end", self._done_bytes, round(seconds, 3))
        return sharded

    def _sharded(self, shard: Callable[[nn.Module], nn.Module | None] | None) -> nn.Module:
        """Shard the model; second names of its tensors follow them, and attributes that stay on meta are logged."""
        before = {name: owner.tensor for name, owner in owners_of(self.model).items()}
        try:
            wrapped = shard(self.model) if shard else None
        except Exception as error:
            note_place(error, "in the function passed as shard=")
            raise
        sharded = self.model if wrapped is None else wrapped
        if not isinstance(sharded, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"the function passed as shard= returned a {type(sharded).__name__}",
                expected="the wrapped module, or None if it is wrapped in place",
                hint="return the model alone",
            )
        now = owners_of(sharded)
        if foreign := [name for name, owner in now.items() if name not in before and owner.tensor.is_meta]:
            raise ConfigError(
                f"the function passed as shard= returned a model with {foreign[0]!r} on meta, which is new",
                expected="the names of the model, which FSDP and tensor parallelism keep",
                hint="return the model itself, and put it into another module after loading",
            )
        rename(sharded, {id(tensor): now[name].tensor for name, tensor in before.items() if name in now})
        if (left := on_meta(sharded)) and self.ranks.me == 0:
            shown = few(left, count=SHOWN)
            logger.warning("%d attributes have tensors on meta, which are not loaded: %s", len(left), shown)
        return sharded

    def _agree(self, dtype: torch.dtype | None, optimizer: torch.optim.Optimizer | None) -> None:
        """Agree with the other ranks on the sources of weights and match their names; the model is not changed yet."""
        sights = self.ranks.run_on_all_ranks("look for the weights", lambda: self._look(dtype, optimizer))
        self._choose(sights)
        catalogs = (
            self.ranks.run_on_all_ranks("learn what the checkpoint holds", self._catalog) if self._servers else []
        )
        seed = int(sights[0]["seed"])
        fits = self.ranks.run_on_all_ranks("fit the weights to the model", lambda: self._fit(catalogs, seed=seed))
        same_on_all_ranks(  # collectives would mix the bytes of tensors that differ, or hang
            fits,
            expected=SAME_TENSORS,
            hint="build the same model on each rank, or pass the same dtype= on each; parts of a model that differ by "
            "rank need the names that they have in the whole model",
        )

    def _look(self, dtype: torch.dtype | None, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Check the arguments, and find the weights that this rank sees."""
        loaded = self._weights is None and self.options.source != "initialize" and is_loaded(self.model)
        check_model(self.model, loaded=loaded)
        check_attributes(self.model)
        self._rebinding = Rebinding(self.model, optimizer)
        if loaded:
            self._weights = values_of(self.model)
            self._undo.callback(empty(self.model))
        self._undo.callback(set_dtype(self.model, dtype))
        self._four = FourBit(self.model, dtype)
        self._undo.callback(self._four.undo)
        weights, name = None if self.options.source == "initialize" else self._weights, "the given values"
        if isinstance(weights, nn.Module):
            self.checkpoint = checkpoint_of(values_of(weights), "the given model")
        elif isinstance(weights, Mapping):
            self.checkpoint = checkpoint_of(weights, "the given state dict")
        elif weights is not None:
            paths = [weights] if isinstance(weights, (str, os.PathLike)) else list(weights)
            folder = str(paths[0] if len(paths) == 1 else Path(paths[0]).parent) if paths else ""
            name = f"a checkpoint in {folder!r}"
            if self.ranks.count == 1 or all(map(is_present, paths)):
                self.checkpoint = open_checkpoint(*paths, allow_pickle=self.options.allow_pickle)
        sees = "" if self.checkpoint is None else "all" if self.ranks.count == 1 else self.checkpoint.digest()
        with torch.random.fork_rng([]):
            host, seed = os.uname().nodename, _draw_seed()
        wanted = {"given": weights is not None, "source": self.options.source}
        return wanted | {"sees": sees, "name": name, "host": host, "seed": seed}

    def _choose(self, sights: Sequence[Mapping[str, Any]]) -> None:
        """Choose the source from what the ranks see; all choose the same."""
        sees, source = [s["sees"] for s in sights], self.options.source
        if any(s["source"] != source for s in sights):
            sources = by_rank({rank: repr(sight["source"]) for rank, sight in enumerate(sights)})
            raise ConfigError(f"source differs: {sources}", expected="one source", hint="pass the same on all ranks")
        blind, kinds = [r for r, s in enumerate(sees) if not s], {s for s in sees if s}
        if len(kinds) > 1:
            seen = by_rank({rank: sight[:8] or "nothing" for rank, sight in enumerate(sees)})
            raise DataError(
                f"ranks see {len(kinds)} different checkpoints ({seen})",
                expected="the same tensors, dtypes and files on each rank that sees a checkpoint",
                hint="check that every machine has the same copy",
            )
        name = next((s["name"] for s in sights if s["given"]), "any weights")
        if not kinds and (source in ("slices", "broadcast") or any(s["given"] for s in sights)):
            raise DataError(
                f"no rank sees {name}",
                expected="a checkpoint that at least one rank can read",
                hint="check the path (a name on the Hub is none) and the mounted file systems; without a path, weights "
                "are initialized",
            )
        if source == "slices" and blind:
            raise ConfigError(
                f"source='slices' and ranks {', '.join(map(str, blind))} do not see the checkpoint",
                expected="a checkpoint that all ranks see",
                hint="source='auto' sends those ranks their weights",
            )
        hosts = [s["host"] for s in sights]
        self._one_machine = len(set(hosts)) == 1
        self._servers = servers_of(sees, hosts, one_a_host=source == "broadcast")
        self.path = "initialize" if not kinds else "broadcast" if self._servers else "slices"
        reason = {
            "initialize": "there is no checkpoint",
            "broadcast": f"{len(self._servers)} of {len(sees)} ranks get them from a rank that reads",
            "slices": "every rank sees the checkpoint",
        }
        logger.info("loading by %s: %s", self.path, reason[self.path])

    def _catalog(self) -> dict[str, Any]:
        """Send the checkpoint's contents to the other ranks, from one rank if all see the same."""
        if self.checkpoint is None or self.ranks.me != min(self._servers.values()):
            return {}
        entries = self.checkpoint.entries.items()
        return {"name": self.checkpoint.name, "entries": {k: [e.shape, word(e.dtype)] for k, e in entries}}

    def _fit(self, catalogs: Sequence[Mapping[str, Any]], *, seed: int) -> dict[str, Any]:
        """Match the checkpoint with the model, and keep what initial values need; return the model's tensors."""
        if self.ranks.me in self._servers:
            catalog = next(c for c in catalogs if c)
            entries = {
                key: CheckpointEntry(shape=tuple(shape), dtype=getattr(torch, dtype))
                for key, (shape, dtype) in catalog["entries"].items()
            }
            self.checkpoint = Checkpoint(entries=entries, name=catalog["name"])
        if self.checkpoint is not None:
            self.plan = match_names(self.model, self.checkpoint.entries, self._four)
            plan, options = self.plan, self.options
            check_names(plan, self.checkpoint.name, missing=options.missing, unexpected=options.unexpected)
            catalog = {"made by the model": plan.missing, "kept as they are": plan.kept, "not used": plan.unexpected}
            for what, names in catalog.items():
                if names and self.ranks.me == 0:
                    shown = few(names, count=SHOWN)
                    logger.warning("%d names are not in both model and checkpoint, and %s: %s", len(names), what, shown)
        self._initialiser = Initialiser(self.model, self._init, seed=seed, sourced=self.plan.sourced)
        self._four.learn_sources({name: match.source for name, match in self.plan.matches.items()})
        return {name: f"{tuple(t.shape)} of {word(t.dtype)}" for name, t in wanted_of(self.model).items()}

    def _serving(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Act; then, even after an error or an interrupt, serve the ranks that read from this one."""
        raised: list[BaseException] = []
        result: dict[str, Any] = {}
        try:
            result = act()
        except BaseException as error:  # another rank waits in a receive that only this one ends
            raised.append(error)
        clients = [client for client, server in self._servers.items() if server == self.ranks.me]
        with signals_held(raised):
            if self.ranks.me in self._servers:
                Client(self._servers[self.ranks.me], {}).finish()
            elif clients and self.checkpoint is not None:
                with self._source(self.checkpoint, set()) as source:
                    send_slices(clients, source, self.checkpoint.entries, raised)
        if raised:
            raise raised[0]
        return result

    def _reading_ahead(self) -> contextlib.AbstractContextManager[object]:
        """Let this machine's ranks read the checkpoint into the page cache, if together they need all of it."""
        if self.checkpoint is None or not self.checkpoint.files or self.path != "slices" or not self._one_machine:
            return contextlib.nullcontext()
        keys = dict.fromkeys(key for match in self.plan.matches.values() for key in match.source.keys)
        return ReadAhead([self.checkpoint.entries[key] for key in keys], self.ranks.me, self.ranks.count)

    def _read(self, targets: dict[str, Target]) -> None:
        for target in targets.values():
            if target.local.device.type == "cpu" and target.local.is_contiguous():
                use_huge_pages(target.local.data_ptr(), target.local.nbytes)
        if self.checkpoint is not None:
            filling = Filling(self.plan, targets, self.checkpoint.entries, self._four)
            self._total_bytes = filling.total_bytes
            if self.ranks.me in self._servers:
                filling.fill(Client(self._servers[self.ranks.me], self.checkpoint.entries), self._done)
            else:
                pinned = any(target.local.device.type != "cpu" for target in targets.values())
                with self._source(self.checkpoint, filling.shared_keys(), pinned=pinned) as source:
                    filling.fill(source, self._done)

    @contextlib.contextmanager
    def _source(
        self, checkpoint: Checkpoint, shared: Collection[str], *, pinned: bool = False
    ) -> Generator[SliceSource]:
        """Open a checkpoint; arguments as for ``SliceReader``."""
        with SliceReader(checkpoint.entries, shared=shared, ahead=self._one_machine, pinned=pinned) as reader:
            yield Values(checkpoint.values, reader)

    def _done(self, nbytes: int) -> None:
        """Count the bytes read; report at every twentieth part and at the end."""
        before = self._done_bytes
        self._done_bytes += nbytes
        step = max(self._total_bytes // _STEPS, 1)
        if before // step != self._done_bytes // step or self._done_bytes == self._total_bytes:
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
            logger.debug("rank %d: %s of %s", self.ranks.me, *map(format_size, (self._done_bytes, self._total_bytes)))
            self._emit("progress", self._done_bytes)

    def _emit(self, edge: str, nbytes: int | None, seconds: float | None = None) -> None:
        BUS.emit("load", edge=edge, source=self.path, rank=self.ranks.me, bytes=nbytes, seconds=seconds)


def _draw_seed() -> int:
    """Draw a seed for initial values, as ordinary initialisation draws them: from the CPU's random numbers."""
    return int(torch.randint(1 << 62, (), device="cpu"))
