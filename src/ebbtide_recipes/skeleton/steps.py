"""Report a step's figures to the run file, the log and the progress bar.

[Note: phases] In every mode ``forward`` ends after the model's forward and the loss, before backward: at this point
most tensors are saved, so memory is comparable with ebbtide and without it. The trainer marks forward and backward
(``trainer.py``), this callback marks the optimizer.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ebbtide.base.errors import TrainingError
from ebbtide.base.events import BUS
from ebbtide.store.device_memory import peak_bytes
from ebbtide.track import MemoryReader
from ebbtide_recipes.skeleton.progress import GIB, StepBar

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from ebbtide.integrations.transformers import OffloadCallback

LOGGER = logging.getLogger("ebbtide.recipes")


class StepRecorder(TrainerCallback):
    """Gathers a step's figures from the trainer and reports them at the step's end.

    Args:
        offload: The callback with ebbtide's handle; ``None`` in other modes.
        bar: The progress bar.
        mean: Returns the mean of a tensor over all processes.
        processes: Number of processes.
        nan_loss: ``"stop"`` or ``"skip"``.
    """

    def __init__(
        self,
        offload: OffloadCallback | None,
        bar: StepBar,
        *,
        mean: Callable[[torch.Tensor], torch.Tensor],
        processes: int = 1,
        nan_loss: str = "stop",
    ) -> None:
        self._offload, self._bar, self._mean, self._processes = offload, bar, mean, processes
        self.skips = nan_loss == "skip"
        """Whether a step whose loss or gradients are not finite is skipped; else it stops the run."""
        self._gradient_norm: torch.Tensor | float | None = None
        self._loss = 0.0
        self._losses: list[torch.Tensor] = []
        self._since_line: list[float] = []  # the losses of the steps since the last line
        self._noted: dict[str, list[float]] = {}
        self._seconds: list[float] = []
        self._tokens = 0
        self._began = self._training_began = 0.0
        self._first_step = 0
        self._learning_rate: float | None = None
        self._memory_bytes = 0
        self._stalled_seconds = self._logged_seconds = 0.0  # of the handle's stalls
        self.shown: dict[str, float | None] = {}

    def micro_batch(self, *, accuracy: float | None, tokens: int) -> None:
        """Add the figures of one micro-batch, at the end of its forward."""
        self.note(token_accuracy=accuracy)
        self._tokens += tokens
        self._memory_bytes = max(self._memory_bytes, _memory_bytes())

    def note(self, **figures: float | None) -> None:
        """Add further figures of a micro-batch by name; the step reports their mean."""
        for name, value in figures.items():
            if value is not None:
                self._noted.setdefault(name, []).append(value)

    def micro_loss(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's share of the step's loss."""
        self._losses.append(loss.detach())

    def mean_loss(self, trainers: float) -> float | None:
        """Return the trainer's mean loss since the last line; if some are not finite, that of the others."""
        finite = [loss for loss in self._since_line if math.isfinite(loss)]
        if len(finite) == len(self._since_line):
            return trainers
        return sum(finite) / len(finite) if finite else None

    def gradient_norm(self, norm: torch.Tensor | float | None) -> None:
        """Take the norm of the step's gradients over all processes, as it was before clipping; ``None``: unknown."""
        self._gradient_norm = norm

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the run's clock; a resumed run begins after its checkpoint's step."""
        self._training_began, self._first_step = time.perf_counter(), state.global_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the step's clock."""
        self._began = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the optimizer's start; check loss and gradients; record the learning rate before it changes.

        Raises:
            TrainingError: The loss or the gradients are not finite, and the run must stop.
        """
        # Summed as tensors: with one micro-batch this is the tensor that backward started from.
        loss = torch.stack(self._losses).sum()
        # Of float16's gradients that overflow, loss scaling takes care: it skips the step and lowers the scale.
        norm = 0.0 if args.fp16 or self._gradient_norm is None else self._gradient_norm
        both = torch.stack([loss, torch.as_tensor(norm, dtype=loss.dtype, device=loss.device)])
        self._loss, norm = (float(value) for value in (self._mean(both) if self._processes > 1 else both).tolist())
        if not math.isfinite(self._loss):
            self._not_finite(f"the loss of step {state.global_step + 1} is {self._loss}", kwargs["optimizer"])
        elif not math.isfinite(norm):
            what = (
                f"the loss of step {state.global_step + 1} is {self._loss:g}, but the norm of its gradients is {norm}"
            )
            self._not_finite(what, kwargs["optimizer"])
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])
        BUS.emit("phase", name="optimizer", edge="begin", step=state.global_step + 1)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Mark the optimizer's end."""
        BUS.emit("phase", name="optimizer", edge="end", step=state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the step."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - self._began
        loss = self._loss
        noted = {name: sum(values) / len(values) for name, values in self._noted.items()}
        accuracy = noted.pop("token_accuracy", None)
        BUS.emit(
            "step",
            step=state.global_step,
            loss=loss,
            seconds=seconds,
            tokens=self._all_tokens(),
            learning_rate=self._learning_rate,
            token_accuracy=accuracy,
            **noted,
        )
        saved_bytes = self._report_stats(state.global_step)
        self._seconds.append(seconds)
        self._since_line.append(loss)
        self.shown = {
            **noted,
            "token_acc": accuracy,
            "memory(GiB)": self._memory_bytes / GIB,
            "train_speed(s/it)": sum(self._seconds) / len(self._seconds),
            "memory_saved(GiB)": saved_bytes / GIB if saved_bytes is not None else None,
            "stall(s)": None if saved_bytes is None else self._stalled_seconds - self._logged_seconds,
        }
        self._bar.update(
            state.global_step,
            state.max_steps,
            loss=loss,
            memory_bytes=self._memory_bytes,
            saved_bytes=saved_bytes,
            seconds=seconds,
        )
        self._losses, self._noted, self._tokens, self._memory_bytes = [], {}, 0, 0

    def _all_tokens(self) -> int:
        """Return the tokens of the step over all processes."""
        if self._processes == 1:
            return self._tokens
        mean = self._mean(torch.tensor(float(self._tokens), device=self._losses[0].device))
        return round(float(mean.item()) * self._processes)

    def _not_finite(self, found: str, optimizer: torch.optim.Optimizer) -> None:
        """Stop, or skip the update; equal in all processes, because loss and norm are their means."""
        if not self.skips:
            raise TrainingError(
                found,
                expected="a finite number",
                hint="a lower --learning_rate, more warmup or --torch_dtype float32 may help; "
                "--nan_loss skip skips such steps",
            )
        LOGGER.warning("%s: the step is skipped, the weights stay", found)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # parameters without gradients are neither updated nor decayed

    def _report_stats(self, step: int) -> int | None:
        """Emit the handle's figures; return the saved bytes."""
        handle = None if self._offload is None else self._offload.handle
        if handle is None:
            return None
        stats = handle.stats()
        BUS.emit("stats", step=step, **stats.as_dict())
        self._stalled_seconds = stats.total_stall_seconds
        return stats.memory_saved_bytes

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a step's line; the trainer decides which steps have one."""
        if logs and "eval_loss" in logs:
            self._report_evaluation(state, logs)
        if not logs or "loss" not in logs:
            return
        figures = {"grad_norm": logs.get("grad_norm"), "learning_rate": self._learning_rate, "epoch": state.epoch}
        line = {"loss": logs["loss"], **self.shown, **figures}
        rounded = {name: value if value is None else float(f"{float(value):.6g}") for name, value in line.items()}
        LOGGER.info("step %d/%d %s", state.global_step, state.max_steps, json.dumps(rounded | self._progress(state)))
        self._seconds, self._since_line, self._logged_seconds = [], [], self._stalled_seconds

    def _progress(self, state: TrainerState) -> dict[str, str]:
        """Return the run's progress and remaining time, under ms-swift's names."""
        elapsed = time.perf_counter() - self._training_began
        done = max(1, state.global_step - self._first_step)
        return {
            "percentage": f"{100 * state.global_step / state.max_steps:.2f}%",
            "elapsed_time": _duration(elapsed),
            "remaining_time": _duration(elapsed / done * (state.max_steps - state.global_step)),
        }

    def _report_evaluation(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Emit and log the result of an evaluation."""
        loss, accuracy = logs["eval_loss"], logs.get("eval_mean_token_accuracy")
        reward = {"reward": logs["eval_reward"]} if "eval_reward" in logs else {}
        BUS.emit("evaluation", step=state.global_step, loss=loss, token_accuracy=accuracy, **reward)
        line = {"eval_loss": loss, "eval_token_acc": accuracy}
        line |= {f"eval_{name}": value for name, value in reward.items()}
        LOGGER.info("evaluation after step %d %s", state.global_step, json.dumps(line))


def _duration(seconds: float) -> str:
    """Write a time as ``1h 2m 3s``, without leading zeros."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h"] if hours else []
    return " ".join([*parts, *([f"{minutes}m"] if parts or minutes else []), f"{rest}s"])


def _memory_bytes() -> int:
    """Return the most device memory in use so far; without an accelerator, the process's resident memory now."""
    return peak_bytes() if torch.accelerator.is_available() else MemoryReader().rss_bytes() or 0
