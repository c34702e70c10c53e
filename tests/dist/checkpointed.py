"""Sharded models with activation checkpointing, in the ways of the trainers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.dist.trial import Enable, Findings, Job, Record, compare, note_step, randomise
from tests.helpers.cpu_fsdp import shard_on_cpus
from tests.helpers.models import build, switch_on_checkpoints

VOCABULARY = 61


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to train.

    Attributes:
        how: The checkpointing: a name of ``WAYS``.
        wrapper: ``"fsdp2"``, ``"fsdp"`` or ``"ddp"``.
        reentrant: The older kind of checkpoint.
        lora: All weights are frozen; PEFT adapters are trained.
    """

    how: str
    wrapper: str = "fsdp2"
    reentrant: bool = False
    lora: bool = False


def compare_setup(setup: Setup, policies: tuple[str, ...]) -> dict[str, Findings]:
    """Train without ebbtide, then with each policy; return the findings of each."""
    return compare(partial(_job, setup), policies)


def _job(setup: Setup, enable: Enable) -> Job:
    model = build("llama", num_hidden_layers=3, attention_dropout=0.1).model
    if setup.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        model.enable_input_require_grads()
    whole = randomise(model)
    runs: list[int] = []
    layers = next(m for k, m in model.named_modules() if k.endswith("layers"))
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    wrapped = WAYS[setup.how](setup, model, layers)
    enable(wrapped, strategy=setup.wrapper)
    return Job(model=wrapped, step=partial(_step, wrapped, runs), whole=whole)


def _step(model: nn.Module, runs: list[int], step: int, record: Record) -> None:
    torch.manual_seed(step)
    rank = torch.distributed.get_rank()
    ids = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(10 * step + rank))
    value = model(input_ids=ids, labels=ids).loss
    value.backward()
    note_step(record, str(step), model, value)
    record[f"{step} runs of blocks"] = torch.tensor(len(runs))  # neither cancelled nor doubled


def _wrapped(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    match setup.wrapper:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp":
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
                use_orig_params=True,
                device_id=torch.device("cpu"),
            )
        case _:
            mesh = init_device_mesh("cpu", (2,))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)


def _by_transformers(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    switch_on_checkpoints(model, {"use_reentrant": setup.reentrant})
    return _wrapped(setup, model, layers)


def _by_older_transformers(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Checkpoint the call of each layer: FSDP's hooks are inside, and are repeated in backward."""
    base = type(layers[0])

    class Older(base):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(super().__call__, **kwargs), *args, use_reentrant=setup.reentrant)

    for layer in layers:
        layer.__class__ = Older
    model.enable_input_require_grads()
    return _wrapped(setup, model, layers)


def _selectively(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    switch_on_checkpoints(model, {"use_reentrant": False, "context_fn": _products_are_kept})
    return _wrapped(setup, model, layers)


def _products_are_kept() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _impl(setup: Setup) -> CheckpointImpl:
    return CheckpointImpl.REENTRANT if setup.reentrant else CheckpointImpl.NO_REENTRANT


def _wrapper_in_unit(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, checkpoint_impl=_impl(setup))
    return _wrapped(setup, model, layers)


def _unit_in_wrapper(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    whole = _wrapped(setup, model, layers)
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, checkpoint_impl=_impl(setup))
    return whole


def _by_accelerate(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Like ``Accelerator.prepare`` for the setup's version of FSDP."""
    if setup.wrapper == "fsdp":
        whole, kind = _wrapped(setup, model, layers), type(layers[0])
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(whole, checkpoint_wrapper_fn=wrapper, auto_wrap_policy=ModuleWrapPolicy({kind}))
        return whole
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils as accelerate_fsdp

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(layers[0]).__name__],
        activation_checkpointing=True,
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    model = accelerate_fsdp.fsdp2_apply_ac(SimpleNamespace(state=state), model)
    chosen, mesh = accelerate_fsdp.fsdp2_prepare_auto_wrap_policy(plugin, model), init_device_mesh("cpu", (2,))
    for module in accelerate_fsdp.get_module_children_bottom_up(model)[:-1]:
        if chosen(module):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _by_verl(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Like verl's engine: transformers checkpoints, FSDP2 around layers and embedding, the weights from one rank."""
    switch_on_checkpoints(model, {"use_reentrant": False})
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (2,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
        ),
        "reshard_after_forward": True,
    }
    for module in model.modules():
        if isinstance(module, (type(layers[0]), nn.Embedding)):
            fully_shard(module, **options)
    fully_shard(model, **options)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def _by_ms_swift(setup: Setup, model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Like ms-swift's trainer: accelerate wraps with its FSDP2 settings, and inputs require gradients."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    undo = shard_on_cpus()
    try:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(layers[0]).__name__],
            activation_checkpointing=True,
        )
        # Its FSDP2 takes a model with an optimizer only; the trial has its own.
        wrapped, _ = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model, torch.optim.SGD(model.parameters()))
    finally:
        undo()
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    wrapped.enable_input_require_grads()
    assert isinstance(wrapped, FSDPModule)
    return wrapped


WAYS: dict[str, Callable[[Setup, nn.Module, nn.ModuleList], nn.Module]] = {
    "transformers": _by_transformers,
    "older transformers": _by_older_transformers,
    "selective": _selectively,
    "wrapper in unit": _wrapper_in_unit,
    "unit in wrapper": _unit_in_wrapper,
    "accelerate": _by_accelerate,
    "verl": _by_verl,
    "ms-swift": _by_ms_swift,
}
POLICIES = {"verl": ("enable_ckpt",), "ms-swift": ("enable_ckpt",)}
"""Both call ``enable_activation_offloading(model, "fsdp2", enable_ckpt=True)``."""

USUAL = (
    Setup(how="transformers"),
    Setup(how="transformers", reentrant=True, lora=True),
    Setup(how="older transformers"),
    Setup(how="older transformers", reentrant=True),
    Setup(how="unit in wrapper"),
    Setup(how="accelerate"),
    Setup(how="accelerate", wrapper="fsdp"),
    Setup(how="verl"),
    Setup(how="ms-swift"),
)
"""In every run of the tests."""

FURTHER = (
    Setup(how="transformers", lora=True),
    Setup(how="transformers", wrapper="fsdp"),
    Setup(how="transformers", wrapper="fsdp", reentrant=True),
    Setup(how="transformers", wrapper="ddp"),
    Setup(how="older transformers", lora=True, reentrant=True),
    Setup(how="older transformers", wrapper="fsdp"),
    Setup(how="older transformers", wrapper="ddp"),
    Setup(how="selective"),
    Setup(how="selective", wrapper="ddp"),
    Setup(how="wrapper in unit"),
    Setup(how="wrapper in unit", reentrant=True),
    Setup(how="unit in wrapper", reentrant=True),
    Setup(how="unit in wrapper", wrapper="fsdp"),
    Setup(how="verl", lora=True),
    Setup(how="ms-swift", lora=True),
)
"""With the slow tests."""
