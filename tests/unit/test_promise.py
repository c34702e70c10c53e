"""``Auto`` and its promise on real models: plain blocks, plans that checkpoint blocks, and models with nothing to gain.

Time is the fake device's: the layers and, if a test gives them a cost, the hooks advance its clock.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.events import BUS
from ebbtide.base.runs import SETTLING
from ebbtide.engine.run import BlockRun
from ebbtide.engine.stats import Tally
from ebbtide.engine.timing import StepTimer
from ebbtide.engine.untraced import leave_untraced
from ebbtide.planner.checkpointing import checkpointed
from ebbtide.planner.profile import Profile
from ebbtide.planner.solve import Search, Solution
from ebbtide.profiling.auto import MEASURED_STEPS, AutoPlan
from ebbtide.profiling.closed_loop import kept_blocks
from ebbtide.profiling.minimal import ROUNDS
from ebbtide.profiling.promise import ADDED, CHECKED, CORRECTIONS, FIRST_LOOK, FURTHER, UNUSED, Judgement
from ebbtide.profiling.trials import Method, Range
from ebbtide.schedule import CopyIn
from ebbtide.store.host import HostTier
from ebbtide.wrap.plain import all_kept
from tests.helpers.engines import assert_nothing_left, drain
from tests.helpers.fakedevice import FakeDevice
from tests.helpers.handles import Unlimited, enable_over
from tests.helpers.models import build
from tests.helpers.oracle import differences

BLOCKS = 4
UNTIL_PLAN = 1 + MEASURED_STEPS
TO_JUDGE = SETTLING + CHECKED + 2
"""Passes until a plan is judged: two later, when nobody waits for what is read."""


class _Spend(torch.autograd.Function):
    """Takes time in forward and backward, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spend: Callable[[], None]) -> torch.Tensor:
        ctx.spend = spend
        spend()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.spend()
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self, spend: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.norm, self.spend = nn.Linear(8, 8), nn.LayerNorm(8), spend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _Spend.apply(torch.nn.functional.gelu(self.inner(self.norm(x))), self.spend)


class Timed:
    """Tiny blocks over a fake device, each direction of which takes a second."""

    def __init__(self, blocks: int = BLOCKS, **policy: Any) -> None:
        self.device = FakeDevice(1e9, 1e9)
        self.tier = HostTier(self.device)
        self.model = nn.Sequential(*[Layer(lambda: self.device.compute(1.0)) for _ in range(blocks)])
        self.x = torch.randn(16, 8)
        self.expected = self.gradients()
        self.handle = enable_over(self.tier, self.model, policy=Unlimited(**policy), min_bytes=0)

    @property
    def plan(self) -> AutoPlan:
        assert isinstance(self.handle.plan, AutoPlan)
        return self.handle.plan

    def gradients(self) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.model(self.x).square().sum(), list(self.model.parameters())))

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert all(map(torch.equal, self.gradients(), self.expected))


def test_without_memory_for_blocks_without_hooks_a_plan_is_judged_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10**12]
    monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier: free[0])
    timed = Timed(12, max_slowdown=0.5)
    with timed.handle:
        timed.steps(UNTIL_PLAN + 1)
        while not timed.plan.judged:
            timed.steps(1)
        timer, first = timed.plan._timer, timed.plan._judgement
        assert timer is not None and first is not None
        free[0] = 0  # somebody else took it meanwhile

        def without_hooks() -> int:
            return sum(timer.runs_plain(str(block)) for block in range(12))

        kept = without_hooks()
        for looks in (2, 3):
            timed.steps(timer.spans.paused)
            assert (first.looks, timer.spans.paused) == (looks - 1, 0)
            timed.steps(1)
            assert (first.looks, timer.spans.paused) == (looks, FIRST_LOOK * FURTHER ** (looks - 1) - 1)
            assert not timer.spans.wanted and without_hooks() == kept
        free[0] = 10**12
        timed.steps(timer.spans.paused + 1)
        assert timer.spans.wanted and without_hooks() > kept


def test_what_a_pass_keeps_is_free_again_when_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that has room for the plan and for blocks without hooks would never judge the plan again."""
    holds = [False]  # from the last block's forward to the end of the step
    monkeypatch.setattr("ebbtide.profiling.closed_loop.room_bytes", lambda tier: 0 if holds[0] else 10**12)
    timed = Timed(12, max_slowdown=0.5)

    def spend() -> None:
        timed.device.compute(1.0)
        holds[0] = True

    def steps(count: int) -> None:
        for _ in range(count):
            timed.steps(1)
            holds[0] = False

    timed.model[-1].spend = spend  # type: ignore[assignment]
    with timed.handle:
        steps(UNTIL_PLAN + 1)
        while not timed.plan.judged:
            steps(1)
        judgement, timer = timed.plan._judgement, timed.plan._timer
        assert judgement is not None
        steps(timer.spans.paused + 1)
        assert judgement.looks == 1 and timer.spans.wanted
        assert any(timer.runs_plain(name) for name in timer.yardsticks - timer.unhooked)


def calls_of_ours(work: Callable[[], object]) -> Counter[str]:
    """Count the calls of ebbtide's functions."""
    calls: Counter[str] = Counter()
    home = str(Path(ebbtide.__file__).parent)

    def profile(frame: Any, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(home):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture
def dear_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let every saved tensor in a hook cost half a second; return the blocks that packed."""
    packed: list[str] = []
    leave_untraced()  # once in a process, and not while another function replaces it
    pack = BlockRun.pack

    def dear(run: BlockRun, tensor: torch.Tensor, outer: Any = None) -> Any:
        packed.append(run.block.name)
        run.engine.tier.device.compute(0.5)  # type: ignore[attr-defined]
        return pack(run, tensor, outer)

    monkeypatch.setattr(BlockRun, "pack", dear)
    yield packed


def test_in_the_last_measured_step_one_block_runs_without_hooks(dear_hooks: list[str]) -> None:
    timed = Timed(max_slowdown=0.05)
    with timed.handle:
        timed.steps(2)
        before = timed.handle.stats()
        assert dear_hooks.count("3")
        dear_hooks.clear()
        timed.steps(1)
        assert set(dear_hooks) == {"1", "2", "3"}
        stats = timed.handle.stats()
        assert (stats.unique_bytes, stats.packs) == (before.unique_bytes, before.packs)
        assert stats.kept_bytes >= stats.unique_bytes // BLOCKS
        timed.steps(1)
        profile = timed.plan.profile
        assert profile is not None
        assert profile.forward_seconds == pytest.approx(BLOCKS, rel=0.05)
        assert profile.backward_seconds == pytest.approx(BLOCKS, rel=0.05)


def test_a_model_with_nothing_to_gain_ends_without_hooks_and_says_so(
    dear_hooks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    timed = Timed(max_slowdown=0.05)
    emitted: list[dict[str, Any]] = []
    remove = BUS.subscribe(lambda kind, fields: emitted.append(fields) if kind in ("plan", "verdict") else None)
    with timed.handle:
        timed.steps(UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE)
        remove()
        assert {one["kept_because"] for one in (*emitted, BUS.ask("plan")[-1])} == {"gains_nothing"}
        dear_hooks.clear()
        timed.steps(2)
        assert not dear_hooks, "hooks ran"
        stats = timed.handle.stats()
        assert stats.kept_bytes == stats.unique_bytes > 0
        assert "blocks run without hooks, as in ordinary training: nothing is gained" in timed.handle.explain()
        assert caplog.text.count("no plan saves memory within max_slowdown=0.05; hint: ") == 1
        assert "a larger limit: policy=ebbtide.Auto(max_slowdown=0.1)" in caplog.text
        forward = calls_of_ours(lambda: timed.model(timed.x))
        assert forward["StandIn.__call__"] == 1 and max(forward.values()) < BLOCKS, (
            forward
        )  # the model's; none of any block
        loss = timed.model(timed.x).square().sum()
        assert not calls_of_ours(loss.backward)
        timed.model.zero_grad()
        began = timed.device.now_seconds
        timed.steps(1)
        assert timed.device.now_seconds - began == pytest.approx(2 * BLOCKS)
        drain()
        assert_nothing_left(timed.handle._engine)


def test_counts_stay_where_the_inputs_tensors_are_in_objects() -> None:
    seen = Tally()
    seen.saved = seen.unique = 12
    kept = all_kept(seen, 0, 0)
    assert (kept.saved, kept.unique, kept.kept) == (12, 12, 12)


def test_bytes_of_blocks_without_hooks_are_those_of_the_latest_batch(dear_hooks: list[str]) -> None:
    """They are counted in a measured step; a batch of half the size keeps half of them."""
    timed = Timed(max_slowdown=0.05)
    with timed.handle:
        timed.steps(UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE)
        long = timed.handle.stats()
        assert timed.plan._timer is not None and len(timed.plan._timer.unhooked) == BLOCKS
        assert long.unique_bytes == long.kept_bytes > 0
        timed.x, full, blocks = timed.x[:8], timed.x, list[int]()
        timed.gradients()  # nothing is installed on the blocks
        assert timed.handle.stats().unique_bytes == timed.handle.stats().kept_bytes == long.unique_bytes // 2
        deaf = timed.handle._engine.bus.subscribe(
            lambda kind, fields: blocks.append(fields["unique_bytes"]) if kind == "block" else None
        )
        timed.gradients()  # with a listener it is, and each block counts
        assert timed.handle.stats().unique_bytes == timed.handle.stats().kept_bytes == long.unique_bytes // 2
        assert sum(blocks) == long.unique_bytes // 2
        deaf()
        timed.x = full
        timed.steps(1)
        assert timed.handle.stats().unique_bytes == long.unique_bytes


def test_what_hooks_cost_is_measured_where_they_keep_everything(dear_hooks: list[str]) -> None:
    """Half a second for each saved tensor: no plan for all twelve blocks is within 50 %, but one for some is."""
    timed = Timed(12, max_slowdown=0.5)
    with timed.handle:
        timed.steps(1)
        tensors = dear_hooks.count(dear_hooks[0])
        timed.steps(UNTIL_PLAN - 1)
        stats = timed.handle.stats()
        assert stats.kept_bytes > stats.unique_bytes // 3  # three run plain and three keep all
        timed.steps(1)
        profile = timed.plan.profile
        assert profile is not None
        assert [block.hook_seconds for block in profile.blocks] == pytest.approx([tensors / 2] * 12, rel=0.05)
        assert profile.step_seconds == pytest.approx(24, rel=0.05)
        assert timed.plan.table is not None
        predicted = timed.plan.table.predicted
        assert 0 < len(timed.plan._timer.unhooked) < 12  # type: ignore[union-attr]
        assert 0 < predicted.overhead_percent <= 50 and predicted.kept_bytes < stats.unique_bytes


def test_frozen_first_layers_have_no_backward_in_ordinary_training() -> None:
    """They are of the class of the trained ones, of which some run without hooks to be compared."""
    timed = Timed(12, max_slowdown=0.5)
    for place in range(6):
        timed.model[place].requires_grad_(False)
    with timed.handle:
        for _ in range(UNTIL_PLAN + 4 * TO_JUDGE):
            timed.model(timed.x).square().sum().backward()
        judgement = timed.plan._judgement
        assert judgement is not None and judgement.measured is not None and not judgement.too_slow
        # Second forwards end early: their layers wait before they save anything, so the plan takes no longer.
        assert judgement.solution.profile.step_seconds == pytest.approx(12 + 6, rel=0.05)
        assert judgement.measured.seconds == pytest.approx(12 + 6, rel=0.05)


def test_a_plan_is_judged_where_blocks_are_called_without_the_model() -> None:
    """Like in a method of the model: such a pass ends when the next one begins, after its backward."""
    timed = Timed(max_slowdown=0.6)
    layers = nn.Sequential(*timed.model.children())
    with timed.handle:
        for _ in range(UNTIL_PLAN + TO_JUDGE + 2):
            found = torch.autograd.grad(layers(timed.x).square().sum(), list(timed.model.parameters()))
            assert all(map(torch.equal, found, timed.expected))
        assert timed.plan._judgement is not None and timed.plan._judgement.measured is not None


def test_a_model_of_one_block_gets_a_plan() -> None:
    """In one of its measured steps no block has hooks."""
    timed = Timed(1, max_slowdown=0.05)
    with timed.handle:
        timed.steps(UNTIL_PLAN + 1)
        assert timed.plan.judged
        assert "plain step 2 s" in timed.handle.explain()


def test_a_second_measured_step_that_is_longer_takes_the_place_of_the_first(dear_hooks: list[str]) -> None:
    """Blocks with larger inputs than before do not run without hooks, so that step alone has no baseline."""
    timed = Timed(max_slowdown=0.05)
    with timed.handle:
        for rows in (16, 16, *[64] * (UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE)):
            timed.x = torch.randn(rows, 8)
            dear_hooks.clear()
            timed.model(timed.x).square().sum().backward()
        profile = timed.plan.profile
        assert profile is not None and profile.saved_bytes == timed.handle.stats().unique_bytes
        assert profile.forward_seconds == pytest.approx(BLOCKS, rel=0.05)
        assert not dear_hooks and timed.handle._attachment._rest._resting


def test_batches_of_all_lengths_get_a_plan_that_is_judged() -> None:
    """No two are equal, as with padding to the longest sequence of a batch."""
    timed = Timed(12, max_slowdown=0.5)
    with timed.handle:
        for rows in range(40, 40 + UNTIL_PLAN + TO_JUDGE):
            timed.x = torch.randn(rows % 7 + 30, 8)
            timed.model(timed.x).square().sum().backward()
        assert timed.plan.table is not None and timed.plan.judged
        assert timed.handle.stats().kept_bytes < timed.handle.stats().unique_bytes


def test_a_plan_is_carried_out_where_each_backward_has_two_forwards() -> None:
    """Like a discriminator's: no pass is alone, so none is compared."""
    timed = Timed(8, max_slowdown=0.5)
    with timed.handle:
        for _ in range(UNTIL_PLAN + UNUSED + 3):
            (timed.model(timed.x) + timed.model(timed.x)).square().sum().backward()
        assert timed.plan.judged and timed.plan._timer is not None and timed.plan._judgement is not None
        assert timed.plan._timer.unhooked == kept_blocks(timed.plan._judgement.solution)


def last_kept(count: int) -> Callable[[Profile, float], Solution]:
    """Return a solver that offloads what the first blocks save and keeps what the last ``count`` do."""

    def shrink(profile: Profile, max_slowdown: float) -> Solution:
        first = len(profile.blocks) - count
        actions = [Action.OFFLOAD if place < first else Action.KEEP for place in range(len(profile.blocks))]
        return Search(profile).simulated(
            tuple((a,) * len(block.units) for a, block in zip(actions, profile.blocks, strict=True))
        )

    return shrink


def test_the_only_block_that_offloads_has_hooks_while_its_plan_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(BLOCKS - 1))
    timed = Timed(max_slowdown=10.0)
    with timed.handle:
        timed.steps(UNTIL_PLAN + 1)
        timer = timed.plan._timer
        assert timer is not None and timer.unhooked == {"1", "2", "3"}
        assert timer.times_blocks and not timer.runs_plain("0")


def test_blocks_of_which_all_is_kept_have_no_hooks_from_the_first_planned_step(
    monkeypatch: pytest.MonkeyPatch, dear_hooks: list[str]
) -> None:
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(2))
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)
    timed = Timed(max_slowdown=10.0)
    with timed.handle:
        timed.steps(UNTIL_PLAN)
        dear_hooks.clear()
        timed.steps(1)
        assert set(dear_hooks) == {"0", "1"}
        stats = timed.handle.stats()
        assert stats.unique_bytes == stats.kept_bytes + stats.offloaded_bytes
        drain()
        assert_nothing_left(timed.handle._engine)


def test_the_backward_of_a_block_without_hooks_hides_what_is_brought_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy-ins begin with the backward, whichever block is its first."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(2))
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)
    timed = Timed(max_slowdown=10.0)
    began: list[float] = []
    advance = CopyIn.advance

    def spy(flow: CopyIn) -> None:
        began.append(timed.device.now_seconds)
        advance(flow)

    monkeypatch.setattr(CopyIn, "advance", spy)
    with timed.handle:
        timed.steps(UNTIL_PLAN + 1)
        began.clear()
        start = timed.device.now_seconds
        timed.steps(1)
        # Four forwards, then the backwards: the first copies begin before the backward of any block.
        assert began[0] - start == pytest.approx(BLOCKS, rel=0.01)


def test_blocks_without_hooks_are_reported_like_others(dear_hooks: list[str]) -> None:
    told: list[tuple[str, str]] = []
    timed = Timed(max_slowdown=0.05)
    with timed.handle:
        timed.steps(UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE)
        forget = BUS.subscribe(lambda event, fields: told.append((event, str(fields.get("name")))))
        timed.steps(1)
        forget()
    names = [str(i) for i in range(BLOCKS)]
    assert [name for event, name in told if event == "block"] == names
    assert [name for event, name in told if event == "block_backward"] == names[::-1]


def test_hooks_come_back_for_a_larger_batch(dear_hooks: list[str]) -> None:
    timed = Timed(max_slowdown=0.05)
    with timed.handle:
        timed.steps(UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE)
        dear_hooks.clear()
        timed.x = torch.randn(64, 8)
        timed.gradients()
        assert set(dear_hooks) == {"0", "1", "2", "3"}
        before = timed.plan.table
        for _ in range(MEASURED_STEPS + 1):
            timed.gradients()
        assert timed.plan.table is not before


@pytest.mark.parametrize(("kept", "frozen"), [(BLOCKS, 3), (2, 3), (BLOCKS, 0)])
def test_hooks_come_back_for_what_was_frozen_until_it_has_shown_what_it_saves(
    monkeypatch: pytest.MonkeyPatch, dear_hooks: list[str], kept: int, frozen: int
) -> None:
    """The first layer saves nothing at all while it is frozen, so its training needs another plan."""
    if kept < BLOCKS:
        monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(kept))
    timed = Timed(max_slowdown=0.05 if kept == BLOCKS else 10.0)
    hooked, settled = {str(place) for place in range(BLOCKS - kept)}, UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE

    def steps(count: int, *, frozen_: bool) -> set[str]:
        for weight in timed.model[frozen].parameters():
            weight.requires_grad_(not frozen_)
        for _ in range(count):
            dear_hooks.clear()
            timed.model(timed.x).square().sum().backward()
        return set(dear_hooks)

    with timed.handle:
        assert steps(settled, frozen_=True) == hooked
        before = timed.plan.table
        assert str(frozen) in steps(1, frozen_=False)
        assert steps(settled, frozen_=False) == hooked
        assert (timed.plan.table is before) == (frozen == 3)
        before = timed.plan.table
        steps(1, frozen_=True)
        for frozen_ in (True, False, True):
            assert steps(1, frozen_=frozen_) == hooked
        assert timed.plan.table is before


@pytest.mark.parametrize("kept", [BLOCKS, 2])
def test_rare_larger_batches_keep_no_more_than_the_plan(
    monkeypatch: pytest.MonkeyPatch, dear_hooks: list[str], kept: int
) -> None:
    """Not only the first of them, after which the steps that are measured are small again."""
    if kept < BLOCKS:
        monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(kept))
    timed = Timed(max_slowdown=0.05 if kept == BLOCKS else 10.0)
    with timed.handle:
        for _ in range(3):
            timed.x = torch.randn(16, 8)
            for _ in range(UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE):
                dear_hooks.clear()
                timed.gradients()
            assert timed.plan.judged and set(dear_hooks) == {str(place) for place in range(BLOCKS - kept)}
            timed.x = torch.randn(160, 8)
            dear_hooks.clear()
            timed.gradients()
            assert set(dear_hooks) == {"0", "1", "2", "3"}
            assert timed.handle.stats().kept_bytes < timed.handle.stats().unique_bytes


def test_a_handle_at_rest_is_closed_like_any_other(dear_hooks: list[str]) -> None:
    timed = Timed(max_slowdown=0.05)
    with timed.handle:
        timed.steps(UNTIL_PLAN + (CORRECTIONS + 1) * TO_JUDGE)
        assert not any("forward" in layer.__dict__ or layer.norm._forward_hooks for layer in timed.model)
    assert "forward" not in timed.model.__dict__
    with enable_over(timed.tier, timed.model, policy="keep", min_bytes=0) as handle:
        timed.steps(2)
        assert handle.stats().packs


def test_free_hooks_are_judged_and_left(caplog: pytest.LogCaptureFixture) -> None:
    timed = Timed(max_slowdown=0.05)
    with timed.handle, caplog.at_level("INFO", logger="ebbtide"):
        timed.steps(UNTIL_PLAN + TO_JUDGE + 2)
        assert timed.plan._judgement is not None and timed.plan._judgement.measured is not None
        assert "the plan keeps its promise: plain step" in caplog.text
        assert "missed" not in caplog.text
        judged = timed.plan._judgement.measured
        timed.steps(TO_JUDGE)
        assert timed.plan._judgement.measured is judged  # no further step is timed


def until_judged(timed: Timed) -> tuple[Judgement, StepTimer]:
    """Train until the plan is judged."""
    timed.steps(UNTIL_PLAN)
    while not timed.plan.judged:
        timed.steps(1)
    judgement, timer = timed.plan._judgement, timed.plan._timer
    assert judgement is not None
    return judgement, timer


def test_a_plan_that_stays_is_timed_again_later() -> None:
    """With blocks without hooks in the same steps, and all gradients equal."""
    timed = Timed(12, max_slowdown=0.5)
    with timed.handle:
        judgement, timer = until_judged(timed)
        assert judgement.measured is not None and not judgement.keeps
        before, steps = timed.plan.table, judgement.measured.steps
        compared = sorted(timer.yardsticks - timer.unhooked)
        assert compared and not timer.runs_plain(compared[0])
        timed.steps(FIRST_LOOK)
        assert timer.spans.wanted and timed.plan.judged and timer.runs_plain(compared[0])
        timed.steps(SETTLING + ADDED + 2)
        assert not timer.spans.wanted and not timer.runs_plain(compared[0])
        assert judgement.measured.steps == steps + ADDED and timed.plan.table is before
        assert f"in {steps + ADDED} steps" in timed.handle.explain()


def test_a_plan_whose_kept_blocks_are_compared_alone_is_timed_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only other block executes the plan."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(BLOCKS - 1))
    timed = Timed(max_slowdown=10.0)
    with timed.handle:
        judgement, timer = until_judged(timed)
        assert judgement.measured is not None and not timer.yardsticks
        steps = judgement.measured.steps
        timed.steps(FIRST_LOOK)
        assert timer.spans.wanted
        timed.steps(SETTLING + ADDED + 2)
        assert not timer.spans.wanted and judgement.measured.steps == steps + ADDED


def test_a_plan_is_judged_again_after_steps_that_could_not_be_compared() -> None:
    """As where for a while each backward has two forwards."""
    timed = Timed(12, max_slowdown=0.5)
    with timed.handle:
        judgement, timer = until_judged(timed)
        timed.steps(FIRST_LOOK)
        assert timer.spans.wanted and judgement.looks == 1
        for _ in range(UNUSED + 3):
            (timed.model(timed.x) + timed.model(timed.x)).square().sum().backward()
        assert not timer.spans.wanted and judgement.looks == 2
        timed.steps(timer.spans.paused + 1)
        assert timer.spans.wanted


def whole(inputs: Action) -> Callable[[Profile, float], Solution]:
    """Return a solver that checkpoints every block that allows it."""

    def shrink(profile: Profile, max_slowdown: float) -> Solution:
        return Search(profile).simulated(checkpointed(profile, len(profile.blocks), inputs))

    return shrink


@pytest.mark.parametrize("inputs", [Action.KEEP, Action.OFFLOAD])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_plan_may_checkpoint_blocks(monkeypatch: pytest.MonkeyPatch, family: str, inputs: Action) -> None:
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", whole(inputs))
    for module in ("auto", "closed_loop"):
        monkeypatch.setattr(f"ebbtide.profiling.{module}.sample", lambda *args, **kwargs: frozenset[str]())
    tiny = build(family)
    plain = tiny.step()
    with ebbtide.enable_activation_offloading(tiny.model, policy=ebbtide.Auto(), min_bytes=0, verify=True) as handle:
        for _ in range(UNTIL_PLAN):
            assert not differences(plain, tiny.step())
            assert not handle.stats().checkpointed_blocks
        for _ in range(2):
            assert not differences(plain, tiny.step())
        stats = handle.stats()
        assert stats.checkpointed_blocks == len(tiny.block_list())
        assert bool(stats.offloaded_bytes) == (inputs is Action.OFFLOAD)
        drain()
        assert_nothing_left(handle._engine)


def test_a_block_that_needs_other_ranks_to_run_again_is_not_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.wrap.checkpointable.has_collectives", lambda module: True)
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", whole(Action.KEEP))
    tiny = build("llama")
    with ebbtide.enable_activation_offloading(tiny.model, policy=ebbtide.Auto(), min_bytes=0) as handle:
        for _ in range(UNTIL_PLAN + 1):
            tiny.step()
        assert handle.plan.profile is not None  # type: ignore[attr-defined]
        assert not handle.stats().checkpointed_blocks


UNTIL_CHOSEN = 1 + 2 * ROUNDS
"""Steps of ``Minimal`` until it has tried each method."""


@pytest.mark.parametrize("family", ["llama", "gpt2", "mlp", "bart", "qwen3_moe_eager", "dropout"])
@pytest.mark.parametrize("method", [Method.CHECKPOINT, Method.RECIPES, Method.OFFLOAD])
def test_minimal_tries_each_method_and_stays_with_one(
    monkeypatch: pytest.MonkeyPatch, family: str, method: Method
) -> None:
    """In tiny blocks times mean nothing. Where a block cannot run twice, that is not tried."""
    tried: list[set[Method]] = []

    def choose(took: dict[Method, Range]) -> Method:
        tried.append(set(took))
        assert all(one.middle > 0 for one in took.values())
        return method if method in took else Method.RECIPES

    monkeypatch.setattr("ebbtide.profiling.minimal.fastest", choose)
    tiny = build(family)
    plain, seen = tiny.step(), list[tuple[int, int, int]]()
    with ebbtide.enable_activation_offloading(
        tiny.model, policy="minimal", min_bytes=0, window=1, verify=True
    ) as handle:
        window = handle._engine._window
        for _ in range(UNTIL_CHOSEN + 2):
            assert not differences(plain, tiny.step())
            stats = handle.stats()
            seen.append((stats.checkpointed_blocks, stats.recomputed_bytes, window._block_bytes))
        assert stats.kept_bytes == 0
        drain()
        assert_nothing_left(handle._engine)
    checkpointing, offloaded, last = seen[1:UNTIL_CHOSEN:2], seen[2:UNTIL_CHOSEN:2], seen[-1]
    assert all(found[0] for found in checkpointing)
    assert not any(checkpointed or recomputed for checkpointed, recomputed, _ in offloaded)
    match method if method in tried[0] else None:
        case Method.OFFLOAD:
            assert last == offloaded[-1]
        case Method.CHECKPOINT:
            assert last[0] >= max(checkpointed for checkpointed, *_ in seen)
            assert 0 < last[2] < offloaded[-1][2], "the window follows what the blocks offload now"
        case Method.RECIPES if family not in {
            "bart",
            "dropout",
        }:  # the rule checkpoints blocks that recipes cover badly
            assert last[0] == 0 and 0 < last[2] < offloaded[-1][2]
        case _:
            pass
