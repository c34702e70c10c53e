"""Ordinary training, the tools of torch and transformers, and ebbtide's policies."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import ebbtide
from benchmarks.peers import Mode, Prepared
from ebbtide.profiling.auto import AutoPlan


def _decoder(model: nn.Module) -> nn.Module:
    """Return the object with ``gradient_checkpointing_enable``: the model itself, or the one that an adapter wraps."""
    found = getattr(model, "get_base_model", lambda: model)()
    if not hasattr(found, "gradient_checkpointing_enable") and not hasattr(found, "enable_gradient_checkpointing"):
        raise RuntimeError(f"{type(found).__name__} has no gradient checkpointing")
    return found


def plain(model: nn.Module) -> Generator[Prepared]:
    """Everything is kept."""
    yield Prepared(model=model)


def checkpointing(model: nn.Module) -> Generator[Prepared]:
    """Each block is checkpointed."""
    decoder = _decoder(model)
    if hasattr(decoder, "gradient_checkpointing_enable"):
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        decoder.enable_gradient_checkpointing()
    yield Prepared(model=model)
    (getattr(decoder, "gradient_checkpointing_disable", None) or decoder.disable_gradient_checkpointing)()


def checkpointing_offload(model: nn.Module) -> Generator[Prepared]:
    """Each block is checkpointed, and its input waits in host memory."""
    decoder = _decoder(model)
    decoder.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    yield Prepared(model=model)
    decoder.gradient_checkpointing_disable()


def saved_in_pageable_memory(model: nn.Module) -> Generator[Prepared]:
    """Every saved tensor waits in pageable host memory; each copy halts the host."""
    yield Prepared(model=model, forward=save_on_cpu)


def saved_on_cpu(model: nn.Module) -> Generator[Prepared]:
    """Every saved tensor waits in host memory, pinned for the device that torch is passed: its default is CUDA."""
    where = torch.accelerator.current_accelerator()
    pinned: dict[str, Any] = {} if where is None else {"pin_memory": True, "device_type": where.type}
    yield Prepared(model=model, forward=lambda: save_on_cpu(**pinned))


def policy(name: str) -> Mode:
    """Return the mode of one of ebbtide's policies."""

    def prepare(model: nn.Module) -> Generator[Prepared]:
        yield from _under(model, name)

    return Mode(name=f"ebbtide {name}", prepare=prepare, setting=f"policy={name!r}")


def with_settings(name: str) -> Mode:
    """Return the mode of a name such as ``ebbtide offload, window=1MiB``; ``benchmarks.peers.planned`` makes them too.

    Its notes are the plan's predictions, if there is a plan.

    Raises:
        ValueError: The name is not one of these.
    """
    begin, *given = name.split(", ")
    kinds: dict[str, type[Any]] = {"auto": ebbtide.Auto, "minimal": ebbtide.Minimal, "offload": ebbtide.Offload}
    kind = kinds.get(begin.removeprefix("ebbtide "))
    if kind is None or begin == name or not all("=" in text for text in given):
        raise ValueError(f"{name!r} is no mode")
    aim: dict[str, Any] = dict(text.split("=", 1) for text in given)
    window = aim.pop("window", None)
    if "max_slowdown" in aim:
        aim["max_slowdown"] = float(aim["max_slowdown"])

    def prepare(model: nn.Module) -> Generator[Prepared]:
        yield from _under(model, kind(**aim), window)

    return Mode(name=name, prepare=prepare, setting=name.removeprefix("ebbtide "))


def _under(model: nn.Module, policy: Any, window: str | None = None) -> Generator[Prepared]:
    with ebbtide.enable_activation_offloading(model, policy=policy, window=window) as handle:
        plan = handle.plan

        def notes() -> dict[str, Any]:
            found: dict[str, Any] = {"explained": plan.explain().splitlines()[:6]}
            return found | ({"predicted": asdict(plan.made().predicted)} if isinstance(plan, AutoPlan) else {})

        yield Prepared(model=model, notes=notes, settled=lambda: getattr(plan, "judged", True))


MODES = (
    Mode(name="plain", prepare=plain),
    Mode(name="checkpointing", prepare=checkpointing, setting="use_reentrant=False"),
    Mode(name="transformers offload", prepare=checkpointing_offload, setting="use_reentrant=False, offload=True"),
    Mode(name="save_on_cpu", prepare=saved_on_cpu, setting="pin_memory=True on a device"),
    Mode(name="save_on_cpu, pageable", prepare=saved_in_pageable_memory, setting="pin_memory=False, its default"),
    *map(policy, ("auto", "minimal", "offload", "inputs")),
)

HOOKS_ALONE = policy("keep")
"""Spares nothing: what the hooks themselves cost."""
