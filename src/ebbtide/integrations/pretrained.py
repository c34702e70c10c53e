"""transformers' ``from_pretrained`` without weights, which are loaded later, per rank.

[Note: weights that come later]
``from_pretrained`` downloads the files, reads the configuration, chooses dtype and attention, replaces layers for
quantisation, and then reads weights. ``weights_later`` patches the last step while it is open, so that it returns the
model on meta and remembers the files. Missing weights are initialised by ``load_sharded``.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ebbtide.base.errors import ConfigError

_READ, _FINALIZE = "_load_pretrained_model", "_finalize_model_loading"

Found = Sequence[Path] | Mapping[str, torch.Tensor]
"""The source of a model's weights: its files or a state dict."""


class Later:
    """Models made without weights, and the sources of their weights."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[nn.Module, Found] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._found)

    def note(self, model: nn.Module, found: Found) -> None:
        """Remember the source of a model's weights."""
        self._found[model] = found

    def of(self, model: nn.Module) -> Found | None:
        """Return the source of the weights of a model, or of the one that it wraps; ``None``: it was not made here."""
        return next((self._found[m] for m in model.modules() if m in self._found), None)

    def done(self, model: nn.Module) -> None:
        """Forget a model whose weights are loaded."""
        for module in model.modules():
            self._found.pop(module, None)


@contextmanager
def weights_later() -> Generator[Later, None, None]:
    """Make transformers' ``from_pretrained`` return models on meta.

    It downloads the files and replaces layers for quantisation as ever, and remembers where the weights are in place
    of reading them.

    ::

        with weights_later() as later:
            model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
        model = ebbtide.load_sharded(model, later.of(model), shard=shard)

    Not thread-safe: it patches the library.

    Yields:
        The record of the models' weights.

    Raises:
        ConfigError: An option of ``from_pretrained`` needs weights at once, or this version of transformers is not
            supported.
    """
    read = inspect.getattr_static(PreTrainedModel, _READ, None)
    finalize = inspect.getattr_static(PreTrainedModel, _FINALIZE, None)
    if not isinstance(read, staticmethod) or finalize is None:
        raise ConfigError(
            "this version of transformers reads weights in an unknown way",
            expected="5.5 or newer, as docs/reference/versions.md lists them",
            hint="build the model on meta from its configuration, and pass it to ebbtide.load_sharded",
        )
    later = Later()
    try:
        setattr(PreTrainedModel, _READ, _reading(later, read))
        setattr(PreTrainedModel, _FINALIZE, staticmethod(_finalized))
        yield later
    finally:
        setattr(PreTrainedModel, _READ, read)
        setattr(PreTrainedModel, _FINALIZE, finalize)


class _NothingYet:
    """The loading report of version 5's ``from_pretrained``, empty."""

    def to_dict(self) -> dict[str, set[str]]:
        return {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}


def _reading(later: Later, read: Any) -> Any:
    """Return the replacement of the step that reads weights."""
    names = list(inspect.signature(read.__func__).parameters)

    def noted(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        model = arguments["model"]
        _check(model, lambda name: getattr(arguments["load_config"], name, None))
        files: Sequence[str | os.PathLike[str]] | None = arguments["checkpoint_files"]
        state_dict: Mapping[str, torch.Tensor] | None = arguments["state_dict"]
        if state_dict is None and not files:
            raise ConfigError("there are no weights", expected="a checkpoint", hint="pass the folder of the checkpoint")
        later.note(model, state_dict if state_dict is not None else [Path(file) for file in files or ()])
        return _NothingYet(), None

    return staticmethod(noted)


def _finalized(model: Any, load_config: Any, loading_info: Any) -> Any:
    """Tie weights: the only step for a model on meta after reading."""
    model.tie_weights()
    return loading_info


def _has_own_names(model: Any, mapping: Sequence[Any] | None, quantiser: Any) -> bool:
    """Whether version 5 must rename more than the model's type requires."""
    if mapping is None:
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    return len(mapping) != len(get_model_conversion_mapping(model, None, quantiser))


def _check(model: Any, options: Callable[[str], Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "the checkpoint is an adapter of PEFT",
            expected="one of a whole model",
            hint="load the base model here, and after its weights PeftModel.from_pretrained(model, folder)",
        )
    device_map, quantiser = options("device_map"), options("hf_quantizer")
    if device_map is not None and quantiser is None:  # a quantiser chooses one device by itself
        raise ConfigError(
            f"device_map is {device_map!r:.60}",
            expected="none: the wrapper places the shards",
            hint="leave device_map out",
        )
    if options("device_mesh") is not None:
        raise ConfigError(
            "from_pretrained shards the model itself (tp_plan or distributed_config)",
            expected="a model that is wrapped afterwards",
            hint="leave those arguments out, or load without this context: transformers then shards",
        )
    if quantiser is not None and not getattr(getattr(quantiser, "quantization_config", None), "load_in_4bit", False):
        raise ConfigError(
            f"the model is quantised by {type(quantiser).__name__}",
            expected="no quantisation, or 4-bit weights of bitsandbytes",
            hint="load it without this context",
        )
    if options("key_mapping") or _has_own_names(model, options("weight_mapping"), quantiser):
        raise ConfigError(
            "key_mapping is set",
            expected="a checkpoint with the names that transformers knows for this type of model",
            hint="rename the tensors in the checkpoint, or load without this context",
        )
    if options("ignore_mismatched_sizes"):
        raise ConfigError(
            "ignore_mismatched_sizes is set",
            expected="a checkpoint whose weights have the model's shapes",
            hint="remove the weights that differ from the checkpoint: missing weights are initialised",
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} was not built on meta",
            expected="a model without memory",
            hint="load it without this context",
        )
