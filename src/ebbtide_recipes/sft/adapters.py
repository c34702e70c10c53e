"""Adapters by PEFT: on weights as they are (LoRA), and on weights in 4 bits (QLoRA)."""

from __future__ import annotations

import copy
import importlib.util
import re
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, nearest
from ebbtide.base.extras import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from ebbtide_recipes.sft.config import SftConfig


def check(config: SftConfig) -> None:
    """Refuse 4 bits where what computes with them is not installed.

    Raises:
        EbbtideError: bitsandbytes is missing.
    """
    if config.train_type == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        require("bitsandbytes", extra="qlora", use="--train_type qlora")


def four_bits(config: SftConfig, dtype: str) -> dict[str, Any]:
    """Return what makes ``from_pretrained`` quantise the weights as it loads them.

    Args:
        config: Says whether FSDP shards the weights.
        dtype: What is computed in, such as ``"bfloat16"``.
    """
    import torch
    from transformers import BitsAndBytesConfig

    computed = getattr(torch, dtype)
    made = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        # FSDP shards only what is stored in the type of the other weights.
        bnb_4bit_quant_storage=computed if config.fsdp_strategy != "none" else torch.uint8,
    )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    return {"quantization_config": made, "device_map": {"": torch.device(device.type, index) if index else device}}


def lora_config(config: SftConfig, model: PreTrainedModel, *, without: Sequence[str] = ()) -> LoraConfig:
    """Return the adapters that the config asks for.

    Args:
        config: Names the modules.
        model: An ``outline`` of the model; the adapters are tried on it.
        without: Paths of modules inside which nothing gets an adapter.

    Raises:
        ConfigError: A name in ``target_modules`` is no module of the model, or one that can have no adapter.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets = list(config.target_modules)
    known = {part for name, _ in model.named_modules() for part in (name, name.rpartition(".")[2])} - {""}
    for target in targets:
        if target != "all-linear" and target not in known:
            raise ConfigError(
                f"target_modules names {target!r}",
                expected="modules of the model",
                hint=nearest(target, sorted(known)) or "all-linear takes every linear module but the head",
            )
    if "all-linear" in targets and len(targets) > 1:
        raise ConfigError(
            f"target_modules is {' '.join(targets)}",
            expected="all-linear alone, or names alone",
            hint="all-linear takes every linear module but the head",
        )
    made = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=rf".*(?:{'|'.join(map(re.escape, without))})\..*" if without else None,
    )
    named = {type(m).__name__ for name, m in model.named_modules() if {name, name.rpartition(".")[2]} & set(targets)}
    try:
        # Tried on a copy of the config: PEFT writes the modules it finds into the one it is given.
        inject_adapter_in_model(copy.deepcopy(made), model)
    except ValueError as error:
        raise ConfigError(
            f"target_modules is {' '.join(targets)}, which names {', '.join(sorted(named)) or 'no module'}",
            expected="modules that can have adapters, such as Linear",
            hint="all-linear takes every linear module but the head",
        ) from error
    return made
