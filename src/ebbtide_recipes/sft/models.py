"""Getting a model and its tokenizer: the built-in one, a local path, or a hub name."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, EbbtideError, nearest
from ebbtide_recipes.sft import smollm2

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ebbtide_recipes.sft.config import SftConfig


BUILTIN = ("builtin:smollm2",)
PLACES = f"a folder with config.json, weights and tokenizer, a hub name, or one of {', '.join(BUILTIN)}"


def check(name: str) -> None:
    """Refuse a model's name that neither a folder, nor the hub, nor ebbtide itself can know.

    Raises:
        DataError: There is no such built-in model or local folder, or the folder holds no model.
    """
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise DataError(
                f"there is no model {name!r}",
                expected=f"one of {', '.join(BUILTIN)}",
                hint=nearest(name, BUILTIN) or "a local folder or a hub name will do too",
            )
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DataError(
                f"model {name!r} cannot be loaded: the folder has no config.json",
                expected="a folder with config.json, weights and tokenizer",
                hint="give the folder that save_pretrained wrote",
            )
    elif path.exists():
        raise DataError(
            f"model {name!r} is a file",
            expected="a folder with config.json, weights and tokenizer",
            hint="give the folder that the file lies in",
        )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"there is no model folder {name!r}",
            expected=PLACES,
            hint=_near(name) or "look at the path; it is relative to the folder you are in",
        )


def locate(name: str) -> str:
    """Return what transformers loads for a model's name; makes the built-in model if need be.

    Raises:
        DataError: As ``check``; or the built-in model cannot be fetched.
    """
    check(name)
    if name.startswith("builtin:"):
        return str(smollm2.make())
    path = Path(name).expanduser()
    return str(path) if path.exists() else name


def _near(name: str) -> str:
    """Name the built-in models and local folders with names like this one."""
    folder = Path(name).expanduser().parent
    try:
        # Beside a bare name, which may be a hub's, only what is surely a model; along a path every folder.
        local = [o.name for o in folder.iterdir() if o.is_dir() and ("/" in name or (o / "config.json").is_file())]
    except OSError:
        local = []
    return nearest(Path(name).name, (*BUILTIN, *local), count=1)


def dtype_name(choice: str) -> str:
    """Return the type weights are loaded in: ``auto`` is float32 on a CPU, bfloat16 on an accelerator."""
    import torch

    if choice != "auto":
        return choice
    return "bfloat16" if torch.accelerator.is_available() else "float32"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is known of a model before its weights are loaded.

    Args:
        place: What transformers loads.
        config: The model's own config.
        tokenizer: Its tokenizer.
    """

    place: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase


def look_up(config: SftConfig) -> Source:
    """Find the model, and read what is quick to read: its config and its tokenizer.

    Raises:
        DataError: The model cannot be found or read.
        ConfigError: Sequences are longer than the model allows.
    """
    from transformers import AutoConfig, AutoTokenizer

    place = locate(config.model)
    with _told(config):
        found = AutoConfig.from_pretrained(place)
        _check_length(config, found)
        return Source(place=place, config=found, tokenizer=AutoTokenizer.from_pretrained(place))


def outline(config: SftConfig, source: Source) -> PreTrainedModel:
    """Return the model without its weights: modules and shapes on the meta device.

    Raises:
        DataError: The model cannot be made from its config.
        ConfigError: The attention implementation is not there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with _told(config), torch.device("meta"):
        return AutoModelForCausalLM.from_config(source.config, attn_implementation=config.attn_impl)


def load(config: SftConfig, source: Source | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer.

    Args:
        config: Names the model, its type and its attention implementation.
        source: As ``look_up`` returned it; ``None``: it is looked up.

    Raises:
        DataError: The model cannot be found or read.
        ConfigError: Sequences are longer than the model allows; the attention implementation is not there.
    """
    from transformers import AutoModelForCausalLM

    source = look_up(config) if source is None else source
    with _told(config):
        model = AutoModelForCausalLM.from_pretrained(
            source.place, dtype=dtype_name(config.torch_dtype), attn_implementation=config.attn_impl
        )
    return model, source.tokenizer


@contextmanager
def _told(config: SftConfig) -> Generator[None, None, None]:
    """Turn what transformers raises about a model into an error that says what was looked for."""
    from safetensors import SafetensorError

    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{config.model} cannot be loaded with attn_impl {config.attn_impl!r}: {_first_line(error)}",
            expected="the packages that the model and its attention need",
            hint="--attn_impl sdpa needs none; for the rest install what the message names",
        ) from error
    except (OSError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        if isinstance(error, EbbtideError):
            raise
        raise DataError(_not_loaded(config.model, error), expected=PLACES, hint=_what_to_do(config.model)) from error


def _not_loaded(name: str, error: Exception) -> str:
    """Say where a model was looked for."""
    said = _first_line(error)
    if Path(name).expanduser().is_dir() or name in BUILTIN:
        return f"model {name!r} cannot be loaded: {said}"
    return f"model {name!r} is no folder here, no built-in model, and as a hub name cannot be loaded: {said}"


def _what_to_do(name: str) -> str:
    if Path(name).expanduser().is_dir():
        return "give a folder that save_pretrained of a language model and of its tokenizer wrote"
    return _near(name) or "without a network give a local folder, or a model that was fetched before"


def _first_line(error: Exception) -> str:
    """Return an error's first line: what follows in transformers' errors is advice about something else."""
    return (str(error).strip() or repr(error)).splitlines()[0]


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

    Args:
        config: Names the modules.
        model: An ``outline`` of the model; the adapters are tried on it.

    Raises:
        ConfigError: A name in ``target_modules`` is no module of the model, or one that can have no adapter.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets = list(config.target_modules)
    known = {part for name, _ in model.named_modules() for part in (name, name.rpartition(".")[2])} - {""}
    for target in targets:
        if target != "all-linear" and target not in known:
            raise ConfigError(
                f"target_modules names {target!r}",
                expected="modules of the model",
                hint=nearest(target, sorted(known)) or "all-linear takes every linear module but the head",
            )
    if "all-linear" in targets and len(targets) > 1:
        raise ConfigError(
            f"target_modules is {' '.join(targets)}",
            expected="all-linear alone, or names alone",
            hint="all-linear takes every linear module but the head",
        )
    made = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    named = {type(m).__name__ for name, m in model.named_modules() if {name, name.rpartition(".")[2]} & set(targets)}
    try:
        # Tried on a copy of the config: PEFT writes the modules it finds into the one it is given.
        inject_adapter_in_model(copy.deepcopy(made), model)
    except ValueError as error:
        raise ConfigError(
            f"target_modules is {' '.join(targets)}, which names {', '.join(sorted(named)) or 'no module'}",
            expected="modules that can have adapters, such as Linear",
            hint="all-linear takes every linear module but the head",
        ) from error
    return made
