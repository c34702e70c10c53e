"""A pipeline from its name: a folder, a hub's, or a built-in one."""

from __future__ import annotations

from pathlib import Path

from ebbtide.base.errors import DataError, nearest
from ebbtide_recipes.skeleton import hubs
from ebbtide_recipes.video import builtin
from ebbtide_recipes.video.source import Source


def open_source(name: str, *, seed: int, use_hf: bool = True) -> Source:
    """Return the parts of the pipeline that ``--model`` names.

    Args:
        name: A folder, a hub's name, or a built-in one.
        seed: Of a built-in one's weights.
        use_hf: Whether a hub's name is one of Hugging Face; else of ModelScope.

    Raises:
        DataError: There is no such pipeline, or it is not supported.
    """
    if name.startswith("builtin:"):
        return builtin.source(name, seed=seed)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Source(folder)
    if folder.is_file():
        raise DataError(
            f"{name!r} is a file",
            expected="a pipeline folder in diffusers' layout, with all parts of the pipeline",
            hint="fetch the pipeline from a hub repository in that layout (its name often ends in -diffusers); "
            "put a transformer of one file into it: Transformer.from_single_file(...).save_pretrained(...)",
        )
    if is_local(name):
        raise DataError(
            f"there is no folder {name!r}",
            expected="a pipeline folder in diffusers' layout, a hub name, or " + " or ".join(builtin.NAMES),
            hint=_near(folder) or f"looked in {folder.parent.resolve()}",
        )
    return Source(_fetched(name) if use_hf else Path(hubs.from_modelscope("model", name)))


def is_local(name: str) -> bool:
    """Whether a pipeline can be opened without a network."""
    return name.startswith(("builtin:", ".", "~", "/")) or Path(name).exists() or name.count("/") != 1


def _near(folder: Path) -> str:
    """Return a hint with names like that of a folder that does not exist; empty if there are none."""
    if not folder.parent.is_dir():
        return ""
    return nearest(folder.name, (*(path.name for path in folder.parent.iterdir()), *builtin.NAMES))


def _fetched(name: str) -> Path:
    """Fetch a pipeline from the hub or its cache."""
    from diffusers import DiffusionPipeline

    try:
        with hubs.cached_without_network():
            return Path(DiffusionPipeline.download(name))
    except (OSError, ValueError) as error:
        raise DataError(
            f"pipeline {name!r} is no local folder and could not be fetched by that name: {str(error)[:300]}",
            expected="a pipeline folder in diffusers' layout, or a hub name",
            hint=_near(Path(name)) or "without a network use the folder of a pipeline fetched before",
        ) from error
