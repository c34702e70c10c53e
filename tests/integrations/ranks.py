"""The code of the ranks in distributed tests: the recipe, and other trainers with our callback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.cpu_fsdp import shard_on_cpus
from tests.integrations import rewards

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


@contextlib.contextmanager
def fresh_world(*, sharded: bool, ranks_a_node: int | None = None) -> Iterator[None]:
    """Reset accelerate's view of the ranks, as in a new process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()

    forget()
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_a_node or os.environ["WORLD_SIZE"])
    os.environ.setdefault("MASTER_ADDR", "localhost")  # needed if there are several nodes
    undo = shard_on_cpus() if sharded else (lambda: None)
    try:
        yield
    finally:
        undo()
        forget()


def recipe(
    model: str, folder: str, /, *, ranks_a_node: int | None = None, digest: bool = False, **changes: Any
) -> dict[str, Any]:
    """Train with the recipe ``sft``; return the losses, the model's wrapper, and the saved files.

    With ``digest`` also a digest of each full weight and of the full optimizer state.
    """
    from ebbtide_recipes.sft.recipe import RECIPE

    config = sft_config(model, folder, **{"dataset": ("builtin:pydoc#60",), "max_length": 256, **changes})
    return _carried_out(RECIPE, config, ranks_a_node=ranks_a_node, digest=digest)


def sft_config(model: Path | str, folder: Path | str, /, **changes: Any) -> Any:
    """Return a short run of ``sft`` that learns something at every step."""
    from ebbtide_recipes.sft.config import SftConfig

    values = {
        "model": str(model),
        "dataset": ("builtin:pydoc#40",),
        "max_steps": 3,
        "max_length": 64,
        "packing": True,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save": False,
        "output_dir": str(folder),
    }
    return SftConfig(**{**values, **changes})


def grpo_config(model: Path | str, folder: Path | str, /, **changes: Any) -> Any:
    """Return a short run of ``grpo`` that learns something at every step."""
    from ebbtide_recipes.grpo.config import GrpoConfig

    values = {
        "model": str(model),
        "reward_funcs": (rewards.NAME, "closeness"),
        "num_generations": 4,
        "max_prompt_length": 32,
        "max_completion_length": 16,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save": False,
        "output_dir": str(folder),
    }
    return GrpoConfig(**{**values, **changes})


def grpo_case(model: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Train with the recipe ``grpo``; return like ``recipe``, and whether ranks generate until the last is done."""
    from transformers import GenerationMixin

    from ebbtide_recipes.grpo.recipe import RECIPE

    together: set[bool] = set()
    generate = GenerationMixin.generate

    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        together.add(bool(kwargs.get("synced_gpus")))
        return generate(self, *args, **kwargs)

    GenerationMixin.generate = seen
    try:
        result = _carried_out(RECIPE, grpo_config(model, folder, **changes))
    finally:
        GenerationMixin.generate = generate
    return {**result, "together": together}


def _carried_out(recipe: Any, config: Any, *, ranks_a_node: int | None = None, digest: bool = False) -> dict[str, Any]:
    from ebbtide.wrap.strategy import found_strategy
    from ebbtide_recipes.skeleton import run

    sharded = config.fsdp_strategy != "none"
    with warnings.catch_warnings(), fresh_world(sharded=sharded, ranks_a_node=ranks_a_node):
        warnings.simplefilter("ignore")  # of the hosts; they are errors in tests of one process
        config = run.check(recipe, config)
        trainer = run.carry_out(recipe, config, run.claim(config, contextlib.ExitStack()))
        wrapped = found_strategy(trainer.model_wrapped)
        state = _digests(trainer) if digest else None
        blocks = [_blocks(model) for model in (trainer.model_wrapped, getattr(trainer, "ref_model", None)) if model]
        shards = {
            len({p.shape, p.to_local().shape}) for p in trainer.model_wrapped.parameters() if hasattr(p, "to_local")
        }
    if os.environ["RANK"] != "0":
        return {"wrapped": wrapped}
    events = [json.loads(line) for line in Path(config.output_dir, "run.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    stats = [event for event in events if event["event"] == "stats"]
    return {
        "wrapped": wrapped,
        "losses": {event["step"]: event["loss"] for event in steps},
        "rewards": {event["step"]: event.get("reward") for event in steps},
        "tokens": [event["tokens"] for event in steps],
        "evaluations": [event.get("reward") for event in events if event["event"] == "evaluation"],
        "phases": sorted({event["name"] for event in events if event["event"] == "phase"}),
        "saved": stats[-1]["memory_saved_bytes"] if stats else None,
        "begin": events[0],
        "state": state,
        "cut": shards == {2},
        "blocks": blocks,
    }


def _blocks(model: Any) -> list[str]:
    """Return the names of the blocks that FSDP gathers separately."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    units = (FSDPModule, FullyShardedDataParallel)
    return [name for name, module in model.named_modules() if isinstance(module, units) and "layers." in name]


def _digests(trainer: Any) -> dict[str, str]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimizer = get_state_dict(trainer.model_wrapped, trainer.optimizer.optimizer, options=options)
    found = {f"weight {name}": value for name, value in weights.items()}
    for name, values in optimizer.get("state", {}).items():
        found |= {f"{kind} {name}": value for kind, value in values.items()}
    return {name: hashlib.sha256(_bytes(value)).hexdigest() for name, value in found.items()}


def _bytes(value: Any) -> bytes:
    """Return a tensor's bytes; numpy has no bfloat16."""
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def recipe_case(model: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Call ``recipe`` with the positional arguments of a case."""
    return recipe(model, folder, **changes)


def trainer_case(
    kind: str, model: str, folder: str, offload: bool, config: dict[str, Any], callback: bool = False
) -> dict[str, Any]:
    """Train in a trainer of transformers or TRL; ``offload`` is the switch in its own ``fsdp_config``.

    With ``callback`` the trainer is the host's own class, and the callback is among its ``callbacks``.
    """
    from ebbtide.integrations.transformers import OffloadCallback, OffloadMixin
    from ebbtide.wrap.strategy import found_strategy

    with warnings.catch_warnings(), fresh_world(sharded=True):
        warnings.simplefilter("ignore")
        settings = {"fsdp": True, "fsdp_config": {**FSDP2["fsdp_config"], **config, "activation_cpu_offload": offload}}
        base, arguments, options = _trainer(kind, model, folder, settings)
        if callback:
            made = base(args=arguments, callbacks=[OffloadCallback()], **options)
        else:
            made = type(f"Offloading{base.__name__}", (OffloadMixin, base), {})(args=arguments, **options)
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        callbacks = [c for c in made.callback_handler.callbacks if isinstance(c, OffloadCallback)]
        stats = [c.handle.stats() for c in callbacks if c.handle is not None]
        return {
            "losses": losses,
            "wrapped": found_strategy(made.model_wrapped),
            "sharded": _sharded(made.model_wrapped),
            "callbacks": len(callbacks),
            "saved": stats[0].memory_saved_bytes if stats else 0,
            "open": [c.handle.enabled for c in callbacks if c.handle is not None],
        }


def accelerate_case(model: str, offload: bool) -> dict[str, Any]:
    """Train in a hand-written loop on the results of accelerate's ``prepare``."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    import ebbtide

    with warnings.catch_warnings(), fresh_world(sharded=True):
        warnings.simplefilter("ignore")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        made = AutoModelForCausalLM.from_pretrained(model)
        network, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
        handle = ebbtide.enable_activation_offloading(network, "fsdp2") if offload else None
        ids = torch.arange(4 * 192).reshape(4, 192) * (accelerator.process_index + 3) % 300
        losses = []
        for _ in range(3):
            with accelerator.accumulate(network):
                loss = network(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        saved = 0
        if handle is not None:
            saved = handle.stats().memory_saved_bytes
            handle.close()
        return {"losses": losses, "sharded": _sharded(network), "saved": saved}


def _sharded(network: Any) -> int:
    """Count the modules that FSDP2 shards."""
    from torch.distributed.fsdp import FSDPModule

    return sum(isinstance(module, FSDPModule) for module in network.modules())


def _trainer(kind: str, place: str, folder: str, settings: dict[str, Any]) -> tuple[type, Any, dict[str, Any]]:
    """Return a trainer's class, its arguments, and its further parameters."""
    import trl
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
    )

    common = {
        "output_dir": folder,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **settings,
    }
    tokenizer = AutoTokenizer.from_pretrained(place)
    text = "What does this function do? It returns the value of the argument. " * 12
    off = {"gradient_checkpointing": False, "bf16": False, "max_length": 192}
    pairs = Dataset.from_list(
        [{"prompt": text[i : i + 400], "chosen": text[:300], "rejected": text[7:300]} for i in range(8)]
    )
    if kind == "trainer":
        rows = [{"input_ids": (ids := tokenizer(text[i:])["input_ids"][:128]), "labels": ids} for i in range(8)]
        model = AutoModelForCausalLM.from_pretrained(place)
        return Trainer, TrainingArguments(**common), {"model": model, "train_dataset": Dataset.from_list(rows)}
    if kind == "sft":
        rows = Dataset.from_list([{"text": text[i:]} for i in range(8)])
        model = AutoModelForCausalLM.from_pretrained(place)
        options = {"model": model, "train_dataset": rows, "processing_class": tokenizer}
        return trl.SFTTrainer, trl.SFTConfig(**common, **off), options
    if kind == "dpo":
        model, reference = (AutoModelForCausalLM.from_pretrained(place) for _ in range(2))
        options = {"model": model, "ref_model": reference, "train_dataset": pairs, "processing_class": tokenizer}
        return trl.DPOTrainer, trl.DPOConfig(**common, **off), options
    model = AutoModelForSequenceClassification.from_pretrained(place, num_labels=1)
    options = {"model": model, "train_dataset": pairs, "processing_class": tokenizer}
    return trl.RewardTrainer, trl.RewardConfig(**common, **off), options
