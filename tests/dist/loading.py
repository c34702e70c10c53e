"""Load a checkpoint with ``load_sharded`` and in the ordinary way, train both, and compare every shard bitwise.

The ordinary way is the library's own: ``from_pretrained`` on each rank, then the same wrapper.
"""

from __future__ import annotations

import copy
import importlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ebbtide
from ebbtide.load import empty_module
from tests.helpers.sizes import TINY

_FAMILIES = ("decoder", "diffusion", "media", "text")
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One case; its name lists the differences from the defaults.

    ``adapters`` are made ``before`` or ``after`` the model is sharded; ``four`` is the dtype in which 4-bit weights are
    stored, with ``nested`` scales, and with ``column`` as the checkpoint has them.
    """

    family: str = "qwen3"
    wrapper: str = "fsdp2"
    tied: bool = False
    dtype: str | None = None
    source: str = "auto"
    seeing: str = "all"
    flat: bool = False
    host: bool = False
    replicas: int = 1
    tensor: int = 1
    sharding: str = "FULL_SHARD"
    adapters: str = ""
    optimizer: bool = False
    four: str = ""
    nested: bool = False
    column: bool = False


def spelled(setup: Setup) -> str:
    """Name a setup by its changes from the defaults."""
    changed = [f"{f.name}={v}" for f in fields(setup) if (v := getattr(setup, f.name)) != f.default]
    return " ".join(changed) or "plain"


def built(family: str, *, tied: bool = False) -> tuple[Any, dict[str, Any], str]:
    """Return a family's tiny model with random weights in bf16, a batch, and the path of its blocks."""
    torch.manual_seed(7)
    makers: dict[str, Any] = {}
    for name in _FAMILIES:
        module = importlib.import_module(f"tests.helpers.{name}_families")
        makers |= {k: v for table in vars(module).values() if isinstance(table, dict) for k, v in table.items()}
    model, batch, blocks = makers[family](TINY, {"tie_word_embeddings": True} if tied else {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    return model, batch, blocks


def write_checkpoint(folder: Path, setup: Setup) -> None:
    """Save a setup's model in several files, in bf16 or in 4 bits, as its library does."""
    model, _, _ = built(setup.family, tied=setup.tied)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    if setup.column:
        quantised = type(model).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=_four_bit(setup))
        quantised.save_pretrained(folder / "column", max_shard_size="20KB")


def source_of(setup: Setup, folder: str) -> str:
    """Return the place of a setup's checkpoint in its folder."""
    return f"{folder}/column" if setup.column else folder


def checkpoint_of(setup: Setup) -> Setup:
    """Return the key that setups with the same checkpoint share."""
    four = (setup.four, setup.nested) if setup.column else ("", False)
    return Setup(family=setup.family, tied=setup.tied, column=setup.column, four=four[0], nested=four[1])


def _four_bit(setup: Setup) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=setup.nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=getattr(torch, setup.four),
    )


def _model_on_meta(setup: Setup, folder: str, dtype: torch.dtype) -> Any:
    """Build a setup's model on meta, its linear layers in 4 bits if the setup has them."""
    if not setup.four:
        return on_meta(setup.family, dtype, tied=setup.tied)
    from ebbtide.integrations.pretrained import weights_later

    real, _, _ = built(setup.family, tied=setup.tied)
    quantised = {} if setup.column else {"quantization_config": _four_bit(setup)}
    with weights_later():
        return type(real).from_pretrained(folder, dtype=dtype, **quantised)


def on_meta(family: str, dtype: torch.dtype, *, tied: bool = False) -> Any:
    """Build a family's model on meta."""
    real, _, _ = built(family, tied=tied)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if _is_host(real):
            with torch.device("meta"):
                return type(real)(copy.deepcopy(real.config))
        from accelerate import init_empty_weights

        with init_empty_weights():  # diffusers computes buffers in the constructors
            return type(real).from_config(real.config)
    finally:
        torch.set_default_dtype(before)


def sharder(setup: Setup, blocks: str) -> Callable[[nn.Module], nn.Module]:
    """Return the function that wraps a model according to a setup."""

    def shard(model: nn.Module) -> nn.Module:
        world = torch.distributed.get_world_size()
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        layers = list(base.get_submodule(blocks))
        if setup.wrapper == "single":
            return model
        if setup.wrapper == "fsdp":
            return _flat(model, setup, layers, world)
        names = {"replicate": setup.replicas, "fsdp": world // setup.replicas // setup.tensor, "tp": setup.tensor}
        kept = {k: n for k, n in names.items() if n > 1 or k == "fsdp"}
        mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
        if setup.tensor > 1:
            for layer in layers:
                plan = {n: ColwiseParallel() for n, _ in layer.named_modules() if n.split(".")[-1] in _COLUMNS}
                plan |= {n: RowwiseParallel() for n, _ in layer.named_modules() if n.split(".")[-1] in _ROWS}
                parallelize_module(layer, mesh["tp"], plan)
        if setup.wrapper == "tp":
            return model
        policy = CPUOffloadPolicy(pin_memory=False) if setup.host else OffloadPolicy()
        data = mesh["replicate", "fsdp"] if setup.replicas > 1 else mesh["fsdp"]
        for layer in layers:
            fully_shard(layer, mesh=data, offload_policy=policy)
        fully_shard(model, mesh=data, offload_policy=policy)
        return model

    return shard


def _flat(model: nn.Module, setup: Setup, layers: list[nn.Module], world: int) -> nn.Module:
    shape = (setup.replicas, world // setup.replicas) if setup.replicas > 1 else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers}),
        use_orig_params=not setup.flat,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[setup.sharding],
        param_init_fn=empty_module("cpu"),
    )


def compare(setup: Setup, folder: str) -> dict[str, Any]:
    """Load and train both ways in this rank; return the differences, and the way of loading."""
    dtype = getattr(torch, setup.dtype) if setup.dtype else torch.bfloat16
    real, batch, blocks = built(setup.family, tied=setup.tied)
    shard = sharder(setup, blocks)
    folder = source_of(setup, folder)
    meta = _model_on_meta(setup, folder, torch.bfloat16)
    quantised = {"quantization_config": _four_bit(setup)} if setup.four and not setup.column else {}
    plain = type(real).from_pretrained(folder, dtype=dtype, **quantised)
    if setup.seeing == "itself" and torch.distributed.get_rank() == 0 or setup.seeing == "themselves":
        meta = copy.deepcopy(plain)
    if setup.adapters == "before":
        meta = _adapted(meta)
    if setup.adapters:
        plain = _adapted(plain)
    optimizer = _optimizer(meta) if setup.optimizer else None
    seen: list[tuple[int, int]] = []
    ours = ebbtide.load_sharded(
        meta,
        _weights(setup, folder, plain),
        shard=shard,
        source=setup.source,
        dtype=dtype if setup.dtype else None,
        optimizer=optimizer,
        progress=lambda done, total: seen.append((done, total)),
    )
    if setup.adapters == "before":
        _copy_adapters(ours, plain)
    if setup.adapters == "after":
        ours = _adapted(ours)
        for layer in ours.get_base_model().get_submodule(blocks):
            fully_shard([m for n, m in layer.named_modules() if n.split(".")[-2:-1] in (["lora_A"], ["lora_B"])])
    plain = shard(plain)
    ours.train(), plain.train()
    batch = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    found = {
        "loaded": _differences(ours, plain),
        "trained": _train(ours, plain, batch, optimizer),
        "names": len(_locals(ours)),
        "progress": seen[-1] if seen else (0, 0),
        "held": sum(t.numel() * t.element_size() for t in _locals(ours).values()),
    }
    if setup.tied:
        base: Any = ours
        found["tied"] = base.lm_head.weight is base.get_input_embeddings().weight
    return found


def _weights(setup: Setup, folder: str, plain: nn.Module) -> Any:
    """Return this rank's source: the folder, a missing one, or values in memory on one rank."""
    first = torch.distributed.get_rank() == 0
    match setup.seeing:
        case "all":
            return folder
        case "first":
            return folder if first else folder + "-not-here"
        case "states":  # what a trainer of another machine saves
            Path(folder + "-states").mkdir(exist_ok=True)
            torch.save({}, folder + "-states/rng_state_1.pth")
            return folder if first else folder + "-states"
        case "state dict":
            return plain.state_dict() if first else None
        case "itself" | "themselves":
            return None
        case _:
            return plain if first else None


def _is_host(model: nn.Module) -> bool:
    return hasattr(type(model), "base_model_prefix")


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))  # type: ignore[arg-type]


def _copy_adapters(ours: nn.Module, plain: nn.Module) -> None:
    """Copy the adapters to the plain model: their values are random, and checked elsewhere."""
    wanted = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            value: Any = parameter
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if "lora_B" in name:
                assert not whole.any()
            else:
                assert whole.isfinite().all() and whole.std() > 0
            wanted[name].data = whole.detach().to(wanted[name].dtype).clone()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in named if "norm" not in n]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def _train(
    ours: nn.Module, plain: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    """Train both for two steps; return the differences afterwards."""
    found: list[str] = []
    optimizers = (optimizer or _optimizer(ours), _optimizer(plain))
    for step in range(2):
        losses: list[Tensor] = []
        for model, one in zip((ours, plain), optimizers, strict=True):
            torch.manual_seed(step)
            out = model(**batch)
            loss = out.loss if getattr(out, "loss", None) is not None else out[0].float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            one.step()
            one.zero_grad()
        if not torch.equal(*losses):
            found.append(f"loss of step {step}")
        if not losses[0].isfinite():
            found.append(f"loss of step {step} is {losses[0]}")
    return found + _differences(ours, plain)


def _locals(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's part of every parameter and buffer."""
    found: dict[str, Tensor] = {}
    tensors: Iterator[tuple[str, Tensor]] = iter(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    )
    for name, tensor in tensors:
        found[name] = getattr(tensor, "_local_tensor", tensor).detach()
    for name, module in model.named_modules():
        if (state := getattr(module, "quant_state", None)) is not None:
            found |= {f"{name}.{kind}": value for kind, value in state.as_dict(packed=True).items()}
    return found


def _differences(ours: nn.Module, plain: nn.Module) -> list[str]:
    one, two = _locals(ours), _locals(plain)
    if one.keys() != two.keys():
        return [f"names {one.keys() ^ two.keys()}"]
    return [n for n in one if not _same(one[n], two[n])]


def _same(one: Tensor, two: Tensor) -> bool:
    """Compare bits: packed numbers in a floating-point dtype may be NaN."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return torch.equal(one.reshape(-1).contiguous().view(torch.uint8), two.reshape(-1).contiguous().view(torch.uint8))


def save(setup: Setup, folder: str, out: str) -> int:
    """Load in this rank, save with the others; return the bytes of this rank's part."""
    _, _, blocks = built(setup.family, tied=setup.tied)
    source = source_of(setup, folder)
    model = ebbtide.load_sharded(_model_on_meta(setup, source, torch.bfloat16), source, shard=sharder(setup, blocks))
    ebbtide.save_sharded(model, source_of(setup, out), max_file_bytes=30_000)
    return sum(p.numel() for p in _locals(model).values())


def first_values(setup: Setup) -> dict[str, Tensor]:
    """Initialise in this rank; return every full parameter and buffer."""
    _, _, blocks = built(setup.family, tied=setup.tied)
    torch.manual_seed(100 + torch.distributed.get_rank())  # ranks with different seeds agree on the first one's
    model = ebbtide.load_sharded(on_meta(setup.family, torch.float32, tied=setup.tied), shard=sharder(setup, blocks))
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value: Any = tensor
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    return found


def fail(fault: str, folder: str) -> tuple[str, bool]:
    """Load with a fault, usually on the last rank; return the message, and whether parameters are still on meta."""
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    meta = on_meta("qwen3", torch.float32 if fault == "dtype" and rank == last else torch.bfloat16)
    mesh = init_device_mesh("cpu", (last + 1,))

    def shard(model: nn.Module) -> None:
        if fault == "shard" and rank == last:
            raise RuntimeError("this rank cannot shard")
        fully_shard(model, mesh=mesh)
        if fault == "memory" and rank == last:  # more than any machine has
            prefix, _, name = next(name for name, _ in model.named_buffers()).rpartition(".")
            setattr(model.get_submodule(prefix), name, torch.empty(1 << 60, dtype=torch.uint8, device="meta"))

    absent = folder + "-not-here"
    weights: dict[str, Any] = {
        "read": _values(folder, readable=rank != last) if fault == "read" else None,
        "server": _values(folder, readable=False) if fault == "server" and rank == 0 else None,
        "cut": folder + "-cut" if rank == last else folder,
        "another": folder + "-another" if rank == last else folder,
        "values": folder + "-values" if rank == last else folder,
        "nobody": absent,
        "slices": absent if rank == last else folder,
    }
    try:
        sources = {"slices": "slices", "sources": ("auto", "broadcast")[rank == last]}
        source = sources.get(fault, "auto")
        ebbtide.load_sharded(meta, weights.get(fault, folder), shard=shard, source=source)
    except ebbtide.EbbtideError as error:
        return str(error), all(p.is_meta for p in meta.parameters())
    return "", False


def refuse(save: bool, option: str, folder: str) -> str:
    """Load or save with an argument that only the last rank cannot use; return the error's message."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    wrong: dict[str, Any] = {"weights": 3, "device": "gpu", "folder": None, "name": "", "max_file_bytes": 200}
    wrong |= {"shard": "fully_shard", "source": "slice", "missing": "ignore"}
    usual: dict[str, Any] = {"folder": folder, "max_file_bytes": 100} if save else {"weights": folder}
    arguments = usual | ({option: wrong[option]} if last else {})
    model = nn.Linear(8, 8)
    try:
        (ebbtide.save_sharded if save else ebbtide.load_sharded)(model.to("cpu" if save else "meta"), **arguments)
    except ebbtide.EbbtideError as error:
        return str(error)
    return ""


def _sent(progress: Callable[[int, int], object] | None = None) -> str:
    """Load weights that all ranks but the last have, in several messages; return what this rank raised."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    values = None if _is_last() else {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    try:
        ebbtide.load_sharded(model, values, progress=progress)
    except (ebbtide.EbbtideError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _is_last() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def fail_receiving() -> str:
    """Let the last rank fail after the first of several messages with its weights; return what this rank raised."""

    def stop(done: int, total: int) -> None:
        raise RuntimeError("progress")

    return _sent(stop if _is_last() else None)


def interrupt(rank: int) -> str:
    """Interrupt one rank while weights go from the first to the last; return what this rank raised."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    return _sent(stop if torch.distributed.get_rank() == rank else None)


def interrupt_messages(rank: int) -> str:
    """Interrupt one rank between the messages with the last rank's weights; return what this rank raised."""
    me = torch.distributed.get_rank()
    before, plain, received = signal.signal(signal.SIGINT, signal.default_int_handler), torch.distributed.recv, [0]

    def receive(data: Tensor, src: int) -> None:
        plain(data, src=src)
        received[0] += 1
        if me == rank and received[0] == (2 if _is_last() else 1):  # a message, or the first part of the request
            signal.raise_signal(signal.SIGINT)  # as one that came while this rank was waiting

    torch.distributed.recv = receive  # type: ignore[assignment]
    try:
        return _sent()
    finally:
        torch.distributed.recv = plain
        signal.signal(signal.SIGINT, before)


def draw_twice() -> bool:
    """Load two models of which only the last rank has a part without values; return whether the two are equal."""
    name, made = "second" if _is_last() else "first", list[Tensor]()
    for _ in range(2):
        with torch.device("meta"):
            model = nn.ModuleDict({name: nn.Linear(4, 4)})
        values = {f"first.{kind}": torch.ones(shape) for kind, shape in (("weight", (4, 4)), ("bias", (4,)))}
        loaded = ebbtide.load_sharded(model, values, missing="initialize", unexpected="ignore")
        made.append(loaded.get_parameter(f"{name}.weight").detach())
    return torch.equal(*made)


def tie(kind: str, folder: str) -> tuple[bool, str]:
    """Load or initialize a model whose tied weights FSDP2 shards together or apart; return whether they stay tied."""
    with torch.device("meta"):
        model: Any = nn.Identity()
        model.embed, model.norm, model.head = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8)
        model.head.weight = model.embed.weight
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def shard(model: Any) -> None:
        units = {"together": [[model.embed, model.head]], "apart": [model.embed, model.head]}
        for unit in units.get(kind.split()[0], []):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)

    try:
        ebbtide.load_sharded(model, None if "initialized" in kind else folder, shard=shard)
    except ebbtide.EbbtideError as error:
        return False, str(error)
    return model.head.weight is model.embed.weight, ""


def count(folder: str) -> list[tuple[int, ...]]:
    """Save and load batch norms that have counted steps, sharded; return the counters and their dtypes' sizes."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(3)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))

    def shard(model: nn.Module) -> None:
        for unit in (*model.children(), model):
            fully_shard(unit, mesh=mesh)

    model = build()
    for _ in range(3):
        model(torch.randn(5, 4))
    model = ebbtide.load_sharded(model, shard=shard)
    ebbtide.save_sharded(model, folder)
    with torch.device("meta"):
        loaded, fresh = build(), build()
    loaded, fresh = ebbtide.load_sharded(loaded, folder, shard=shard), ebbtide.load_sharded(fresh, shard=shard)
    counters: Any = [one[1].num_batches_tracked for one in (model, loaded, fresh)]  # type: ignore[index]
    same: Any = [torch.equal(model[1].running_var, loaded[1].running_var)]  # type: ignore[index]
    return [(int(c), c.dim(), c.element_size()) for c in counters] + [(int(same[0]),)]


def save_after_evaluation(wrapper: str, out: str) -> None:
    """Save a model with float32 shards that computes in bfloat16, before and after a forward without backward."""
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(nn.Linear(6, 7), nn.Sequential(nn.Linear(7, 9)), nn.Linear(9, 5))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if wrapper == "fsdp2":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model[1], mesh=mesh, mp_policy=precision, reshard_after_forward=False)  # type: ignore[index]
        fully_shard(model, mesh=mesh, mp_policy=precision)
    else:
        model = FullyShardedDataParallel(
            model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), device_id=torch.device("cpu")
        )
    ebbtide.save_sharded(model, out + "/before")
    with torch.no_grad():
        model(torch.ones(2, 6))
    ebbtide.save_sharded(model, out + "/after")


def load_uneven() -> list[int]:
    """Load shards that FSDP2 pads on the last rank; return how many first copies are left after each is padded."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.multiprocessing.reductions import StorageWeakRef

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 5, bias=False) for _ in range(4)))
    values = {name: torch.full(p.shape, float(i)) for i, (name, p) in enumerate(model.named_parameters())}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    first: list[StorageWeakRef] = []
    left: list[int] = []
    reset = FSDPParam.reset_sharded_param

    def counted(self: Any) -> None:
        local = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        loaded = not local.is_meta
        first.extend([StorageWeakRef(local.untyped_storage())] if loaded else [])
        del local
        reset(self)
        left.extend([sum(not one.expired() for one in first[:-1])] if loaded else [])

    FSDPParam.reset_sharded_param = counted  # type: ignore[method-assign]
    try:
        ebbtide.load_sharded(model, values, shard=lambda m: fully_shard(m, mesh=mesh))
    finally:
        FSDPParam.reset_sharded_param = reset  # type: ignore[method-assign]
    held: Any = list(model.parameters())
    good = all((p.full_tensor() == i).all() for i, p in enumerate(held))
    return left if good and len(left) == len(held) else [-1]


class _Unreadable(dict[str, Tensor]):
    """A state dict whose values cannot be read."""

    def __getitem__(self, key: str) -> Tensor:
        raise OSError(5, "Input/output error")


def _values(folder: str, *, readable: bool) -> dict[str, Tensor]:
    """Return a checkpoint in memory; an unreadable one lists its contents and fails when it is read."""
    values: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        values |= load_file(file)
    return values if readable else _Unreadable(values)
