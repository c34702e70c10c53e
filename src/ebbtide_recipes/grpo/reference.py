"""The reference under FSDP2, in units of blocks like the trained model.

[Note: the units of the reference]
TRL (checked with 1.16) shards only the root: each rank would move the reference to its device before cutting it, and
gather all of it in each scoring. Blocks that are units already stay so, and the root takes what they leave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ebbtide_recipes.skeleton.trainer import name_present_blocks


class Reference:
    """A trainer's ``ref_model``, whose blocks are sharded when it is set. See [Note: the units of the reference]."""

    def __get__(self, trainer: Any, owner: type) -> Any:
        """Return the reference; ``None``: there is none."""
        return vars(trainer).get("ref_model")

    def __set__(self, trainer: Any, model: torch.nn.Module | None) -> None:
        """Take the reference, as it is loaded or as it is prepared."""
        if model is not None and trainer.is_fsdp_enabled and not isinstance(model, FSDPModule):
            _shard_blocks(model, trainer.accelerator)
        vars(trainer)["ref_model"] = model


def _shard_blocks(model: Any, accelerator: Any) -> None:
    """Make a unit of each block, by accelerate's policy and with TRL's settings for the root."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        return
    name_present_blocks(model)
    is_block: Any = fsdp2_prepare_auto_wrap_policy(plugin, model)
    mesh = getattr(accelerator, "torch_device_mesh", None)
    settings: dict[str, Any] = {
        "reshard_after_forward": True,  # no backward follows, which would
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
    }
    for module in reversed([*model.modules()][1:]):  # children before their parents
        if is_block is not None and is_block(module):
            fully_shard(module, **settings)
