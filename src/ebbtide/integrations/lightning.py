"""ebbtide in Lightning: a callback for its ``Trainer``. Fabric needs none: enable offloading after ``fabric.setup``.

[Note: when offloading begins in Lightning]
``on_train_start`` follows wrapping (DDP, FSDP) and restoring a checkpoint; it is paired with ``on_train_end``, or
``on_exception``. Unless a strategy wraps the module, Lightning calls ``training_step`` without the module's
``forward``, so ``training_step`` delimits a pass. With manual optimization it holds several steps: then blocks delimit
a pass, and the first repeated block starts the next.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ebbtide import enable_activation_offloading
from ebbtide.base.errors import EbbtideError
from ebbtide.integrations.options import CallbackOptions
from ebbtide.wrap.forward import StandIn

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Two names of one library; the one that the process has imported is used."""


def _callback_class() -> type:
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name).Callback
    raise EbbtideError(
        "lightning is not installed",
        expected="lightning, or pytorch_lightning, for ebbtide.integrations.lightning",
        hint="pip install lightning",
    )


if TYPE_CHECKING:

    class Callback: ...

else:
    Callback = _callback_class()


class OffloadCallback(CallbackOptions, Callback):
    """Keep, offload or recompute saved tensors while a ``Trainer`` of Lightning trains.

    The callback calls ``ebbtide.enable_activation_offloading`` when training begins, on the module as the strategy has
    wrapped it, and closes the handle when training ends or raises.

    Example::

        callback = OffloadCallback(policy="minimal")
        trainer = lightning.Trainer(callbacks=[callback])
        trainer.fit(module, loader)
        print(callback.handle.stats())

    Args: as of ``ebbtide.enable_activation_offloading``, without the model.

    Attributes:
        handle: The handle of the latest training; None before the first.

    Raises:
        ConfigError: A value cannot be used; raised here, before anything is set up.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enable offloading on the wrapped module.

        Raises:
            EbbtideError: As ``ebbtide.enable_activation_offloading``.
        """
        self.close()  # of a training that ended without either event
        model = cast("nn.Module", trainer.strategy.model or pl_module)
        self.handle = enable_activation_offloading(model, **self.options)
        attachment: Any = self.handle._attachment
        if model is pl_module and getattr(pl_module, "automatic_optimization", False):
            attachment._undo.append(StandIn(pl_module, attachment._model_call, "training_step").remove)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the handle; its figures remain."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the handle after a training that raised."""
        self.close()
