"""The adapters of a checkpoint against those of the run that resumes it.

A checkpoint of adapters has no other weights, and PEFT loads the values that fit and drops the others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ebbtide.base.errors import ConfigError

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig

LOGGER = logging.getLogger("ebbtide.recipes")

_FITTING = (
    "lora_alpha",
    "alpha",
    "lora_dropout",
    "module_dropout",
    "rank_dropout",
    "init_lora_weights",
    "init_weights",
)
"""Settings with which other values than before are computed, or begun with, but the same are trained."""

_FLAGS: Mapping[str, str] = {"r": "lora_rank"}


def described(config: RecipeConfig) -> dict[str, Any]:
    """Return what the seal of a checkpoint says of a run's adapters; nothing if it has none."""
    if not config.trains_adapters:
        return {}
    path = Path(config.model).expanduser()
    return {"model": str(path.absolute()) if path.exists() else config.model, "settings": config.adapter_settings}


def check(folder: Path, theirs: Mapping[str, Any], config: RecipeConfig) -> None:
    """Refuse a checkpoint whose adapters are not on the same modules, of the same shapes, on the same model.

    Args:
        folder: The checkpoint.
        theirs: As ``described``; what is missing is unknown.
        config: Of the run that resumes it.

    Raises:
        ConfigError: They differ.
    """
    if not config.trains_adapters:
        return
    before, now = theirs.get("model", config.model), config.model
    if not _same_model(before, now) and (Path(before).exists() or not Path(now).expanduser().exists()):
        raise ConfigError(
            f"{folder} was written with adapters on the model {before!r}, and this run has {now!r}",
            expected="the model they were trained on",
            hint=f"--model {before} resumes it",
        )
    for name, (before, now) in _differences(folder, theirs, config).items():
        if name not in _FITTING:
            raise ConfigError(
                f"{folder} was written with {name} {_text(before)}, and this run has {_text(now)}",
                expected="the same adapters",
                hint="resume it with the --adapter_config or --adapters that wrote it"
                if "peft_type" in config.adapter_settings
                else f"--{_FLAGS.get(name, name)} {_text(before, most=None)} resumes it",
            )


def warn(folder: Path, theirs: Mapping[str, Any], config: RecipeConfig) -> None:
    """Warn of a model of another name, and of settings that ``check`` allows to differ; arguments are the same."""
    if not config.trains_adapters:
        return
    before = theirs.get("model", config.model)
    if not _same_model(before, config.model):
        LOGGER.warning(
            "%s was written with adapters on the model %r and is resumed on %r: they fit only the same weights",
            *(folder, before, config.model),
        )
    changed = _differences(folder, theirs, config)
    if changed:
        texts = (", ".join(f"{name} {_text(pair[i])}" for name, pair in changed.items()) for i in (0, 1))
        LOGGER.warning("%s was written with %s and is resumed with %s", folder, *texts)


def _same_model(before: str, now: str) -> bool:
    first, second = Path(before), Path(now).expanduser()
    return before == now or (first.exists() and second.exists() and first.samefile(second))


def _differences(folder: Path, theirs: Mapping[str, Any], config: RecipeConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: theirs and ours, by name."""
    before, now = theirs.get("settings"), config.adapter_settings
    adapters: str | None = getattr(config, "adapters", None)
    if before is None or (adapters is not None and Path(adapters).expanduser().resolve() == folder.resolve()):
        return {}
    # Flags name few settings; PEFT's file names all.
    alike = ("peft_type" in before) == ("peft_type" in now)
    names = [name for name in (*now, *(before.keys() - now.keys())) if alike or (name in before and name in now)]
    pairs = {name: (before.get(name), now.get(name)) for name in names}
    return {name: (first, second) for name, (first, second) in pairs.items() if (first or None) != (second or None)}


def _text(value: Any, *, most: int | None = 8) -> str:
    if not isinstance(value, list):
        return str(value).lower() if isinstance(value, bool) else str(value)
    names: list[Any] = value[:most]
    more = len(cast("list[Any]", value)) - len(names)
    return " ".join(map(str, names)) + (f" and {more} more" if more else "")
