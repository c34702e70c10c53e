"""Find a model and its tokenizer: the built-in one, a local path, or a hub name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, EbbtideError, first_line, nearest
from ebbtide_recipes.language import smollm2
from ebbtide_recipes.language.config import loss_scaling_refused
from ebbtide_recipes.skeleton import hubs
from ebbtide_recipes.skeleton.precision import dtype_name
from ebbtide_recipes.skeleton.rows import check_builtin

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from ebbtide.integrations.pretrained import Found
    from ebbtide_recipes.language.config import LanguageConfig

LOGGER = logging.getLogger("ebbtide.recipes")

BUILTIN = ("builtin:smollm2",)
PLACES = f"a folder with config.json, weights and tokenizer, a hub name, or one of {', '.join(BUILTIN)}"


def check(name: str) -> None:
    """Reject a name that is neither a folder, nor a possible hub name, nor a built-in model.

    Raises:
        DataError: There is no such built-in model or local folder, or the folder holds no model.
    """
    if name.startswith("builtin:"):
        check_builtin("model", name, BUILTIN, "or a local folder, or a hub name")
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DataError(
                f"model {name!r} cannot be loaded: the folder has no config.json",
                expected="a folder with config.json, weights and tokenizer",
                hint="pass a folder written by save_pretrained",
            )
    elif path.exists():
        raise DataError(
            f"model {name!r} is a file",
            expected="a folder with config.json, weights and tokenizer",
            hint="pass the folder of the file",
        )
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(
            f"there is no model folder {name!r}",
            expected=PLACES,
            hint=_near(name) or "check the path; it is relative to the current folder",
        )


def locate(name: str, *, use_hf: bool = True) -> str:
    """Return the path or name for transformers; build the built-in model if necessary.

    Args:
        name: A local path, a hub name or a built-in name.
        use_hf: Whether a hub name is one of Hugging Face; else of ModelScope.

    Raises:
        DataError: As ``check``; or the model cannot be fetched.
    """
    check(name)
    if name.startswith("builtin:"):
        return str(smollm2.make())
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    return name if use_hf else hubs.from_modelscope("model", name)


def _near(name: str) -> str:
    """Name the built-in models and local folders with names like this one."""
    folder = Path(name).expanduser().parent
    try:
        # For a bare name, which may be a hub's, only certain models; for a path every folder.
        local = [o.name for o in folder.iterdir() if o.is_dir() and ("/" in name or (o / "config.json").is_file())]
    except OSError:
        local = []
    return nearest(Path(name).name, (*BUILTIN, *local), count=1)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model before its weights are loaded.

    Args:
        place: Path or hub name for transformers.
        config: The model's own config.
        processor: Its tokenizer; for a multimodal model the processor that has it.
    """

    place: str
    config: PreTrainedConfig
    processor: PreTrainedTokenizerBase | ProcessorMixin

    @property
    def multimodal(self) -> bool:
        """Whether the model takes images, videos or sounds with text."""
        return is_multimodal(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return getattr(self.processor, "chat_template", None) is not None or self.tokenizer.chat_template is not None


def is_vision_language(config: PreTrainedConfig) -> bool:
    """Whether a config is of a model that takes images with text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and hasattr(config, "vision_config")


def is_multimodal(config: PreTrainedConfig) -> bool:
    """Whether a config is of a model that takes images, videos or sounds with text."""
    from transformers.models.auto import modeling_auto

    every = set(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    others = every - set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return is_vision_language(config) or config.model_type in others


def tokens_of(config: PreTrainedConfig) -> int:
    """Return how many tokens a model has embeddings of."""
    return getattr(config.get_text_config(), "vocab_size", None) or sys.maxsize


def media_parts(model: nn.Module, config: PreTrainedConfig) -> list[str]:
    """Return the paths of the vision and audio modules: those built from these parts of the config."""
    parts = [getattr(config, name, None) for name in ("vision_config", "audio_config")]
    kinds = tuple(type(part) for part in parts if part is not None)
    found = [name for name, module in model.named_modules() if name and isinstance(getattr(module, "config", 0), kinds)]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def look_up(config: LanguageConfig) -> ModelSource:
    """Find the model, and read its config and tokenizer.

    Raises:
        DataError: The model cannot be found or read, or its tokenizer cannot end or pad texts.
        ConfigError: Sequences are longer than the model allows.
    """
    from accelerate import PartialState
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    with PartialState().main_process_first():  # only one process fetches or builds
        place = locate(config.model, use_hf=config.use_hf)
        with described(config.model), explained(config), hubs.cached_without_network():
            found = AutoConfig.from_pretrained(place)
            check_length(config, found)
            _check_unquantised(config, found)
        with explained(config), hubs.cached_without_network():
            reader = AutoProcessor if is_multimodal(found) else AutoTokenizer
            source = ModelSource(place=place, config=found, processor=reader.from_pretrained(place))
    _check_tokenizer(config, source)
    return source


def check_end(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer that cannot end a text.

    Raises:
        DataError: It has no ``eos_token``.
    """
    if tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer of {name} has no eos_token",
            expected="a token that ends a text; where there is no pad_token, batches are padded with it, too",
            hint="name it in the model's tokenizer_config.json",
        )


def _check_tokenizer(config: LanguageConfig, source: ModelSource) -> None:
    """Reject a tokenizer that cannot end or pad texts; where nothing is padded, give it a token of the model."""
    # A trained model names its `pad_token`, and one that has no embedding of it cannot be loaded.
    tokenizer: Any = source.tokenizer
    count = tokens_of(source.config)
    if config.always_ends or tokenizer.pad_token is None:
        check_end(config.model, tokenizer)
    if tokenizer.pad_token is None or tokenizer.pad_token_id < count:
        return
    found = (
        f"the tokenizer of {config.model} pads with {tokenizer.pad_token!r}, token {tokenizer.pad_token_id}, and the "
        f"model has {count} tokens"
    )
    if config.pads or tokenizer.eos_token is None or tokenizer.eos_token_id >= count:
        raise DataError(
            found,
            expected="a token of the model",
            hint="name another pad_token in the model's tokenizer_config.json, such as the eos_token",
        )
    LOGGER.warning("%s: nothing is padded here, and its pad_token is now the eos_token", found)
    tokenizer.pad_token = tokenizer.eos_token


def outline(config: LanguageConfig, model_config: PreTrainedConfig, dtype: str | None = None) -> PreTrainedModel:
    """Return the model that a config describes, without weights: modules and shapes on the meta device.

    Args:
        config: Names the attention implementation.
        model_config: The model's own config.
        dtype: Type of its weights; ``None``: that of the model's config.

    Raises:
        DataError: The model cannot be made from its config.
        ConfigError: The attention implementation is not available.
    """
    import torch

    options: dict[str, Any] = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    with explained(config), torch.device("meta"):
        kind = _auto_class(model_config)
        return kind.from_config(model_config, attn_implementation=config.attn_impl, **options)


def load(config: LanguageConfig, source: ModelSource) -> tuple[PreTrainedModel, Found | None]:
    """Load the model; with ``memory_efficient_init`` make it on meta, and find where its weights are.

    Args:
        config: Names the model, its type and its attention implementation.
        source: As ``look_up`` returned it.

    Returns:
        The model, and the source of the weights of one on meta; ``None``: it has them.

    Raises:
        DataError: The model cannot be found or read.
        ConfigError: The attention implementation is not available.
    """
    if not config.memory_efficient_init:
        return _from_pretrained(config, source), None
    from ebbtide.integrations.pretrained import weights_later

    with weights_later() as later:
        model = _from_pretrained(config, source)
    found = later.of(model)
    if found is None:
        raise DataError(
            f"the weights of {config.model} cannot be read without the model",
            expected="a model that transformers reads weight by weight",
            hint="leave --memory_efficient_init out",
        )
    return model, found


def _from_pretrained(config: LanguageConfig, source: ModelSource) -> PreTrainedModel:
    """Return transformers' model without the parts that are not trained."""
    options: dict[str, Any] = {"dtype": dtype_name(config), "attn_implementation": config.attn_impl}
    if config.train_type == "qlora":
        from ebbtide_recipes.language.adapters import four_bits

        options |= four_bits(config, options["dtype"])
    with explained(config):
        try:
            model = _auto_class(source.config).from_pretrained(source.place, **options)
        except Exception as error:
            with described(config.model):  # if its config makes no model, that is the reason
                outline(config, source.config)
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise DataError(
                f"weights of {config.model} have other sizes than its config.json says",
                expected="the weights of the model that the config describes",
                hint="the table above names them; compare config.json with that of the published model",
            ) from error
    if source.multimodal and config.freeze_vit:
        for part in media_parts(model, source.config):
            model.get_submodule(part).requires_grad_(False)
    return model


def _auto_class(model_config: PreTrainedConfig) -> Any:
    import transformers

    if is_vision_language(model_config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForMultimodalLM if is_multimodal(model_config) else transformers.AutoModelForCausalLM


def _check_unquantised(config: LanguageConfig, model_config: Any) -> None:
    """Reject quantised weights where they cannot be used: trained, quantised again, or with loss scaling."""
    found = getattr(model_config, "quantization_config", None)
    if found is None:
        return
    if config.memory_efficient_init or config.train_type in ("full", "qlora"):
        other = "memory_efficient_init is true" if config.memory_efficient_init else ""
        raise ConfigError(
            f"the weights of {config.model} are already quantised, and "
            + (other or f"train_type is {config.train_type!r}"),
            expected="a model with weights in a floating-point type",
            hint="leave --memory_efficient_init out"
            if other
            else "use the full-precision model; --train_type lora accepts quantised weights",
        )
    if config.fp16 and found.get("quant_method") == "bitsandbytes":
        raise loss_scaling_refused(f"the quantised weights of {config.model}")


@contextmanager
def explained(config: LanguageConfig) -> Generator[None, None, None]:
    """Turn transformers' error about a model into one that names the model and the places searched."""
    from safetensors import SafetensorError

    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{config.model} cannot be loaded with attn_impl {config.attn_impl!r}: {first_line(error)}",
            expected="the packages of the model and its attention",
            hint="--attn_impl sdpa needs none; otherwise install the packages of the message",
        ) from error
    except (OSError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        if isinstance(error, EbbtideError):
            raise
        if "attn_implementation" in str(error) and config.attn_impl != "eager":
            raise ConfigError(
                f"{config.model} cannot be made with attn_impl {config.attn_impl!r}: "
                + first_line(error).partition(". ")[0],  # the rest is about Python code
                expected="an attention that this kind of model has",
                hint="use --attn_impl eager",
            ) from error
        known = Path(config.model).expanduser().exists() or config.model in BUILTIN
        unknown = "" if known else "is no folder here, no built-in model, and as a hub name "
        reason = first_line(error)  # the rest of transformers' errors is unrelated advice
        raise DataError(
            f"model {config.model!r} {unknown}cannot be loaded: {reason}", expected=PLACES, hint=_hint(config.model)
        ) from error


@contextmanager
def described(name: str) -> Generator[None]:
    """Turn an error of any kind into one about the model's config: the model's code computes with its values.

    Raises:
        DataError: The config describes no model.
    """
    try:
        yield
    except EbbtideError:
        raise
    except Exception as error:
        path = Path(name).expanduser()
        raise DataError(
            f"{path / 'config.json' if path.is_dir() else name} describes no model "
            f"({type(error).__name__}: {' '.join(str(error).split()):.300})",
            expected="sizes of which transformers can make the model",
            hint="compare the file with that of the published model",
        ) from error


def _hint(name: str) -> str:
    if Path(name).expanduser().is_dir():
        return "pass a folder that save_pretrained of a language model and of its tokenizer wrote"
    return _near(name) or f"without a network use a local folder, or a model fetched before; {hubs.ON_MODELSCOPE}"


def check_length(config: LanguageConfig, model_config: Any) -> None:
    """Reject sequences longer than the model's positions."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    lengths = {name: getattr(config, name) for name in config.length_flags}
    if limit is not None and sum(lengths.values()) > limit:
        one = len(lengths) == 1
        origin = {name: "" if config.is_set(name) else " (its default)" for name in lengths}
        raise ConfigError(
            " and ".join(f"{name} is {length}{origin[name]}" for name, length in lengths.items()),
            expected=f"at most {limit}{'' if one else ' together'}, the positions {config.model} has",
            hint=(f"use --{next(iter(lengths))} {limit}" if one else "lower them")
            + ", or use a model with a longer context",
        )
