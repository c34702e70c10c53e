"""Bytes of weights, gradients and optimizer state in this process's device memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ebbtide.engine.storages import plain_tensors

TRAINED = "trained"
"""Name of the weights that an optimizer trains outside of the known models."""


def tensor_bytes(tensors: Iterable[torch.Tensor], counted: set[int] | None = None) -> int:
    """Return the device memory of tensors on this process; of sharded tensors, that of its shards.

    A storage counts once. With an accelerator, tensors in host memory do not count.

    Args:
        tensors: Of any kind; those without a storage of their own do not count.
        counted: Addresses of storages that do not count; those of the tensors are added.
    """
    device_type = "cpu"
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        device_type = accelerator.type
    counted, total = set() if counted is None else counted, 0
    for tensor in plain_tensors(tensors):
        parts = (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,)
        for part in parts:
            try:
                storage = part.untyped_storage()
                address = storage.data_ptr()
            except (RuntimeError, ValueError):  # an opaque subclass, another layout, a lazy parameter
                continue
            if part.device.type == device_type and address not in counted:
                counted.add(address)
                total += storage.nbytes()
    return total


def model_bytes(models: Iterable[tuple[str, Iterable[torch.Tensor]]]) -> dict[str, int]:
    """Return the device memory of models by name, the second model of a name as ``NAME 2``.

    A storage counts once in all, so a wrapper of a model is left out, as is a model without device memory.
    """
    counted: set[int] = set()
    sizes: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for name, parameters in models:
        if size := tensor_bytes(parameters, counted):
            number = numbers[name] = numbers.get(name, 0) + 1
            sizes[name if number == 1 else f"{name} {number}"] = size
    return sizes


def parts_of(
    models: Iterable[tuple[str, Iterable[torch.Tensor]]], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the fields of the event ``parts``, before gradients are zeroed.

    Args:
        models: As ``model_bytes`` takes them; what the optimizers train besides is ``TRAINED``.
        optimizers: Those that have stepped.
    """
    optimizers = list(optimizers)
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return {
        "weights": model_bytes([*models, (TRAINED, trained)]),
        "gradient_bytes": tensor_bytes(p.grad for p in trained if p.grad is not None),
        "optimizer_bytes": optimizer_bytes(optimizers),
    }


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the device memory of the state of optimizers."""
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    return tensor_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))
