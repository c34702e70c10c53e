"""Kinds of adapters: PEFT's config from a name, a file or a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, first_line, nearest
from ebbtide.base.files import json_object

if TYPE_CHECKING:
    from peft import PeftConfig

KINDS = (
    "beft", "boft", "c3a", "delora", "fourierft", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora",
    "miss", "oft", "randlora", "road", "vblora", "vera", "waveft",
)  # fmt: skip
"""Kinds of adapters that lie in the model's modules and that train like any other weight."""

FILE = "adapter_config.json"
_OF_A_RUN = ("inference_mode", "base_model_name_or_path", "revision", "auto_mapping")
"""What PEFT writes into the file in addition to an adapter's settings."""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_EXAMPLE = '{"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}'


_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of LoRA's init_lora_weights with which the adapters' values are taken out of the model's weights."""


def settings_of(text: str) -> dict[str, Any]:
    """Return the settings of ``--adapter_config``: a kind's name, or a file like PEFT's ``adapter_config.json``.

    Raises:
        ConfigError: There is no such kind.
        DataError: The file cannot be read.
    """
    if not text.endswith(".json") and "/" not in text:
        return {"peft_type": _kind(text, "adapter_config")}
    document = json_object(
        Path(text).expanduser(),
        f"adapter_config file {text!r}",
        expected=f"a file in the form of PEFT's {FILE}, or one of {', '.join(KINDS)}",
        hint=f"such as {_EXAMPLE}",
    )
    if not isinstance(document.get("peft_type"), str):
        raise DataError(f"{text} names no peft_type", expected="a JSON object with one", hint=f"such as {_EXAMPLE}")
    settings = {name: value for name, value in document.items() if value is not None and name not in _OF_A_RUN}
    return {**settings, "peft_type": _kind(document["peft_type"], f"peft_type in {text}")}


def _kind(text: str, what: str) -> str:
    """Return PEFT's name for a kind of adapter."""
    if text.lower() not in KINDS:
        raise ConfigError(
            f"{what} is {text!r}",
            expected=f"one of {', '.join(KINDS)}, or a .json file",
            hint=nearest(text.lower(), KINDS) or "kinds that need more than trained weights are not supported",
        )
    return text.upper()


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings in a folder of adapters.

    Raises:
        DataError: It holds none.
        ConfigError: Their kind is not supported.
    """
    if not (folder / FILE).is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        near = [path.parent.name for path in folder.parent.glob(f"*/{FILE}")] if folder.parent.is_dir() else []
        raise DataError(
            f"adapters {str(folder)!r} holds no adapters",
            expected=f"a folder with {FILE} and {_WEIGHTS[0]}",
            hint=nearest(folder.name, near) or "pass the folder of a run with adapters",
        )
    return settings_of(str(folder / FILE))


def config_of(settings: Mapping[str, Any], where: str) -> PeftConfig:
    """Make PEFT's config.

    Raises:
        ConfigError: A setting is unknown, or not supported.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]]
    known = {field.name for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"unknown setting {name!r} in {where or kind.__name__}",
                expected=f"a setting of PEFT's {kind.__name__}",
                hint=nearest(name, known) or f"such as {_EXAMPLE}",
            )
    start: object = settings.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGING_THE_BASE):
        raise ConfigError(
            f"init_lora_weights is {start!r}, which changes the model's weights besides its adapters",
            expected="adapters that leave the model as it is, or true, gaussian or orthogonal",
            hint="leave init_lora_weights out; PEFT's save_pretrained converts adapters that were trained so to LoRA",
        )
    try:
        return kind(**{name: value for name, value in settings.items() if name in known and name != "peft_type"})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where or kind.__name__} cannot be used: {first_line(error)}",
            expected=f"settings of PEFT's {kind.__name__}",
            hint=f"such as {_EXAMPLE}",
        ) from error
