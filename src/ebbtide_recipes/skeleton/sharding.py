"""FSDP's settings, from flags and from the JSON files that users of transformers and ms-swift have.

[Note: one meaning]
A file has its own keys for settings that are flags, too: sharding of weights, activation offloading, checkpointing.
``resolved`` translates them into the flags, so that the rest of the code uses one config. A flag that is not at its
default overrides the file.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ebbtide.base.checks import FALSE, NOTHING, TRUE
from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.files import json_object

if TYPE_CHECKING:
    from torch import nn

    from ebbtide_recipes.skeleton.config import RecipeConfig, Strategy

LOGGER = logging.getLogger("ebbtide.recipes")

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard")
_VERSIONS = {"fsdp2": 2, "fsdp1": 1}
_WORDS = (*STRATEGIES, "auto_wrap", "offload", *_VERSIONS, "true")
_OURS = (
    "version", "reshard_after_forward", "sharding_strategy", "activation_checkpointing", "activation_cpu_offload",
    "cpu_ram_efficient_loading",
)  # fmt: skip
_FULL_SHARD = ("native_fsdp", "accelerate", "fsdp", "fsdp2")
"""What twinkle calls the ways to ``full_shard``; there is one here. verl's ``fsdp`` is FSDP1."""

_RENAMED = {"offload_params": "cpu_offload", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}
"""What accelerate calls some of them."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "backward_prefetch": ("NO_PREFETCH", "BACKWARD_PRE", "BACKWARD_POST"),
    "state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
}
_SWITCHES = ("cpu_offload", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params")
_OF_VERSION_1 = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params")
_CLASSES = "transformer_layer_cls_to_wrap"
_PASSED_ON = (*_CHOICES, *_SWITCHES, _CLASSES, "min_num_params")
"""Settings that transformers' ``fsdp_config`` takes."""

_GUIDE = "docs/guides/sft.md lists the settings"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The settings of a file or ``--fsdp``; ``None`` where it has none.

    Attributes:
        strategy: What is sharded.
        version: 1 or 2.
        activation_cpu_offload: Whether ebbtide is on.
        activation_checkpointing: Whether blocks are checkpointed.
        memory_efficient_init: Whether weights are read straight into place: accelerate's
            ``cpu_ram_efficient_loading``, by ebbtide's own loading.
        settings: Passed to transformers' ``fsdp_config`` unchanged.
    """

    strategy: Strategy | None = None
    version: int | None = None
    activation_cpu_offload: bool | None = None
    activation_checkpointing: bool | None = None
    memory_efficient_init: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def resolved(config: RecipeConfig) -> RecipeConfig:
    """Return the config with the settings of its FSDP file as flags; itself if it names no file.

    Raises:
        ConfigError: The file has an unsupported setting; ``deepspeed`` without FSDP.
        DataError: The file cannot be read.
    """
    settings = read(config)
    if config.fsdp_strategy == "fsdp2" and config.fsdp_version == 1:
        raise ConfigError(
            "fsdp_strategy is 'fsdp2' with fsdp_version 1",
            expected="one meaning: fsdp2 is full_shard with fsdp_version 2, fsdp with 1",
            hint="leave --fsdp_version out",
        )
    changes: dict[str, Any] = {"fsdp_strategy": "full_shard"} if config.fsdp_strategy in _FULL_SHARD else {}
    if config.fsdp_strategy in ("fsdp", "fsdp2"):
        changes["fsdp_version"] = 1 if config.fsdp_strategy == "fsdp" else 2
    if settings is not None:
        if config.fsdp_strategy == "none":
            changes["fsdp_strategy"] = settings.strategy or "full_shard"
        if config.fsdp_version == 2 and settings.version is not None and "fsdp_version" not in changes:
            changes["fsdp_version"] = settings.version
        if settings.activation_cpu_offload:
            changes["activation_cpu_offload"] = True
        if settings.activation_checkpointing:
            changes["gradient_checkpointing"] = True
        version = changes.get("fsdp_version", config.fsdp_version)
        if settings.memory_efficient_init and config.train_type == "qlora" and version == 1:
            LOGGER.warning("cpu_ram_efficient_loading has no effect with train_type qlora and FSDP1: FSDP2 can")
        elif settings.memory_efficient_init:
            changes["memory_efficient_init"] = True
    config = dataclasses.replace(config, **changes) if changes else config
    _check_deepspeed(config)
    return config


def trainer_settings(config: RecipeConfig) -> dict[str, Any]:
    """Return transformers' arguments for FSDP; empty without FSDP.

    Args:
        config: As ``resolved`` returned it.

    Raises:
        ConfigError: A setting of the file is not one of this version of FSDP.
    """
    if config.fsdp_strategy == "none":
        return {}
    sharding = read(config)
    settings: dict[str, Any] = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}
    settings |= dict(sharding.settings) if sharding is not None else {}
    if config.fsdp_version == 2:
        for name in set(_OF_VERSION_1) & set(settings):
            if settings.pop(name) not in (False, "NO_PREFETCH"):
                LOGGER.warning("%s has no effect with FSDP2: it is a setting of FSDP1", name)
        reshard: bool | str = config.fsdp_strategy != "shard_grad_op"
    else:
        reshard = config.fsdp_strategy
        # Each rank reads the weights or its part of them, so nothing is sent.
        if config.memory_efficient_init:
            settings["sync_module_states"] = False
        settings.setdefault("sync_module_states", False)
    settings |= {"version": config.fsdp_version, "reshard_after_forward": reshard}
    return {"fsdp": True, "fsdp_config": settings}


def read(config: RecipeConfig) -> Sharding | None:
    """Return the settings of ``--fsdp_config`` or ``--fsdp``; ``None`` if neither is given, or it is off.

    Raises:
        ConfigError: A setting is unsupported.
        DataError: The file cannot be read.
    """
    if config.fsdp_config is not None:
        return _read_settings(config.fsdp_config, "fsdp_config")
    text = (config.fsdp or "").strip()
    if text.lower() in (*NOTHING, *FALSE):
        return None
    if text.startswith("{") or text.endswith(".json") or "/" in text:
        return _read_settings(text, "fsdp")
    return _from_words(text, f"fsdp is {text!r}")


def _read_settings(written: str, flag: str) -> Sharding:
    """Read JSON or a JSON file: settings, or ``fsdp`` words with ``fsdp_config`` settings."""
    inline = written.lstrip().startswith("{")
    path = flag if inline else Path(written).expanduser()
    what, expected = flag if inline else f"{flag} file {str(path)!r}", "a JSON object with FSDP's settings"
    content = json_object(written if isinstance(path, str) else path, what, expected=expected, hint=_GUIDE)
    outer = {k: v for k, v in content.items() if not k.startswith("_")}
    words, inner = outer.pop("fsdp", None), outer.pop("fsdp_config", {})
    if not isinstance(inner, dict):
        raise ConfigError(f"fsdp_config in {path} is {inner!r:.60}", expected="an object of settings", hint=_GUIDE)
    settings = _from_settings({**outer, **cast("dict[str, Any]", inner)}, path)
    if words in (None, "", True):
        return settings
    named = _from_words(" ".join(words) if isinstance(words, list) else str(words), f"fsdp in {path} is {words!r:.60}")
    return dataclasses.replace(
        settings,
        strategy=named.strategy or settings.strategy,
        version=settings.version or named.version,
        settings={**named.settings, **settings.settings},
    )


def _from_words(text: str, found: str) -> Sharding:
    """Read ``full_shard auto_wrap`` and its like."""
    words = text.lower().replace(",", " ").split()
    for word in words:
        if word not in _WORDS:
            hint = "--fsdp_strategy none is DDP" if word == "no_shard" else nearest(word, _WORDS) or _GUIDE
            raise ConfigError(found, expected=f"a JSON file, or some of {', '.join(_WORDS)}", hint=hint)
    strategies, versions = ([word for word in words if word in known] for known in (STRATEGIES, _VERSIONS))
    for named, known in ((strategies, STRATEGIES), (versions, _VERSIONS)):
        if len(named) > 1:
            raise ConfigError(found, expected=f"one of {', '.join(known)}", hint="leave the others out")
    return Sharding(
        strategy=cast("Strategy", strategies[0]) if strategies else None,
        version=_VERSIONS[versions[0]] if versions else None,
        settings={"cpu_offload": True} if "offload" in words else {},
    )


def _from_settings(settings: Mapping[str, Any], path: Path | str) -> Sharding:
    """Read settings, with the prefix ``fsdp_`` or without."""
    values: dict[str, Any] = {}
    known = {*_PASSED_ON, *_OURS, *_RENAMED}
    for key, value in settings.items():
        if key.startswith("_"):
            continue
        name = key.removeprefix("fsdp_")
        if name not in known:
            raise ConfigError(
                f"unknown setting {key!r} in {path}", expected="a setting of FSDP", hint=nearest(name, known) or _GUIDE
            )
        values[_RENAMED.get(name, name)] = value
    version = values.get("version")
    if version is not None and str(version) not in ("1", "2"):
        raise ConfigError(f"version in {path} is {version!r:.60}", expected="1 or 2", hint="2 is fully_shard")
    return Sharding(
        strategy=_strategy(values, path),
        version=None if version is None else int(version),
        activation_cpu_offload=_switch(values, "activation_cpu_offload", path),
        activation_checkpointing=_switch(values, "activation_checkpointing", path),
        memory_efficient_init=_switch(values, "cpu_ram_efficient_loading", path),
        settings=_passed_on(values, path),
    )


def _passed_on(values: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    """Return the settings for transformers: it takes any text for true, and fails late at others that are wrong."""
    made = {name: value for name in _PASSED_ON if (value := values.get(name)) not in (None, "", [])}
    for name in made.keys() & _SWITCHES:
        made[name] = _switch(values, name, path)
    for name in made.keys() & _CHOICES.keys():
        made[name] = str(made[name]).upper()
        if made[name] not in _CHOICES[name]:
            raise ConfigError(
                f"{name} in {path} is {values[name]!r:.60}",
                expected=f"one of {', '.join(_CHOICES[name])}",
                hint=nearest(made[name], _CHOICES[name]) or f"leave {name} out",
            )
    if _CLASSES in made:
        texts = made[_CLASSES] if isinstance(made[_CLASSES], list) else [made[_CLASSES]]
        made[_CLASSES] = [name.strip() for text in texts for name in str(text).split(",")]
    if "min_num_params" in made:
        if not str(made["min_num_params"]).isdecimal():
            raise ConfigError(
                f"min_num_params in {path} is {made['min_num_params']!r:.60}",
                expected="a number of parameters",
                hint='"min_num_params": 100000000',
            )
        made["min_num_params"] = int(made["min_num_params"])
    return made


def check_classes(config: RecipeConfig, model: nn.Module) -> None:
    """Reject settings that name a class of blocks of which the model has no module.

    Raises:
        ConfigError: There is one.
    """
    sharding, present = read(config), {type(module).__name__ for module in model.modules()}
    for name in sharding.settings.get(_CLASSES, ()) if sharding is not None else ():
        if name not in present:
            raise ConfigError(
                f"{_CLASSES} names {name!r}, and {config.model} has no module of that class",
                expected="classes of the model's blocks",
                hint=nearest(name, present) or f"leave {_CLASSES} out: the model names its blocks",
            )


def _strategy(values: Mapping[str, Any], path: Path | str) -> Strategy | None:
    """Return the sharding strategy from a file's value: its name, or whether weights are resharded."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        word = str(values.get(key, "")).lower()
        if word in ("true", "1"):
            return "full_shard"
        if word in ("false", "2"):
            return "shard_grad_op"
        if word in STRATEGIES:
            return cast("Strategy", word)
        if word not in NOTHING:
            raise ConfigError(
                f"{key} in {path} is {values[key]!r:.60}",
                expected=f"true, false, or one of {', '.join(STRATEGIES)}",
                hint=nearest(word, STRATEGIES) or "true shards the weights again after each forward",
            )
    return None


def _switch(values: Mapping[str, Any], name: str, path: Path | str) -> bool | None:
    """Return a boolean setting; ``None`` if it is absent, or null."""
    word = str(values.get(name, "")).strip().lower()
    if word not in (*TRUE, *FALSE, *NOTHING):
        raise ConfigError(f"{name} in {path} is {values[name]!r:.60}", expected="true or false", hint=f'"{name}": true')
    return None if word in NOTHING else word in TRUE


def _check_deepspeed(config: RecipeConfig) -> None:
    """Reject ``--deepspeed`` without another sharding flag."""
    if config.deepspeed is not None and config.fsdp_strategy == "none":
        if config.deepspeed.strip().lower() in (*NOTHING, *FALSE):
            return
        raise ConfigError(
            f"deepspeed is {config.deepspeed!r} without FSDP",
            expected="FSDP",
            hint="--fsdp_strategy shard_grad_op is like ZeRO-2, full_shard like ZeRO-3; leave --deepspeed out",
        )
