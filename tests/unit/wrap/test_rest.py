"""Blocks of which a plan keeps everything have nothing installed on them. See [Note: rest] in ``ebbtide.wrap.rest``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ebbtide.base.actions import Action
from ebbtide.wrap.plain import plain_site, within
from tests.unit.test_promise import UNTIL_PLAN, Layer, Timed, calls_of_ours, last_kept, until_judged

BLOCKS = 6


def replaced(timed: Timed) -> list[int]:
    """Return the blocks whose forward is replaced."""
    return [place for place, block in enumerate(timed.model) if "forward" in vars(block)]


@pytest.fixture
def unjudged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """A plan that will keep everything of the last four of six blocks."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(4))
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)
    timed = Timed(BLOCKS, max_slowdown=10.0)
    with timed.handle:
        yield timed


@pytest.fixture
def timed(unjudged: Timed) -> Timed:
    """The same, judged: what it keeps rests."""
    until_judged(unjudged)
    unjudged.steps(2)
    return unjudged


def test_of_the_kept_blocks_after_others_only_the_last_has_its_forward_replaced(timed: Timed) -> None:
    assert replaced(timed) == [0, 1, 5], "the last one's backward starts the prefetches of the first two"
    for block in list(timed.model)[2:5]:
        assert not block._forward_pre_hooks and not block.inner._forward_hooks


def test_no_function_of_ours_runs_for_a_block_that_rests(timed: Timed) -> None:
    calls = calls_of_ours(timed.gradients)
    assert calls["Attachment._block_call"] == 3 and calls["PlainBlocks.call"] == 1


def test_prefetches_start_when_the_backward_of_the_last_block_does(timed: Timed) -> None:
    loss, begun = timed.model(timed.x).square().sum(), list[tuple[int, float]]()
    restorer, begin = timed.handle._engine.restorer, timed.handle._engine.restorer.begin_block
    restorer.begin_block = lambda run, task: (begun.append((run.number, timed.device.now_seconds)), begin(run, task))[1]  # type: ignore[method-assign]
    before = timed.device.now_seconds
    loss.backward()
    assert begun[0] == (1, before), "before any block's backward took time"


def test_what_a_resting_block_keeps_counts_as_before(timed: Timed) -> None:
    stats, blocks = timed.handle.stats(), list[int]()
    sites = dict(timed.handle._engine.last_pass.sites)
    deaf = timed.handle._engine.bus.subscribe(
        lambda kind, fields: blocks.append(fields["unique_bytes"]) if kind == "block" else None
    )
    timed.steps(1)
    assert replaced(timed) == list(range(BLOCKS)), "each block reports to a listener"
    heard = timed.handle.stats()
    assert (heard.unique_bytes, heard.kept_bytes) == (stats.unique_bytes, stats.kept_bytes)
    assert sum(blocks) == stats.unique_bytes
    assert dict(timed.handle._engine.last_pass.sites) == sites
    deaf()
    timed.steps(1)
    assert replaced(timed) == [0, 1, 5]


def test_a_smaller_batch_keeps_as_much_less(timed: Timed) -> None:
    def plain() -> tuple[int, int]:
        sites = timed.handle._engine.last_pass.sites
        [found] = [sites[site, action] for site, action in sites if site == plain_site("Layer")]
        return found

    blocks, full = plain()
    timed.x = timed.x[:8]
    timed.gradients()
    assert replaced(timed) == [0, 1, 5]
    assert blocks == 4 and plain() == (4, full // 2)


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """A plan that keeps everything: all blocks rest."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(BLOCKS))
    monkeypatch.setattr("ebbtide.profiling.closed_loop.WORTH", 2.0)
    timed = Timed(BLOCKS, max_slowdown=10.0)
    with timed.handle:
        timed.steps(UNTIL_PLAN + 3)
        assert not replaced(timed)
        yield timed


def test_once_all_blocks_rest_the_sites_of_the_latest_pass_are_those_of_its_batch(resting: Timed) -> None:
    """``stats()`` has its sums, and ``explain()`` its lines."""
    full = resting.handle.stats().unique_bytes
    for size in (8, 16, 4):
        resting.model(torch.randn(size, 8)).square().sum().backward()
        assert not replaced(resting)
        stats, sites = resting.handle.stats(), resting.handle._engine.last_pass.sites
        assert stats.unique_bytes == stats.kept_bytes == full * size // 16
        assert sites == {(plain_site("Layer"), Action.KEEP): (BLOCKS, stats.kept_bytes)}


def test_a_larger_batch_gets_hooks_on_all_blocks_before_its_first_one_runs(timed: Timed) -> None:
    before = timed.handle.stats()
    timed.x = torch.cat([timed.x, timed.x])
    timed.gradients()
    assert replaced(timed) == list(range(BLOCKS))
    stats = timed.handle.stats()
    assert stats.unique_bytes == 2 * before.unique_bytes
    assert stats.kept_bytes < 2 * before.kept_bytes


def test_other_trained_weights_end_the_rest_until_it_is_known_what_is_saved(timed: Timed) -> None:
    before = timed.handle.stats().unique_bytes
    for trained in (False, True):
        for parameter in timed.model[3].parameters():
            parameter.requires_grad_(trained)
        timed.model(timed.x).square().sum().backward()
        assert replaced(timed) == list(range(BLOCKS))
        awake = timed.handle.stats().unique_bytes
        assert (awake == before) is trained
        for _ in range(3):
            timed.model(timed.x).square().sum().backward()
            assert timed.handle.stats().unique_bytes == awake
        assert replaced(timed) == [0, 1, 5]


def test_a_trained_module_that_is_added_once_all_blocks_rest_ends_the_rest(resting: Timed) -> None:
    resting.model[3].added = nn.Linear(8, 8)
    resting.model(resting.x).square().sum().backward()
    assert replaced(resting) == list(range(BLOCKS))


class _SavesMore(nn.LayerNorm):
    """Has the weights of its parent."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.sin().cos())


def test_a_module_that_is_replaced_by_one_with_equal_weights_ends_the_rest(timed: Timed) -> None:
    before, block = timed.handle.stats().unique_bytes, timed.model[3]
    block.norm = _SavesMore(8)
    timed.model(timed.x).square().sum().backward()
    assert replaced(timed) == list(range(BLOCKS))
    assert timed.handle.stats().unique_bytes > before


def test_an_input_that_takes_a_gradient_ends_the_rest_until_it_is_known_what_is_saved(timed: Timed) -> None:
    timed.model(timed.x.requires_grad_()).square().sum().backward()
    assert replaced(timed) == list(range(BLOCKS))
    awake = timed.handle.stats().unique_bytes
    for _ in range(3):
        timed.model(timed.x).square().sum().backward()
        assert timed.handle.stats().unique_bytes == awake
    assert replaced(timed) == [0, 1, 5]


def test_an_input_with_other_dimensions_brings_hooks_until_it_is_known_what_is_saved(timed: Timed) -> None:
    """As many elements: fewer, longer sequences save more where attention is quadratic."""
    for known in (False, True):
        timed.model(timed.x.view(2, 8, 8)).square().sum().backward()
        assert replaced(timed) == list(range(BLOCKS))
        assert (plain_site("Layer") in {site for site, _ in timed.handle._engine.last_pass.sites}) is known


class _Attends(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x @ x.transpose(-1, -2)).softmax(-1) @ x)


def test_fewer_longer_sequences_are_counted_with_what_they_save(unjudged: Timed) -> None:
    timed = unjudged
    for layer in timed.model:
        layer.__class__ = _Attends
    timed.x = torch.randn(8, 2, 8)
    timed.expected = timed.gradients()
    until_judged(timed)
    before = timed.handle.stats()
    timed.model(timed.x.view(1, 16, 8)).square().sum().backward()
    stats = timed.handle.stats()
    assert stats.unique_bytes > 1.2 * before.unique_bytes
    assert stats.kept_bytes < 1.1 * before.kept_bytes


@pytest.mark.parametrize(
    ("shapes", "fits"),
    [
        (((4, 100), (4, 50)), True),
        (((4, 110), (4, 10)), True),
        (((4, 111), (4, 10)), False),
        (((4, 10), (4, 56)), False),  # labels grow, as many features
        (((2, 200), (4, 50)), False),
        (((4, 100),), False),
        (((4, 100, 1), (4, 50)), False),
        ((), False),
    ],
)
def test_each_dimension_of_each_input_counts(shapes: tuple[tuple[int, ...], ...], fits: bool) -> None:
    measured = [torch.Size((4, 100)), torch.Size((4, 50))]
    assert within(list(map(torch.Size, shapes)), measured) is fits


def test_blocks_that_are_called_without_the_model_have_everything_installed(timed: Timed) -> None:
    before, layers = timed.handle.stats().unique_bytes, list(timed.model)
    for _ in range(2):
        y = timed.x
        for layer in layers:
            y = layer(y)
        y.square().sum().backward()
        assert replaced(timed) == list(range(BLOCKS))
    assert timed.handle.stats().unique_bytes == before
    timed.steps(3)
    assert replaced(timed) == [0, 1, 5] and timed.handle.stats().unique_bytes == before


def test_a_block_whose_forward_somebody_has_wrapped_does_not_rest(timed: Timed) -> None:
    before, block = timed.handle.stats().unique_bytes, timed.model[3]
    bus = timed.handle._engine.bus
    deaf = bus.subscribe(lambda kind, fields: None)  # wakes all
    timed.steps(1)
    deaf()
    ours = block.forward
    block.forward = lambda x: ours(x)
    for _ in range(3):
        timed.steps(1)
        assert timed.handle.stats().unique_bytes == before
    assert replaced(timed) == [0, 1, 3, 5]
    block.forward = ours
    timed.handle.close()
    assert replaced(timed) == []


class _Reversed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self):
            x = block(x)
        return x


def test_the_last_block_is_the_one_that_runs_last(unjudged: Timed) -> None:
    unjudged.model.__class__ = _Reversed
    unjudged.expected = unjudged.gradients()
    until_judged(unjudged)
    unjudged.steps(2)
    assert replaced(unjudged) == [0, 4, 5]


def test_a_pass_that_is_timed_ends_the_rest(timed: Timed) -> None:
    timer = timed.plan._timer
    assert timer is not None
    timer.spans.want()
    timed.steps(1)
    assert replaced(timed) == list(range(BLOCKS))


def test_another_plan_ends_the_rest_of_the_blocks_that_it_does_not_keep(timed: Timed) -> None:
    timer = timed.plan._timer
    assert timer is not None
    timer.unhooked = frozenset({"0", "4", "5"})
    timed.steps(1)
    assert replaced(timed) == list(range(BLOCKS))
    timed.steps(1)
    assert replaced(timed) == [1, 2, 3, 5], "block 0 rests, for nothing before it is prefetched"


def test_a_block_that_leaves_the_model_while_it_rests_stays_as_it_is(timed: Timed) -> None:
    block = timed.model[3]
    del timed.model[3]
    timed.model(timed.x).square().sum().backward()
    timed.handle.close()
    assert "forward" not in vars(block)
    assert replaced(timed) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_block_that_is_compiled_while_it_rests_counts_once(timed: Timed) -> None:
    before = timed.handle.stats().unique_bytes
    timed.model[3].compile(backend="eager")
    for _ in range(3):
        timed.gradients()
        assert timed.handle.stats().unique_bytes == before
