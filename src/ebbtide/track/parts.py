"""Bytes of weights, gradients and optimizer state in this process's device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the device memory of tensors on this process; of sharded tensors, that of its shards.

    A storage counts once. With an accelerator, tensors in host memory do not count.
    """
    from torch.distributed.tensor import DTensor

    kind = "cpu"
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        kind = accelerator.type
    held: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == kind:
            storage = local.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def optimizer_parts(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the fields of the event ``parts`` from optimizers, before gradients are zeroed.

    Args:
        optimizers: The optimizers that have just stepped.
    """
    optimizers = list(optimizers)
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return {
        "weights": {"trained": held_bytes(trained)},
        "gradient_bytes": held_bytes(p.grad for p in trained if p.grad is not None),
        "optimizer_bytes": held_bytes(value for optimizer in optimizers for value in _state(optimizer)),
    }


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
