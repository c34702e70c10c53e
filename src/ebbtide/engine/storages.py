"""The memory under tensors, and what names it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have memory: those that are no wrappers, and the tensors inside wrappers."""
    pending, found = list(tensors), list[torch.Tensor]()
    while pending:
        tensor = pending.pop()
        if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
            found.append(tensor)
        else:
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            pending += [part for part in inner if isinstance(part, torch.Tensor)]
    return found


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that names a storage while it lives: for weights, which the model holds."""
    return storage._cdata


def storage_keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the keys of the storages that have bytes now."""
    return {storage._cdata for storage in storages(tensors)}


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages that have bytes now."""
    others, found = list[torch.Tensor](), list[torch.UntypedStorage]()
    for tensor in tensors:  # at each forward, of each weight: no more calls than needed
        if type(tensor) is not nn.Parameter:
            others.append(tensor)
        elif tensor.layout is torch.strided and (storage := tensor.untyped_storage()).nbytes():
            found.append(storage)
    for tensor in plain_tensors(others):
        if is_lazy(tensor):  # has no memory yet
            continue
        if tensor.layout == torch.strided and (storage := tensor.untyped_storage()).nbytes():
            found.append(storage)
    return found
