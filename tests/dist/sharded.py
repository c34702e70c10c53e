"""Sharded training: the ways to wrap a model, each a job for ``trial.compare``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.dist.decoder import VOCABULARY, Decoder, Expert
from tests.dist.schedules import SCHEDULES, Order, job_of
from tests.dist.trial import POLICIES, Enable, Findings, Job, compare, randomise
from tests.helpers.models import Mlp, Tiny, build


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to train.

    Attributes:
        model: ``"decoder"`` or a name of ``tests.helpers.models``.
        wrapper: ``"fsdp2"``, ``"fsdp"``, ``"ddp"`` or ``"single"``.
        units: FSDP2 units: ``"blocks"``; ``"nested"``: blocks and parts of them; ``"parts"``: parts of blocks only;
            ``"experts"``: blocks and single experts; ``"together"``: all blocks in one unit; ``"norm and head"``:
            blocks, and a unit of two modules; ``"root"``: the model is the one unit (FSDP1 too).
        reshard: ``reshard_after_forward``.
        mixed: bfloat16 parameters in forward and backward (FSDP2's policy), or ``"autocast"``.
        frozen: Some weights take no gradient.
        tied: The head's weight is the embedding's.
        lora: All weights are frozen; PEFT adapters are trained.
        host: FSDP2's ``CPUOffloadPolicy``.
        prefetch: FSDP2's explicit prefetch of the next units is set.
        replicas: Copies of the shards (hybrid sharding): FSDP2 and FSDP1.
        schedule: A name of ``SCHEDULES``.
        early: Offloading is enabled before the model is wrapped.
        flat: FSDP1 with ``use_orig_params=False``.
        sharding: FSDP1's strategy.
        ddp: Enabled options of DDP.
        unused: Some weights are in no graph.
    """

    model: str = "decoder"
    wrapper: str = "fsdp2"
    units: str = "blocks"
    reshard: bool = True
    mixed: bool | str = False
    frozen: bool = False
    tied: bool = False
    lora: bool = False
    host: bool = False
    prefetch: bool = False
    replicas: int = 1
    schedule: str = "one"
    early: bool = False
    flat: bool = False
    sharding: str = "FULL_SHARD"
    ddp: tuple[str, ...] = ()
    unused: bool = False


def compare_setup(setup: Setup, policies: tuple[str, ...] = POLICIES) -> dict[str, Findings]:
    """Train without ebbtide, then with each policy; return the findings of each."""
    return compare(partial(make_job, setup), policies)


def make_job(setup: Setup, enable: Enable) -> Job:
    """Build, wrap and enable according to a setup."""

    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        model, blocks = _build(setup)
        whole = randomise(model)
        # Some blocks are found by structure, some are named.
        options: dict[str, Any] = {"strategy": "auto", "blocks": None if setup.model == "decoder" else blocks}
        if setup.early:
            enable(model, **options)
        wrapped = _wrap(model, setup, blocks)
        if not setup.early:
            enable(wrapped, **options | {"strategy": setup.wrapper})
        return wrapped, whole

    return job_of(setup.schedule, make, partial(_loss, setup))


def _loss(setup: Setup, model: nn.Module, number: int, order: Order) -> Tensor:
    rank = torch.distributed.get_rank()
    ids = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(100 * number + rank))
    with torch.autocast("cpu", torch.bfloat16, enabled=setup.mixed == "autocast"):
        if setup.model != "decoder":
            return model(input_ids=ids, labels=ids).loss
        logits = model(ids) if order is None else model(ids, order)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


# Models


def _build(setup: Setup) -> tuple[nn.Module, list[str]]:
    """Return the model and the paths of its blocks."""
    if setup.model == "decoder":
        model: nn.Module = Decoder(tied=setup.tied)
        names = [f"layers.{i}" for i in range(2)]
    else:
        tiny: Tiny = build(setup.model, num_hidden_layers=2)
        model, names = tiny.model, [f"{tiny.blocks}.{i}" for i in range(2)]
    if setup.unused:
        model.register_module("spare", nn.Linear(8, 8))
    if setup.lora:
        _adapt(model)
    if setup.frozen:
        for k, p in model.named_parameters():
            p.requires_grad_(not ("attention" in k or "self_attn" in k or "norm" in k))

    return model, names


def _adapt(model: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=3, lora_dropout=0.1, target_modules=["qkv", "gate", "down", "q_proj"]), model)


# Wrappers


def _wrap(model: nn.Module, setup: Setup, blocks: list[str]) -> nn.Module:
    layers = [model.get_submodule(b) for b in blocks]
    world = torch.distributed.get_world_size()
    shape = (setup.replicas, world // setup.replicas) if setup.replicas > 1 else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    match setup.wrapper:
        case "single":
            return model
        case "ddp":
            return DistributedDataParallel(model, **dict.fromkeys(setup.ddp, True))
        case "fsdp":
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=None if setup.units == "root" else ModuleWrapPolicy({type(layers[0]), Mlp, Expert}),
                use_orig_params=not setup.flat,
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy[setup.sharding],
                device_mesh=mesh,
            )
        case _:
            return _shard(model, setup, layers, mesh)


def _shard(model: nn.Module, setup: Setup, layers: list[nn.Module], mesh: Any) -> nn.Module:
    dtype = torch.bfloat16 if setup.mixed is True else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": setup.reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if setup.host else OffloadPolicy(),
    }
    for layer in layers:
        for part in _parts(layer, setup.units):
            fully_shard(part, **options)
        if setup.units not in ("parts", "together", "root"):
            fully_shard(layer, **options)
    if setup.units == "together":
        fully_shard(layers, **options)
    if setup.units == "norm and head":
        fully_shard([model.get_submodule("norm"), model.get_submodule("head")], **options)
    fully_shard(model, **options)
    if setup.prefetch:
        for one, two in pairwise(layers):
            one.set_modules_to_forward_prefetch([two])
            two.set_modules_to_backward_prefetch([one])
    return model


def _parts(layer: nn.Module, units: str) -> list[nn.Module]:
    if units == "experts":
        return list(layer.get_submodule("moe.experts").children())
    if units in ("nested", "parts"):
        wanted = ("attention", "mlp", "moe.experts.1", "self_attn")
        return [m for k, m in layer.named_modules() if k in wanted]
    return []


# The combinations


def spelled(setup: Any) -> str:
    """Name a setup by its changes from the defaults."""
    changed = [f"{f.name}={v}" for f in fields(setup) if (v := getattr(setup, f.name)) != f.default]
    return " ".join(changed) or "plain"


NESTED, PARTS = Setup(units="nested"), Setup(units="parts")
FSDP, DDP = Setup(wrapper="fsdp"), Setup(wrapper="ddp")

USUAL = (
    PARTS,
    replace(NESTED, mixed="autocast", frozen=True),
    replace(NESTED, early=True, schedule="accumulated", frozen=True),
    replace(PARTS, schedule="accumulated", reshard=False, mixed=True),
    replace(NESTED, prefetch=True, schedule="accumulated"),
    replace(NESTED, model="qwen3", mixed=True),
    replace(FSDP, sharding="SHARD_GRAD_OP", tied=True),
    replace(DDP, schedule="accumulated", ddp=("gradient_as_bucket_view",)),
    replace(DDP, ddp=("static_graph",)),
    replace(DDP, ddp=("find_unused_parameters",), unused=True),
)
"""Combinations, on two ranks, in every run of the tests."""

FURTHER = (
    Setup(units="experts"),
    Setup(units="together", frozen=True),
    replace(NESTED, reshard=False),
    replace(NESTED, mixed=True),
    replace(NESTED, frozen=True),
    replace(NESTED, early=True),
    Setup(units="root", early=True),
    replace(FSDP, units="root", early=True),
    replace(FSDP, units="root", flat=True, early=True),
    replace(NESTED, lora=True, mixed=True),
    replace(NESTED, host=True, mixed=True),
    replace(NESTED, tied=True, mixed="autocast"),
    replace(NESTED, unused=True),
    replace(PARTS, model="qwen3", mixed=True),
    replace(NESTED, model="qwen3", lora=True),
    replace(FSDP, frozen=True),
    replace(FSDP, sharding="NO_SHARD"),
    replace(FSDP, sharding="NO_SHARD", flat=True),
    replace(FSDP, flat=True, mixed="autocast"),
    replace(FSDP, sharding="SHARD_GRAD_OP", flat=True),
    replace(FSDP, early=True, mixed="autocast"),
    replace(DDP, ddp=("static_graph", "gradient_as_bucket_view")),
    replace(DDP, ddp=("find_unused_parameters",), unused=True, schedule="accumulated", tied=True),
    replace(DDP, ddp=("find_unused_parameters",), schedule="skipped and repeated"),
    replace(DDP, lora=True, mixed="autocast"),
    replace(DDP, early=True, frozen=True),
)
"""On two ranks, with the slow tests."""

STRATEGIES = (
    Setup(wrapper="single"),
    Setup(),
    Setup(reshard=False),
    Setup(units="root"),
    NESTED,
    Setup(units="norm and head", reshard=False, mixed=True),
    Setup(host=True, tied=True),
    Setup(frozen=True),
    Setup(lora=True),
    Setup(model="qwen3", mixed=True),
    FSDP,
    replace(FSDP, flat=True),
    replace(FSDP, units="root"),
    DDP,
)
"""Every way to wrap and to hold weights once: each is tried with every schedule."""


def refused_by_torch(setup: Setup) -> bool:
    """Whether ordinary training cannot follow the schedule, so that there is no case."""
    wrapper, schedule = setup.wrapper, setup.schedule
    return (
        # FSDP1 uses the last forward's weights for all; with original parameters it needs one backward each.
        (wrapper == "fsdp" and schedule == "forwards, then backwards")
        or (setup == replace(FSDP, schedule="several forwards"))
        # Weights that are in no graph.
        or (schedule == "skipped and repeated" and (wrapper == "ddp" or setup.flat))
        # Its blocks are run by the model alone.
        or (schedule == "skipped and repeated" and setup.model != "decoder")
    )


PRODUCT = tuple(
    setup
    for strategy in STRATEGIES
    for schedule in SCHEDULES
    if not refused_by_torch(setup := replace(strategy, schedule=schedule))
)

ON_FOUR = (
    Setup(replicas=2, units="nested"),
    Setup(replicas=2, units="parts", mixed=True, schedule="accumulated"),
    Setup(wrapper="fsdp", replicas=2, sharding="HYBRID_SHARD", flat=True),
)
