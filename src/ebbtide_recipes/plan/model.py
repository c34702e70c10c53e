"""The model to plan for: from its config alone, on the meta device, with adapters if requested."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.base.extras import require
from ebbtide.wrap import find_blocks
from ebbtide_recipes.language import adapters, models, smollm2
from ebbtide_recipes.skeleton import hubs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ebbtide_recipes.sft.config import SftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model without weights, and facts about it.

    Attributes:
        module: The model on meta.
        dtype: Type of its weights.
        tokens: Tokens of a micro-batch.
        amount: Description of a micro-batch.
        sees: Whether it takes images, too.
        experts: Experts per block; 0: none.
    """

    module: nn.Module
    dtype: str
    tokens: int
    amount: str
    sees: bool = False
    experts: int = 0

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def trained(self) -> int:
        """Number of trained weights."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    @property
    def blocks(self) -> str:
        """Number of blocks of each kind, such as ``36 x Qwen3DecoderLayer``."""
        kinds = Counter(type(block).__name__ for block, _ in find_blocks(self.module, None))
        return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


class Subject:
    """A language model to plan for.

    Args:
        config: Of the recipe that would train it.

    Raises:
        DataError: Its config cannot be found or read.
        ConfigError: Sequences are longer than the model allows; the weights are quantised.
    """

    def __init__(self, config: SftConfig) -> None:
        self._config, self._found = config, read(config)

    def outline(self, dtype: str) -> Outline:
        """Make the model without weights, with adapters if requested.

        Args:
            dtype: Of its weights.

        Raises:
            DataError: The config describes no model.
            ConfigError: The attention implementation is not available; adapters that do not fit.
        """
        config, found = self._config, self._found
        with _explained(config.model):
            model: nn.Module = models.outline(config, found, dtype)
        sees = models.is_multimodal(found)
        frozen = models.media_parts(model, found) if sees and config.freeze_vit else []
        if config.trains_adapters:
            model = _with_adapters(config, found, dtype, frozen)
        else:
            for part in frozen:
                model.get_submodule(part).requires_grad_(False)
        text = found.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return Outline(
            module=model.train(),
            dtype=dtype,
            tokens=config.per_device_train_batch_size * config.max_length,
            amount=f"{config.per_device_train_batch_size} x {config.max_length} tokens",
            sees=sees,
            experts=next((n for name in names if (n := getattr(text, name, None))), 0),
        )

    def batch(self) -> dict[str, torch.Tensor]:
        """Return a batch of full sequences of text, each token to be learned: one token in memory."""
        one = torch.ones(1, 1, dtype=torch.long)
        tokens = one.expand(self._config.per_device_train_batch_size, self._config.max_length)
        return {"input_ids": tokens, "labels": tokens}


def read(config: SftConfig) -> PreTrainedConfig:
    """Read the model's own config; nothing else is read or fetched.

    Args:
        config: Names the model: a folder, a file, a hub name or a built-in name.

    Raises:
        DataError: It cannot be found or read.
        ConfigError: Sequences are longer than the model allows; the weights are quantised.
    """
    path = Path(config.model).expanduser()
    with _explained(config.model):
        if not path.is_file():
            models.check(config.model)
        found = _checked(config, _found(config, path))
    for part in (found, found.get_text_config()):
        part.use_cache = False  # as in trainers: a key-value cache would count as saved
    return found


@contextmanager
def _explained(name: str) -> Generator[None]:
    """Explain an error in making a model with this command's requirements, which are fewer than for training."""
    with models.described(name):
        try:
            yield
        except DataError as error:
            enough = "the config.json of a text or vision-language model is enough; no weights are read"
            raise DataError(
                error.found,
                expected=f"a folder with config.json, such a file, a hub name, or one of {', '.join(models.BUILTIN)}",
                hint=enough if Path(name).expanduser().exists() else error.hint.removesuffix(f"; {hubs.ON_MODELSCOPE}"),
            ) from error


def _found(config: SftConfig, path: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    with models.explained(config):
        if config.model in models.BUILTIN:
            return AutoConfig.for_model(**smollm2.SHAPE)
        with hubs.cached_without_network():
            return AutoConfig.from_pretrained(str(path) if path.exists() else config.model, trust_remote_code=False)


def _checked(config: SftConfig, found: PreTrainedConfig) -> PreTrainedConfig:
    models.check_length(config, found)
    if getattr(found, "quantization_config", None) is not None:
        raise ConfigError(
            f"the weights of {config.model} are already quantised",
            expected="a model with weights in a floating-point type",
            hint="plan for the full-precision model, which takes more memory",
        )
    return found


def _with_adapters(config: SftConfig, found: PreTrainedConfig, dtype: str, frozen: list[str]) -> nn.Module:
    """Return the model with the adapters that training would put on it, all on meta."""
    peft = require("peft", extra="recipes", use="--train_type lora")
    with warnings.catch_warnings():
        # PEFT uses a deprecated name of transformers; users cannot change that.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        # Trying adapters adds them to the outline.
        made = adapters.chosen(config, models.outline(config, found, dtype), without=frozen)
        with torch.device("meta"):
            model = peft.get_peft_model(models.outline(config, found, dtype), made)
    if config.train_type == "qlora":
        from ebbtide_recipes.plan.four_bits import compute_in_4_bits

        compute_in_4_bits(model)
    return model
