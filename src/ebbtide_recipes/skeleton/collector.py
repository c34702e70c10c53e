"""Python's garbage collector during training.

[Note: the collector] Training allocates thousands of Python objects a step, more with saved tensors offloaded, and that
is what makes Python search the entire heap for cycles every few steps. Most of the heap are modules, configs and data
that live as long as the training, and the device may wait meanwhile. After the first step, which makes what later steps
keep, these are frozen: no longer searched (``gc.freeze``).
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments


FROZEN_BY_PYTHON = 1000
"""Python itself may have frozen some objects at its start: 3.12 has, 375."""


class _Freezer(TrainerCallback):
    """Freezes the heap at the end of the first step."""

    def __init__(self) -> None:
        self.frozen = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Freeze what is alive after the first step, unless somebody has frozen something."""
        if not self.frozen and gc.get_freeze_count() < FROZEN_BY_PYTHON:
            gc.collect()
            self.frozen = True  # before: an interrupt in between leaves nothing frozen for good
            gc.freeze()


@contextmanager
def frozen_heap(trainer: Trainer) -> Generator[None]:
    """Let the collector pass over what is alive after the first step, until the training is over.

    See [Note: the collector].

    Args:
        trainer: Its training begins inside.
    """
    freezer = _Freezer()
    trainer.add_callback(freezer)
    try:
        yield
    finally:
        trainer.remove_callback(freezer)
        if freezer.frozen:
            gc.unfreeze()
