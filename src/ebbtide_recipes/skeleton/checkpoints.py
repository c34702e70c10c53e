"""Checkpoints that are complete or ignored.

[Note: a checkpoint's seal]
A checkpoint has many files, written by several processes, any of which may be killed. When all files are written, the
main process writes ``ebbtide.json``: their names and sizes, the step, the number of processes, and what the order of
rows depends on. A folder without this seal, or different from it, is never resumed from. An older checkpoint is removed
only after a newer one has its seal, and loses its own seal first. File systems remove at once and write data later:
each process flushes the files to the disk before the seal, or a node that crashes would lose the old and the new.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.checks import FALSE, NOTHING
from ebbtide.base.errors import ConfigError, DataError, DiskFullError, nearest
from ebbtide.base.files import flush, replacing
from ebbtide_recipes.skeleton import adapted
from ebbtide_recipes.skeleton.diskfailure import disk_failure

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig

LOGGER = logging.getLogger("ebbtide.recipes")

SEAL = "ebbtide.json"
LATEST = ("latest", "last", "true", "yes", "on")
"""Values of ``--resume_from_checkpoint`` that are no folder."""

_ORDER = (
    "seed", "packing", "dataset_shuffle", "num_generations", "num_iterations", "micro_batches", "clips_of_a_batch",
)  # fmt: skip
"""Flags that the order of rows depends on, the micro-batches of a rollout, and the clips that are drawn together."""

_ADAPTED: Mapping[str, type] = {"model": str, "settings": dict}

_NAME = re.compile(r"checkpoint-(\d+)")
ASIDE = "set-aside-"
"""Begins the names of checkpoints beyond the one that a run was resumed from."""


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """The seal of a complete checkpoint.

    Attributes:
        folder: Its path.
        step: Finished steps.
        sharding: ``"none"``, ``"fsdp1"`` or ``"fsdp2"``: the layout of weights in its files.
        train_type: The training type.
        adapters: The kind of adapters, as PEFT names it; ``None``: none, or unknown.
        order: What the order of rows depends on, by name; empty: unknown.
        adapted: What ``adapted.described`` returned; empty: no adapters, or unknown.
    """

    folder: Path
    step: int
    sharding: str
    train_type: str
    adapters: str | None = None
    order: Mapping[str, Any] = field(default_factory=dict[str, Any])
    adapted: Mapping[str, Any] = field(default_factory=dict[str, Any])


def sharding_of(config: RecipeConfig) -> str:
    """Return the layout of the config's weights in a checkpoint's files."""
    return "none" if config.fsdp_strategy == "none" else f"fsdp{config.fsdp_version}"


def seal(folder: Path, config: RecipeConfig, *, step: int, world_size: int, rows: int | None = None) -> None:
    """Write the seal of a checkpoint whose files are all written. See [Note: a checkpoint's seal]."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    facts = {"step": step, "world_size": world_size, "sharding": sharding_of(config), "train_type": config.train_type}
    facts |= {"adapters": config.adapter_kind, **adapted.described(config)}
    order = _order(config, world_size, rows)
    with replacing(folder / SEAL) as draft:
        draft.write_text(json.dumps({"schema": 1, **facts, "order": order, "files": files}, indent=1) + "\n")
    for path in (folder, folder.parent):
        flush(path)


def flush_all(folder: Path) -> None:
    """Write the files of a checkpoint that this machine still has in memory to the disk, before the seal."""
    for place, _, files in os.walk(folder):
        for path in (*(Path(place) / name for name in files), Path(place)):
            flush(path)


def _order(config: RecipeConfig, processes: int, rows: int | None) -> dict[str, Any]:
    """Return what the order of rows depends on, by name; what the recipe has."""
    found = {name: getattr(config, name) for name in _ORDER if hasattr(config, name)}
    found["rows of a step"] = processes * config.per_device_train_batch_size * config.gradient_accumulation_steps
    if found.get("packing"):  # else the number of rows tells if some are too long
        found["max_length"] = getattr(config, "max_length", None)
    return {"processes": processes, **found, **({} if rows is None else {"rows": rows})}


def read_seal(folder: Path) -> tuple[Sealed | None, str]:
    """Return a checkpoint's seal, or ``None`` and the problem.

    Raises:
        DataError: The disk fails. An incomplete checkpoint would be skipped, and removed in time.
    """
    with _reading(folder):
        try:
            seal: Any = json.loads((folder / SEAL).read_text())
            files = {str(name): int(size) for name, size in seal["files"].items()}
            sealed = Sealed(
                folder=folder,
                step=int(seal["step"]),
                sharding=str(seal["sharding"]),
                train_type=str(seal["train_type"]),
                adapters=seal.get("adapters"),
                order={"processes": int(seal["world_size"]), **seal.get("order", {})},
                adapted={name: kind(seal[name]) for name, kind in _ADAPTED.items() if name in seal},
            )
        except FileNotFoundError:
            return None, f"has no {SEAL}, which is written last"
        except (ValueError, KeyError, TypeError, AttributeError):
            return None, f"has an {SEAL} that cannot be read"
        for name, size in files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                return None, f"holds {found} bytes of {name}, not {size}" if found is not None else f"lacks {name}"
        return sealed, ""


def complete(folder: Path) -> list[Sealed]:
    """Return the complete checkpoints in an output folder, oldest first."""
    found = [read_seal(path)[0] for path in _folders(folder)]
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def resumes(config: RecipeConfig) -> bool:
    """Whether a run is to be resumed: a file of settings may have ``none`` or ``false``."""
    return (config.resume_from_checkpoint or "none").lower() not in (*NOTHING, *FALSE)


def set_aside_later(config: RecipeConfig) -> None:
    """Rename the checkpoints beyond the one to resume from, which ``latest`` and ``prune`` would take for newer.

    That one may be of another folder, or a copy with a name of its own: the step is its seal's.
    """
    name, output = config.resume_from_checkpoint or "none", Path(config.output_dir).expanduser()
    if not resumes(config) or name.lower() in LATEST:
        return
    begin = Path(name).expanduser()
    step = _named(begin).step
    for path in _folders(output):
        if _step(path) > step and path.resolve() != begin.resolve():
            aside = path.with_name(f"{ASIDE}{path.name}")
            if aside.exists():
                remove(aside)
            path.rename(aside)
            LOGGER.warning("the run is resumed at step %d: %s is set aside as %s", step, path, aside.name)


def find(config: RecipeConfig, *, world_size: int | None = None, rows: int | None = None) -> Path | None:
    """Return the checkpoint to resume from; ``None``: begin at the first step.

    Args:
        config: Names the checkpoint and the training type.
        world_size: Number of processes; ``None``: not known yet.
        rows: Number of rows to train on; ``None``: not known.

    Raises:
        DataError: There is no such checkpoint, or it is incomplete.
        ConfigError: It was written by a different kind of run.
    """
    name = config.resume_from_checkpoint
    if name is None or not resumes(config):
        return None
    output = Path(config.output_dir).expanduser()
    if name.lower() in LATEST:
        sealed = next(reversed(complete(output)), None)
        if sealed is None:
            return None
        for path in (path for path in _folders(output) if world_size is not None and _step(path) > sealed.step):
            LOGGER.warning("%s %s: %s is resumed", path, read_seal(path)[1], sealed.folder)
    else:
        sealed = _named(Path(name).expanduser())
    _check_kind(sealed, config)
    if world_size is not None:
        _warn_of_order(sealed, _order(config, world_size, rows))
        adapted.warn(sealed.folder, sealed.adapted, config)
    return sealed.folder


def _warn_of_order(sealed: Sealed, ours: Mapping[str, Any]) -> None:
    """Warn of a resumed run whose rows do not follow those before."""
    changed = [name for name, value in ours.items() if sealed.order.get(name, value) != value]
    if changed:
        before, now = (", ".join(f"{name} {order[name]}" for name in changed) for order in (sealed.order, ours))
        LOGGER.warning(
            "%s was written with %s and is resumed with %s: the order of rows changes from here on",
            *(sealed.folder, before, now),
        )


def prune(folder: Path, keep: int | None) -> None:
    """Remove checkpoints older than the newest ``keep`` complete ones, including incomplete ones."""
    if keep is None:
        return
    kept = {one.folder for one in complete(folder)[-keep:]}
    newest = max((_step(path) for path in kept), default=0)
    for path in _folders(folder):
        if path not in kept and _step(path) < newest:
            remove(path)


def remove(folder: Path) -> None:
    """Remove a checkpoint; its seal goes first, so that it never looks complete. Of a link only the link is removed."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / SEAL).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(folder: Path, output: Path, *, remove_failed: bool) -> Generator[None]:
    """Raise an error with a hint if a save in the context fails because of the disk.

    Args:
        folder: What is written.
        output: The run's output folder.
        remove_failed: Remove the folder after a failed save.

    Raises:
        DiskError: The disk is full, or fails.
    """
    try:
        yield
    except Exception as error:
        failure = disk_failure(error, output)  # before anything is removed, which would free a full disk
        if remove_failed:
            with suppress(OSError):  # of a disk that fails: the first error has the reason
                remove(folder)
        if failure is None:
            raise
        kind, reason = failure
        found, after = f"{folder} could not be written: {reason}", resumable(output)  # not the removed one
        expected, hint = "a disk that takes every byte", f"check its space, your quota and the system log; {after}"
        if kind is DiskFullError:
            remedy = "lower --save_total_limit" if after.startswith("resume") else "name another --output_dir"
            expected, hint = "room for it on the disk", f"free some space, or {remedy}; {after}"
        raise kind(found, expected=expected, hint=hint) from error


def resumable(output: Path) -> str:
    """Return a sentence on the checkpoint from which an interrupted run can be resumed."""
    try:
        last = next(reversed(complete(output)), None)
    except DataError as error:
        return error.found
    if last is None:
        return "no checkpoint was written before"
    return f"resume from {last.folder} (--resume_from_checkpoint latest)"


def _named(folder: Path) -> Sealed:
    """Return the checkpoint in a folder that was named."""
    with _reading(folder):
        exists = folder.is_dir()
    if not exists:
        near = nearest(folder.name, [path.name for path in _folders(folder.parent)])
        raise DataError(
            f"there is no checkpoint {str(folder)!r}",
            expected="a folder that a run wrote with --save_steps, or latest",
            hint=near or "latest is the newest complete one in the output folder",
        )
    sealed, wrong = read_seal(folder)
    if sealed is None:
        others = complete(folder.parent)
        hint = f"the last complete one is {others[-1].folder}" if others else f"{folder.parent} holds no complete one"
        raise DataError(f"checkpoint {str(folder)!r} {wrong}", expected="a complete checkpoint", hint=hint)
    return sealed


def _check_kind(sealed: Sealed, config: RecipeConfig) -> None:
    """Reject a checkpoint of a different kind of run."""
    for name, theirs, ours, hint in (
        ("train_type", sealed.train_type, config.train_type, f"--train_type {sealed.train_type}"),
        ("adapters", sealed.adapters, config.adapter_kind, f"--adapter_config {str(sealed.adapters).lower()}"),
        ("sharding", sealed.sharding, sharding_of(config), _sharding_hint(sealed.sharding)),
    ):
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"{sealed.folder} was written with {name} {theirs!r}, and this run has {ours!r}",
                expected="a run of the same kind",
                hint=f"{hint} resumes it",
            )
    adapted.check(sealed.folder, sealed.adapted, config)


def _sharding_hint(sharding: str) -> str:
    if sharding == "none":
        return "--fsdp_strategy none"
    return f"--fsdp_strategy full_shard --fsdp_version {sharding[-1]}"


def written(folder: Path) -> list[Path]:
    """Return all checkpoints that runs wrote into a folder: complete or not, set aside or not."""
    with _reading(folder):
        found = folder.iterdir() if folder.is_dir() else ()
        return [path for path in found if _NAME.fullmatch(path.name.removeprefix(ASIDE)) and path.is_dir()]


def _folders(folder: Path) -> Sequence[Path]:
    return sorted((path for path in written(folder) if not path.name.startswith(ASIDE)), key=_step)


@contextmanager
def _reading(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{str(folder)!r} cannot be read ({error.strerror})",
            expected="checkpoints on a disk that can be read",
            hint="check its permissions and the system log; once it can be read, the run can be resumed",
        ) from error


def _step(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else 0
