"""The public functions for weights: ``load_sharded`` and ``save_sharded``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbtide.base.checks import check_path, check_value
from ebbtide.base.errors import ConfigError
from ebbtide.base.extras import check_version
from ebbtide.load import Loading, LoadOptions, Saving, Weights
from ebbtide.load.together import Ranks, same_on_all_ranks
from ebbtide.wrap.meeting import Meeting

_SHARD_ADVICE = "such as a function that calls fully_shard on each block and then on the model"


def load_sharded(
    model: nn.Module,
    weights: Weights = None,
    *,
    shard: Callable[[nn.Module], nn.Module | None] | None = None,
    source: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    missing: str = "error",
    unexpected: str = "error",
    init: Callable[[nn.Module], object] | None = None,
    allow_pickle: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> nn.Module:
    """Load weights into a model on meta, sharded: no process holds more than its shard and small staging buffers.

    Each rank reads the byte ranges of its own slices from the safetensors files, or one rank per machine reads and
    sends them. Use it when the whole model does not fit into one process. Every rank calls it. If one fails, all raise
    the same message and parameters stay on meta (flat parameters of FSDP1 are undefined); a loaded model keeps its
    values if nothing was sharded yet.

    Example::

        ebbtide.save_sharded(torch.nn.Linear(8, 8), "weights")
        with torch.device("meta"):
            model = torch.nn.Linear(8, 8)
        model = ebbtide.load_sharded(model, "weights", shard=None)  # shard=: a function that calls fully_shard

    Args:
        model: On meta: built under ``with torch.device("meta"):``. Or loaded, without ``weights``: its own values are
            sharded and the whole copy is dropped; it may be loaded on one rank and on meta on the others.
        weights: A checkpoint's folder, index, file or files; a state dict or a model in memory, on one rank or more,
            ``None`` on the others; ``None`` everywhere: the model's own initial values, by a seed that is drawn from
            torch's random numbers on the first rank.
        shard: Wraps the model on meta (``fully_shard``, ``parallelize_module``, FSDP1, or several) and returns it, or
            ``None`` if it is wrapped in place; without it every rank holds the whole model.
        source: ``"slices"``: each rank reads its own byte ranges; ``"broadcast"``: one rank of each machine reads and
            sends the others their slices; ``"initialize"``: ``weights`` is ignored, the model gets its own initial
            values; ``"auto"``: chosen by what the ranks see.
        dtype: Of floating-point parameters, converted slice by slice; default: as the model was built. Weights that
            ``shard`` widens are rounded to it first.
        device: Where shards are; default: the mesh's device, or the accelerator if there is one.
        optimizer: Built from the parameters on meta; it gets the new ones.
        missing: ``"error"``, or ``"initialize"`` the weights missing in the checkpoint; tensors with values keep
            them.
        unexpected: ``"error"``, or ``"ignore"`` tensors that the model does not have.
        init: Initializes one module; called with each, children first, after the model's own ``_init_weights`` and
            ``reset_parameters``, as ``model.apply(init)``; default: those alone.
        allow_pickle: Also read pickled checkpoints; tensors and plain containers only.
        progress: Called with the bytes this rank has read and will read, in its own thread.

    Returns:
        The sharded model.

    Raises:
        ConfigError: An argument cannot be used, or a rank does not make the call.
        DataError: The checkpoint is damaged, does not fit, or cannot be read on some rank.
        EbbtideError: torch or transformers is older than the tested versions.
    """
    checked: list[tuple[LoadOptions, torch.device | None]] = []

    def check() -> dict[str, Any]:
        _check_arguments(weights, {"shard": shard, "init": init, "progress": progress})
        options = LoadOptions(
            source=source,  # pyright: ignore[reportArgumentType]
            missing=missing,  # pyright: ignore[reportArgumentType]
            unexpected=unexpected,  # pyright: ignore[reportArgumentType]
            allow_pickle=allow_pickle,
        )
        checked.append((options, _device(device)))
        return {}

    ranks = Ranks(_meet)
    ranks.run_on_all_ranks("call load_sharded", check)
    ((options, place),) = checked
    loading = Loading(model, weights, options, ranks, init=init, progress=progress)
    return loading.run(shard, dtype=dtype, device=place, optimizer=optimizer)


def save_sharded(
    model: nn.Module, folder: str | PathLike[str], *, max_file_bytes: int = 5 * 10**9, name: str = "model"
) -> None:
    """Write a sharded model's parameters and persistent buffers as safetensors files with an index.

    Every rank calls it and writes its own slices; nothing is gathered. The folder must be on a file system that all
    ranks share. Existing files of these names are replaced once everything is written. See ``load_sharded``.

    Args:
        model: As ``load_sharded`` returned it, or wrapped by FSDP2, tensor parallelism or FSDP1, or plain.
        folder: Created if missing.
        max_file_bytes: A file is closed before it grows beyond this, unless one tensor alone does.
        name: Files are called ``<name>-00001-of-00003.safetensors``.

    Raises:
        ConfigError: Parameters are on meta or quantised to 8 bits, an argument cannot be used or differs between ranks,
            or a rank does not make the call.
        DataError: The folder cannot be written, or ranks do not see the same one, or have different tensors of a name.
        EbbtideError: torch is older than the tested versions.
    """

    def check() -> dict[str, Any]:
        check_version("torch")
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            what = f"model is a {type(model).__name__}"
            raise ConfigError(what, expected="a torch.nn.Module with data", hint="pass the model itself")
        check_path("folder", folder, hint="pass the same folder on every rank; '.' is the working directory")
        check_value("max_file_bytes", max_file_bytes, int)
        check_value("name", name, str)
        if max_file_bytes < 1:
            raise ConfigError(f"max_file_bytes is {max_file_bytes}", expected="1 or more", hint="such as 5 * 10**9")
        if not name or Path(name).name != name or "\0" in name:
            raise ConfigError(
                f"name is {name!r:.80}", expected="the first part of a file's name", hint="such as 'model'"
            )
        return {"name": name, "max_file_bytes": int(max_file_bytes)}

    ranks = Ranks(_meet)
    arguments = ranks.run_on_all_ranks("call save_sharded", check)
    # Each rank computes the places of all tensors from them.
    same_on_all_ranks(arguments, expected="the same on all ranks", hint="pass the same on each rank", spell=repr)
    Saving(model, folder, ranks, max_file_bytes=max_file_bytes, name=name).run()


def _check_arguments(weights: object, functions: Mapping[str, object]) -> None:
    check_version("torch")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name} is {function!r:.80}", expected="a function", hint=_SHARD_ADVICE)
    several = isinstance(weights, Sequence) and all(isinstance(one, (str, PathLike)) for one in weights)
    if weights is not None and not (several or isinstance(weights, (PathLike, Mapping, nn.Module))):
        raise ConfigError(
            f"weights is a {type(weights).__name__}",
            expected="a path, a state dict, a model, or None",
            hint="pass the folder of the checkpoint",
        )


def _device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device is {device!r:.80}", expected="a torch device", hint="such as device='cuda', or leave it out"
        ) from error


def _meet(ranks: Sequence[int], about: str, text: str) -> Mapping[int, str]:
    with Meeting(ranks, about, text) as meeting:
        return meeting.attend()
