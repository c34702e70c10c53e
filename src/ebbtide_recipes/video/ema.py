"""A moving average of the trained weights, kept in checkpoints, used for samples and the saved model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ebbtide.base.errors import DataError
from ebbtide.track.parts import tensor_bytes
from ebbtide_recipes.skeleton.trainer import local

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

_FILE = "ema-{}.safetensors"


class Average(TrainerCallback):
    """Averages the trained parameters after every step, in float32. Each process averages its own shards.

    Args:
        module: The trained module, before it is sharded.
        decay: Share of the average that a step keeps.
        learned: Whether the module learned in this step: its average is left alone in others.
    """

    def __init__(self, module: torch.nn.Module, *, decay: float, learned: Callable[[], bool] = lambda: True) -> None:
        self._module, self._decay, self._learned = module, decay, learned
        self._average: Any = None

    @property
    def bytes(self) -> int:
        """Device memory of the average."""
        return tensor_bytes(self._average.shadow_params) if self._average is not None else 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with the current weights, unless a checkpoint was loaded."""
        self._begin()

    def _begin(self) -> None:
        from diffusers.training_utils import EMAModel

        if self._average is None:
            self._average = EMAModel(self._parameters(), decay=self._decay)
            # In bfloat16 a step's share of the difference would round to nothing.
            self._average.shadow_params = [shadow.float() for shadow in self._average.shadow_params]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the weights of this step."""
        if self._learned():
            self._average.step(self._parameters())

    def save(self, folder: Path, rank: int) -> None:
        """Write this process's part of the average into a checkpoint; the first writes that of whole weights."""
        from safetensors.torch import save_file

        if rank != self._part(rank):
            return
        tensors = {str(n): local(t).contiguous().cpu() for n, t in enumerate(self._average.shadow_params)}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / _FILE.format(rank), metadata={"steps": str(self._average.optimization_step)})

    @contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """Replace the weights by the average while open."""
        if self._average is None:
            yield
            return
        self._average.store(self._parameters())
        self._average.copy_to(self._parameters())
        try:
            yield
        finally:
            self._average.restore(self._parameters())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def load(self, folder: Path, rank: int) -> None:
        """Read this process's part of the average from a checkpoint.

        Raises:
            DataError: It is missing, or of other weights.
        """
        from safetensors import SafetensorError, safe_open

        self._begin()
        path = folder / _FILE.format(self._part(rank))
        try:
            with safe_open(path, framework="pt") as opened, torch.no_grad():
                self._average.optimization_step = int(opened.metadata()["steps"])
                for number, tensor in enumerate(self._average.shadow_params):
                    part = local(tensor)
                    part.copy_(opened.get_tensor(str(number)).to(part))
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise DataError(
                f"{path} holds no average of these weights: {str(error)[:200]}",
                expected="the average of a run with --ema_decay, as many processes and the same training type",
                hint="leave --ema_decay out, or resume with as many processes as wrote the checkpoint",
            ) from error

    def _part(self, rank: int) -> int:
        """Return the process that writes what this one reads: itself if weights are sharded, else the first."""
        return rank if any(isinstance(shadow, DTensor) for shadow in self._average.shadow_params) else 0
