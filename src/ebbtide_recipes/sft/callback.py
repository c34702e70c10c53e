"""What a step tells the run file, the log and the progress bar.

[Note: phases]
``forward`` ends when the model's forward and the loss are done and before backward begins, in every mode: at that
instant the saved tensors are at their height, so memory there means the same with ebbtide and without it. The trainer
marks forward and backward (``trainer.py``), this callback marks the optimizer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ebbtide.base.events import BUS
from ebbtide_recipes.sft.progress import GIB, StepBar

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

LOGGER = logging.getLogger("ebbtide.sft")


class StepRecorder(TrainerCallback):
    """Gathers a step's figures from the trainer and tells them once, at the step's end.

    Args:
        handle: What ``enable_activation_offloading`` returned; ``None`` in the other modes.
        bar: The progress bar.
    """

    def __init__(self, handle: Any | None, bar: StepBar) -> None:
        self._handle, self._bar = handle, bar
        self._losses: list[torch.Tensor] = []
        self._accuracies: list[float] = []
        self._seconds: list[float] = []
        self._tokens = 0
        self._began = 0.0
        self._learning_rate: float | None = None
        self._memory_bytes = 0
        self._stalled_seconds = 0.0
        self.shown: dict[str, float | None] = {}

    def micro_batch(self, *, accuracy: float | None, tokens: int) -> None:
        """Take the figures of one micro-batch, at the end of its forward."""
        if accuracy is not None:
            self._accuracies.append(accuracy)
        self._tokens += tokens
        self._memory_bytes = max(self._memory_bytes, _memory_bytes())

    def micro_loss(self, loss: torch.Tensor) -> None:
        """Take one micro-batch's share of the step's loss."""
        self._losses.append(loss.detach())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the step's clock."""
        self._began = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the optimizer's begin; note the learning rate before the schedule moves it."""
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])
        BUS.emit("phase", name="optimizer", edge="begin", step=state.global_step + 1)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the optimizer's end."""
        BUS.emit("phase", name="optimizer", edge="end", step=state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the step."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - self._began
        # Summed as tensors: with one micro-batch this is the very tensor that backward started from.
        loss = float(torch.stack(self._losses).sum().item())
        accuracy = sum(self._accuracies) / len(self._accuracies) if self._accuracies else None
        BUS.emit(
            "step",
            step=state.global_step,
            loss=loss,
            seconds=seconds,
            tokens=self._tokens,
            learning_rate=self._learning_rate,
            token_accuracy=accuracy,
        )
        saved_bytes, stall_seconds = self._tell_stats(state.global_step)
        self._seconds.append(seconds)
        self.shown = {
            "token_acc": accuracy,
            "memory(GiB)": self._memory_bytes / GIB,
            "train_speed(s/it)": sum(self._seconds) / len(self._seconds),
            "memory_saved(GiB)": saved_bytes / GIB if saved_bytes is not None else None,
            "stall(s)": stall_seconds,
        }
        self._bar.update(
            state.global_step,
            state.max_steps,
            loss=loss,
            memory_bytes=self._memory_bytes,
            saved_bytes=saved_bytes,
            seconds=seconds,
        )
        self._losses, self._accuracies, self._tokens, self._memory_bytes = [], [], 0, 0

    def _tell_stats(self, step: int) -> tuple[int | None, float | None]:
        """Emit the handle's figures; return the bytes saved and the seconds stalled since the step before."""
        if self._handle is None:
            return None, None
        stats = self._handle.stats()
        BUS.emit("stats", step=step, **dataclasses.asdict(stats))
        stalled = stats.total_stall_seconds - self._stalled_seconds
        self._stalled_seconds = stats.total_stall_seconds
        return stats.memory_saved_bytes, stalled

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a step's line; the trainer decides which steps have one."""
        if not logs or "loss" not in logs:
            return
        line = {"loss": logs["loss"], **self.shown, "learning_rate": self._learning_rate}
        rounded = {name: value if value is None else float(f"{value:.6g}") for name, value in line.items()}
        LOGGER.info("step %d/%d %s", state.global_step, state.max_steps, json.dumps(rounded))
        self._seconds = []


def _memory_bytes() -> int:
    """Return the most device memory in use so far; without an accelerator, the process's resident memory now."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    import psutil

    return psutil.Process().memory_info().rss
