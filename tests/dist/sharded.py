"""Training in shards: the models, the ways to shard them, and a step that can be repeated with offloading on.

[Note: what a case shows]
``compare`` trains the same model twice in one rank, from the same seed, without and with offloading, and returns what
differs: local gradients after every backward, weights after every optimizer step, losses. Beside that it watches the
store: every byte that is parked is searched for every weight, sharded or whole, in every dtype it is used in. All
weights are random, those of norms too, so that no activation equals one by chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide.base.actions import Action, Plan
from tests.helpers.engines import assert_nothing_left
from tests.helpers.models import WIDTH, Attention, Mlp, Tiny, build
from tests.helpers.oracle import same_bits

POLICIES = ("keep", "offload", "minimal", "remake", "auto")
"""``"remake"`` is minimal with no block re-run whole: as many recipes as there can be."""
VOCABULARY = 61


class ShiftedNorm(nn.Module):
    """A norm that uses its weight as an activation (``1 + weight``), and once more detached."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        return scaled + x * self.weight.detach()


class Expert(nn.Module):
    """An expert whose matrix is used through views and through ``data``: neither is a parameter any more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ShiftedNorm()
        self.up = nn.Parameter(torch.empty(40, WIDTH))
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = torch.sigmoid(y @ self.up.data.t())
        return torch.tanh(self.down(nn.functional.silu(y @ self.up.t()) * gate))


class Experts(nn.Module):
    """A router and its experts: every token goes to one of them, so shapes change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return x + sum(e(x * share[..., i : i + 1]) for i, e in enumerate(self.experts))


class Layer(nn.Module):
    """One block: attention, feed-forward, experts, and a scale of its own that follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.moe = Attention(), Mlp(), Experts()
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor, shared: nn.Module) -> Tensor:
        y = self.moe(self.mlp(self.attention(x)))
        return x + torch.tanh(shared(y) * self.scale) * y


class Decoder(nn.Module):
    """Embedding, blocks, head; one projection of the root is used by every block."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.shared)
        return self.head(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A way to train.

    Attributes:
        model: ``"decoder"`` or a name of ``tests.helpers.models``.
        wrapper: ``"fsdp2"``, ``"fsdp1"`` or ``"ddp"``.
        units: FSDP2 units: ``"blocks"``; ``"nested"``: blocks and parts of them; ``"parts"``: parts of blocks only;
            ``"experts"``: blocks and single experts; ``"together"``: all blocks in one unit.
        reshard: ``reshard_after_forward``.
        mixed: bfloat16 parameters in forward and backward (FSDP2's policy), or ``"autocast"``.
        frozen: Part of the weights takes no gradient.
        accumulate: Microbatches a step; gradients are reduced in the last one only.
        early: Offloading is enabled before the model is wrapped.
        flat: FSDP1 with ``use_orig_params=False``.
    """

    model: str = "decoder"
    wrapper: str = "fsdp2"
    units: str = "blocks"
    reshard: bool = True
    mixed: bool | str = False
    frozen: bool = False
    accumulate: int = 1
    early: bool = False
    flat: bool = False


@dataclass(kw_only=True)
class Findings:
    """What one rank saw: see [Note: what a case shows]."""

    differences: list[str] = field(default_factory=list)
    weights_parked: list[str] = field(default_factory=list)
    parked: int = 0
    recomputes: int = 0
    checkpointed: int = 0
    live_tickets: int = 0
    store_bytes: int = 0
    demoted: tuple[str, ...] = ()
    units: int = 0
    block_names: list[str] = field(default_factory=list)


def compare(setup: Setup, policies: tuple[str, ...] = POLICIES) -> dict[str, Findings]:
    """Train plainly, then with each policy; return the findings of each."""
    plain, _ = _train(setup, None)
    found: dict[str, Findings] = {}
    for policy in policies:
        record, findings = _train(setup, policy)
        findings.differences = [
            k
            for k in plain.keys() | record.keys()
            if k not in plain or k not in record or not _same(plain[k], record[k])
        ]
        found[policy] = findings
    return found


Record = dict[str, Tensor | None]


def _train(setup: Setup, policy: str | None, steps: int = 2) -> tuple[Record, Findings]:
    torch.manual_seed(7)
    model, blocks, loss = _build(setup)
    # Taken before sharding: what the store must never hold.
    whole = {k: p.detach().clone() for k, p in model.named_parameters()} | {
        k: b.detach().clone() for k, b in model.named_buffers()
    }
    findings = Findings()
    with contextlib.ExitStack() as stack:
        handle: ebbtide.Handle | None = None
        if policy is not None and setup.early:
            handle = stack.enter_context(_enable(model, policy, blocks))
        wrapped = _wrap(model, setup, blocks)
        if policy is not None and not setup.early:
            handle = stack.enter_context(_enable(wrapped, policy, blocks if setup.model != "decoder" else None))
        parked = _watch(handle) if handle is not None else []
        record: Record = {}
        optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        for step in range(steps):
            _step(setup, wrapped, loss, step, record)
            if handle is not None:
                findings.weights_parked += _weights_among(parked, whole, wrapped)
                findings.parked += len(parked)
                parked.clear()
            optimizer.step()
            optimizer.zero_grad()
            record |= {f"{step} weight {k}": _local(p).detach().clone() for k, p in wrapped.named_parameters()}
        if handle is not None:
            assert_nothing_left(handle._engine)
            stats = handle.stats()
            findings.recomputes, findings.checkpointed = stats.total_recomputes, stats.checkpointed_blocks
            findings.live_tickets, findings.store_bytes = stats.live_tickets, stats.store_bytes
            findings.demoted = stats.demoted_sites
            findings.block_names = handle._attachment.block_names
    findings.units = sum(isinstance(m, (FSDPModule, FullyShardedDataParallel)) for m in wrapped.modules())
    return record, findings


def _step(setup: Setup, model: nn.Module, loss: Callable[[nn.Module, int], Tensor], step: int, record: Record) -> None:
    for micro in range(setup.accumulate):
        last = micro == setup.accumulate - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else no_sync():
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=setup.mixed == "autocast")
            with autocast:
                value = loss(model, step * setup.accumulate + micro)
            value.backward()
        record[f"{step}.{micro} loss"] = value.detach().clone()
        record |= {f"{step}.{micro} grad {k}": _copy(p.grad) for k, p in model.named_parameters()}


def _enable(model: nn.Module, policy: str, blocks: list[str] | None) -> ebbtide.Handle:
    name = "minimal" if policy == "remake" else policy
    handle = ebbtide.enable_activation_offloading(model, policy=name, min_bytes=0, blocks=blocks, window="1MiB")
    if policy == "remake":
        handle._engine.plan = _Remake(handle.plan)
    return handle


class _Remake:
    """A plan that re-runs no block whole."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def block_action(self, kind: str, index: int, **sizes: int) -> Action:
        return Action.KEEP


# Models


def _build(setup: Setup) -> tuple[nn.Module, list[str], Callable[[nn.Module, int], Tensor]]:
    """Return the model, the paths of its blocks, and what computes the loss of a microbatch."""
    if setup.model == "decoder":
        model: nn.Module = Decoder()
        names = [f"layers.{i}" for i in range(2)]
    else:
        tiny: Tiny = build(setup.model, num_hidden_layers=2)
        model, names = tiny.model, [f"{tiny.blocks}.{i}" for i in range(2)]
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    if setup.frozen:
        for k, p in model.named_parameters():
            p.requires_grad_(not ("attention" in k or "self_attn" in k or "norm" in k))

    def loss(wrapped: nn.Module, number: int) -> Tensor:
        rank = torch.distributed.get_rank()
        ids = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(100 * number + rank))
        if setup.model != "decoder":
            return wrapped(input_ids=ids, labels=ids).loss
        return nn.functional.cross_entropy(wrapped(ids).flatten(0, 1).float(), ids.flatten())

    return model, names, loss


def _wrap(model: nn.Module, setup: Setup, blocks: list[str]) -> nn.Module:
    layers = [model.get_submodule(b) for b in blocks]
    if setup.wrapper == "ddp":
        return DistributedDataParallel(model)
    if setup.wrapper == "fsdp1":
        classes = {type(layer) for layer in layers} | {Mlp, Expert}
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(classes),
            use_orig_params=not setup.flat,
            device_id=torch.device("cpu"),
        )
    dtype = torch.bfloat16 if setup.mixed is True else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
        "reshard_after_forward": setup.reshard,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
    }
    for layer in layers:
        for part in _parts(layer, setup.units):
            fully_shard(part, **options)
        if setup.units not in ("parts", "together"):
            fully_shard(layer, **options)
    if setup.units == "together":
        fully_shard(layers, **options)
    fully_shard(model, **options)
    return model


def _parts(layer: nn.Module, units: str) -> list[nn.Module]:
    if units == "experts":
        return list(layer.get_submodule("moe.experts").children())
    if units in ("nested", "parts"):
        wanted = ("attention", "mlp", "moe.experts.1", "self_attn")
        return [m for k, m in layer.named_modules() if k in wanted]
    return []


# Watching


def _watch(handle: ebbtide.Handle) -> list[Tensor]:
    """Let the store remember every byte that is parked in it."""
    tier, parked = handle._engine.tier, []
    park = tier.park

    def watched(source: Tensor) -> Any:
        parked.append(source.clone())
        return park(source)

    tier.park = watched  # type: ignore[method-assign]
    return parked


def _weights_among(parked: list[Tensor], whole: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Name the weights whose bytes stand somewhere in what was parked, as they were in this step's forward."""
    now = dict(whole)
    for k, p in model.named_parameters():
        now[k] = p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        now[k + " (local)"] = _local(p).detach()
    blobs = [b.numpy().tobytes() for b in parked]
    found: list[str] = []
    for k, w in now.items():
        for dtype in {w.dtype, torch.bfloat16} if w.is_floating_point() else {w.dtype}:
            needle = w.to(dtype).contiguous().flatten().view(torch.uint8).numpy().tobytes()
            if len(needle) >= 32 and any(needle in b for b in blobs):
                found.append(f"{k} as {dtype}")
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else _local(grad).detach().clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return same_bits(one, other)


def spelled(setup: Setup) -> str:
    """Name a setup by what it changes."""
    plain = Setup()
    changed = [f"{k}={getattr(setup, k)}" for k in vars(setup) if getattr(setup, k) != getattr(plain, k)]
    return " ".join(changed) or "plain"


def variants() -> list[Setup]:
    """Every setup that is tried."""
    base = [Setup(units=u) for u in ("blocks", "nested", "parts", "experts")]
    base += [Setup(reshard=False), Setup(units="nested", reshard=False)]
    base += [replace(Setup(units="nested"), **change) for change in _CHANGES]
    base += [Setup(units="parts", accumulate=2, reshard=False, mixed=True), Setup(units="together", frozen=True)]
    base += [Setup(model="qwen3", units="nested"), Setup(model="qwen3", units="parts", mixed=True)]
    base += [Setup(wrapper="fsdp1"), Setup(wrapper="fsdp1", flat=True), Setup(wrapper="ddp", accumulate=2)]
    return base


_CHANGES: tuple[dict[str, Any], ...] = (
    {"mixed": True},
    {"mixed": "autocast", "frozen": True},
    {"frozen": True},
    {"accumulate": 2},
    {"early": True},
    {"early": True, "accumulate": 2, "frozen": True},
)
