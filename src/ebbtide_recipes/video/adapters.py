"""Low-rank adapters on a transformer of diffusers, by PEFT."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.base.errors import ConfigError, DataError, nearest
from ebbtide_recipes.video.objective import block_classes

if TYPE_CHECKING:
    from ebbtide_recipes.video.config import VideoConfig

LOGGER = logging.getLogger("ebbtide.video")


def put_on(transformer: Any, config: VideoConfig) -> None:
    """Freeze a transformer and add adapters to it.

    Raises:
        EbbtideError: As ``targets_of``.
    """
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    targets = targets_of(transformer, config.target_modules)
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        transformer.add_adapter(
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=targets,
            )
        )
    cast_training_params(transformer, dtype=torch.float32)
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    LOGGER.info("adapters on %d modules: %d weights are trained", len(targets), trained)


def targets_of(transformer: Any, names: tuple[str, ...]) -> list[str]:
    """Return the full names of the modules that get adapters: of ``all-linear``, every linear module of the blocks.

    Raises:
        DataError: diffusers adds no adapters to such a transformer.
        ConfigError: No module has one of the names.
    """
    if not hasattr(transformer, "add_adapter"):
        raise DataError(
            f"diffusers adds no adapters to a {type(transformer).__name__}",
            expected="a transformer with adapter support",
            hint="--train_type full",
        )
    classes = block_classes(transformer)
    blocks = [name for name, part in transformer.named_modules() if type(part).__name__ in classes]
    linear = [name for name, part in transformer.named_modules() if isinstance(part, torch.nn.Linear)]
    if names == ("all-linear",):
        return [name for name in linear if any(name.startswith(f"{block}.") for block in blocks)]
    found: list[str] = []
    for wanted in names:
        part = [name for name in linear if name == wanted or name.endswith(f".{wanted}")]
        if not part:
            endings = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"target_modules names {wanted!r}, and no linear module has that name",
                expected=f"some of {', '.join(endings)}, or all-linear",
                hint=nearest(wanted, endings) or "all-linear takes every linear module of the blocks",
            )
        found += part
    return sorted(set(found))
