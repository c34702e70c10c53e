"""The public functions: refused arguments, and the attributes of a handle."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action, Candidate
from ebbtide.base.errors import (
    BlocksError,
    ConfigError,
    ConflictError,
    DiskError,
    EbbtideError,
    ModifiedInPlaceError,
    TargetError,
)
from ebbtide.base.events import BUS
from ebbtide.engine import Expr, NodeView
from ebbtide.engine.engine import Engine
from tests.helpers.engines import assert_nothing_left
from tests.helpers.models import build
from tests.helpers.oracle import differences

without_device = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


def enable(model: Any = None, *args: Any, **options: Any) -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(build("mlp").model if model is None else model, *args, **options)


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        pytest.param({"target": "disc"}, ConfigError, r"'disc'.*expected.*hint: did you mean 'disk'", id="target"),
        pytest.param({"policy": ebbtide.Minimal}, ConfigError, r"hint: call the class: Minimal\(\)", id="policy class"),
        pytest.param({"policy": ebbtide.Auto}, ConfigError, r"hint: .*Auto\(\), not Auto", id="Auto class"),
        pytest.param({"policy": "minimum"}, ConfigError, r"'minimum'.*hint: did you mean 'minimal'", id="policy name"),
        pytest.param({"policy": "q2.txt"}, ConfigError, r"'q2.txt'.*a plan file whose.* \.json", id="ending"),
        pytest.param({"policy": 3}, ConfigError, r"policy is 3", id="policy type"),
        pytest.param(
            {"enable_ckpt": True, "policy": "offload"}, ConfigError, r"enable_ckpt=True and policy", id="both"
        ),
        pytest.param({"strategy": "fsdp3"}, ConfigError, r"'fsdp3'.*hint: did you mean.*'fsdp2'", id="strategy"),
        pytest.param({"blocks": ["layer.*"]}, BlocksError, r"'layer\.\*'.*hint: did you mean 'layers'", id="glob"),
        *(
            pytest.param({name: size}, ConfigError, rf"{name}.*expected", id=f"{name} {size!r}")
            for name in ("window", "host_budget")
            for size in ("0", 0, "-1", -1, "40 XB", "")
        ),
        pytest.param({"min_bytes": -1}, ConfigError, r"min_bytes is '?-1", id="min_bytes -1"),
        pytest.param({"min_bytes": "-1"}, ConfigError, r"min_bytes is '?-1", id="min_bytes '-1'"),
        pytest.param({"min_bytes": "-5MiB"}, ConfigError, r"min_bytes is '-5MiB'; expected a size of 0", id="-5MiB"),
        pytest.param({"min_bytes": "many"}, ConfigError, r"min_bytes is 'many'", id="min_bytes many"),
    ],
)
def test_bad_values_are_refused_and_leave_the_model_alone(
    options: dict[str, Any], error: type[EbbtideError], text: str
) -> None:
    model = build("mlp").model
    with pytest.raises(error, match=f"(?s){text}"):
        enable(model, **options)
    with enable(model):
        pass


@pytest.mark.parametrize("size", ["40 GB", "40GiB", "1.5MiB", 4096, "4096"])
def test_sizes_are_read_in_every_spelling(size: str | int) -> None:
    with enable(window=size, min_bytes=size):
        pass


def test_min_bytes_may_be_zero_in_every_spelling() -> None:
    for size in (0, "0"):
        tiny = build("mlp")
        with enable(tiny.model, min_bytes=size, policy="offload") as handle:
            tiny.step()
            assert handle.stats().kept_bytes == 0


@without_device
def test_the_host_target_needs_a_device() -> None:
    with pytest.raises(TargetError, match=r"(?s)host.*expected.*hint: .*disk"):
        enable(target="host")


def test_a_disk_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"(?s)missing.*hint: "):
        enable(target="disk", disk_path=tmp_path / "missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_disk_path_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match=r"(?s)hint: "):
        enable(target="disk", disk_path=tmp_path)


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="no proc here")
def test_a_disk_path_that_even_root_cannot_write() -> None:
    with pytest.raises(DiskError, match=r"(?s)/proc.*hint: "):
        enable(target="disk", disk_path="/proc")


def test_a_disk_path_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DiskError, match=r"(?s)file.*hint: "):
        enable(target="disk", disk_path=file)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs here")
def test_a_disk_path_in_memory_is_no_disk() -> None:
    with pytest.raises(DiskError, match=r"(?s)/dev/shm.*tmpfs.*hint: "):
        enable(target="disk", disk_path="/dev/shm")


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(ConfigError, match=r"(?s)model is a list.*hint: pass the model itself"):
        enable([nn.Linear(2, 2)])


def test_a_model_without_blocks() -> None:
    with pytest.raises(BlocksError, match=r"(?s)Identity has no parameters.*hint: .*offload_saved_tensors"):
        enable(nn.Identity())


def test_two_offloaders_at_once() -> None:
    model = build("mlp").model
    with enable(model), pytest.raises(ConflictError, match=r"(?s)already offloaded.*hint: "):
        enable(model)


def test_a_failed_enable_opens_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    model = build("mlp").model
    with enable(model):
        original = ebbtide.api.open_tier

        def opened(*args: Any, **kwargs: Any) -> Any:
            tier = original(*args, **kwargs)
            close = tier.close
            tier.close = lambda: (closed.append(True), close())
            return tier

        monkeypatch.setattr(ebbtide.api, "open_tier", opened)
        with pytest.raises(ConflictError):
            enable(model)
    assert closed == [True]


# Handles


def test_positional_names_of_other_frameworks() -> None:
    with enable(build("mlp").model, "auto", True) as handle:
        assert handle.plan.name == "minimal"
    with enable(enable_ckpt=True, policy="minimal") as handle:
        assert handle.plan.name == "minimal"


def test_the_default_is_auto() -> None:
    with enable() as handle:
        assert handle.plan.name == "auto"


def test_a_handle_is_a_context_manager_that_closes() -> None:
    tiny = build("mlp")
    with enable(tiny.model) as handle:
        assert handle.enabled
    assert not handle.enabled
    handle.close()
    handle.disable()
    with pytest.raises(ConfigError, match=r"(?s)closed.*hint: call enable_activation_offloading"):
        handle.enable()


def test_the_blocks_of_a_handle_are_paths_of_the_model() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    with enable(model) as handle:
        assert handle.blocks == ["0", "1", "2"]
    assert handle.blocks == []
    with enable(model, blocks=["1"]) as handle:
        assert handle.blocks == ["1"]


def test_an_exception_closes_the_handle() -> None:
    tiny = build("mlp")
    with pytest.raises(ZeroDivisionError), enable(tiny.model) as handle:
        raise ZeroDivisionError
    assert not handle.enabled
    assert "forward" not in vars(tiny.model)


def test_what_is_enabled_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ebbtide"), enable():
        pass
    assert "Enabling activation offloading for single-device strategy" in caplog.messages


def test_stats_before_and_after_a_step() -> None:
    tiny = build("block")
    with enable(tiny.model, policy="offload", min_bytes=0) as handle:
        before = handle.stats()
        assert (before.packs, before.unique_bytes, before.memory_saved_percent) == (0, 0, None)
        assert before.copy_out_bytes_per_second is None
        tiny.step()
        after = handle.stats()
        assert after.unique_bytes == after.kept_bytes + after.offloaded_bytes + after.recomputed_bytes > 0
        assert after.saved_bytes >= after.unique_bytes
        assert after.memory_saved_bytes == after.unique_bytes - after.kept_bytes
        assert after.memory_saved_percent == 100.0
        assert after.total_recomputes == after.recomputed_bytes == 0
        assert after.live_tickets == 0
        assert after.total_copy_out_bytes <= after.offloaded_bytes  # copies that had not begun were cancelled
        assert after.as_dict() == dataclasses.asdict(after)
        json.dumps(after.as_dict())
        tiny.step()
        again = handle.stats()
        assert (again.packs, again.unique_bytes) == (after.packs, after.unique_bytes)  # of one pass
        assert again.total_copy_out_bytes >= after.total_copy_out_bytes  # since the handle was made


def test_explain_names_the_plan_and_every_kind_of_site() -> None:
    tiny = build("block")
    with enable(tiny.model, policy="auto", min_bytes=0) as handle:
        assert handle.explain() == handle.plan.explain()
        tiny.step()
        first, *lines = handle.explain().splitlines()
    assert first == handle.plan.explain() and lines[0] == "in the latest pass:"
    assert any(" recompute " in line and " Block/" in line for line in lines)
    assert any(" offload " in line and " Block/" in line for line in lines)
    assert any(line.startswith("store: ") and line.endswith(" read") for line in lines)


def test_a_handle_and_a_plan_are_printed_in_one_line() -> None:
    tiny = build("block")
    plan = ebbtide.make_plan(tiny.model, tiny.inputs, machine="h200", min_bytes=0)
    with enable(tiny.model, policy=plan) as handle:
        assert repr(handle).startswith("<Handle: auto, enabled; ")
        assert repr(handle.plan) == "<TablePlan: auto; explain() shows more>"
    assert ", closed; " in repr(handle)


def test_a_handle_through_which_nothing_came_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("block")
    with enable(tiny.model):
        pass
    assert "nothing was offloaded" in caplog.text
    caplog.clear()
    with enable(tiny.model, min_bytes=0):
        tiny.step()
    assert "nothing was offloaded" not in caplog.text


def evaluated(tiny: Any) -> None:
    with torch.no_grad():
        tiny.loss(tiny.model)


def frozen(tiny: Any) -> None:
    tiny.model.requires_grad_(False)
    inputs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in tiny.inputs.items()}
    tiny.model(**inputs)


def failed_at_once(tiny: Any) -> None:
    def fail(*inputs: object) -> None:
        raise OSError("before anything was saved")

    next(m for m in tiny.model.modules() if not list(m.children())).register_forward_pre_hook(fail)
    with pytest.raises(OSError, match="before anything"):
        tiny.step()


@pytest.mark.parametrize("use", [evaluated, frozen, failed_at_once], ids=lambda use: use.__name__)
def test_a_handle_with_nothing_to_offload_is_no_reason_for_a_warning(
    use: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    tiny = build("block")
    with caplog.at_level(logging.INFO, "ebbtide"), enable(tiny.model, policy="keep"):
        use(tiny)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "nothing to offload: " in caplog.text


class Lazy(nn.Module):
    """Like zuko's flows: layers run when somebody asks what forward returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self) -> Callable[[Tensor], Tensor]:
        return lambda x: self.head(x).square().mean()


@pytest.mark.parametrize("trains", [True, False])
def test_a_model_that_is_trained_outside_of_its_forward_is_named(
    trains: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Lazy(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters() if trains else other.parameters(), 0.1)
    with caplog.at_level(logging.INFO, "ebbtide"), enable(model):
        for rows in range(1, 4):
            taken = model()
            loss = taken(torch.ones(rows, 8)) if trains else other(torch.ones(rows, 8)).sum()
            loss.backward()
            optimizer.step()
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["outside of its forward" in text and "hint: blocks=[...]" in text for text in warned] == [True] * trains
    assert ("nothing to offload: " in caplog.text) is not trains


@pytest.mark.parametrize("earlier", [True, False])
def test_storages_below_min_bytes_are_named_only_where_no_pass_moved_any(
    earlier: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    with enable(model, policy="offload", min_bytes=1024, window="1B"):  # what is offloaded is copied, not cancelled
        for rows in (256, 4) if earlier else (4,):
            model(torch.ones(rows, 8)).sum().backward()
    assert ("below min_bytes=1.0 KiB" in caplog.text) is not earlier


def test_bytes_that_auto_copies_to_measure_rates_hide_no_small_storages(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    with enable(model) as handle:
        for _ in range(5):
            model(torch.ones(4, 8)).sum().backward()
        assert "all storages that blocks save are below min_bytes" in handle.explain()
        assert BUS.ask("plan")[-1]["kept_because"] == "small"
        stats = handle.stats()
        assert stats.store["disk_written_bytes"] and not stats.total_copy_out_bytes
        assert "max_slowdown" not in caplog.text
    assert "below min_bytes=64.0 KiB" in caplog.text


def test_a_last_pass_that_failed_is_no_reason_to_say_so(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("block")

    def fail(*inputs: object) -> None:
        raise OSError("in the middle of a pass")

    with enable(tiny.model, policy="offload", min_bytes=0) as handle:
        tiny.step()
        next(m for m in tiny.model.modules() if not list(m.children())).register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="in the middle"):
            tiny.step()
        assert handle.stats().packs == 0
    assert "nothing was offloaded" not in caplog.text


def test_stats_print_ten_lines() -> None:
    tiny = build("block")
    with enable(tiny.model, policy="minimal", min_bytes=0) as handle:
        assert len(str(handle.stats()).splitlines()) == 10  # before any pass too
        tiny.step()
        stats = handle.stats()
    assert len(str(stats).splitlines()) == 10 and f"{stats.memory_saved_percent:.1f} %" in str(stats)
    assert str(stats) in stats._repr_html_()
    some = dataclasses.replace(stats, unique_bytes=2048, packs=18, small_storages=6, small_bytes=1024)
    assert "2.0 KiB, 1.0 KiB in 6 small storages; 18 tensors" in str(some)
    assert "2.0 KiB; 18 tensors" in str(dataclasses.replace(some, small_storages=0))


class OwnPlan:
    """A user's plan: returns the action that it was made with."""

    name = "own"

    def __init__(self, choice: Any = Action.OFFLOAD, block: Any = Action.KEEP, *, recomputes: bool = True) -> None:
        self.choice, self.block, self.recomputes = choice, block, recomputes

    def choose(self, candidate: Candidate) -> Any:
        return self.choice

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Any:
        return self.block

    def explain(self) -> str:
        return "own"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (OwnPlan("keep"), r"OwnPlan\.choose returned 'keep'; expected .*KEEP.*hint: .*Action\.KEEP"),
        (OwnPlan(None), r"OwnPlan\.choose returned None; expected .*hint: "),
        (OwnPlan(Action.CHECKPOINT), r"choose returned <Action\.CHECKPOINT.*hint: block_action"),
        (OwnPlan(Action.RECOMPUTE, recomputes=False), r"choose returned <Action\.RECOMPUTE.*hint: .*recomputes = True"),
        (OwnPlan(block=None), r"OwnPlan\.block_action returned None; expected .*CHECKPOINT.*hint: "),
        (OwnPlan(block=Action.OFFLOAD), r"OwnPlan\.block_action returned <Action\.OFFLOAD.*hint: choose returns it"),
    ],
)
def test_a_plan_of_ones_own_returns_actions(plan: OwnPlan, text: str) -> None:
    tiny = build("block")
    with enable(tiny.model, policy=plan, min_bytes=0), pytest.raises(ConfigError, match=f"(?s){text}"):
        tiny.step()


def test_a_plan_of_ones_own_has_the_members_of_plan() -> None:
    class ChoosesOnly:
        def choose(self, candidate: Candidate) -> Action:
            return Action.KEEP

    class ByKeyword(OwnPlan):
        def block_action(self, *, kind: str, index: int, input_bytes: int, must_keep_bytes: int) -> Action:  # type: ignore[override]
            return Action.KEEP

    for policy, text in (
        (ChoosesOnly(), r"ChoosesOnly lacks name, recomputes, block_action, explain; expected .*hint: docs/concepts/"),
        (ByKeyword(), r"ByKeyword\.block_action does not take .*; expected .*\(kind, index, \*, input_b.*hint: docs/"),
        (OwnPlan, r"hint: call the class: OwnPlan\(\), not OwnPlan"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){text}"):
            enable(policy=policy)


def test_the_plan_in_the_docs_is_carried_out() -> None:
    page = (Path(__file__).parents[2] / "docs/concepts/planning.md").read_text()
    code = next(part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class " in part)
    tiny, values = build("block"), dict[str, Any](ebbtide=ebbtide)
    values["model"] = tiny.model
    exec(code, values)
    values["handle"].close()
    plan = values["FirstBlocks"]()
    with enable(tiny.model, policy=plan, min_bytes=0) as handle:
        assert differences(build("block").step(), tiny.step()) == []
        assert handle.plan is plan and plan.explain() in handle.explain()
        assert handle.stats().kept_bytes > 0 and handle.stats().offloaded_bytes > 0


def test_a_plan_of_ones_own_is_checked_in_later_steps() -> None:
    tiny, plan = build("block"), OwnPlan()
    with enable(tiny.model, policy=plan, min_bytes=0):
        tiny.step()
        plan.choice = "keep"
        with pytest.raises(ConfigError, match="returned 'keep'"):
            tiny.step()


@pytest.mark.parametrize("policy", ["minimal", "keep"])
def test_a_plan_that_follows_from_its_policy_is_not_saved(policy: str, tmp_path: Path) -> None:
    with enable(policy=policy) as handle, pytest.raises(ConfigError, match=rf"{policy}.*expected .*(?s:.)*hint: "):
        handle.plan.save(tmp_path / "plan.json")


@without_device
def test_options_without_effect_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with enable(host_budget="1GiB", disk_path=tmp_path):
        pass
    told = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    assert told == ["host_budget has no effect here: offloaded bytes go to disk"]
    caplog.clear()
    with enable(policy="keep", host_budget="1GiB"):  # where nothing is offloaded by design
        pass
    assert "no effect" not in caplog.text


def test_a_bad_value_is_found_before_a_store_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebbtide.api, "open_tier", lambda *args, **kwargs: pytest.fail("a store was opened"))
    for options in ({"tensor_filter": 3}, {"keep_filter": 3}, {"blocks": [1]}, {"verify": "no"}, {"window": 0}):
        with pytest.raises(ConfigError):
            enable(**options)


def test_filters_keep_tensors() -> None:
    tiny = build("block")
    expected = tiny.step()
    with enable(tiny.model, policy="auto", min_bytes=0, tensor_filter=lambda t: False) as handle:
        assert differences(tiny.step(), expected) == []
        assert handle.stats().offloaded_bytes == 0
        assert handle.stats().recomputed_bytes > 0
    with enable(tiny.model, policy="auto", min_bytes=0, keep_filter=lambda t: False) as handle:
        assert differences(tiny.step(), expected) == []
        assert handle.stats().kept_bytes == handle.stats().unique_bytes > 0


@pytest.mark.parametrize("name", ["tensor_filter", "keep_filter"])
def test_a_filter_that_offloads_nothing_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny = build("block")
    refused = pytest.raises(ConfigError, match=f"(?s){name} returned None; expected true or false.*hint: ")
    with enable(tiny.model, policy="offload", min_bytes=0, **{name: lambda t: None}), refused:
        tiny.step()
    for policy, expected in (("offload", 1), ("keep", 0)):
        caplog.clear()
        with enable(tiny.model, policy=policy, min_bytes=0, **{name: lambda t: False}):
            tiny.step()
        assert caplog.text.count(f"nothing was offloaded: {name} returned False for every tensor; hint: ") == expected


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_verify_compares_and_finds_nothing(policy: str) -> None:
    tiny = build("block")
    expected = tiny.step()
    with enable(tiny.model, policy=policy, min_bytes=0, verify=True):
        assert differences(tiny.step(), expected) == []


# Without a model


@pytest.mark.parametrize("policy", [None, "offload", "minimal", "auto", "keep"])
def test_the_context_is_a_drop_in_for_save_on_cpu(policy: str | None) -> None:
    tiny = build("block")
    expected = tiny.step()
    call = tiny.model.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0):
            return call(*args, **kwargs)

    tiny.model.forward = inside
    assert differences(tiny.step(), expected) == []


def test_the_context_refuses_what_the_function_refuses(tmp_path: Path) -> None:
    for options, error in (
        ({"policy": ebbtide.Minimal}, ConfigError),
        ({"target": "disc"}, ConfigError),
        ({"window": "-1"}, ConfigError),
        ({"min_bytes": -1}, ConfigError),
        ({"target": "disk", "disk_path": tmp_path / "missing"}, DiskError),
    ):
        with pytest.raises(error), ebbtide.offload_saved_tensors(**options):
            pytest.fail("was entered")


def test_a_context_on_disk_refuses_a_budget_that_nothing_would_plan_for() -> None:
    context = ebbtide.offload_saved_tensors(policy=ebbtide.Auto(memory_budget="1MiB"), target="disk")
    with pytest.raises(ConfigError, match=r"(?s)memory_budget='1MiB'.*hint: "), context:
        pass
    x = torch.randn(4, 4, requires_grad=True)
    with ebbtide.offload_saved_tensors(policy=ebbtide.Auto(), target="disk", min_bytes=0):
        x.exp().sum().backward()


@pytest.mark.parametrize(("policy", "warned"), [("inputs", True), ("keep", False), ("offload", False)])
def test_inputs_that_no_block_saves_are_named_at_the_end(
    policy: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, target="disk"):
        model(torch.randn(2, 8, 16)).sum().backward()
    assert ("policy 'inputs' offloads the inputs of blocks" in caplog.text) is warned


def test_the_context_takes_sizes_as_text() -> None:
    with ebbtide.offload_saved_tensors(min_bytes="64KiB", window="1MiB"):
        pass


def test_an_exception_closes_the_context() -> None:
    with pytest.raises(ZeroDivisionError), ebbtide.offload_saved_tensors():
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_context_closes_the_checkpoints_in_which_an_exception_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.11 leaves their hooks open, and ours below them."""
    closed: list[BaseException] = []
    monkeypatch.setattr("ebbtide.wrap.hooks._close_checkpoints", closed.append)
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError), ebbtide.offload_saved_tensors():
        raise error
    assert closed == [error]


@pytest.mark.parametrize("target", ["auto", "disk"])
def test_of_a_context_that_cannot_be_entered_nothing_stays(target: Any) -> None:
    context = ebbtide.offload_saved_tensors(policy="offload", min_bytes=0, target=target)
    inside = context(lambda x: x.exp().sum())
    x = torch.randn(8, 8, requires_grad=True)
    inside(x).backward()
    engines = lambda: sum(type(each) is Engine for each in gc.get_objects())  # noqa: E731
    gc.collect()
    before, figures = engines(), context.stats()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(inside)(x.detach())
    gc.collect()
    assert engines() == before and not any(context._entered.values())
    assert context.stats().packs == figures.packs
    inside(x).backward()


def test_a_change_in_place_under_the_context_is_found() -> None:
    x = torch.randn(100, requires_grad=True)
    with ebbtide.offload_saved_tensors(min_bytes=0):
        y = x.exp()
        z = y.sin()
    y.add_(1)
    with pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation"):
        z.sum().backward()


# The user's rules


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(Cubed.apply(self.inner(x)))


def cube_rule(node: NodeView) -> Expr | None:
    x = node.operand("", 0)
    return None if x is None else Expr(lambda v: v * v * v, (x,), key=("cube",))


def test_a_registered_rule_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebbtide.api, "_custom_rules", {})

    def recomputed() -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Cube(), Cube())
        x = torch.randn(4, 8, requires_grad=True)
        with enable(model, policy="auto", min_bytes=0) as handle:
            model(x).sum().backward()
            assert handle.stats().demoted_sites == ()
            assert_nothing_left(handle._engine)
            return handle.stats().recomputed_bytes, x.grad

    before, expected = recomputed()
    ebbtide.register_recompute("CubedBackward", cube_rule)
    after, grad = recomputed()
    assert after == before + 2 * 4 * 8 * 4
    assert torch.equal(grad, expected)


def test_the_example_of_the_guide_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebbtide.api, "_custom_rules", {})
    guide = Path(__file__).parents[2] / "docs/guides/custom-operators.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(guide), "exec"), names)
    stats = names["stats"]
    assert stats.recomputed_bytes >= 2 * names["x"].nbytes  # each block's input of the linear after the function
    assert stats.demoted_sites == ()
    x = names["x"].detach().requires_grad_()
    names["model"](x).sum().backward()
    assert torch.equal(x.grad, names["x"].grad)


def test_a_rule_must_be_callable() -> None:
    with pytest.raises(ConfigError, match="rule is a str"):
        ebbtide.register_recompute("X", "y")


def test_the_context_is_a_decorator_and_may_be_entered_again() -> None:
    context = ebbtide.offload_saved_tensors(min_bytes=0)

    @context
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp().sum()

    x = torch.randn(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    with context:
        inside = x.sin()
        for y in (forward(x), inside.exp().sum()):
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
