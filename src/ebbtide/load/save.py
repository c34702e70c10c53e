"""Writes a sharded model as safetensors files, each rank its own slices.

[Note: files nobody gathers]
A safetensors file is a header and the tensors' bytes, so the place of each slice is known before any is written. The
first rank makes the files at their full length, with headers; then every rank writes the runs of its boxes. Of
replicas only the first writes. Until all ranks are done, the files have draft names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConfigError, DataError, few
from ebbtide.base.files import DRAFT, FULL_ERRNOS, replacing
from ebbtide.base.units import format_size
from ebbtide.load.attributes import plain_name
from ebbtide.load.checkpoint import INDEX_SUFFIX
from ebbtide.load.fourbit import scales_in
from ebbtide.load.header import DTYPES, METADATA, CheckpointEntry
from ebbtide.load.layout import Box, Piece
from ebbtide.load.prepare import check_tensors
from ebbtide.load.reader import place_of, spans_of
from ebbtide.load.targets import Target, held_by, reshard
from ebbtide.load.together import SAME_TENSORS, Ranks, same_on_all_ranks
from ebbtide.store.buffers import view_memory

logger = logging.getLogger("ebbtide.load")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Files = Mapping[str, Mapping[str, CheckpointEntry]]


class Saving:
    """One save. Arguments as for ``save_sharded``; ``ranks``: those that save together."""

    def __init__(
        self, model: nn.Module, folder: str | os.PathLike[str], ranks: Ranks, *, max_file_bytes: int, name: str
    ) -> None:
        while isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # a checkpoint of it has the model's own names
        self._model, self._folder, self._name = model, Path(folder).expanduser(), name
        self._max_file_bytes, self.ranks = max_file_bytes, ranks

    def run(self) -> None:
        """Write everything.

        Raises:
            EbbtideError: As ``ebbtide.save_sharded``; the same on all ranks.
        """
        if getattr(self._model, "peft_config", None) and self.ranks.me == 0:
            logger.warning(
                "%s has adapters of PEFT: the files have the names of its weights in PEFT, which from_pretrained of "
                "the base model does not know; hint: model.save_pretrained(folder) writes the adapters, and "
                "save_sharded(model.merge_and_unload(), folder) writes a model without them",
                type(self._model).__name__,
            )
        if self.ranks.me == 0 and (modules := _saving_more(self._model)):
            logger.warning(
                "%s save state of their own, which save_sharded does not write; hint: save state_dict() of these "
                "modules as well",
                few(modules),
            )
        held: dict[str, Target] = {}
        answers = self.ranks.run_on_all_ranks("look at what it holds", lambda: self._look(held))
        found = same_on_all_ranks(
            answers,
            expected=SAME_TENSORS,
            hint="give the modules of each rank their own names, as in the whole model",
            spell=_spelled,
            error=DataError,
        )
        shapes = {name: what for name, (_, what) in found.items()}
        first = {name: rank for name, (rank, _) in found.items()}
        files = self._files(shapes)
        try:
            self._put(files, held, first)
        except BaseException:
            if self.ranks.me == 0:
                for file in files:
                    with contextlib.suppress(OSError):
                        (self._folder / (file + DRAFT)).unlink(missing_ok=True)
            raise
        nbytes = sum(entry.nbytes for entries in files.values() for entry in entries.values())
        logger.info("saved %s in %d files in %s", format_size(nbytes), len(files), self._folder)

    def _put(self, files: Files, held: Mapping[str, Target], first: Mapping[str, int]) -> None:
        """Make the drafts, write them, and name them; ``first`` has the first rank that holds each tensor."""
        lead = self.ranks.me == 0
        self._run("make the files", lambda: self._make(files) if lead else None)
        # A plain tensor is whole on each rank that has it.
        mine = {
            name: target
            for name, target in held.items()
            if target.writes
            and (hasattr(target.old, "device_mesh") or target.old is None or first[name] == self.ranks.me)
        }
        self._run("write its slices", lambda: self._write(files, mine))
        self._run("name the files", lambda: self._finish(files) if lead else None)

    def _look(self, held: dict[str, Target]) -> dict[str, Any]:
        reshard(self._model)
        for name, parameter in self._model.named_parameters():
            if type(parameter).__name__ == "Int8Params":
                raise ConfigError(
                    f"{plain_name(name)!r} is quantised to 8 bits",
                    expected="parameters in their own dtype, or in 4 bits",
                    hint="save the model with its own library, which saves the scales, too",
                )
        held.update(held_by(self._model))
        check_tensors((name, target.local) for name, target in held.items())
        for name, value in scales_in(self._model):
            boxes = [(Box.full(value.shape), value)]
            held[name] = Target(name=name, old=value, local=value, boxes=boxes, shape=value.shape, shared=True)
        for name, target in held.items():
            if target.local.is_meta:
                raise ConfigError(
                    f"{name!r} is on meta", expected="parameters with data", hint="load the model before saving it"
                )
            if target.local.dtype not in _NAMES:
                raise ConfigError(
                    f"{name!r} is {target.local.dtype}",
                    expected="a dtype of safetensors: " + ", ".join(DTYPES),
                    hint="convert it first",
                )
        return {name: [list(target.shape), _NAMES[target.local.dtype]] for name, target in held.items()}

    def _files(self, shapes: Mapping[str, Any]) -> dict[str, dict[str, CheckpointEntry]]:
        """Assign tensors to files, in order; return each file's name and the places in it."""
        parts: list[dict[str, CheckpointEntry]] = [{}]
        filled_bytes = 0
        for name, (shape, kind) in shapes.items():
            entry = CheckpointEntry(shape=tuple(shape), dtype=DTYPES[kind])
            if parts[-1] and filled_bytes + entry.nbytes > self._max_file_bytes:
                parts.append({})
                filled_bytes = 0
            parts[-1][name] = entry
            filled_bytes += entry.nbytes
        files: dict[str, dict[str, CheckpointEntry]] = {}
        for number, part in enumerate(parts, 1):
            numbered = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            file = f"{self._name}{numbered}.safetensors"
            at = len(_header(part))
            files[file] = {}
            for name, entry in part.items():
                files[file][name] = CheckpointEntry(shape=entry.shape, dtype=entry.dtype, file=file, offset_bytes=at)
                at += entry.nbytes
        return files

    def _make(self, files: Files) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for file, entries in files.items():
            header = _header(entries)
            with (self._folder / (file + DRAFT)).open("wb") as draft:
                draft.write(header)
                draft.truncate(len(header) + sum(entry.nbytes for entry in entries.values()))

    def _write(self, files: Files, held: Mapping[str, Target]) -> None:
        for file, entries in files.items():
            wanted = [(held[name], entry) for name, entry in entries.items() if name in held]
            if not wanted:
                continue
            fd = os.open(self._folder / (file + DRAFT), os.O_WRONLY | os.O_CLOEXEC)
            try:  # one open file at a time: there may be more files than a process may open
                for target, entry in wanted:
                    for box, view in target.boxes:
                        for run in spans_of(Piece(key=target.name, box=box, into=view), entry, exact=True):
                            _put(fd, run.into, place_of(run.box, entry))
                os.fsync(fd)
            finally:
                os.close(fd)

    def _finish(self, files: Files) -> None:
        """Rename the drafts, write the index, and remove files of an earlier save of this name."""
        index = f"{self._name}.safetensors{INDEX_SUFFIX}"
        if any((self._folder / file).exists() for file in files):  # a killed save leaves no mixture that loads
            (self._folder / index).unlink(missing_ok=True)
        for file in files:
            (self._folder / (file + DRAFT)).replace(self._folder / file)
        if len(files) > 1:
            weights = {name: file for file, entries in files.items() for name in entries}
            total = sum(entry.nbytes for entries in files.values() for entry in entries.values())
            listing = {"metadata": {"total_size": total}, "weight_map": weights}
            with replacing(self._folder / index) as draft:
                draft.write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
        ours = re.compile(
            rf"{re.escape(self._name)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?({re.escape(DRAFT)})?"
        )
        kept = {*files, *([index] if len(files) > 1 else [])}
        for old in self._folder.iterdir():
            if ours.fullmatch(old.name) and old.name not in kept:
                old.unlink()

    def _run(self, about: str, act: Callable[[], object]) -> None:
        def attempt() -> dict[str, Any]:
            try:
                act()
            except OSError as error:
                hints = {errno.ENOENT: "choose a folder that every machine mounts"}
                hints |= dict.fromkeys(FULL_ERRNOS, "free some space there, or choose another folder")
                usual = "choose a folder that every machine may write to, or see the system log"
                raise DataError(
                    f"{str(self._folder)!r} cannot be written ({error.strerror or error})",
                    expected="a folder on a file system that all ranks share",
                    hint=hints.get(error.errno or 0, usual),
                ) from error
            return {}

        self.ranks.run_on_all_ranks(about, attempt)


def _saving_more(model: nn.Module) -> list[str]:
    """Return the modules that give a state dict more than parameters and buffers; of 4-bit ones that is saved."""
    own = [(name, type(m)) for name, m in model.named_modules() if not hasattr(m, "quant_state")]
    methods = ("get_extra_state", "_save_to_state_dict")
    return [
        plain_name(name) or kind.__name__
        for name, kind in own
        if any(getattr(kind, method) is not getattr(nn.Module, method) for method in methods)
    ]


def _spelled(what: Sequence[Any]) -> str:
    return f"{what[1]} {tuple(what[0])}"


def _header(entries: Mapping[str, CheckpointEntry]) -> bytes:
    """Return the bytes before the first tensor."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, entry in entries.items():
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _put(fd: int, values: torch.Tensor, offset_bytes: int) -> None:
    """Write a tensor's bytes at an offset."""
    data = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    nbytes = data.numel() * data.element_size()
    view, done = view_memory(data.data_ptr(), nbytes), 0
    while done < nbytes:
        count = os.pwrite(fd, view[done:], offset_bytes + done)
        if count <= 0:
            raise OSError(errno.EIO, f"short write: {done} of {nbytes} bytes")
        done += count
