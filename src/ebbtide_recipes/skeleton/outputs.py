"""What a run may do to the folder that it writes into, and to what lies there."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ebbtide.base.errors import DataError
from ebbtide.base.runs import (
    EVENTS_FILE,
    OUTSIDE_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    put_record_aside,
    records_aside,
)
from ebbtide_recipes.skeleton import checkpoints

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig

LOGGER = logging.getLogger("ebbtide.recipes")

_SOURCES = ("model", "adapters", "teacher", "critic")
"""Flags that may name a folder of weights to load."""

_MODELS = ("*.safetensors", "*.bin", "transformer/*.safetensors", "transformer/*.bin")
"""Files of a trained model, at the places where a recipe saves its own."""

_SAVED = {
    True: ((".", "adapter_model"), (".", "pytorch_lora_weights"), ("lora_ema", "pytorch_lora_weights")),
    False: (
        (".", "model"),
        (".", "pytorch_model"),
        ("transformer", "diffusion_pytorch_model"),
        ("transformer_ema", "diffusion_pytorch_model"),
        ("critic", "diffusion_pytorch_model"),
    ),
}
"""For adapters (true) and whole models: the places where recipes save weights, and how the names of these begin."""

_NAME_END = re.compile(r"(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""How the names of weights end: one file, or shards and their index."""

_SETTINGS = {
    True: ("adapter_config.json", "chat_template.jinja"),
    False: ("config.json", "generation_config.json", "chat_template.jinja"),
}
"""Files next to weights that the save of another model may leave, and that loading it would read."""


DRAFT = "new-model"
"""The folder inside the output folder that holds a model until all of it is written."""


def only_latents(config: RecipeConfig) -> bool:
    """Whether a run only makes latents, and in a folder of their own: it writes nothing into its output folder."""
    return getattr(config, "preprocess_only", False) and getattr(config, "latents_dir", None) is not None


def place(config: RecipeConfig) -> Path:
    """Return the folder of a run's log: the output folder, or that of the latents which are all that it makes."""
    return Path(getattr(config, "latents_dir" if only_latents(config) else "output_dir")).expanduser()


def check(config: RecipeConfig) -> None:
    """Reject an output folder in which this run would replace or remove what must stay.

    Raises:
        DataError: It holds an earlier run, which this run neither resumes nor replaces, what this run loads, or weights
            of another program.
    """
    if only_latents(config):
        return
    folder = Path(config.output_dir).expanduser()
    _check_sources(config, folder)
    if config.overwrite_output_dir:
        return
    found = [EVENTS_FILE] * (folder / EVENTS_FILE).exists() + [one.folder.name for one in checkpoints.complete(folder)]
    if found and not _goes_on(config, folder):
        raise DataError(
            f"{folder} holds an earlier run ({', '.join(found)})",
            expected="a folder without one",
            hint="choose another --output_dir, resume it (--resume_from_checkpoint latest), "
            "or pass --overwrite_output_dir true",
        )
    saved = {str(path.relative_to(folder)) for pattern in _MODELS for path in folder.glob(pattern)}
    models = sorted(saved) if config.save else []
    others = ", ".join([*sorted(path.name for path in checkpoints.written(folder)), *models])
    if others and not _is_ours(folder):
        raise DataError(
            f"{folder} holds {others}, and no record of a run by ebbtide",
            expected="a folder without weights of other programs, which this run would replace or remove",
            hint="choose another --output_dir, or pass --overwrite_output_dir true",
        )
    other = [
        path.name
        for place, weights in _saved(folder, adapters=not config.trains_adapters)
        for path in weights
        if place == folder
    ]
    if other and config.save:
        raise DataError(
            f"{folder} holds {', '.join(other)}, and this run saves "
            f"{'adapters' if config.trains_adapters else 'all weights'}",
            expected="a folder without a model of the other kind, which would be loaded together with the new one",
            hint="move it, or pass --overwrite_output_dir true, which removes it when the new model is saved",
        )
    if models and checkpoints.resumes(config) and checkpoints.find(config) is None:
        raise DataError(
            f"{folder} holds {', '.join(models)}, and no complete checkpoint to resume from",
            expected="a complete checkpoint, or a folder without a trained model: the run would train another one",
            hint="--overwrite_output_dir true replaces the model; --save_steps makes a run resumable",
        )


def check_shared(
    folder: Path,
    flag: str = "output_dir",
    part: str = "part of a checkpoint",
    otherwise: str = "a run without --save_steps and --resume_from_checkpoint",
) -> None:
    """Reject a folder, into which each rank writes its part, that ranks of other machines do not see.

    They would resume at different steps, or lack the latents that the others make.

    Args:
        folder: The folder; rank 0 creates it.
        flag: The flag that names it.
        part: What each rank writes.
        otherwise: The remedy where there is no shared folder.

    Raises:
        DataError: A rank does not see a file written by rank 0.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    # A new name: network file systems cache failed look-ups.
    names = [f".seen-{uuid.uuid4().hex}"]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).touch()
    dist.broadcast_object_list(names, src=0)
    mark = folder / names[0]
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, mark.exists())
    if dist.get_rank() == 0:
        mark.unlink()
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise DataError(
            f"{flag} {str(folder)!r} on rank {', '.join(blind)} is not the folder of rank 0",
            expected=f"a folder that all nodes share, because every rank writes its {part} there",
            hint=f"--{flag} on a file system that all nodes mount, or {otherwise}",
        )


def _goes_on(config: RecipeConfig, folder: Path) -> bool:
    """Whether this run resumes the one in its output folder, and not that of another folder."""
    name = config.resume_from_checkpoint
    if name is None or not checkpoints.resumes(config):
        return False
    begin = Path(name).expanduser()
    return name.lower() in checkpoints.LATEST or folder.resolve() in (begin.parent.resolve(), begin.resolve().parent)


def _replaces(config: RecipeConfig, folder: Path) -> bool:
    """Whether this run removes the one in its output folder."""
    return config.overwrite_output_dir and not _goes_on(config, folder)


def _saved(folder: Path, *, adapters: bool) -> Iterator[tuple[Path, list[Path]]]:
    """Return the places in an output folder with weights under the names that recipes save, and these files."""
    for name, begin in _SAVED[adapters]:
        place = folder / name
        found = [path for path in place.glob(f"{begin}*") if _NAME_END.fullmatch(path.name.removeprefix(begin))]
        if found:
            yield place, sorted(found)


def _is_ours(folder: Path) -> bool:
    """Whether a run of a recipe wrote into an existing folder before."""
    sealed = ((path / checkpoints.SEAL).exists() for path in checkpoints.written(folder))
    return (folder / EVENTS_FILE).exists() or bool(records_aside(folder)) or any(sealed)


def _check_sources(config: RecipeConfig, folder: Path) -> None:
    """Reject weights to load that lie where this run replaces or removes them."""
    removed = checkpoints.written(folder) if _replaces(config, folder) else []
    replaced = {folder.resolve(), (folder / "transformer").resolve()}
    for name, source in _sources(config):
        if source in replaced:
            raise DataError(
                f"--{name} {str(getattr(config, name))!r} is where this run writes what it trained",
                expected="an output folder other than that of the weights to load",
                hint="choose another --output_dir",
            )
        for path in removed:
            if source.is_relative_to(path.resolve()):
                raise DataError(
                    f"--{name} {str(getattr(config, name))!r} is in {path}, which --overwrite_output_dir true removes",
                    expected="weights outside the run that is replaced",
                    hint="choose another --output_dir",
                )


def _sources(config: RecipeConfig) -> Iterator[tuple[str, Path]]:
    """Return the folders that the config names to load weights from, by flag."""
    for name in _SOURCES:
        value = getattr(config, name, None)
        if value is not None and (path := Path(value).expanduser()).exists():
            yield name, path.resolve()


class Earlier:
    """The record of an earlier run, out of the place of this run's: renamed to ``run-1.jsonl``, ``run-2.jsonl``, ...

    Args:
        config: The config of a run that resumes or replaces the earlier one; of any other run nothing is renamed.
        folder: The output folder.

    Raises:
        DataError: The earlier record cannot be read or renamed.
    """

    def __init__(self, config: RecipeConfig, folder: Path) -> None:
        self._folder = folder
        self._record: Path | None = None
        self._made: dict[str, bytes] = {}
        if (checkpoints.resumes(config) or config.overwrite_output_dir) and (folder / EVENTS_FILE).exists():
            paths = [path for name in (SUMMARY_FILE, REPORT_FILE, OUTSIDE_FILE) if (path := folder / name).is_file()]
            try:
                self._made = {path.name: path.read_bytes() for path in paths}
                self._record = put_record_aside(folder)
            except OSError as error:
                raise DataError(
                    f"the record of the earlier run in {folder} cannot be renamed: {error}",
                    expected="a folder in which you may rename files",
                    hint="choose another --output_dir, or check the permissions of its files",
                ) from error

    def restore(self) -> None:
        """Put it back, with the files that belong to it: the run that should follow never began."""
        if self._record is None:
            return
        try:
            self._record.rename(self._folder / EVENTS_FILE)
            for name, content in self._made.items():
                if not (path := self._folder / name).is_file():
                    path.write_bytes(content)
        except OSError as error:  # must not hide the error of the run
            LOGGER.warning("the record of the earlier run in %s is not as it was: %s", self._folder, error)


def clear(config: RecipeConfig, folder: Path) -> None:
    """Delete the checkpoints and records of an overwritten run, of which ``latest`` would find a checkpoint."""
    if _replaces(config, folder) and (records_aside(folder) or checkpoints.complete(folder)):
        for path in checkpoints.written(folder):
            checkpoints.remove(path)
        for path in records_aside(folder).values():
            path.unlink()


def place_model(config: RecipeConfig, folder: Path) -> None:
    """Replace the model of an earlier run by that of this run, all of which is in the draft."""
    clear_model(config, folder)
    draft = folder / DRAFT
    for path in sorted(filter(Path.is_file, draft.rglob("*"))):
        target = folder / path.relative_to(draft)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)  # a link to another disk may lead there


def clear_model(config: RecipeConfig, folder: Path) -> None:
    """Delete the model of an earlier run.

    In other files, one or shards, it would be loaded in place of the new one. That of an overwritten run may also be of
    the other kind, and both would be loaded as one. Settings are deleted only with the weights next to them; any other
    file stays.
    """
    if not config.overwrite_output_dir:
        for place, weights in _saved(folder, adapters=config.trains_adapters):
            for path in weights:
                if place == folder and ".bin" not in path.name:  # safetensors are loaded first
                    path.unlink()
        return
    for adapters, settings in _SETTINGS.items():
        for place, weights in _saved(folder, adapters=adapters):
            # Weights last: the next run finds what a killed one leaves.
            for path in (*(place / name for name in settings), *weights):
                path.unlink(missing_ok=True)
            if place != folder:
                with suppress(OSError):  # it has other files
                    place.rmdir()
