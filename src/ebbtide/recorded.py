"""Report a handle's plan and figures to run recorders, and its savings to the log on close."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ebbtide.base.actions import Plan
from ebbtide.base.events import BUS
from ebbtide.base.units import format_size
from ebbtide.engine import Engine
from ebbtide.engine.slots import SINCE, readable
from ebbtide.planner.table import Prediction
from ebbtide.wrap.threads import SerialCalls

logger = logging.getLogger("ebbtide")


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of the event ``plan``."""
    predicted = getattr(getattr(plan, "table", plan), "predicted", None)
    known = {"predicted": asdict(predicted)} if isinstance(predicted, Prediction) else {}
    return {"name": plan.name, "text": plan.explain(), "kept_because": getattr(plan, "kept_because", None), **known}


def provide(engine: Engine, model: nn.Module) -> Callable[[], None]:
    """Provide a model's plan, figures and weights to recorders until the returned function is called.

    The bus holds neither the engine nor the model: a handle may be dropped without being closed.
    """
    engine_of, model_of = weakref.ref(engine), weakref.ref(model)

    def plan() -> Mapping[str, Any] | None:
        if (engine := engine_of()) is None:
            return None
        own = None if engine.coverage is None else engine.coverage.checkpointed
        return {**plan_fields(engine.plan), "own_checkpoints": own}

    def stats() -> Mapping[str, Any] | None:
        engine = engine_of()
        return None if engine is None else engine.stats().as_dict()

    def weights() -> Mapping[str, Any] | None:
        model = model_of()
        return None if model is None else {type(model).__name__: [*model.parameters()]}

    removes = [BUS.provide("plan", plan), BUS.provide("stats", stats), BUS.provide("weights", weights)]

    def remove() -> None:
        for call in removes:
            call()

    weakref.finalize(engine, remove)
    return remove


def log_saved(engine: Engine, calls: SerialCalls) -> None:
    """Log how much a handle saved; warn if it saved nothing although it could have.

    Args:
        engine: Of the handle.
        calls: The forwards that the handle saw.
    """
    stats = engine.stats()
    filters = [name for name in ("tensor_filter", "keep_filter") if getattr(engine, name) is not None]
    moved = stats.total_copy_out_bytes or stats.total_recomputes  # of all passes; other figures are of the latest one
    if not (stats.packs or moved or stats.coverage_percent):
        if calls.in_backward:
            logger.warning(
                "nothing was offloaded: blocks ran with gradients only inside a backward, as under GradCache, the "
                "Cached losses of sentence-transformers, or a checkpoint of the model's own: what they save is read at "
                "once; hint: without that cache or checkpoint (gradient_checkpointing=False) ebbtide offloads"
            )
            return
        if calls.called and calls.updated and engine.guard.steps:
            logger.warning(
                "nothing was offloaded: the model was trained, but neither its forward nor a block saved a tensor: "
                "other modules ran outside of its forward, in a method or in what it returned (a distribution, say); "
                "hint: blocks=[...] names modules that run, or open `with ebbtide.offload_saved_tensors():` around "
                "the forward and the loss"
            )
            return
        if calls.called:
            logger.info(
                "nothing to offload: no forward that ended saved tensors for a backward pass (a frozen model and "
                "evaluation save none)"
            )
            return
        logger.warning(
            "nothing was offloaded: no forward came through the handle; hint: enable it on the model you "
            "train; if you compile later, compile its blocks, not the whole model"
        )
    elif not stats.unique_bytes and stats.small_bytes and not moved:
        logger.warning(
            "nothing was offloaded: all %d storages that blocks save are below min_bytes=%s and stay on the device; "
            "hint: a larger batch or model has larger ones, and min_bytes=0 treats every storage",
            stats.small_storages,
            format_size(engine.options.min_bytes),
        )
    elif stats.unique_bytes and not moved and engine.plan.name == "inputs":
        logger.warning(
            "nothing was offloaded: policy 'inputs' offloads the inputs of blocks, and these blocks save no input of "
            "min_bytes or more (nn.TransformerEncoderLayer saves a copy); hint: use policy 'auto', 'minimal' or "
            "'offload'"
        )
    elif stats.unique_bytes and not moved and engine.plan.name != "keep" and filters:
        logger.warning(
            "nothing was offloaded: %s returned False for every tensor; hint: return True for those to offload",
            " or ".join(filters),
        )
    elif stats.memory_saved_percent is not None:
        saved, of = stats.memory_saved_bytes / 1024**3, stats.unique_bytes / 1024**3
        logger.info("Memory saved: %.2f GiB of the %.2f GiB that blocks save for the backward pass", saved, of)


def warn_of_idle(engine: Engine, model: nn.Module, *, host_budget: object) -> None:
    """Warn about what has no effect on the target. A disk path always has one: the host target spills to it."""
    keeps = engine.plan.name == "keep"
    if engine.tier.name != "host":
        if host_budget is not None and not keeps:
            logger.warning("host_budget has no effect here: offloaded bytes go to %s", engine.tier.name)
    elif not engine.weights.move and all(p.is_cpu and not engine.tier.owns(p) for p in model.parameters()):
        logger.warning(
            "the model is on the CPU, but this machine has an accelerator, and only tensors on that are %s; "
            "hint: move the model before you train it%s",
            "counted" if keeps else "offloaded to host memory",
            "" if keeps else ", or pass target='disk'",
        )


def warn_of_torch(engine: Engine) -> None:
    """Warn about a plan that recomputes, under a torch that lacks what most recipes need."""
    if engine.plan.recomputes and not readable():
        logger.warning(
            "torch %s does not show what autograd saved (SavedTensor.data, torch %s): most tensors that would be "
            "recomputed are offloaded, and the coverage of the blocks is not measured; "
            "hint: pip install --upgrade 'torch>=%s'",
            torch.__version__, SINCE, SINCE,
        )  # fmt: skip
