"""Lets accelerate shard on gloo ranks without an accelerator. For tests only.

On a world of CPUs transformers and TRL silently run DDP whatever the FSDP settings are. Here accelerate takes
such a world for one of accelerators, so that its real FSDP code runs. Every test that uses this must assert that the
model is an ``FSDPModule``: without the shim it would prove nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def shard_on_cpus() -> Callable[[], None]:
    """Install the shim, before the trainer's arguments are made. Return a function that removes it."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    real = PartialState.__init__

    def init(self: PartialState, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        shared = PartialState._shared_state
        if shared.get("distributed_type") == DistributedType.MULTI_CPU:
            shared["distributed_type"] = self.__dict__["distributed_type"] = DistributedType.MULTI_GPU
            # FSDP1 mistakes the numbered device, cpu:0, for another device than the one it computes on.
            shared["device"] = self.__dict__["device"] = torch.device("cpu")

    PartialState.__init__ = init

    def undo() -> None:
        PartialState.__init__ = real

    return undo


def main() -> int:
    """Run ``ebbtide`` with the shim: ``torchrun -m tests.helpers.cpu_fsdp sft ...``."""
    from ebbtide.cli import main as ebbtide
    from tests.helpers.gloo import use_one_worker

    use_one_worker()
    shard_on_cpus()
    return ebbtide(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
