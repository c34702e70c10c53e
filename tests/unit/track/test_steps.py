"""Automatic marks of steps and phases, around loops that mark nothing, something or everything."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.base.events import BUS
from ebbtide.base.runs import read_events
from ebbtide.report import load_run
from ebbtide.track import summarise
from ebbtide.track.parts import model_bytes, tensor_bytes
from ebbtide.track.steps import StepMarker
from tests.helpers.torches import needs_slots

STEPS = 4


def model_of(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True) for _ in range(3)])


def loop(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = STEPS, micro: int = 1) -> Iterator[float]:
    for number in range(steps):
        for _ in range(micro):
            batch = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(number))
            loss = model(batch).square().mean()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def marks(folder: Path, kind: str = "phase") -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run.jsonl") if event["event"] == kind]


def spans(folder: Path, step: int) -> list[str]:
    """Return the phases of a step in the order in which they ended."""
    return [e["name"] for e in marks(folder) if e["edge"] == "end" and e["step"] == step]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def hooks_are_gone() -> Iterator[None]:
    from torch.optim import optimizer

    yield
    hooks = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    assert not any(isinstance(getattr(hook, "__self__", None), StepMarker) for hook in hooks)
    assert not BUS.active and not BUS.ask("stats") and not BUS.ask("plan")


def test_a_loop_that_marks_nothing_has_steps_phases_figures_and_parts(tmp_path: Path) -> None:
    model = model_of()
    optimizer = adam(model)
    with ebbtide.track_memory(tmp_path), ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        list(loop(model, optimizer))
    steps = marks(tmp_path, "step")
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    assert all(e["seconds"] > 0 for e in steps)
    for number in (1, 2, 3, 4):
        assert spans(tmp_path, number) == ["forward", "backward", "optimizer"]
    assert [e["step"] for e in marks(tmp_path, "stats")] == [1, 2, 3, 4]
    weights = sum(p.nbytes for p in model.parameters())
    parts = marks(tmp_path, "parts")[0]
    assert (parts["weights"], parts["gradient_bytes"]) == ({"Sequential": weights}, weights)
    assert 2 * weights <= parts["optimizer_bytes"] <= 2 * weights + 8 * len(list(model.parameters()))
    run = load_run(tmp_path)
    assert run.summary["steps"] == 4 and run.summary["step_seconds_median"] > 0
    assert run.summary["inside"]["floor_bytes"] is not None
    assert set(run.summary["phases"]) == {"forward", "backward", "optimizer"}
    assert run.step_span(2) is not None


def test_phases_of_a_step_follow_each_other_and_end_in_the_step(tmp_path: Path) -> None:
    model = model_of()
    with ebbtide.track_memory(tmp_path), ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0):
        list(loop(model, adam(model)))
    run = load_run(tmp_path)
    ends = {e["step"]: e["t"] for e in marks(tmp_path, "step")}
    for number in (2, 3, 4):
        forward, backward, optimizer = sorted((s for s in run.phases if s.step == number), key=lambda s: s.begin)
        assert ends[number - 1] <= forward.begin < forward.end <= backward.begin < backward.end <= optimizer.begin
        assert optimizer.end <= ends[number]
        blocks = [e["t"] for e in marks(tmp_path, "block_backward") if forward.begin < e["t"] < ends[number]]
        assert blocks and all(backward.begin <= t <= backward.end for t in blocks)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_record_in_another_goes_on_counting_and_leaves_the_other_its_later_steps(
    tmp_path: Path, by_hand: bool
) -> None:
    model = model_of()
    with ebbtide.track_memory(tmp_path / "outer", model=model) as outer:
        losses = []
        for loss in loop(model, adam(model), steps=2):
            losses.append(loss)
            outer.step(loss=loss)
        with ebbtide.track_memory(tmp_path / "inner", model=model) as inner:
            for number, loss in enumerate(loop(model, adam(model), steps=2), start=3):
                losses.append(loss)
                figures = {"step": number, "seconds": 1.0} if by_hand else {}
                inner.step(loss=loss, **figures)
        list(loop(model, adam(model), steps=2))
    assert [e["step"] for e in marks(tmp_path / "outer", "step")] == [1, 2, 3, 4, 5, 6]
    assert load_run(tmp_path / "outer").summary["loss"] == [*losses, None, None]
    assert [(e["step"], e["loss"]) for e in marks(tmp_path / "inner", "step")] == [(3, losses[2]), (4, losses[3])]
    assert len(marks(tmp_path / "inner", "parts")) == (not by_hand)
    assert spans(tmp_path / "outer", 6) == ["forward", "backward", "optimizer"]


def test_a_record_that_ends_before_one_begun_later_has_its_last_step(tmp_path: Path) -> None:
    model, records = model_of(), [ebbtide.track_memory(tmp_path / name) for name in ("first", "second")]
    optimizer = adam(model)
    for record in records:
        record.__enter__()
    for record in records:
        list(loop(model, optimizer, steps=2))
        record.__exit__(None, None, None)
    assert [e["step"] for e in marks(tmp_path / "first", "step")] == [1, 2]
    assert [e["step"] for e in marks(tmp_path / "second", "step")] == [1, 2, 3, 4]


def test_figures_of_a_step_that_another_has_marked_are_logged_and_counted(tmp_path: Path) -> None:
    """For example under `ebbtide run`, which marks the steps of a script that has its own record."""
    model = model_of()
    with ebbtide.track_memory(tmp_path, model=model) as run:
        for number, _ in enumerate(loop(model, adam(model)), start=1):
            BUS.emit("step", step=number, loss=0.5, seconds=2.0, tokens=None)
            run.step(loss=0.5, tokens=64)
    assert [event["logs"] for event in marks(tmp_path, "log")] == [{"loss": 0.5, "tokens": 64}] * STEPS
    summary = load_run(tmp_path).summary
    assert summary["loss"] == [0.5] * STEPS and summary["tokens_per_second"] == 32


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_optimizer_step_is_marked_and_its_hooks_stay_eager(tmp_path: Path) -> None:
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    clear_compilation_metrics()
    with ebbtide.track_memory(tmp_path, model=model), ebbtide.enable_activation_offloading(model, min_bytes=0):
        for _ in loop(model, steps=6):
            step()
            optimizer.zero_grad()
    assert [e["step"] for e in marks(tmp_path, "step")] == [1, 2, 3, 4, 5, 6]
    compiled = {str(frame.co_filename) for frame in get_compilation_metrics()}
    assert compiled and not [name for name in compiled if "/ebbtide/" in name], "Dynamo compiles what the hooks do"


def test_without_offloading_forward_and_backward_are_one_phase(tmp_path: Path) -> None:
    model = model_of()
    with ebbtide.track_memory(tmp_path):
        list(loop(model, adam(model)))
    assert [e["step"] for e in marks(tmp_path, "step")] == [1, 2, 3, 4]
    assert marks(tmp_path, "step")[0]["seconds"] is None  # nothing shows when the first step began
    assert spans(tmp_path, 1) == ["optimizer"]
    assert spans(tmp_path, 3) == ["forward and backward", "optimizer"]
    assert marks(tmp_path, "parts")[0]["weights"] == {"trained": sum(p.nbytes for p in model.parameters())}


@pytest.mark.parametrize("offloads", [False, True])
def test_a_model_that_is_followed_has_its_phases_with_and_without_offloading(tmp_path: Path, offloads: bool) -> None:
    model = model_of()
    plain = model_of()
    list(loop(plain, adam(plain), micro=2))
    with ebbtide.track_memory(tmp_path, model=model):
        if offloads:
            with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
                list(loop(model, adam(model), micro=2))
        else:
            list(loop(model, adam(model), micro=2))
        with torch.no_grad():
            model(torch.ones(2, 16, 32))
    assert all(a.equal(b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert not model._forward_hooks and not model._forward_pre_hooks
    for number in (1, 2, 3, 4):
        assert spans(tmp_path, number) == ["forward", "backward"] * 2 + ["optimizer"]
    assert {e["step"] for e in marks(tmp_path)} == {1, 2, 3, 4}, "the evaluation has no phase"
    assert marks(tmp_path, "parts")[0]["weights"] == {"Sequential": sum(p.nbytes for p in model.parameters())}
    run = load_run(tmp_path)
    assert (run.summary["model"], run.summary["inside"]["floor_bytes"] is not None) == ("Sequential", True)


def test_a_result_that_may_not_be_used_any_more_is_no_error_of_the_record(tmp_path: Path) -> None:
    class Splits(nn.Linear):
        def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = super().forward(input) * 1
            part, _ = y.split(16, -1)
            y.mul_(2)  # from here on torch refuses to say how the part was made
            return y, part

    model = Splits(32, 32)
    with ebbtide.track_memory(tmp_path, model=model):
        for _ in range(2):
            model(torch.ones(2, 32))[0].sum().backward()
    assert [e["name"] for e in marks(tmp_path) if e["edge"] == "end"][:2] == ["forward", "backward"]


def test_a_model_that_is_compiled_is_followed_without_a_break(tmp_path: Path) -> None:
    model = model_of()
    graphs: list[object] = []

    def counted(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=counted)
    with ebbtide.track_memory(tmp_path, model=compiled):
        list(loop(compiled, adam(model), steps=3))
    assert len(graphs) == 1
    assert spans(tmp_path, 3) == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("offloads", [False, True])
def test_accumulation_and_optimizers_back_to_back_are_one_step(tmp_path: Path, offloads: bool) -> None:
    model = model_of()
    first, *rest = model.children()
    pair = adam(first), torch.optim.SGD([p for child in rest for p in child.parameters()], lr=0.1)
    options = {"policy": "offload" if offloads else "keep", "min_bytes": 0}
    with ebbtide.track_memory(tmp_path):
        if offloads:
            with ebbtide.enable_activation_offloading(model, **options):
                list(loop(model, *pair, micro=3))
        else:
            list(loop(model, *pair, micro=3))
    assert [e["step"] for e in marks(tmp_path, "step")] == [1, 2, 3, 4]
    seen = spans(tmp_path, 2)
    expected = ["forward", "backward"] * 3 if offloads else ["forward and backward"]
    assert seen == [*expected, "optimizer", "optimizer"]
    parts = marks(tmp_path, "parts")[0]
    assert parts["gradient_bytes"] <= sum(p.nbytes for p in model.parameters())
    assert sum(parts["weights"].values()) == sum(p.nbytes for p in model.parameters())


def test_steps_marked_by_hand_are_not_marked_again(tmp_path: Path) -> None:
    model = model_of()
    with (
        ebbtide.track_memory(tmp_path) as run,
        ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0),
    ):
        for number, loss in enumerate(loop(model, adam(model)), start=10):
            run.step(number, seconds=0.5, loss=loss)
    steps = marks(tmp_path, "step")
    assert [(e["step"], e["seconds"]) for e in steps] == [(n, 0.5) for n in (10, 11, 12, 13)]
    assert not marks(tmp_path, "stats")


def test_phases_marked_by_hand_are_not_marked_again_and_name_the_step(tmp_path: Path) -> None:
    model = model_of()
    optimizer = adam(model)
    with (
        ebbtide.track_memory(tmp_path) as run,
        ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0),
    ):
        for number in (7, 8, 9):
            with run.phase("forward", step=number):
                loss = model(torch.ones(2, 16, 32)).sum()
            with run.phase("backward", step=number):
                loss.backward()
            optimizer.step()
    assert [(e["name"], e["edge"], e["step"]) for e in marks(tmp_path)] == [
        (name, edge, n) for n in (7, 8, 9) for name in ("forward", "backward") for edge in ("begin", "end")
    ]
    assert [e["step"] for e in marks(tmp_path, "step")] == [7, 8, 9]


def test_a_loading_phase_marked_by_hand_leaves_the_steps_to_themselves(tmp_path: Path) -> None:
    with ebbtide.track_memory(tmp_path) as run:
        with run.phase("load", step=0):
            model = model_of()
        list(loop(model, adam(model), steps=2))
    assert [e["step"] for e in marks(tmp_path, "step")] == [1, 2]
    assert spans(tmp_path, 2) == ["forward and backward", "optimizer"]


def test_a_loop_adds_its_loss_to_the_step_that_marked_itself(tmp_path: Path) -> None:
    model = model_of()
    with ebbtide.track_memory(tmp_path) as run:
        losses = []
        for loss in loop(model, adam(model)):
            losses.append(loss)
            run.step(loss=loss, tokens=32)
        with pytest.raises(ebbtide.ConfigError, match="(?s)step=3 and seconds=None.*hint: "):
            run.step(3, loss=0.0)
    summary = load_run(tmp_path).summary
    assert summary["loss"] == losses and len(losses) == STEPS
    assert summary["tokens_per_second"] > 0


@pytest.mark.parametrize("followed", [True, False])
def test_a_step_that_a_scaler_skips_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, followed: bool
) -> None:
    model = model_of()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    with ebbtide.track_memory(tmp_path, model=model if followed else None) as run:
        for number in range(4):
            loss = model(torch.ones(2, 16, 32)).square().mean() * (math.inf if number in (0, 2) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.step(loss=number)
    assert load_run(tmp_path).summary["loss"] == [1, 3]
    assert caplog.text.count("no optimizer has stepped since the previous step") == 1


class Opaque(torch.Tensor):
    """Like the state of an 8-bit optimizer, but nothing names the tensor inside."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_sparse_gradients_are_counted_and_tensors_without_a_storage_left_out(tmp_path: Path) -> None:
    model = nn.Embedding(64, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with ebbtide.track_memory(tmp_path):
        for _ in range(2):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
    assert marks(tmp_path, "parts")[0]["gradient_bytes"] == 2 * 8 * 4 + 2 * 8
    assert tensor_bytes([Opaque(torch.ones(8)), torch.ones(8)]) == 32


def test_two_models_of_a_class_and_a_wrapper_of_one_are_each_counted_once(tmp_path: Path) -> None:
    def weights(*models: nn.Module) -> list[tuple[str, Iterator[torch.Tensor]]]:
        return [(type(model).__name__, model.parameters()) for model in models]

    one, other = nn.Linear(4, 4, bias=False), nn.Linear(8, 4, bias=False)
    assert model_bytes(weights(one, other, nn.Sequential(one))) == {"Linear": 64, "Linear 2": 128}
    model = model_of()
    wrapped = ebbtide.track_memory(tmp_path, model=nn.Sequential(model))
    with wrapped, ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        list(loop(model, adam(model), steps=1))
    assert list(marks(tmp_path, "parts")[0]["weights"].values()) == [sum(p.nbytes for p in model.parameters())]


def test_parts_are_of_all_optimizers_also_of_one_that_steps_later(tmp_path: Path) -> None:
    """And of weights outside of the model that is followed."""
    models = model_of(), model_of()
    optimizers = [adam(model) for model in models]
    with ebbtide.track_memory(tmp_path, model=models[0]):
        for step in range(3):
            for model, optimizer in [*zip(models, optimizers, strict=True)][: 1 + step]:
                model(torch.ones(2, 16, 32)).sum().backward()
                optimizer.step()
    first, second = marks(tmp_path, "parts")
    size = sum(p.nbytes for p in models[0].parameters())
    assert (first["weights"], first["gradient_bytes"]) == ({"Sequential": size}, size)
    assert second["weights"] == {"Sequential": size, "trained": size} and second["gradient_bytes"] == 2 * size
    assert second["optimizer_bytes"] == 2 * first["optimizer_bytes"] > 0


def test_an_optimizer_that_calls_the_model_is_one_step(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16, 32)).square().mean()
        loss.backward()
        return loss

    with ebbtide.track_memory(tmp_path), ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        for _ in range(3):
            optimizer.step(closure)
    assert [e["step"] for e in marks(tmp_path, "step")] == [1, 2, 3]
    assert spans(tmp_path, 2)[-1] == "optimizer"


def test_optimizers_that_step_inside_backward_are_one_step(tmp_path: Path) -> None:
    model = model_of()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad())[0])
    with ebbtide.track_memory(tmp_path), ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0):
        list(loop(model))
    assert [e["step"] for e in marks(tmp_path, "step")] == [1, 2, 3, 4]
    assert spans(tmp_path, 2) == ["forward", "backward"]


def test_training_is_bitwise_the_same_while_it_is_tracked(tmp_path: Path) -> None:
    plain, tracked = model_of(), model_of()
    before = list(loop(plain, adam(plain)))
    with ebbtide.track_memory(tmp_path):
        assert list(loop(tracked, adam(tracked))) == before
    assert all(a.equal(b) for a, b in zip(plain.parameters(), tracked.parameters(), strict=True))


def test_a_plan_that_was_made_before_is_recorded(tmp_path: Path) -> None:
    model = model_of()
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        with ebbtide.track_memory(tmp_path):
            list(loop(model, adam(model), steps=1))
        assert marks(tmp_path, "plan")[0]["name"] == handle.plan.name


class Checkpointing(nn.Module):
    """Checkpoints its own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@needs_slots
def test_blocks_that_the_model_checkpoints_itself_are_recorded_with_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Checkpointing()
    with ebbtide.enable_activation_offloading(model, min_bytes=0):
        for folder in ("first", "later"):  # the second record begins after the plan was made
            with ebbtide.track_memory(tmp_path / folder):
                list(loop(model, adam(model), steps=5))
            assert summarise(tmp_path / folder)["plan"]["own_checkpoints"] == 3
    assert "no plan saves memory within max_slowdown=0.05; hint: switch the model's own checkpointing" in caplog.text


@pytest.mark.parametrize("closed", [True, False])
def test_a_handle_that_is_closed_or_dropped_leaves_no_source_behind(closed: bool) -> None:
    model = model_of()
    handle = ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0)
    assert len(BUS.ask("stats")) == 1 == len(BUS.ask("weights"))
    if closed:
        handle.close()
    else:
        del handle, model
        gc.collect()
    assert not BUS.ask("stats")


def test_a_tiny_model_that_offloads_nothing_gets_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    with ebbtide.enable_activation_offloading(model, policy="offload"):
        list(loop(model, adam(model), steps=1))
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("below min_bytes=64.0 KiB" in words and "hint: " in words for words in said), said


def test_an_optimizer_whose_step_raised_does_not_end_the_steps_of_others(tmp_path: Path) -> None:
    model = model_of()
    failing, good = torch.optim.SGD(model.parameters(), lr=0.1), adam(model)

    def closure() -> float:
        raise RuntimeError("out of memory")

    with ebbtide.track_memory(tmp_path) as run:
        for loss in loop(model, good, steps=2):
            run.step(loss=loss)
        with pytest.raises(RuntimeError, match="out of memory"):
            failing.step(closure)
        for loss in loop(model, good, steps=2):
            run.step(loss=loss)
    assert [event["step"] for event in marks(tmp_path, "step")] == [1, 2, 3, 4]
    assert all(spans(tmp_path, step)[-1] == "optimizer" for step in (1, 2, 3, 4))
