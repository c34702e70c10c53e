"""Memory-efficient loading under ``accelerate``: ``from_pretrained``, then ``prepare``; no rank holds a whole model.

[Note: loading in prepare]
``from_pretrained`` inside the context returns a model on meta (see [Note: weights that come later]). ``prepare`` then
does its usual work (activation checkpointing, compilation, sharding) on meta as the ``shard`` function of
``load_sharded``, which fills the shards. Accelerate's own loading, which broadcasts whole tensors from a rank that
holds everything, is disabled meanwhile. Changes to plugin and accelerator are reverted once the model is loaded; the
environment is never touched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from ebbtide import load_sharded
from ebbtide.base.errors import ConfigError
from ebbtide.integrations.pretrained import Later, weights_later
from ebbtide.load import empty_module

logger = logging.getLogger("ebbtide.integrations")


@contextmanager
def memory_efficient_init(
    accelerator: Accelerator,
    *,
    missing: Literal["error", "initialize"] = "initialize",
    unexpected: Literal["error", "ignore"] = "ignore",
    allow_pickle: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Generator[Later | None, None, None]:
    """Load models without a full copy on any rank: on meta here, filled in ``accelerator.prepare``.

    ::

        with memory_efficient_init(accelerator):
            model = AutoModelForCausalLM.from_pretrained(path)
        optimizer = AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)

    An accelerator that does not shard (one process, DDP) loads as it would without the context, and the log says so.

    Args:
        accelerator: Prepares the models afterwards.
        missing: As for ``load_sharded``; initialized names are logged, as ``from_pretrained`` does.
        unexpected: As for ``load_sharded``; ignored names are logged.
        allow_pickle: As for ``load_sharded``.
        progress: As for ``load_sharded``.

    Yields:
        The record of the models' weights; ``None`` if nothing is sharded.

    Raises:
        ConfigError: ``accelerator`` is not an Accelerator, or an option of ``from_pretrained`` needs weights at once.
    """
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            f"accelerator is a {type(accelerator).__name__}",
            expected="an accelerate.Accelerator",
            hint="create the accelerator first: it defines how models are sharded",
        )
    if getattr(accelerator.state, "fsdp_plugin", None) is None:
        logger.info("memory_efficient_init: the accelerator does not shard, weights are loaded as usual")
        yield None
        return
    with weights_later() as later:
        yield later
    if len(later):
        options = {"missing": missing, "unexpected": unexpected, "allow_pickle": allow_pickle, "progress": progress}
        _fill_in_prepare(accelerator, later, options)


def _fill_in_prepare(accelerator: Any, later: Later, options: dict[str, Any]) -> None:
    """Make the accelerator's ``prepare`` load its models, until all have their weights."""
    plain, outer = accelerator.prepare, vars(accelerator).get("prepare")  # the latter: of another context like this

    @functools.wraps(plain)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        models = [a for a in args if isinstance(a, nn.Module) and later.of(a) is not None]
        if not models:
            return plain(*args, **kwargs)
        if len(models) > 1:
            raise ConfigError(
                f"{len(models)} models without weights are prepared at once",
                expected="one model per call of prepare",
                hint="call accelerator.prepare for each model",
            )
        result = _filled(accelerator, models[0], later, lambda: plain(*args, **kwargs), args, options)
        if not len(later) and vars(accelerator).get("prepare") is prepare:
            if outer is None:
                del accelerator.prepare
            else:
                accelerator.prepare = outer
        return result

    accelerator.prepare = prepare


def _filled(
    accelerator: Any,
    model: nn.Module,
    later: Later,
    plain: Callable[[], Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Prepare on meta and load; returns what ``prepare`` returns."""
    found = later.of(model)
    optimizers = [a for a in args if isinstance(a, torch.optim.Optimizer)]
    if len(optimizers) > 1:
        raise ConfigError(
            f"{len(optimizers)} optimizers are prepared with a model",
            expected="one",
            hint="use one optimizer with several parameter groups",
        )
    prepared: list[Any] = []

    def shard(unwrapped: nn.Module) -> nn.Module:
        with on_meta(accelerator):
            prepared.append(plain())
        parts = prepared[0] if isinstance(prepared[0], tuple | list) else [prepared[0]]
        wrapped = [part for part in parts if isinstance(part, nn.Module)]
        return wrapped[0] if wrapped else unwrapped

    optimizer = getattr(optimizers[0], "optimizer", optimizers[0]) if optimizers else None
    load_sharded(model, found, shard=shard, optimizer=optimizer, **options)  # type: ignore[arg-type]
    later.done(model)
    return prepared[0]


@contextmanager
def on_meta(accelerator: Any) -> Generator[None, None, None]:
    """Let the plugin shard models on meta as they are, without its own loading."""
    plugin: Any = accelerator.state.fsdp_plugin
    changed: dict[str, Any] = {"cpu_ram_efficient_loading": False}
    if not accelerator.is_fsdp2:
        changed |= {"sync_module_states": False, "param_init_fn": empty_module(accelerator.device)}
    before = {name: getattr(plugin, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(plugin, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(plugin, name, value)
