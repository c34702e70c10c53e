"""Files of a checkpoint that cannot be read.

[Note: a damaged checkpoint]
The seal tells files that are missing or half-written. A file of the right size may still hold other bytes: a disk has
failed, or somebody has edited it. A run that resumes reads, before it changes anything, the parts of files that say how
the rest is read; the values of weights have no checksum and are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZipFile

from ebbtide.base.errors import DataError, EbbtideError
from ebbtide_recipes.skeleton import checkpoints

STATE = "trainer_state.json"
"""transformers' file of the step and what was logged."""
_LARGE_BYTES = 2**24
"""Parts of files from this size on, which are weights, are not read in advance."""


def check(folder: Path) -> None:
    """Refuse a complete checkpoint of which a file cannot be read, or that is of another step than its seal.

    Raises:
        DataError: It names the file.
    """
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        try:
            _read(path)
        except Exception as error:  # of any kind: damaged bytes are read as sizes and names
            raise refused(folder, f"{path} cannot be read: {_reason(error)}") from error
    sealed, _ = checkpoints.read_seal(folder)
    path = folder / STATE
    if sealed is None or not path.is_file():
        return
    state: Any = json.loads(path.read_text(encoding="utf-8"))
    step = state.get("global_step") if isinstance(state, dict) else None
    if step != sealed.step:
        raise refused(folder, f"{path} is of step {step}, and {checkpoints.SEAL} of step {sealed.step}")


@contextmanager
def explained(folder: str | Path) -> Generator[None]:
    """Explain an error of loading a checkpoint that is complete, and can be read.

    Raises:
        DataError: Its contents are not those of this run.
    """
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except EbbtideError:
        raise
    except (
        *(OSError, ValueError, KeyError, TypeError, EOFError, UnpicklingError, SafetensorError),
        CheckpointException,  # no Exception in torch 2.13
    ) as error:
        raise refused(Path(folder), f"{folder} cannot be loaded: {_reason(error)}") from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or "loading state_dict" not in str(error):  # such as of the device
            raise
        raise refused(Path(folder), f"{folder} does not fit this run: {_reason(error)}") from error


def _read(path: Path) -> None:
    """Read what a file says of its contents, if it is of a known kind.

    Raises:
        Exception: It is not what its name says.
    """
    if path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as opened:
            opened.keys()
    elif path.suffix in (".pt", ".pth", ".bin"):  # as torch.save writes them
        with ZipFile(path) as archive:
            for part in archive.infolist():
                if part.file_size < _LARGE_BYTES:
                    archive.read(part)  # compares its checksum, which torch.load does not


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def refused(folder: Path, found: str) -> DataError:
    """Return the error of a checkpoint that cannot be resumed, with the one before it."""
    sealed, _ = checkpoints.read_seal(folder)
    before = [one.folder for one in checkpoints.complete(folder.parent) if sealed is None or one.step < sealed.step]
    return DataError(
        found,
        expected="a checkpoint of this run, as it was written",
        hint=f"the complete one before it is {before[-1]}: --resume_from_checkpoint {before[-1]}"
        if before
        else "no complete one is before it; --overwrite_output_dir true without --resume_from_checkpoint begins at "
        "the first step",
    )
