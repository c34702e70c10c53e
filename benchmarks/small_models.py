"""Find, for any model type of transformers, a small model and batches that ordinary training can use."""

from __future__ import annotations

import importlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.small_batches import VARIANTS, Unknown, batches
from benchmarks.small_configs import METHODS, small
from benchmarks.trained import loss_of, seed

PARAMETERS = 20_000_000
SEARCH_SECONDS = 4.0
"""Time of the processor for the search of a configuration and a batch."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CHANGES: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5}},
    "esm": {"pad_token_id": 1},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "instructblipvideo": {"video_token_index": 255},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["hybrid", "mamba", "hybrid"], "num_hidden_layers": 3},
}
"""Type → fields that no rule can know."""

LIKED = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForPreTraining", "ForMaskedLM", "ForCTC", "Model")
"""Endings of the classes that are tried first, in order."""

GROUPS = {
    "part": "a part of another type, trained with it",
    "package": "needs a package that is not installed",
    "input": "an argument of its forward is not known",
    "shrink": "no small configuration could be built",
    "large": "too large even when shrunk",
    "plain": "ordinary training fails",
    "differs": "ordinary training differs from run to run",
    "time": "too slow, or the process died",
}
"""Why a type was not trained."""

Found = tuple[Callable[[], nn.Module], list[dict[str, Any]], dict[str, Any]]
"""How to make a model, its batches, and how both were found."""


class Untrained(Exception):
    """A type cannot be trained here; the arguments are a key of ``GROUPS`` and a reason."""


def kinds() -> dict[str, type]:
    """Return model type → class of configuration: each class once, and no part of another type."""
    from transformers import CONFIG_MAPPING

    found: dict[type, str] = {}
    for name in list(CONFIG_MAPPING.keys()):
        cls = CONFIG_MAPPING[name]
        if cls not in found or name == cls.model_type:  # a class may have several names
            found[cls] = name
    parts = {
        part for whole in found for part in (getattr(whole, "sub_configs", None) or {}).values() if part is not whole
    }
    return {name: cls for cls, name in sorted(found.items(), key=lambda item: item[1]) if cls not in parts}


def classes(config: type) -> list[type[nn.Module]]:
    """Return the models of a configuration, those that train on its usual task first."""
    from transformers import MODEL_MAPPING, PreTrainedModel

    module_name = config.__module__.replace("configuration_", "modeling_")
    try:
        modules = [importlib.import_module(module_name)]
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise Untrained("package", f"needs {error.name}") from error
        mapped = MODEL_MAPPING.get(config, None)
        modules = [importlib.import_module(mapped.__module__)] if mapped is not None else []
    found = [
        cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
        if cls.config_class is config or module.__name__ != module_name
        if "forward" in {n for base in cls.__mro__[: cls.__mro__.index(PreTrainedModel)] for n in vars(base)}
    ]
    liked = {cls: next((n for n, end in enumerate(LIKED) if cls.__name__.endswith(end)), len(LIKED)) for cls in found}
    return sorted(found, key=lambda cls: (liked[cls], "For" not in cls.__name__))[:3]


def built(cls: type, config: Any) -> nn.Module:
    """Return a model with random weights from one seed, ready for training."""
    seed(0)
    return cls(config).train()


def candidates(config_class: type, changes: dict[str, Any], reasons: Counter[tuple[str, str]]) -> Iterator[Any]:
    """Yield class, configuration, method and variant, each with a model that can be built and is not too large."""
    found = classes(config_class)
    if not found:
        raise Untrained("shrink", "no model class")
    for method in METHODS:
        try:
            config = small(config_class, method, changes)
        except Exception as error:
            reasons["shrink", brief(error)] += 1
            continue
        for cls in found:
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in built(cls, config).parameters())
            except Exception:
                size = 0
            if size > PARAMETERS:
                reasons["large", f"{size / 1e6:.0f} million parameters"] += 1
                continue
            try:
                model = built(cls, config)
            except ImportError as error:
                raise Untrained("package", brief(error)) from error
            except Exception as error:
                reasons["shrink", brief(error)] += 1
                continue
            if sum(p.numel() for p in model.parameters()) > PARAMETERS:
                reasons["large", "too many parameters"] += 1
                continue
            for variant in VARIANTS:
                yield cls, model, method, variant


def found_training(name: str, config_class: type) -> Found:
    """Return how to make a model of a type, its batches, and how both were found.

    If the whole does not train, the first of its parts that does stands for it, its language model before others.

    Raises:
        Untrained: Nothing that was tried trains; the reason is the whole's.
    """
    changes = CHANGES.get(name, {})
    try:
        return found_for(config_class, changes)
    except Untrained as error:
        parts = getattr(config_class, "sub_configs", {})
        for part in sorted(parts, key=lambda part: part != "text_config"):
            with suppress(Untrained):
                return found_for(parts[part], changes.get(part, {}))
        raise error


def found_for(config_class: type, changes: dict[str, Any]) -> Found:
    """Return the same for one class of configuration."""
    reasons: Counter[tuple[str, str]] = Counter()
    begun = time.process_time()
    for cls, model, method, variant in candidates(config_class, changes, reasons):
        try:
            seed(0)
            data = list(batches(model, variant))
            for batch in data[:2]:
                loss_of(model(**batch)).backward()
        except Unknown as error:
            reasons["input", str(error)] += 1
        except ImportError as error:
            raise Untrained("package", brief(error)) from error
        except Exception as error:
            reasons["plain", brief(error)] += 1
        else:
            about = {
                "class": cls.__name__,
                "parameters": sum(p.numel() for p in model.parameters()),
                "method": method,
                "variant": ", ".join(variant),
                "inputs": {n: list(v.shape) for n, v in data[0].items() if isinstance(v, torch.Tensor)},
            }
            return partial(built, cls, model.config), data, about
        if time.process_time() - begun > SEARCH_SECONDS:
            break
    order = list(GROUPS)
    least = max(reasons, key=lambda key: (order.index(key[0]) == order.index("plain"), reasons[key]), default=None)
    raise Untrained(*(least or ("shrink", "nothing to try")))


def brief(error: BaseException) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
