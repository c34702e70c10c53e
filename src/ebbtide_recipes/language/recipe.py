"""What all recipes that train language models do before and after they read their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ebbtide_recipes.language.config import PACKAGES, LanguageConfig
from ebbtide_recipes.skeleton.recipe import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import Trainer

    from ebbtide_recipes.language.models import ModelSource

ConfigT = TypeVar("ConfigT", bound=LanguageConfig)
TrainerT = TypeVar("TrainerT", bound="Trainer")


class LanguageRecipe(Recipe[ConfigT]):
    """A recipe that trains a language model; ``prepare`` reads the data between ``adapters_for`` and ``built``."""

    packages = PACKAGES

    def check(self, config: ConfigT) -> None:
        """Refuse invalid adapters and models.

        Raises:
            EbbtideError: One of them is invalid.
        """
        from ebbtide_recipes.language import adapters, models

        adapters.check(config)
        models.check(config.model)


def adapters_for(config: LanguageConfig, source: ModelSource) -> PeftConfig | None:
    """Return the adapters of the config; ``None``: all weights are trained.

    Raises:
        EbbtideError: The model's config describes no model, or the adapters do not fit it.
    """
    from ebbtide_recipes.language import adapters, models

    if not config.trains_adapters:
        return None
    with models.described(config.model):
        outline = models.outline(config, source.config)
    frozen = models.media_parts(outline, source.config) if source.multimodal and config.freeze_vit else []
    return adapters.chosen(config, outline, without=frozen)


def built(
    config: LanguageConfig, source: ModelSource, made: PeftConfig | None, build: Callable[[Any], TrainerT]
) -> TrainerT:
    """Load the model, add its adapters, and make its trainer.

    Args:
        config: Says whether the model is made on meta; it gets its weights before or, if it is sharded, afterwards.
        source: As ``models.look_up`` returned it.
        made: As ``adapters_for`` returned it.
        build: Makes the trainer of a model.

    Raises:
        EbbtideError: The model or its adapters cannot be read, or do not fit.
    """
    from ebbtide_recipes.language import adapters, meta, models

    model, weights = models.load(config, source)
    trained: Any = model if made is None else adapters.put_on(model, made, config)
    sharded = config.fsdp_strategy != "none"
    if weights is not None and not sharded:
        meta.fill(trained, weights)
    trainer = build(trained)
    if weights is not None and sharded:
        meta.fill_sharded(trainer, weights)
    return trainer
