"""Blocks of which a plan keeps everything have nothing installed on them. See [Note: rest] in ``ebbtide.wrap.rest``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ebbtide.wrap.plain import plain_site
from tests.unit.test_promise import UNTIL_PLAN, Timed, calls_of_ours, last_kept

BLOCKS = 6


def replaced(timed: Timed) -> list[int]:
    """Return the blocks whose forward is replaced."""
    return [place for place, block in enumerate(timed.model) if "forward" in vars(block)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timed]:
    """A judged plan that keeps everything of the last four of six blocks."""
    monkeypatch.setattr("ebbtide.profiling.closed_loop.shrink_hooked", last_kept(4))
    monkeypatch.setattr("ebbtide.profiling.closed_loop.YARDSTICKS", 0)
    timed = Timed(BLOCKS, max_slowdown=10.0)
    with timed.handle:
        timed.steps(UNTIL_PLAN)
        while not timed.plan.judged:
            timed.steps(1)
        timed.steps(2)
        yield timed


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


def test_a_larger_batch_gets_hooks_on_all_blocks_before_its_first_one_runs(timed: Timed) -> None:
    before = timed.handle.stats()
    timed.x = torch.cat([timed.x, timed.x])
    timed.gradients()
    assert replaced(timed) == list(range(BLOCKS))
    stats = timed.handle.stats()
    assert stats.unique_bytes == 2 * before.unique_bytes
    assert stats.kept_bytes < 2 * before.kept_bytes


def test_other_trained_weights_end_the_rest_until_it_is_known_what_is_saved(timed: Timed) -> None:
    timed.model[3].norm.weight.requires_grad_(requires_grad=False)
    timed.model(timed.x).square().sum().backward()
    assert replaced(timed) == list(range(BLOCKS))
    for _ in range(3):
        timed.model(timed.x).square().sum().backward()
    assert replaced(timed) == [0, 1, 5]


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
    timed.steps(2)
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
