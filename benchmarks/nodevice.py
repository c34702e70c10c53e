"""A device whose streams and events do nothing, which leaves only the host's own time for offloading.

It uses host memory as device memory, and copies at once. See ``ebbtide.store.device.Device``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbtide.store.device import Capabilities


class NoDevice:
    """Implements ``Device`` without one."""

    capabilities = Capabilities(asynchronous_copies=True, pinned_host=False, timed_events=False)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def compute_stream(self, device: torch.device) -> str:
        return "compute"

    def default_stream(self, device: torch.device) -> str:
        return "compute"

    def side_stream(self, device: torch.device, purpose: str) -> str:
        return purpose

    def record(self, stream: str, *, timed: bool = False) -> object:
        return object()

    def wait(self, stream: str, event: object) -> None:
        pass

    def query(self, event: object) -> bool:
        return True

    def synchronize(self, event: object) -> None:
        pass

    def elapsed_seconds(self, begin: object, end: object) -> float:
        return 0.0

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_memory(self, device: torch.device) -> None:
        return None

    def record_use(self, tensor: torch.Tensor, stream: str) -> None:
        pass

    def allocate_host(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_host(self, buffer: torch.Tensor) -> None:
        pass

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str) -> None:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
