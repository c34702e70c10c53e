"""Collectives of the simulated device through host memory and gloo, which takes no such tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

NAME = "through_host"


def register(device: str) -> None:
    """Let ``init_process_group("through_host")`` find them."""
    dist.Backend.register_backend(NAME, _make, devices=["cpu", device])


def _make(store: Any, rank: int, size: int, timeout: Any) -> ThroughHost:
    return ThroughHost(store, rank, size, timeout)


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future)


class ThroughHost(dist.ProcessGroup):
    """Each collective waits for the current stream, runs on the host, and is done when it returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._on_host = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        """The name under which torch knows the group: it replaces the one that torch would make."""
        return dist.distributed_c10d._world.pg_names[self]

    def _summed(self, tensor: Tensor, op: Any) -> Tensor:
        options = dist.AllreduceOptions()
        average = op == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if average else op
        host = tensor.cpu()
        self._on_host.allreduce([host], options).wait()
        return host / self.size() if average else host

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        host = tensor.contiguous().cpu()
        found = [torch.empty_like(host) for _ in range(self.size())]
        self._on_host.allgather([found], [host]).wait()
        return found

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            tensor.copy_(self._summed(tensor, opts.reduceOp))
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            tensor.copy_(self._gathered(tensor)[opts.rootRank])
        return _done(tensors)

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> Any:
        for outputs, tensor in zip(output_tensors, input_tensors, strict=True):
            for output, found in zip(outputs, self._gathered(tensor), strict=True):
                output.copy_(found)
        return _done(output_tensors)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.view(-1).copy_(torch.cat([found.view(-1) for found in self._gathered(tensor)]))
        return _done(output)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        whole = self._summed(tensor.contiguous(), opts.reduceOp).view(-1)
        output.view(-1).copy_(whole.chunk(self.size())[self.rank()])
        return _done(output)

    # The names of torch 2.13 and later.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def barrier(self, opts: Any = None) -> Any:
        self._on_host.barrier().wait()
        return _done(None)
