"""Adapters by PEFT: LoRA on weights as they are and on weights in 4 bits, other kinds, and adapters gone on with."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide.base.extras import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from ebbtide_recipes.sft.config import SftConfig

KINDS = (
    "beft", "boft", "c3a", "delora", "fourierft", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora",
    "miss", "oft", "randlora", "road", "shira", "vblora", "vera", "waveft",
)  # fmt: skip
"""Kinds of adapters that lie in the model's modules and that train like any other weight."""

_FILE = "adapter_config.json"
_ITS_OWN = ("peft_type", "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping")
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_EXAMPLE = '{"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}'


def check(config: SftConfig) -> None:
    """Refuse what can be seen to fail before the model is looked for.

    Raises:
        EbbtideError: bitsandbytes is missing for 4 bits.
        ConfigError: There is no such kind of adapter, or a file says something that cannot be had.
        DataError: A file or folder is not there, or cannot be read.
    """
    if config.train_type == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        require("bitsandbytes", extra="qlora", use="--train_type qlora")
    if config.adapters is not None:
        _said_by_folder(Path(config.adapters).expanduser())
    elif config.adapter_config is not None:
        _said(config.adapter_config)


def four_bits(config: SftConfig, dtype: str) -> dict[str, Any]:
    """Return what makes ``from_pretrained`` quantise the weights as it loads them.

    Args:
        config: Says whether FSDP shards the weights.
        dtype: What is computed in, such as ``"bfloat16"``.
    """
    import torch
    from transformers import BitsAndBytesConfig

    computed = getattr(torch, dtype)
    made = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        # FSDP shards only what is stored in the type of the other weights.
        bnb_4bit_quant_storage=computed if config.fsdp_strategy != "none" else torch.uint8,
    )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    return {"quantization_config": made, "device_map": {"": torch.device(device.type, index) if index else device}}


def chosen(config: SftConfig, model: PreTrainedModel, *, without: Sequence[str] = ()) -> PeftConfig:
    """Return the adapters that the config asks for.

    Args:
        config: Names the kind and the modules, or a folder of adapters to go on with.
        model: An ``outline`` of the model; the adapters are tried on it.
        without: Paths of modules inside which nothing gets an adapter.

    Raises:
        ConfigError: A name in ``target_modules`` is no module of the model, or one that can have no such adapter.
        DataError: The adapters of the folder do not fit the model.
    """
    if config.adapters is not None:
        folder = Path(config.adapters).expanduser()
        made = _made(_said_by_folder(folder), _FILE)
        made.inference_mode = False
        _try(made, model, f"the adapters in {folder}", "the model that they were trained on")
        return made
    said: dict[str, Any] = {"peft_type": "LORA", "r": config.lora_rank, "lora_alpha": config.lora_alpha}
    said["lora_dropout"] = config.lora_dropout
    if config.train_type == "adapter":
        said = _said(str(config.adapter_config))
    if not {"target_modules", "target_parameters"} & said.keys():
        said["target_modules"] = _targets(config, model)
    if without and said["peft_type"] != "LN_TUNING":
        said["exclude_modules"] = rf".*(?:{'|'.join(map(re.escape, without))})\..*"
    made = _made({**said, "task_type": "CAUSAL_LM"}, config.adapter_config or "")
    _try(made, model, *_named(config, model))
    return made


def put_on(model: PreTrainedModel, made: PeftConfig, config: SftConfig) -> PeftModel:
    """Put adapters on a model: new ones, or those of a folder with their values.

    Args:
        model: With its weights, or on meta; see [Note: stand-ins] in ``meta.py``.
        made: As ``chosen`` returned it.
        config: Has the seed of new adapters' values, and names the folder.

    Raises:
        ConfigError: New adapters are made of the weights, which are not there yet.
        DataError: The values in the folder do not fit.
    """
    from peft import PeftModel, get_peft_model
    from transformers import set_seed

    from ebbtide_recipes.sft.meta import standing_in

    set_seed(config.seed)
    with standing_in(model):
        if config.adapters is None:
            return cast("PeftModel", get_peft_model(model, made))
        folder = str(Path(config.adapters).expanduser())
        try:
            return PeftModel.from_pretrained(model, folder, config=made, is_trainable=True, torch_device="cpu")
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise DataError(
                f"the adapters in {folder} cannot be loaded: {str(error).strip().splitlines()[0]}",
                expected="adapters that were trained on this model",
                hint="see base_model_name_or_path in their adapter_config.json",
            ) from error


def _targets(config: SftConfig, model: PreTrainedModel) -> str | list[str]:
    """Return the modules that get adapters, all of which are in the model."""
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
    return "all-linear" if targets == ["all-linear"] else targets


def _said(text: str) -> dict[str, Any]:
    """Return what ``--adapter_config`` says: a kind's name, or a file in the form of PEFT's ``adapter_config.json``.

    Raises:
        ConfigError: There is no such kind.
        DataError: The file cannot be read.
    """
    if not text.endswith(".json") and "/" not in text:
        return {"peft_type": _kind(text, "adapter_config")}
    path = Path(text).expanduser()
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        others = [o.name for o in path.parent.glob("*.json")] if path.parent.is_dir() else []
        raise DataError(
            f"adapter_config file {text!r} cannot be read ({error.strerror})",
            expected=f"a file in the form of PEFT's {_FILE}, or one of {', '.join(KINDS)}",
            hint=nearest(path.name, others) or f"such as {_EXAMPLE}",
        ) from error
    except ValueError as error:
        raise DataError(
            f"adapter_config file {text!r} is not JSON: {error}",
            expected="a JSON object of settings",
            hint=f"such as {_EXAMPLE}",
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("peft_type"), str):
        raise DataError(f"{text} names no peft_type", expected="a JSON object with one", hint=f"such as {_EXAMPLE}")
    said = {key: value for key, value in cast("dict[str, Any]", content).items() if value is not None}
    return {**said, "peft_type": _kind(str(said["peft_type"]), f"peft_type in {text}"), "inference_mode": False}


def _kind(text: str, what: str) -> str:
    """Return PEFT's name for a kind of adapter."""
    if text.lower() not in KINDS:
        raise ConfigError(
            f"{what} is {text!r}",
            expected=f"one of {', '.join(KINDS)}, or a .json file",
            hint=nearest(text.lower(), KINDS) or "kinds that need more of a trainer than to train weights are not here",
        )
    return text.upper()


def _said_by_folder(folder: Path) -> dict[str, Any]:
    """Return what a folder of adapters says of them.

    Raises:
        DataError: It holds none.
        ConfigError: They are of a kind that is not trained here.
    """
    if not (folder / _FILE).is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        near = [path.parent.name for path in folder.parent.glob(f"*/{_FILE}")] if folder.parent.is_dir() else []
        raise DataError(
            f"adapters {str(folder)!r} holds no adapters",
            expected=f"a folder with {_FILE} and {_WEIGHTS[0]}",
            hint=nearest(folder.name, near) or "give the folder that a run with adapters wrote",
        )
    return _said(str(folder / _FILE))


def _made(said: dict[str, Any], where: str) -> PeftConfig:
    """Make PEFT's config.

    Raises:
        ConfigError: A setting is unknown, or cannot be had.
    """
    from dataclasses import fields

    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[said["peft_type"]]
    known = {field.name for field in fields(kind)}
    for name in said:
        if name not in known and name not in _ITS_OWN:
            raise ConfigError(
                f"unknown setting {name!r} in {where or kind.__name__}",
                expected=f"a setting of PEFT's {kind.__name__}",
                hint=nearest(name, known) or f"such as {_EXAMPLE}",
            )
    try:
        return kind(**{name: value for name, value in said.items() if name in known and name != "peft_type"})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where or kind.__name__} cannot be used: {str(error).splitlines()[0]}",
            expected=f"settings of PEFT's {kind.__name__}",
            hint=f"such as {_EXAMPLE}",
        ) from error


def _named(config: SftConfig, model: PreTrainedModel) -> tuple[str, str]:
    """Say what adapters were asked for, and what they could be put on."""
    targets = set(config.target_modules)
    kinds = {type(m).__name__ for name, m in model.named_modules() if {name, name.rpartition(".")[2]} & targets}
    found = (
        f"target_modules is {' '.join(config.target_modules)}, which names {', '.join(sorted(kinds)) or 'no module'}"
    )
    return found, "modules that can have adapters, such as Linear"


def _try(made: PeftConfig, model: PreTrainedModel, found: str, expected: str) -> None:
    """Try adapters on an outline of the model.

    Raises:
        ConfigError: They do not fit.
    """
    from peft import inject_adapter_in_model

    try:
        # Tried on a copy of the config: PEFT writes the modules it finds into the one it is given.
        inject_adapter_in_model(copy.deepcopy(made), model)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{found}: {str(error).strip().splitlines()[0]}",
            expected=expected,
            hint="all-linear takes every linear module but the head",
        ) from error
