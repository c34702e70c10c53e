"""ebbtide in the trainers of transformers and TRL: ``Trainer``, ``SFTTrainer``, ``DPOTrainer``, ``RewardTrainer``, ...

[Note: when offloading begins]
A trainer wraps its model (DDP, FSDP) inside ``train()``, just before ``on_train_begin``. The callback enables
offloading there, on the wrapped model, and closes the handle at ``on_train_end``. Callbacks are not notified of
exceptions: a handle left open, by this or another callback, is closed when the next training of the model begins, or
by ``close()``. The model keeps such a handle alive.

[Note: figures in the trainer's own logs]
A trainer passes one dictionary of logs to its callbacks in turn, and those of TensorBoard, W&B and similar trackers
come before the user's. So the callback moves to the front of the list when training begins. transformers gives
callbacks no reference to the trainer; the list is taken from the calling ``CallbackHandler``.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.training_args import ParallelMode

from ebbtide import Handle, Stats, enable_activation_offloading
from ebbtide.base.checks import FALSE, NOTHING, TRUE
from ebbtide.base.errors import ConfigError, ConflictError, DataError, StrategyError
from ebbtide.base.events import BUS
from ebbtide.base.files import json_object
from ebbtide.integrations.options import CallbackOptions
from ebbtide.wrap import check_strategy
from ebbtide.wrap.other_offloaders import open_handles

logger = logging.getLogger("ebbtide.integrations")

SWITCH = "activation_cpu_offload"
"""The key of ``fsdp_config`` that ms-swift's users know."""


class OffloadCallback(CallbackOptions, TrainerCallback):
    """Keep, offload or recompute saved tensors while a trainer of transformers or TRL trains.

    The callback calls ``ebbtide.enable_activation_offloading`` when training begins, on the model as the trainer has
    wrapped it, and closes the handle when training ends. Use it instead of the trainer's own activation offloading.

    ::

        trainer = SFTTrainer(model, args=args, train_dataset=rows, callbacks=[OffloadCallback(policy="minimal")])
        trainer.train()

    Each training log gets these figures, which TensorBoard, W&B and other trackers of ``report_to`` show. Seconds count
    since the previous log.

    ==================== =================================================================
    ``memory_saved(GiB)`` what blocks save for backward and is not kept (latest pass)
    ``kept(GiB)``         what is kept on the device
    ``offloaded(GiB)``    what is offloaded
    ``stall(s)``          time compute waited for copies
    ``recompute(s)``      host time of recomputing tensors
    ==================== =================================================================

    Args: as of ``ebbtide.enable_activation_offloading``, without the model.

    Raises:
        ConfigError: A value cannot be used; raised here, before the trainer loads or wraps anything.
    """

    _logged = Stats()
    _trainer: Callable[[], Trainer | None] = staticmethod(lambda: None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: a copy, also of a pickled one, has no handle and follows no trainer."""
        return {name: value for name, value in super().__getstate__().items() if name != "_trainer"}

    def follow(self, trainer: Trainer) -> OffloadCallback:
        """Add this callback to a trainer, and offload the trainer's wrapped model.

        Without this call the callback gets the model from the trainer's events: under DDP the unwrapped one, which
        saves the same tensors but is logged as a single-device model. ``strategy="ddp"`` accepts it.
        """
        self._trainer = weakref.ref(trainer)
        trainer.add_callback(self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enable offloading on the wrapped model.

        Raises:
            ConflictError: The trainer offloads activations itself, or has another ``OffloadCallback``.
            StrategyError: The trainer puts the model in ``nn.DataParallel``, in this process.
            EbbtideError: As ``ebbtide.enable_activation_offloading``.
        """
        self.close()
        self.handle, self._logged = None, Stats()
        refuse_other_offloaders(args)
        if 0 < state.max_steps <= state.global_step:
            logger.warning(
                "nothing left to train: step %d is done, and max_steps is %d; hint: a larger max_steps, or more "
                "epochs, continues it",
                *(state.global_step, state.max_steps),
            )
            return
        trainer = self._trainer()
        frame = inspect.currentframe()
        handler = _move_to_front(self, None if frame is None else frame.f_back)
        model = cast("nn.Module", kwargs["model"] if trainer is None else trainer.model_wrapped)
        if handler is not None and not isinstance(model, nn.Module):
            model = cast("nn.Module", handler.model)  # setfit passes the object that holds it
        _refuse_data_parallel(args, model)
        for handle in _handles.intersection(open_handles(model)):
            handle.close()
        options = dict(self.options)
        distributed = args.parallel_mode is ParallelMode.DISTRIBUTED
        if options["strategy"] == "ddp" and distributed and check_strategy(model, "auto") == "single":
            options["strategy"] = "auto"  # what DDP wraps
        self.handle = enable_activation_offloading(model, **options)
        _handles.add(self.handle)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add ebbtide's figures to a log of training, and record it where ``track_memory`` does."""
        if self.handle is None or not logs or "loss" not in logs:
            return
        stats = self.handle.stats()
        figures = {
            "memory_saved(GiB)": stats.memory_saved_bytes / _GIB,
            "kept(GiB)": stats.kept_bytes / _GIB,
            "offloaded(GiB)": stats.offloaded_bytes / _GIB,
            "stall(s)": stats.total_stall_seconds - self._logged.total_stall_seconds,
            "recompute(s)": stats.total_recompute_seconds - self._logged.total_recompute_seconds,
        }
        self._logged = stats
        for known in (logs, *state.log_history[-1:]):  # the trainer's history already has a copy of the logs
            known.update({name: value for name, value in figures.items() if name not in known})
        BUS.emit("log", step=state.global_step, logs=dict(logs))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the handle; its figures remain."""
        self.close()


_GIB = 1024**3

_handles: weakref.WeakSet[Handle] = weakref.WeakSet()
"""Handles that callbacks opened."""


def _refuse_data_parallel(args: TrainingArguments, model: nn.Module) -> None:
    """Raise if the trainer puts the model in ``nn.DataParallel``: it computes with copies."""
    quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    if args.n_gpu > 1 and not quantised:
        raise StrategyError(
            f"the trainer puts the model in DataParallel over {args.n_gpu} devices",
            expected="DistributedDataParallel, FSDP, or one device",
            hint=f"torchrun --nproc-per-node {args.n_gpu} your_script.py; or CUDA_VISIBLE_DEVICES=0 for one device",
        )


def _move_to_front(callback: TrainerCallback, frame: FrameType | None) -> CallbackHandler | None:
    """Move a callback before those of the trackers. See [Note: figures in the trainer's own logs].

    Returns:
        The handler that notifies the callback; None if another caller does.
    """
    handler = None if frame is None else frame.f_locals.get("self")
    if not isinstance(handler, CallbackHandler):
        return None
    if (count := sum(isinstance(one, OffloadCallback) for one in handler.callbacks)) > 1:
        found = f"the trainer has {count} OffloadCallbacks"
        raise ConflictError(found, expected="one offloader on a model", hint="leave the others out of callbacks=")
    handler.callbacks.remove(callback)
    handler.callbacks.insert(0, callback)
    return handler


def add_offloading(trainer: Trainer, **options: Any) -> OffloadCallback | None:
    """Add the callback if the trainer's ``fsdp_config`` has ``"activation_cpu_offload": true``.

    With ``"activation_checkpointing": true`` as well, the tensors that the checkpoints keep are offloaded.

    Args:
        trainer: Any trainer of transformers or TRL, before ``train()``.
        **options: As ``OffloadCallback`` takes them.

    Returns:
        The new or existing callback; ``None`` if the switch is off or absent.

    Raises:
        ConfigError: The switch is neither true nor false.
    """
    if not wanted(cast("Mapping[str, Any] | str | None", trainer.args.fsdp_config)):
        return None
    existing = [c for c in trainer.callback_handler.callbacks if isinstance(c, OffloadCallback)]
    return existing[0] if existing else OffloadCallback(**options).follow(trainer)


class OffloadMixin:
    """Makes a trainer add the callback if its ``fsdp_config`` has ``"activation_cpu_offload": true``.

    ::

        class MyTrainer(OffloadMixin, SFTTrainer): ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_offloading(cast("Trainer", self))


def wanted(fsdp_config: Mapping[str, Any] | str | None) -> bool:
    """Whether a trainer's ``fsdp_config`` enables activation offloading.

    Args:
        fsdp_config: A mapping, a path of a JSON file, or JSON; ms-swift's form with an inner ``fsdp_config`` too.

    Raises:
        ConfigError: The switch is neither true nor false.
        DataError: The file cannot be read.
    """
    value = settings_of(fsdp_config).get(SWITCH, False)
    word = str(value).strip().lower()
    if word not in TRUE + FALSE + NOTHING:
        raise ConfigError(
            f"{SWITCH} of fsdp_config is {value!r:.60}", expected="true or false", hint=f'"{SWITCH}": true'
        )
    return word in TRUE


def settings_of(fsdp_config: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Return the settings of a trainer's ``fsdp_config``; transformers reads a path only where ``fsdp`` is set.

    Raises:
        DataError: The file cannot be read, or does not hold settings.
    """
    hint = f'such as {{"{SWITCH}": true}}'
    read: Any = fsdp_config
    if isinstance(read, str):
        source = read if read.lstrip().startswith("{") else Path(read).expanduser()
        expected = "a JSON file with FSDP's settings, or a dict"
        read = json_object(source, f"fsdp_config {read!r:.300}", expected=expected, hint=hint)
    if read is not None and not isinstance(read, Mapping):
        raise DataError(f"fsdp_config is {read!r:.80}", expected="FSDP's settings by name", hint=hint)
    settings = dict(cast("Mapping[str, Any]", read or {}))
    settings |= settings_of(settings["fsdp_config"]) if settings.get("fsdp_config") else {}
    return {name.removeprefix("fsdp_"): value for name, value in settings.items()}


def refuse_other_offloaders(args: TrainingArguments) -> None:
    """Raise if the trainer's own arguments offload activations: only the innermost hooks would work.

    Raises:
        ConflictError: One of them is set.
    """
    plugin = cast("Mapping[str, Any]", getattr(args, "fsdp_plugin_args", None) or {})
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")  # the latter is an older alias
    kwargs = next((name for name in names if hasattr(args, name)), names[1])
    checkpointing = cast("Mapping[str, Any]", getattr(args, kwargs, None) or {})
    flags = {
        "activation_offloading": getattr(args, "activation_offloading", False),
        f"{kwargs}['offload']": checkpointing.get("offload"),
        "fsdp_config['activation_checkpointing_offload']": plugin.get("activation_checkpointing_offload")
        or settings_of(cast("Mapping[str, Any] | str | None", args.fsdp_config)).get(
            "activation_checkpointing_offload"
        ),
    }
    for name, value in flags.items():
        if value:
            raise ConflictError(
                f"the trainer's own {name} is on together with ebbtide",
                expected="one offloader on a model",
                hint=f"unset {name}, or leave OffloadCallback out",
            )
