"""Steps of small models, in which host time dominates: the modes take them in turn, in one process."""

from __future__ import annotations

import contextlib
import time

import torch

from benchmarks.case import step, synchronize
from benchmarks.frames import ours, shares
from benchmarks.peers import Prepared, mode_named
from benchmarks.shapes import SHAPES, Shape, qwen3

MODES = ("plain", "ebbtide keep", "ebbtide offload", "ebbtide minimal")
WARMUP_STEPS = 5
SPY_SECONDS = 15.0

SMALL_MODELS: dict[str, tuple[Shape, int]] = {
    "8 blocks, width 256, 128 tokens": (qwen3(256, 768, 8, 4, 2, head=64, words=512), 128),
    "12 blocks, width 576, 256 tokens": (SHAPES["SmolLM2-12"], 256),
}
"""Qwen3's kind; the shape and the tokens of a step."""


def small_steps(shape: Shape, tokens: int, pairs: int) -> dict[str, tuple[list[float], float | None]]:
    """Time steps of a model under each mode, in turn.

    Args:
        shape: Shape of the model.
        tokens: Tokens of each step.
        pairs: Steps of each mode that are timed.

    Returns:
        By mode: seconds of its steps ÷ those of the plain ones of the same turn; and the share of its time in ebbtide's
        own lines, None if py-spy is not installed.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    inputs = shape.inputs(tokens, 1, device)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with contextlib.ExitStack() as stack:
        modes: dict[str, Prepared] = {}
        for mode in MODES:
            torch.manual_seed(0)
            model = shape.build(device, "full").train()
            modes[mode] = stack.enter_context(contextlib.contextmanager(mode_named(mode).prepare)(model))
        for _ in range(WARMUP_STEPS):
            losses = [step(prepared, inputs) for prepared in modes.values()]
            if not all(torch.equal(loss, losses[0]) for loss in losses):
                raise SystemExit("the losses differ; no speed number on a red gate")
        for _ in range(pairs):
            for mode, prepared in modes.items():
                synchronize(device)
                began = time.perf_counter()
                step(prepared, inputs)
                synchronize(device)
                seconds[mode].append(time.perf_counter() - began)
        found = {
            mode: shares(lambda prepared=prepared: step(prepared, inputs), SPY_SECONDS)
            for mode, prepared in modes.items()
        }
    return {
        mode: (
            [one / plain for one, plain in zip(seconds[mode], seconds["plain"], strict=True)],
            None if (sampled := found[mode]) is None else ours(sampled),
        )
        for mode in MODES
    }
