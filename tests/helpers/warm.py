"""What every rank imports, imported once by the process that ranks are forked from. See ``tests.helpers.spawn``.

Nothing here may start a thread or use torch beyond importing it: neither survives a fork.
"""

from __future__ import annotations

import gc

import accelerate  # noqa: F401
import peft  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import ebbtide.api  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a rank would copy every page that it looks at
