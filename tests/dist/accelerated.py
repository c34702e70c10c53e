"""Prepare a model of ``from_pretrained`` under accelerate: in the usual way, and inside our context."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.dist.loading import _adapted, _differences, _locals
from tests.helpers.cpu_fsdp import shard_on_cpus
from tests.helpers.sizes import TINY


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is prepared."""

    family: str = "Qwen3ForCausalLM"
    version: int = 2
    precision: str = "no"
    stored: str = "bfloat16"
    dtype: str = "bfloat16"
    efficient: bool = False
    adapters: bool = False
    optimizer_first: bool = True
    checkpointing: bool = False
    storage: str = ""


@contextmanager
def _accelerator(way: Way) -> Iterator[Any]:
    """Yield an accelerator that shards over gloo ranks."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "ACCELERATE_USE_CPU": "true"}
    before = dict(os.environ)
    os.environ.update({k: str(v) for k, v in told.items()})
    undo = shard_on_cpus()
    try:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=way.version,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[way.family.replace("ForCausalLM", "DecoderLayer")],
            cpu_ram_efficient_loading=way.efficient,
            activation_checkpointing=way.checkpointing,
            **({"use_orig_params": True, "sync_module_states": way.efficient} if way.version == 1 else {}),
        )
        yield Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=way.precision)
    finally:
        undo()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.clear()
        os.environ.update(before)


def write_model(folder: str, family: str = "Qwen3ForCausalLM", *, tied: bool = False, dtype: str = "bfloat16") -> None:
    """Save a tiny decoder in several files."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(7)
    sizes = {"hidden_size": TINY.width, "intermediate_size": TINY.inner, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": tied}
    cls = getattr(transformers, family)
    cls(cls.config_class(**sizes, **heads)).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="40KB")


def prepared(way: Way, folder: str, ours: bool) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """Load, prepare and train two steps; return the model, the losses and the leftovers."""
    from ebbtide.integrations.accelerate import memory_efficient_init

    transformers: Any = importlib.import_module("transformers")
    cls, options = getattr(transformers, way.family), {"dtype": getattr(torch, way.dtype)}
    if way.storage:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=getattr(torch, way.storage)
        )
    with _accelerator(way) as accelerator, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's warnings about upcasting and 4 bits
        plugin, environment = accelerator.state.fsdp_plugin, dict(os.environ)
        fields = {k: v for k, v in vars(plugin).items() if not callable(v)}
        read = transformers.PreTrainedModel.__dict__["_load_pretrained_model"]
        if ours:
            with memory_efficient_init(accelerator):
                model = cls.from_pretrained(folder, **options)
            assert all(p.is_meta for p in model.parameters())
        else:
            model = cls.from_pretrained(folder, **options)
        model.train()
        if way.adapters:
            model = _adapted(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        result = accelerator.prepare(model, optimizer)
        model, optimizer = result
        for name, part in _locals(model).items():
            if "lora_" in name:  # random by default, so make them equal here
                part.copy_(torch.linspace(-0.05, 0.05, part.numel()).view_as(part))
        left = {
            "environment": dict(os.environ) == environment,
            "plugin": {k: v for k, v in vars(plugin).items() if k in fields and v != fields[k]},
            "library": transformers.PreTrainedModel.__dict__["_load_pretrained_model"] is read,
            "prepare": "prepare" in vars(accelerator),
        }
        losses = _train(model, optimizer, accelerator)
        return model, losses, left


def _train(model: nn.Module, optimizer: Any, accelerator: Any) -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    ids, losses = torch.randint(2, 60, (2, 12)), []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_prepared(way: Way, folder: str) -> dict[str, Any]:
    """Prepare both ways in this rank; return the differences."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    plain, wanted, _ = prepared(way, folder, False)
    ours, losses, left = prepared(way, folder, True)
    kind = FSDPModule if way.version == 2 else FullyShardedDataParallel
    return {
        "sharded": isinstance(ours, kind) and isinstance(plain, kind),
        "losses": (losses, wanted),
        "trained": _differences(ours, plain),
        "names": len(_locals(ours)),
        "left": left,
    }


def refused(case: str, folder: str) -> str:
    """Call ``from_pretrained`` with arguments that need weights at once; return the error."""
    import ebbtide
    from ebbtide.integrations.accelerate import memory_efficient_init

    transformers: Any = importlib.import_module("transformers")
    options: dict[str, Any] = {
        "device map": {"device_map": "cpu"},
        "shapes": {"ignore_mismatched_sizes": True},
        "names": {"key_mapping": {"^other": "model"}},
        "quantisation": {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)},
    }[case]
    with _accelerator(Way()) as accelerator:
        read = transformers.PreTrainedModel.__dict__["_load_pretrained_model"]
        try:
            with memory_efficient_init(accelerator):
                transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        except ebbtide.EbbtideError as error:
            assert transformers.PreTrainedModel.__dict__["_load_pretrained_model"] is read
            assert "prepare" not in vars(accelerator)
            return str(error)
    return ""
