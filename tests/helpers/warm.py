"""The imports of every rank, done once by the process that ranks are forked from. See ``tests.helpers.spawn``.

Nothing here may start a thread or use torch beyond importing it: neither survives a fork.
"""

from __future__ import annotations

import gc
from importlib import import_module

for _name in (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "peft",
    "pytest",
    "ebbtide.api",
):
    import_module(_name)
import_module("ebbtide_recipes.sft.pydoc").rows()  # kept for the process: saves seconds in each rank that trains
gc.collect()
gc.freeze()  # a collection in a rank would copy every page that it visits
