"""Other packages, each used as its documentation recommends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import Mode, Prepared


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the longest list of modules in a model: its stack of blocks."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def trl(model: nn.Module) -> Generator[Prepared]:
    """TRL opens one context manager around forward and backward."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    manager = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    yield Prepared(model=model, step=lambda: manager)


def torchtune(model: nn.Module) -> Generator[Prepared]:
    """torchtune opens its context manager around the forward."""
    from torchtune.training import OffloadActivations

    manager = OffloadActivations(use_streams=True)
    yield Prepared(model=model, forward=lambda: manager)


def torchtune_checkpointing(model: nn.Module) -> Generator[Prepared]:
    """torchtune's documentation recommends its context manager together with checkpointing."""
    from benchmarks.peers.builtin import checkpointing

    for prepared in torchtune(model):
        for _ in checkpointing(model):
            yield prepared


def verl(checkpointed: bool) -> Mode:
    """Return the mode of verl, which needs at least three blocks under FSDP; here it has one rank."""

    def prepare(model: nn.Module) -> Generator[Prepared]:
        from torch.distributed.fsdp import fully_shard
        from verl.utils.activation_offload import enable_activation_offloading

        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, store=dist.FileStore(os.path.join(folder, "store"), 1), rank=0, world_size=1
            )
            stack.callback(dist.destroy_process_group)
            for block in blocks_of(model):
                fully_shard(block)
            fully_shard(model)
            enable_activation_offloading(model, "fsdp2", checkpointed)
            yield Prepared(model=model)

    name = "verl, checkpointing" if checkpointed else "verl"
    return Mode(
        name=name, prepare=prepare, package="verl", accelerator=True, setting=f"fsdp2, enable_ckpt={checkpointed}",
        once=True,
    )  # fmt: skip


def trainstream(amount: str | float) -> Mode:
    """Return the mode of TrainStream's activation offloader alone: its optimizer is not compared."""

    def prepare(model: nn.Module) -> Generator[Prepared]:
        from trainstream import ActivationOffloader, find_blocks, profile_hardware

        offloader = ActivationOffloader(model, find_blocks(model), amount, profile=profile_hardware())
        yield Prepared(model=model)
        offloader.remove()

    return Mode(
        name=f"TrainStream {amount}", prepare=prepare, package="trainstream", accelerator=True,
        setting=f"activation offload {amount}",
    )  # fmt: skip


def unsloth(model: nn.Module) -> Generator[Prepared]:
    """Unsloth replaces torch's re-entrant checkpoint with its own function."""
    os.environ["UNSLOTH_OFFLOAD_FP32"] = "exact"  # its default stores float32 inputs as bfloat16
    from unsloth_zoo import gradient_checkpointing as unsloth_checkpointing

    unsloth_checkpointing.patch_unsloth_smart_gradient_checkpointing(dtype=next(model.parameters()).dtype)
    decoder = getattr(model, "get_base_model", lambda: model)()
    decoder.enable_input_require_grads()
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    yield Prepared(model=model)
    decoder.gradient_checkpointing_disable()
    unsloth_checkpointing.unpatch_unsloth_smart_gradient_checkpointing()


MODES = (
    Mode(name="TRL", prepare=trl, package="trl", accelerator=True, setting="get_act_offloading_ctx_manager(model)"),
    Mode(name="torchtune", prepare=torchtune, package="torchtune", accelerator=True, setting="use_streams=True"),
    Mode(
        name="torchtune, checkpointing", prepare=torchtune_checkpointing, package="torchtune", accelerator=True,
        setting="use_streams=True on checkpointed blocks",
    ),
    verl(False),
    verl(True),
    trainstream("auto"),
    trainstream(1.0),
    Mode(
        name="Unsloth", prepare=unsloth, package="unsloth_zoo", accelerator=True,
        setting="smart gradient checkpointing, float32 kept exactly",
    ),
)  # fmt: skip
