"""Capabilities of the installed torch: marks for tests that older ones cannot run (``docs/reference/versions.md``)."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ebbtide.engine.slots import SINCE, readable

READS_SLOTS = readable()
"""Whether it shows what autograd saved: more recipes can be built, and the coverage of the blocks is measured."""

needs_slots = pytest.mark.skipif(not READS_SLOTS, reason=f"torch before {SINCE} does not show what autograd saved")

CURRENT_PRECISIONS = hasattr(torch.backends, "fp32_precision")
"""Whether it has the current interface for the precision of float32."""

needs_current_precisions = pytest.mark.skipif(not CURRENT_PRECISIONS, reason="torch before 2.9 has no fp32_precision")


def _multiplies_groups() -> bool:
    try:
        torch._grouped_mm(torch.ones(16, 16), torch.ones(1, 16, 16), offs=torch.tensor([16], dtype=torch.int32))
    except NotImplementedError:
        return False
    except RuntimeError:  # not these shapes or types, but there is a kernel
        return True
    return True


MULTIPLIES_GROUPS = _multiplies_groups()
"""Whether the products of groups run on a CPU."""

SAVES_EPS = hasattr(torch.nn.functional.group_norm(torch.ones(1, 2, 2).requires_grad_(), 1).grad_fn, "_saved_eps")
"""Whether the node of a group norm has its eps, up to torch 2.13; later a recipe needs the layer's."""

HOOKS_SELECTED = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether selective checkpoints can hand what they keep to saved-tensor hooks, since torch 2.14."""

NO_INTEGERS = "FSDP2 of this torch shards no weights of integers"


def shards_integers() -> bool:
    """Whether FSDP2 shards weights of integers; torch 2.8 to 2.10 first make a parameter that needs a gradient."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return "self.sharded_param.requires_grad_(" not in inspect.getsource(FSDPParam._init_sharded_param)
