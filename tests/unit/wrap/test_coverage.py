"""The share of autograd's saved bytes inside blocks, and the reaction if it is small."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.wrap.forward import StandIn
from tests.helpers.engines import assert_nothing_left
from tests.helpers.models import WIDTH as MODEL_WIDTH
from tests.helpers.models import Mlp, Recurrent, Stack, build
from tests.helpers.oracle import differences, same_bits
from tests.helpers.torches import needs_slots
from tests.unit.wrap.test_foreign_checkpoints import Checkpointer

POLICIES = ("auto", "offload", "inputs", "minimal", "keep")
WIDTH = 24


class Head(nn.Module):
    """A stack, and a norm and a projection after it, whose saved tensors are outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(Mlp(WIDTH), Mlp(WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.head(self.norm(self.body(x))).exp(), "seen": len(x)}


class Stem(nn.Module):
    """Most bytes are saved before the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.layers = nn.ModuleList([Mlp(WIDTH), Mlp(WIDTH)])

    rows = 20

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)[:: self.rows]
        for layer in self.layers:
            x = layer(x)
        return x


class Shallow(Stem):
    """What is saved before the stack is as much as half of a block: the stem of a small convolutional network."""

    rows = 1


class Unlike(nn.Module):
    """A stack that is never called, and two layers of different classes, as in a model that can also read pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.ModuleList([Mlp(WIDTH), Mlp(WIDTH)])
        self.text = nn.Module()
        layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)), Mlp(WIDTH)
        self.text.layers, self.text.forward = nn.ModuleList(layers), self.read
        self.head = nn.Linear(WIDTH, 7)

    def read(self, x: Tensor) -> Tensor:
        for layer in self.text.layers:  # type: ignore[union-attr]
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.text(x))


class Bare(nn.Module):
    """Most bytes are saved in a module without a forward, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Module()
        self.mid.first = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mid.last = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList([Mlp(WIDTH), Mlp(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid.last(self.mid.first(x))[::20]  # pyright: ignore[reportCallIssue]
        for layer in self.layers:
            x = layer(x)
        return x


class Bypassed(nn.Module):
    """Its largest children are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.a, *self.b):
            x = module(x)
        return x


def grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    (output["logits"] if isinstance(output, dict) else output).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.to_local().clone() if hasattr(g, "to_local") else g.clone() for g in found]


def enable(model: nn.Module, policy: str = "auto", **options: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, **options)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Count the bytes that autograd saves, with hooks around the entire forward."""
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(s.nbytes() for s in found.values())


@needs_slots
@pytest.mark.parametrize("policy", POLICIES)
def test_inside_and_outside_are_all_that_autograd_saves(policy: str) -> None:
    model, x = Head(), torch.randn(6, WIDTH)
    expected = saved_bytes(model, x)
    with enable(model, policy) as handle:
        assert handle.stats().coverage_percent is None
        assert "blocks hold" not in handle.explain()
        grads(model, x)
        stats, coverage = handle.stats(), handle._engine.coverage
        assert coverage is not None
        assert coverage.total_bytes == expected
        assert coverage.inside_bytes == stats.unique_bytes
        assert stats.coverage_percent == 100 * stats.unique_bytes / expected < 100
        # the norm: its input and two numbers a row; the head: its input; the model itself: what exp returned
        assert coverage.outside == {"norm": 6 * (WIDTH + 2) * 4, "head": 6 * WIDTH * 4, "": 6 * 7 * 4}
        assert f"blocks hold {stats.coverage_percent:.0f} % of what autograd saves; outside: norm" in handle.explain()


@needs_slots
def test_what_another_model_saved_before_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """As a trained encoder does, or a ControlNet before the U-Net that reads its residuals."""
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Tanh(), nn.Linear(4096, WIDTH))
    model, x = Head(), torch.randn(6, WIDTH)
    found = []
    for given in (before(x).detach().requires_grad_(), before(x)):
        with enable(model) as handle:
            grads(model, given)
            found.append(handle._engine.coverage)
    assert found[1] == found[0] is not None and found[0].percent > 50
    assert not caplog.messages


@needs_slots
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("wrapped", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", [Head, Recurrent])
def test_the_coverage_of_a_wrapped_model_is_that_of_the_model(wrapped: str, kind: type[nn.Module]) -> None:
    def measured(how: str) -> tuple[float | None, list[Tensor]]:
        torch.manual_seed(0)
        model: nn.Module = kind()
        x = torch.randn(2, 6, WIDTH if kind is Head else MODEL_WIDTH)
        if how == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif how == "fsdp2":
            mesh = init_device_mesh("cpu", (1,))
            for block in model.body.layers if isinstance(model, Head) else ():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        expected = grads(model, x)
        with enable(model) as handle:
            for _ in range(3):
                assert all(map(same_bits, grads(model, x), expected))
            assert_nothing_left(handle._engine)
            return handle.stats().coverage_percent, expected

    plain, alone = measured("single")
    percent, found = measured(wrapped)
    assert percent == plain is not None
    assert all(map(same_bits, found, alone))


@needs_slots
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Stem, Shallow])
def test_modules_that_save_much_become_blocks(
    policy: str, kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = kind(), torch.randn(200, WIDTH)
    expected = grads(model, x)
    with caplog.at_level(logging.INFO, "ebbtide"), enable(model, policy) as handle:
        for step in range(4):
            assert all(map(same_bits, grads(model, x), expected))
            assert handle.explain().count("blocks hold ") == (1 if step == 0 else 2), "once for each measured pass"
        assert handle._attachment.block_names == ["layers.0", "layers.1", "stem"]
        assert handle.stats().coverage_percent == 100.0
        added = [line for line in handle.explain().splitlines() if line.startswith("in the first pass")]
        assert len(added) == 1 and added[0].endswith("these became blocks: stem")
        assert_nothing_left(handle._engine)
    assert caplog.messages.count("blocks hold 100 % of what autograd saves") == 1
    assert not any(isinstance(v, StandIn) for m in model.modules() for v in vars(m).values())


@needs_slots
def test_a_module_without_a_forward_becomes_no_block() -> None:
    model, x = Bare(), torch.randn(200, WIDTH)
    expected = grads(model, x)
    with enable(model, "offload") as handle:
        for _ in range(3):
            assert all(map(same_bits, grads(model, x), expected))
        assert handle._attachment.block_names == ["layers.0", "layers.1", "mid.first", "mid.last"]
        assert handle.stats().coverage_percent == 100.0


@needs_slots
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_of_different_classes_become_a_block_each(policy: str) -> None:
    model, x = Unlike(), torch.randn(200, WIDTH)
    expected = grads(model, x)
    with enable(model, policy) as handle:
        assert handle._attachment.block_names == ["pictures.0", "pictures.1"]
        for _ in range(4):
            assert all(map(same_bits, grads(model, x), expected))
        assert handle._attachment.block_names[2:] == ["text.layers.0", "text.layers.1"]
        assert_nothing_left(handle._engine)


@needs_slots
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_whose_largest_children_save_nothing_becomes_one_block(policy: str) -> None:
    model, x = Bypassed(), torch.randn(5, WIDTH)
    expected = grads(model, x)
    with enable(model, policy) as handle:
        assert handle._attachment.block_names == ["a", "b"]
        for _ in range(4):
            assert all(map(same_bits, grads(model, x), expected))
        assert handle._attachment.block_names == ["(model)"]
        assert handle.stats().coverage_percent == 100.0
        assert_nothing_left(handle._engine)
    assert not any(isinstance(v, StandIn) for m in model.modules() for v in vars(m).values())


@needs_slots
@pytest.mark.parametrize("kind", [Bypassed, Stem, Head])
def test_a_saved_plan_brings_the_blocks_that_it_was_made_for(
    kind: type[nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x, path = kind(), torch.randn(200, WIDTH), tmp_path / "plan.json"
    with enable(model) as handle:
        for _ in range(5):
            grads(model, x)
        expected, names = grads(model, x), handle._attachment.block_names
        handle.plan.save(path)
    caplog.clear()
    with enable(model, str(path)) as handle:
        assert sorted(handle._attachment.block_names) == sorted(names)
        for _ in range(3):
            assert all(map(same_bits, grads(model, x), expected))
    assert not [message for message in caplog.messages if "the plan has rows" in message]


@needs_slots
@pytest.mark.usefixtures("world")
def test_ranks_keep_the_blocks_of_the_structure(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    model, x = Stem(), torch.randn(200, WIDTH)
    monkeypatch.setattr(dist, "get_world_size", lambda *args: 2)
    with enable(model) as handle:
        grads(model, x)
        assert handle._attachment.block_names == ["layers.0", "layers.1"]
    (record,) = [r for r in caplog.records if "blocks hold" in r.getMessage()]
    assert record.levelno == logging.WARNING and "hint: blocks=[...]" in record.getMessage()


@needs_slots
def test_blocks_that_were_named_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Stem(), torch.randn(200, WIDTH)
    with enable(model, blocks=["layers.*"]) as handle:
        for _ in range(2):
            grads(model, x)
        assert handle._attachment.block_names == ["layers.0", "layers.1"]
        assert handle.stats().coverage_percent is not None and handle.stats().coverage_percent < 50
    assert len([m for m in caplog.messages if "blocks hold" in m]) == 1


class Checkpointed(Head):
    def forward(self, x: Tensor) -> dict[str, Any]:
        x = x.requires_grad_()
        for layer in self.body.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return {"logits": self.head(self.norm(x)).exp()}


@needs_slots
class Forces(nn.Module):
    """An energy whose derivative is taken in the forward: a recorded backward saves most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(WIDTH), Mlp(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = energy = x.requires_grad_()
        for layer in self.layers:
            energy = layer(energy).tanh().exp()
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force * energy


@pytest.mark.parametrize("around", [False, True])
def test_what_a_recorded_backward_saves_is_named_unless_it_is_offloaded(
    around: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x, losses = Forces(), torch.randn(40, WIDTH), list[Tensor]()
    plain = model(x).sum()
    plain.backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    caplog.clear()
    with enable(model, "minimal"):
        for _ in range(3):
            model.zero_grad()
            with ebbtide.offload_saved_tensors(min_bytes=0) if around else contextlib.nullcontext():
                losses.append(model(x).sum())
            losses[-1].backward()
            assert same_bits(losses[-1], plain)
            assert all(same_bits(p.grad, want) for p, want in zip(model.parameters(), expected, strict=False))
    recorded = [m for m in caplog.messages if "was recorded (create_graph=True" in m]
    low = [m for m in caplog.messages if "blocks hold" in m and "around the step offloads it" in m]
    assert (len(recorded), len(low)) == ((0, 0) if around else (1, 1))
    assert all("offload_saved_tensors()" in message for message in recorded)


def test_blocks_in_checkpoints_are_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Checkpointed(), torch.randn(60, WIDTH)
    with caplog.at_level(logging.INFO, "ebbtide"), enable(model) as handle:
        for _ in range(2):
            grads(model, x)
        assert handle._attachment.block_names == ["body.layers.0", "body.layers.1"]
    (record,) = [r for r in caplog.records if "blocks hold" in r.getMessage()]
    assert record.levelno == logging.INFO and "(2 blocks are checkpointed" in record.getMessage()


class CheckpointFunction(torch.autograd.Function):
    """Like DeepSpeed's, which has the name of torch's, and its tensors as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.layer, ctx.x = layer, x
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        torch.autograd.backward(output, grad)
        return None, x.grad


class OwnCheckpointed(Head):
    """Checkpoints like Unsloth: not by torch, and under an unknown name."""

    own: type[torch.autograd.Function] = Checkpointer

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = x.requires_grad_()
        for layer in self.body.layers:
            x = self.own.apply(layer, x)
        return {"logits": self.head(self.norm(x)).exp()}


@needs_slots
@pytest.mark.parametrize("own", [Checkpointer, CheckpointFunction])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpoints_that_are_not_torchs_are_named(
    frozen: bool, own: type[torch.autograd.Function], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = OwnCheckpointed(), torch.randn(60, WIDTH)
    model.own = own
    if frozen:  # then blocks without gradients need no checkpoint
        model.body.requires_grad_(False)
    with caplog.at_level(logging.INFO, "ebbtide"), enable(model) as handle:
        for _ in range(2):
            model(x)["logits"].sum().backward()
        assert (handle._attachment.block_names == ["body.layers.0", "body.layers.1"]) is not frozen
    named = [
        message for message in caplog.messages if "itself checkpoints blocks (body.layers.1, perhaps others)" in message
    ]
    assert len(named) == (0 if frozen else 1) and all("gradient_checkpointing=False" in message for message in named)
    assert all("offloads nothing of them" in message for message in named)


class Probe(nn.Module):
    """A head on layers that run without gradients, though their weights are not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(WIDTH), Mlp(WIDTH)])
        self.head = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 7))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


@needs_slots
def test_blocks_without_gradients_are_no_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Probe(), torch.randn(60, WIDTH)
    expected = grads(model, x)
    with enable(model) as handle:
        for _ in range(2):
            assert all(map(same_bits, grads(model, x), expected))
        assert handle._attachment.block_names == ["layers.0", "layers.1", "head"]
        assert handle.stats().coverage_percent == 100.0
    assert "itself checkpoints blocks" not in caplog.text


def test_what_is_changed_outside_of_the_blocks_is_found_in_the_first_pass_as_well() -> None:
    model, x = Head(), torch.randn(6, WIDTH)
    with enable(model):
        logits = model(x)["logits"]
        logits.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logits.sum().backward()


def test_the_first_pass_leaves_no_module_hooks() -> None:
    model, x = Head(), torch.randn(6, WIDTH)
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in (model, model.norm, model.head)]
    with enable(model):
        grads(model, x)
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in (model, model.norm, model.head)] == before


class Averaged(Head):
    """Keeps a copy of its head, made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.average: nn.Module | None = None

    def forward(self, x: Tensor) -> dict[str, Any]:
        if self.average is None:
            self.average = copy.deepcopy(self.head)
        return super().forward(x)


@needs_slots
def test_a_copy_made_in_the_first_pass_does_nothing_of_ours() -> None:
    """Nor does it hold what was measured."""
    model, x = Averaged(), torch.randn(6, WIDTH)
    with enable(model) as handle:
        grads(model, x)
        assert handle._engine.coverage is not None
    assert model.average is not None
    loaded = pickle.loads(pickle.dumps(model.average))
    assert all(map(torch.equal, loaded.parameters(), model.average.parameters()))
    assert model.average(torch.randn(6, WIDTH)).shape == (6, 7)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("compiled", ["no", "in place", "wrapper"])
def test_the_model_as_one_block(policy: str, compiled: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Recurrent().layers[0] if compiled == "no" else Bypassed()
    x = torch.randn(5, MODEL_WIDTH if compiled == "no" else WIDTH)
    if compiled == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    call = torch.compile(model, backend="aot_eager") if compiled == "wrapper" else model
    expected = grads(call, x)
    with enable(call, policy) as handle:
        for _ in range(3):
            assert all(map(same_bits, grads(call, x), expected))
        assert handle._attachment.block_names == ["(model)"]
        assert handle.stats().unique_bytes > 0
        assert handle.stats().checkpointed_blocks == 0  # checkpointing an entire model saves nothing
        assert_nothing_left(handle._engine)
    assert not any(isinstance(v, StandIn) for m in call.modules() for v in vars(m).values())


@needs_slots
@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_lstm(policy: str) -> None:
    tiny = build("lstm")
    expected = tiny.step()
    with enable(tiny.model, policy) as handle:
        for _ in range(4):
            assert differences(tiny.step(), expected) == []
        assert handle.stats().coverage_percent == 100.0
        assert_nothing_left(handle._engine)
    assert differences(tiny.step(), expected) == []
