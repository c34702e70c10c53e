"""The tensors of a checkpoint: in safetensors files, in pickled files, or in memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.files import json_object
from ebbtide.load.header import CheckpointEntry, read_header, unreadable
from ebbtide.load.names import UNSAVED
from ebbtide.load.pickled import ScatteredTensors, place_tensor, tensors_of

INDEX_SUFFIX = ".index.json"
_STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
_SAMPLES, _SAMPLE_BYTES = 128, 4096
_PICKLED = (".bin", ".pt", ".pth")
_STATES = re.compile(
    r"((device_)?rng_state|rollout|optimizer|scheduler|scaler|sampler|dl_state_dict|training_args)(_\d+)?\.(bin|pt|pth)"
)
"""Pickled files without weights: of transformers' ``Trainer``, accelerate and the recipes. Every rank writes some of
them, into a folder of its own machine."""
_DISTRIBUTED = ".distcp"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint.

    ``values`` has the tensors of those that are in memory already or that lie scattered in a pickled file; the others
    are read from their files.
    """

    entries: dict[str, CheckpointEntry]
    values: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    name: str = "values in memory"

    @property
    def files(self) -> tuple[str, ...]:
        """The files that tensors are read from."""
        return tuple(dict.fromkeys(e.file for e in self.entries.values() if e.file))

    def digest(self) -> str:
        """Return a digest that is equal for ranks that see the same checkpoint, at any path.

        Of the values it has a sample, from files or from memory: two steps of one run differ in that, too. Buffers that
        are not saved are left out: machines may compute them with other roundings.

        Raises:
            DataError: A file cannot be read.
        """
        rows = [
            (name, list(e.shape), str(e.dtype), Path(e.file).name, e.offset_bytes) for name, e in self.entries.items()
        ]
        found = hashlib.sha256(json.dumps(sorted(rows)).encode())
        names = sorted(name for name in self.entries if not name.startswith(UNSAVED))
        for name in names[:: -(-len(names) // _SAMPLES) or 1]:
            value = self.values.get(name)
            found.update(_middle_of_file(self.entries[name]) if value is None else _middle_of_value(value))
        return found.hexdigest()


def _middle_of_value(value: torch.Tensor) -> bytes:
    """Return some bytes of the middle row of a tensor in memory."""
    row = value.detach()
    while row.dim() > 1 and row.numel():
        row = row[row.shape[0] // 2]
    row = row.flatten()
    count = min(row.numel(), _SAMPLE_BYTES // row.dtype.itemsize)
    # One element alone may have any stride, and is contiguous all the same.
    some = row.narrow(0, (row.numel() - count) // 2, count).cpu().clone(memory_format=torch.contiguous_format)
    return bytes(some.view(torch.uint8).tolist())


def _middle_of_file(entry: CheckpointEntry) -> bytes:
    """Return some bytes from the middle of a tensor in a file."""
    begin = max(0, (entry.nbytes - _SAMPLE_BYTES) // 2)
    try:
        with Path(entry.file).open("rb") as file:
            file.seek(entry.offset_bytes + begin)
            return file.read(min(_SAMPLE_BYTES, entry.nbytes))
    except OSError as error:
        raise unreadable(Path(entry.file), error) from error


def is_present(path: str | os.PathLike[str]) -> bool:
    """Whether this rank sees a file, or a folder with files of weights, at a path."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            ends = (".safetensors", INDEX_SUFFIX, *_PICKLED, _DISTRIBUTED)
            return any(name.endswith(ends) and not _STATES.fullmatch(name) for name in os.listdir(place))
        return place.exists()
    except OSError:
        return False


def open_checkpoint(*paths: str | os.PathLike[str], allow_pickle: bool = False) -> Checkpoint:
    """Read the names, shapes, dtypes and places of a checkpoint's tensors.

    Args:
        *paths: A folder, an index, one file, or several files.
        allow_pickle: Also read pickled files; only tensors and plain containers are accepted in them.

    Raises:
        DataError: There is no checkpoint, a file is missing or damaged, or an index names a missing tensor.
        ConfigError: A path is empty, a file is pickled (without ``allow_pickle``), or several paths are not only files.
    """
    if not paths:
        raise ConfigError("no file was passed", expected="a folder, an index, or files", hint="pass the folder")
    if not all(os.fspath(path) for path in paths):
        raise ConfigError(
            "a path is empty",
            expected="a folder, an index, or files",
            hint="check the variable that the path comes from; '.' is the working directory",
        )
    named = [Path(path).expanduser() for path in paths]
    try:
        file, files, promised = _files_of(named)
    except OSError as error:
        raise unreadable(named[0], error) from error
    pickled = next((f for f in files if f.suffix in _PICKLED), None)
    if pickled and not allow_pickle:
        raise ConfigError(
            f"{str(pickled)!r} is a pickled checkpoint",
            expected="safetensors files",
            hint="convert it to safetensors, or pass allow_pickle=True to read tensors, and only those, from it",
        )
    entries, places, scattered = dict[str, CheckpointEntry](), dict[str, Path](), ScatteredTensors()
    for one in files:
        for name, entry in _entries_of(one, scattered).items():
            if name in places:
                raise DataError(
                    f"{name!r} is in {str(places[name])!r} and in {str(one)!r}",
                    expected="each tensor in exactly one file",
                    hint="remove the file that is not part of the checkpoint, or the tensor from one of the two",
                )
            entries[name], places[name] = entry, one
    if absent := [name for name, one in promised.items() if places.get(name) != one]:
        close = "" if absent[0] in places else nearest(absent[0], places)
        raise DataError(
            f"{str(file)!r} names {len(absent)} tensors that are not in their files: {', '.join(absent[:4])}",
            expected="each tensor in the file named by the index",
            hint=close or "index and files belong to different checkpoints: fetch them again",
        )
    folder = named[0] if len(named) == 1 else named[0].parent
    return Checkpoint(entries=entries, values=scattered, name=str(folder))


def _entries_of(file: Path, scattered: ScatteredTensors) -> dict[str, CheckpointEntry]:
    """Return the tensors of a file by name; those of a pickled file that do not lie row by row go to ``scattered``."""
    if file.suffix not in _PICKLED:
        return read_header(file)
    found, state = tensors_of(file)
    values = checkpoint_of(found, str(file)).values
    return {key: place_tensor(key, value, file, state, scattered) for key, value in values.items()}


def _files_of(named: list[Path]) -> tuple[Path, list[Path], dict[str, Path]]:
    """Return the file that names the others, the files with tensors, and by name the files where an index has them."""
    for one in named:
        if not one.exists():
            raise _no_checkpoint(one, "does not exist")
    if len(named) > 1 and (other := next((f for f in named if f.is_dir() or f.name.endswith(INDEX_SUFFIX)), None)):
        raise ConfigError(
            f"{str(other)!r} is one of {len(named)} paths",
            expected="a folder or an index alone, or files that hold tensors",
            hint="pass the folder or the index without the files: it names them",
        )
    file = _front(named[0]) if named[0].is_dir() else named[0]
    if len(named) == 1 and file.name.endswith(INDEX_SUFFIX):
        return file, *_indexed(file)
    return file, named if len(named) > 1 else [file], {}


def checkpoint_of(values: Mapping[str, Any], name: str) -> Checkpoint:
    """Return tensors in memory as a checkpoint.

    Raises:
        DataError: One of them is no tensor, or has no values.
    """
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise DataError(
                f"{name} holds {key!r}, a {type(value).__name__}",
                expected="tensors by name",
                hint="pass the state dict of a model",
            )
        if value.is_meta:
            raise DataError(
                f"{name} has no data for {key!r}: it is on meta",
                expected="tensors with data",
                hint="pass a state dict or a loaded model",
            )
        if hasattr(value, "device_mesh"):
            raise DataError(
                f"{name} holds {key!r} as a shard",
                expected="whole tensors",
                hint="save it with ebbtide.save_sharded and load from there",
            )
    return Checkpoint(
        entries={k: CheckpointEntry(shape=tuple(v.shape), dtype=v.dtype) for k, v in values.items()},
        values=values,
        name=name,
    )


def _front(folder: Path) -> Path:
    """Return the entry file of a folder's checkpoint: the one file, as transformers prefers, or the index."""
    for suffix in (".safetensors", *_PICKLED):
        names = [f"{stem}{suffix}{end}" for stem in _STEMS for end in ("", INDEX_SUFFIX)]
        if found := next((folder / name for name in names if (folder / name).is_file()), None):
            return found
        indices = sorted(folder.glob(f"*{suffix}{INDEX_SUFFIX}"))
        files = sorted(file for file in folder.glob(f"*{suffix}") if not _STATES.fullmatch(file.name))
        if len(indices) == 1 or (not indices and len(files) == 1):
            return (indices or files)[0]
        if indices or files:
            several = ", ".join(f.name for f in (indices or files)[:4])
            raise DataError(
                f"{str(folder)!r} holds {several} and no index of a model",
                expected="one safetensors file, or an index of them such as model.safetensors.index.json",
                hint="pass the index, the file, or all files of the checkpoint",
            )
    if next(folder.glob(f"*{_DISTRIBUTED}"), None) is not None:
        raise DataError(
            f"{str(folder)!r} holds files of torch.distributed.checkpoint",
            expected="safetensors files, or files of torch.save",
            hint="convert them with dcp_to_torch_save of torch.distributed.checkpoint.format_utils",
        )
    raise _no_checkpoint(folder, "holds no checkpoint")


def _indexed(index: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files that an index names, and the file of each tensor."""
    expected, hint = "a JSON object with a weight_map from tensors to files", "fetch it again, or check its permissions"
    promised: Any = json_object(index, f"the index {str(index)!r}", expected=expected, hint=hint).get("weight_map")
    if not isinstance(promised, dict) or not all(isinstance(name, str) for name in promised.values()):
        raise DataError(f"the index {str(index)!r} has {promised!r:.80} as weight_map", expected=expected, hint=hint)
    foreign = [name for name in promised.values() if Path(name).name != name or name in ("", ".", "..")]
    if foreign:
        raise DataError(
            f"{str(index)!r} names the file {foreign[0]!r:.80}",
            expected="names of files in the same folder",
            hint="an index that points elsewhere is damaged or malicious: fetch it again",
        )
    files = {name: index.parent / name for name in dict.fromkeys(promised.values())}
    absent = [name for name, file in files.items() if not file.is_file()]
    if absent:
        raise DataError(
            f"{len(absent)} of {len(files)} files of {str(index)!r} are missing: {', '.join(absent[:4])}",
            expected="every file of the index, in the same folder",
            hint="fetch the missing files",
        )
    return list(files.values()), {name: files[file] for name, file in promised.items()}


def _no_checkpoint(path: Path, what: str) -> DataError:
    like_a_name = not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in (".", "..")
    return DataError(
        f"{str(path)!r} {what}",
        expected="a folder with model.safetensors or its index, or such a file",
        hint="for a model of the Hub, pass the folder that huggingface_hub.snapshot_download returns"
        if like_a_name and not path.exists()
        else "check that this rank mounts the file system of the checkpoint",
    )
