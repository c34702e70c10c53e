"""Plans without a real step: the simulated profile equals that of measured steps, and the plan can be carried out."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.errors import BlocksError, BudgetError, ConfigError, DataError
from ebbtide.config import Options
from ebbtide.planner.checkpointing import checkpointed, checkpointed_peak
from ebbtide.planner.machines import MACHINES, Machine, machine_named
from ebbtide.planner.profile import BlockProfile, Profile
from ebbtide.planner.simulate import simulate
from ebbtide.planner.table import TablePlan
from ebbtide.profiling.auto import AutoPlan
from ebbtide.profiling.faketensors import FakeMachine, without_bytes
from ebbtide.profiling.simulated import Job, simulate_model
from tests.helpers.models import NAMES, PRECISIONS, Tiny, build, outputs_of
from tests.helpers.oracle import differences

H200 = MACHINES["h200"]
CPU = dataclasses.replace(H200, name="cpu", stores_on_disk=True)
"""What is measured here is not a GPU's attention."""


def loss_of(output: Any) -> torch.Tensor:
    found = outputs_of(output)
    return found["loss"] if "loss" in found else sum((v.float().square().mean() for v in found.values()), start=0.0)  # type: ignore[return-value]


def on_paper(tiny: Tiny, **given: Any) -> Profile:
    return simulate_model(tiny.model, tiny.inputs, CPU, options=Options(min_bytes=0), loss=loss_of, **given)


def measured(tiny: Tiny) -> Profile:
    with ebbtide.enable_activation_offloading(tiny.model, min_bytes=0) as handle:
        for _ in range(4):
            tiny.step()
        assert isinstance(handle.plan, AutoPlan) and handle.plan.profile is not None
        assert not handle.stats().demoted_sites
        return handle.plan.profile


def plan_of(*args: Any, **given: Any) -> TablePlan:
    return ebbtide.make_plan(*args, **{"min_bytes": 0, **given})


def saved(profile: Profile) -> list[tuple[Any, ...]]:
    """Return the part of a profile that depends on the model and not on the machine."""
    return [
        (
            block.name,
            block.kind,
            u.site,
            u.nbytes,
            u.narrow_bytes,
            u.block_input,
            u.movable,
            u.recompute_seconds is not None,
        )
        for block in profile.blocks
        for u in block.units
    ]


SOME = ("block", "llama", "t5", "vit", "mixtral", "wan")


ASK_FOR_VALUES = ("mixtral_eager", "qwen3_moe_eager", "deepseek_v3_eager")
"""Which experts are run is decided by the router's values."""

BLOCKS_BY_WHAT_THEY_SAVE = ("resnet",)
"""Their stem becomes a block after the first pass, because of what it saved; the one step on paper is the first."""

OTHERWISE_ON_PAPER = ("unet2d", "sd3", "sana", "hunyuan_video", "lstm", "lstm_stack", "gru_stack")
"""Torch adds the bias of linear layers over strided inputs in place, but not to fake tensors, and asks its CPU
library for the work space of recurrent layers."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SOME)))
def test_every_family_saves_in_simulation_what_it_saves_in_measured_steps(name: str) -> None:
    tiny = build(name, **PRECISIONS["bf16"])
    if name in ASK_FOR_VALUES:
        with pytest.raises(ConfigError, match="reads a tensor's values"):
            on_paper(tiny)
    elif name in OTHERWISE_ON_PAPER:
        found, expected = ([unit[:4] for unit in saved(profile)] for profile in (on_paper(tiny), measured(tiny)))
        assert found == expected or name.endswith("_stack") or name == "lstm"
    elif name in BLOCKS_BY_WHAT_THEY_SAVE:
        found, expected = saved(on_paper(tiny)), saved(measured(tiny))
        names = {unit[0] for unit in found}
        assert found == [unit for unit in expected if unit[0] in names] and len(found) < len(expected)
    else:
        assert saved(on_paper(tiny)) == saved(measured(tiny))


@pytest.mark.parametrize("name", SOME)
def test_simulated_saved_tensors_are_those_of_measured_steps(name: str) -> None:
    tiny = build(name, **PRECISIONS["bf16"])
    assert saved(on_paper(tiny)) == saved(measured(tiny))


def test_what_is_stored_narrow_crosses_the_link_narrow() -> None:
    tiny = build("llama", **PRECISIONS["bf16"])
    with ebbtide.enable_activation_offloading(tiny.model, policy="offload", min_bytes=0) as handle:
        tiny.step()
        counted = handle.stats()
    units = [u for block in on_paper(tiny).blocks for u in block.units]
    assert sum(u.moved_bytes for u in units) == counted.offloaded_bytes < sum(u.nbytes for u in units)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).exp()


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plain_peak(net: nn.Module, *shape: int, checkpointed: bool = False) -> int:
    """Return the peak of a step without the engine: ordinary, or with the layers under torch's checkpoint."""
    with without_bytes():
        twin = copy.deepcopy(net, {id(p): nn.Parameter(torch.empty(p.shape)) for p in net.parameters()})
        x = torch.empty(shape)
        for layer in twin.layers if checkpointed else ():  # type: ignore[union-attr]
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )  # fmt: skip
        machine = FakeMachine(H200, sum(p.nbytes for p in twin.parameters()) + x.nbytes)
        machine.ignore([*twin.parameters(), x])
        with machine:
            twin(x).square().mean().backward()
            return machine.take_peak_bytes()


@pytest.mark.parametrize("rows", [64, 256, 4096])
def test_the_peak_of_keeping_everything_is_that_of_a_plain_step(rows: int) -> None:
    net = Net()
    plan = plan_of(net, torch.zeros(rows, 64, device="meta"), machine=H200, policy="keep", optimizer_state=0.0)
    activation = rows * 64 * 4
    assert plan.predicted.kept_bytes == 5 * activation
    # During a block's backward its saved tensors die one by one, which no profile shows.
    assert 0 <= plan.predicted.peak_bytes - plain_peak(net, rows, 64) <= activation


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 512), nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("depth", [4, 12])
def test_the_peak_of_checkpointing_is_that_of_a_checkpointed_step(depth: int) -> None:
    """A checkpointed block holds all its saved tensors at once; in the heuristic's step it does not."""
    net, rows = Net(), 4096
    net.layers = nn.ModuleList(Gated() for _ in range(depth))
    x = torch.zeros(rows, 64, device="meta")
    profile = simulate_model(net, x, H200, job=Job(optimizer_state=0.0), options=Options(min_bytes=0))
    true = plain_peak(net, rows, 64, checkpointed=True)
    assert [block.input_bytes for block in profile.blocks] == [x.nbytes] * depth
    assert checkpointed_peak(profile) == pytest.approx(true, rel=0.1)
    weights = sum(p.nbytes for p in net.parameters())
    assert checkpointed_peak(profile) >= weights + (depth - 1) * x.nbytes + profile.blocks[0].saved_bytes
    able = dataclasses.replace(profile, blocks=tuple(map(_able, profile.blocks)))
    assert simulate(able, checkpointed(able, depth, Action.KEEP)).peak_bytes == pytest.approx(true, rel=0.1)


def _able(block: BlockProfile) -> BlockProfile:
    return dataclasses.replace(block, checkpointable=True)


def test_weights_gradients_and_state_are_divided_among_shards() -> None:
    net, x = Net(width=512), torch.zeros(8, 512, device="meta")
    weights = 4 * 512 * 512 * 4

    def peak(**job: Any) -> int:
        return plan_of(net, x, machine=H200, policy="keep", **job).predicted.peak_bytes

    assert peak(optimizer_state=2.0) - peak(optimizer_state=0.0) == 2 * weights
    assert peak(optimizer_state=2.0, shards=4) < peak(optimizer_state=2.0) - weights
    # Two blocks are gathered at once, and every finished gradient is a quarter.
    assert peak(optimizer_state=0.0, shards=4) == pytest.approx(weights / 4 + weights / 2 + weights / 2, rel=0.2)


def test_a_model_on_meta_needs_no_values_and_one_with_values_is_left_alone() -> None:
    with torch.device("meta"):
        absent = Net()
    there = Net()
    before = copy.deepcopy(there.state_dict())
    x = torch.randn(16, 64)
    plans = [plan_of(net, x, machine="h200") for net in (absent, there)]
    assert plans[0] == plans[1]
    assert all(torch.equal(before[name], value) for name, value in there.state_dict().items())
    assert all(p.grad is None for p in there.parameters()) and all(p.is_meta for p in absent.parameters())


class Draws(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(())


class Stem(Net):
    def __init__(self) -> None:
        super().__init__(width=512, depth=2)
        self.stem = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))


def test_blocks_that_are_alike_take_alike_and_what_is_before_them_counts() -> None:
    profile = simulate_model(Stem(), torch.zeros(4096, 512, device="meta"), H200, options=Options(min_bytes=0))
    first, second = profile.blocks
    assert first.forward_seconds == pytest.approx(second.forward_seconds)
    assert profile.prologue_seconds == pytest.approx(2 * 4096 * 512 * 512 / H200.flop32_per_second, rel=0.2)


def test_what_blocks_share_is_gathered_once() -> None:
    net = Net(width=512)
    for layer in net.layers[1:]:
        layer.linear.weight = net.layers[0].linear.weight
    x = torch.zeros(8, 512, device="meta")
    peak = plan_of(net, x, machine=H200, policy="keep", shards=4, optimizer_state=0.0).predicted.peak_bytes
    weight = 512 * 512 * 4
    # Its shard and its full value; its gradient from one block, from the next, and their sum.
    assert peak == pytest.approx((0.25 + 1 + 3) * weight, rel=0.05)


def test_the_random_state_is_left_as_it_was() -> None:
    net, before = Draws(), torch.get_rng_state()
    plan_of(net, torch.zeros(4, 64), machine="h200")
    assert torch.equal(before, torch.get_rng_state())


def test_weights_that_are_shared_stay_shared() -> None:
    net = Net()
    net.layers[1].linear.weight = net.layers[0].linear.weight
    x = torch.zeros(4, 64)

    def peak(model: nn.Module) -> int:
        return plan_of(model, x, machine="h200", policy="keep").predicted.peak_bytes

    assert (
        peak(Net()) - peak(net) >= 2 * 64 * 64 * 4
    )  # weight and two of state, less a gradient that is added to another


@pytest.mark.parametrize("policy", ["auto", "keep", "offload", "inputs", "minimal"])
def test_a_simulated_plan_is_carried_out(policy: str, tmp_path: Path) -> None:
    tiny = build("llama", **PRECISIONS["bf16"])
    plain = tiny.step()
    plan = plan_of(tiny.model, tiny.inputs, policy=policy, machine="h200")
    plan.save(tmp_path / "plan.json")
    given = tmp_path / "plan.json"
    with ebbtide.enable_activation_offloading(tiny.model, policy=given, min_bytes=0, window=1, verify=True) as handle:
        for _ in range(2):
            assert not differences(plain, tiny.step())
        stats = handle.stats()
    found = plan.predicted
    assert found.kept_bytes + found.offloaded_bytes + found.recomputed_bytes == stats.unique_bytes
    assert stats.kept_bytes == found.kept_bytes
    assert stats.offloaded_bytes == found.moved_bytes


def test_the_batch_may_be_a_tensor_a_list_or_names() -> None:
    net, x = Net(), torch.zeros(4, 64)
    assert (
        plan_of(net, x, machine="h200") == plan_of(net, [x], machine="h200") == plan_of(net, {"x": x}, machine="h200")
    )


def test_a_budget_is_fitted_or_refused() -> None:
    net, x = Net(width=256), torch.zeros(4096, 256, device="meta")
    keep = plan_of(net, x, machine="h200", policy="keep").predicted
    budget = keep.peak_bytes - keep.kept_bytes // 3
    plan = plan_of(net, x, machine="h200", policy=ebbtide.Auto(memory_budget=budget))
    assert plan.predicted.peak_bytes <= budget
    with pytest.raises(BudgetError, match=r"memory_budget is 1\.0 KiB.*smallest peak"):
        plan_of(net, x, machine="h200", policy=ebbtide.Auto(memory_budget=1024))


def test_a_plan_fits_the_machine_or_is_refused() -> None:
    net, x = Net(width=256), torch.zeros(4096, 256, device="meta")
    least, most = (plan_of(net, x, machine="h200", policy=p).predicted.peak_bytes for p in ("minimal", "keep"))
    small = dataclasses.replace(H200, memory_bytes=int(1.2 * (least + most) / 2))
    plan = plan_of(net, x, machine=small, policy=ebbtide.Auto(max_slowdown=0.0))
    assert 1.2 * plan.predicted.peak_bytes <= small.memory_bytes
    with pytest.raises(BudgetError, match="the device has .*, less a sixth for fragments"):
        plan_of(net, x, machine=dataclasses.replace(H200, memory_bytes=least // 2))


def test_a_plan_is_for_a_model_before_it_is_wrapped_and_for_no_other(caplog: pytest.LogCaptureFixture) -> None:
    net, x = Net(), torch.zeros(64, 64)
    plan = plan_of(net, x, machine="h200", policy="keep")
    wrapped = nn.Module()
    wrapped._forward_module = net  # type: ignore[assignment]
    wrapped.forward = net.forward  # type: ignore[method-assign]
    with ebbtide.enable_activation_offloading(wrapped, policy=plan, min_bytes=0) as handle:
        wrapped(x).sum().backward()
        assert handle.stats().kept_bytes == plan.predicted.kept_bytes > 0
    names = sorted({name for name, _ in plan.actions})
    other = dataclasses.replace(plan, actions={("h.0", site): a for (_, site), a in plan.actions.items()})
    kinds = {(name, site._replace(block_kind="Other")): a for (name, site), a in plan.actions.items()}
    another = dataclasses.replace(plan, actions=kinds)
    for refused, rows in ((other, r"h\.0 \(Layer\)"), (another, r".*\.0 \(Other\)")):
        with pytest.raises(ConfigError, match=rf"rows for {rows}.*, and the model's blocks are .*\(Layer\)"):
            ebbtide.enable_activation_offloading(net, policy=refused)
    more = dataclasses.replace(plan, actions={**plan.actions, **other.actions})
    ebbtide.enable_activation_offloading(net, policy=more).close()
    assert names and "rows for h.0 (Layer), which are no blocks of this model" in caplog.text


def test_this_machine_is_measured_when_none_is_named() -> None:
    plan = plan_of(Net(), torch.zeros(64, 64))
    assert plan.predicted.step_seconds > 0


class Asks(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if x.sum() > 0 else -x


class Breaks(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("missing")


def test_a_model_that_asks_for_values_is_refused_and_its_own_errors_are_its_own() -> None:
    x = torch.zeros(4, 64)
    with pytest.raises(ConfigError, match=r"reads a tensor's values .*; expected .*\n*hint: train a few steps"):
        plan_of(Asks(), x, machine="h200")
    with pytest.raises(KeyError, match="missing") as caught:
        plan_of(Breaks(), x, machine="h200")
    assert "simulated" in caught.value.__notes__[0]


def test_what_cannot_be_planned_is_refused() -> None:
    net, x = Net(), torch.zeros(4, 64)
    with pytest.raises(BlocksError):
        plan_of(nn.Identity(), x, machine="h200")
    with pytest.raises(ConfigError, match=r"policy is a plan"):
        plan_of(net, x, machine="h200", policy=plan_of(net, x, machine="h200"))
    with pytest.raises(ConfigError, match=r"shards is 0"):
        plan_of(net, x, machine="h200", shards=0)
    with pytest.raises(ConfigError, match=r"optimizer_state is -1"):
        plan_of(net, x, machine="h200", optimizer_state=-1)
    with pytest.raises(ConfigError, match=r"no block saved anything of 0 B or more"):
        plan_of(net, x, machine="h200", loss=lambda out: out.detach().sum().requires_grad_())
    with pytest.raises(ConfigError, match=r"no block saved anything of 64\.0 KiB or more"):
        plan_of(net, x, machine="h200", min_bytes="64KiB")
    frozen = Net().requires_grad_(False)
    with pytest.raises(ConfigError, match=r"nothing to begin a backward with"):
        plan_of(frozen, x, machine="h200")


class Odd(torch.Tensor):
    pass


def test_wrapped_weights_are_refused() -> None:
    net = Net()
    net.layers[0].linear.register_buffer("odd", torch.zeros(2).as_subclass(Odd))
    with pytest.raises(ConfigError, match=r"layers\.0\.linear\.odd is a Odd"):
        plan_of(net, torch.zeros(4, 64), machine="h200")


def test_machines_have_names_and_files(tmp_path: Path) -> None:
    assert machine_named("H200") is H200 and machine_named("RTX 4090") is MACHINES["4090"]
    assert machine_named(H200) is H200
    path = tmp_path / "machine.json"
    H200.save(path)
    assert machine_named(path) == H200 == machine_named(str(path))
    with pytest.raises(ConfigError, match=r"machine is 'h201'.*\n*.*hint:.*h200"):
        machine_named("h201")
    with pytest.raises(DataError, match=r"cannot be read"):
        machine_named(tmp_path / "none.json")
    path.write_text('{"name": "x"}')
    with pytest.raises(DataError, match=r"describes no machine"):
        machine_named(path)
    with pytest.raises(DataError, match=r"cannot be written"):
        H200.save(tmp_path / "no" / "where.json")
    path.write_text(json.dumps({**dataclasses.asdict(H200), "devices": 1.5}))
    with pytest.raises(ConfigError, match=r"devices of machine 'h200' is 1\.5; expected a whole number"):
        machine_named(path)
    with pytest.raises(ConfigError, match=r"memory_bytes of machine 'x' is -1"):
        Machine(**{**{f: getattr(H200, f) for f in Machine.__dataclass_fields__}, "name": "x", "memory_bytes": -1})


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("b200", "b200"),
        ("NVIDIA H20", "h20"),
        ("a100-40g", "a100-40g"),
        ("A100 40GB", "a100-40g"),
        ("a100_80gb", "a100"),
        ("l40s", "l40s"),
        ("a10", "a10"),
        ("a10g", "a10g"),
        ("GeForce RTX 5090", "5090"),
        ("rtx4090", "4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_machines_are_found_as_people_write_them(written: str, name: str) -> None:
    assert machine_named(written) is MACHINES[name]


def test_the_rates_of_named_machines_are_in_proportion() -> None:
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.flop32_per_second < machine.flop_per_second
        assert 0.6 < machine.attention_flop_per_second / machine.flop_per_second < 0.9, name
        assert machine.host_bytes_per_second > machine.in_bytes_per_second >= machine.out_bytes_per_second > 20e9, name
        assert machine.memory_bytes < machine.host_memory_bytes


def test_devices_that_copy_at_once_share_the_hosts_memory() -> None:
    assert H200.rates().out_bytes_per_second == 52.8e9
    assert H200.rates(ranks=64).out_bytes_per_second == pytest.approx(921e9 / 64)
    profile = simulate_model(Net(), torch.zeros(4, 64), H200, job=Job(shards=8), options=Options(min_bytes=0))
    assert profile.rates.out_bytes_per_second == 52.8e9
    assert profile.store_bytes == (H200.host_memory_bytes - 8 * 1024**3) // 8
    on_disk = simulate_model(
        Net(), torch.zeros(4, 64), dataclasses.replace(H200, stores_on_disk=True), options=Options(min_bytes=0)
    )
    assert on_disk.store_bytes is None


class Attends(nn.Module):
    """Attention of four heads over 2048 tokens, 192 wide."""

    def __init__(self, value: int, dropout: float = 0.0, *, masked: bool = False, again: bool = False) -> None:
        super().__init__()
        self.sizes, self.dropout, self.masked, self.again = (192, 192, value), dropout, masked, again
        self.into = nn.ModuleList(nn.Linear(64, 4 * size) for size in self.sizes)
        self.out = nn.Linear(4 * value, 64)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        split = [linear(x).unflatten(-1, (4, -1)).transpose(1, 2) for linear in self.into]
        mask = torch.ones(2048, 2048, dtype=torch.bool).tril() if self.masked else None
        attend = nn.functional.scaled_dot_product_attention
        return attend(*split, mask, dropout_p=self.dropout, is_causal=mask is None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)
        return x + self.out(found.transpose(1, 2).flatten(2))


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "other width": lambda: Attends(128),
    "other width, mask": lambda: Attends(128, masked=True),
    "dropout": lambda: Attends(192, 0.1),
    "torch's layer": lambda: nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True),
    "checkpointed": lambda: Attends(128, 0.1, again=True),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_gpu_saves_no_softmax_of_fused_attention(kind: str) -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(ATTENTION[kind]() for _ in range(3))).bfloat16()
        x = torch.zeros(1, 2048, 64, dtype=torch.bfloat16)
    two_softmaxes = 2 * 4 * 2048 * 2048 * 4
    for machine in (CPU, H200):
        profile = simulate_model(net, x, machine, job=Job(optimizer_state=0.0), options=Options(min_bytes=0))
        units = [unit for block in profile.blocks for unit in block.units]
        fused = machine is H200
        assert any("Softmax" in unit.site.node for unit in units) != (fused or kind == "checkpointed")
        assert (simulate(profile, checkpointed(profile, 0, Action.KEEP)).peak_bytes < two_softmaxes) == fused
