"""Random graphs under every policy are bitwise plain autograd, or fail where it fails. Invariants 1, 4, 5 and 6."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.engines import (
    POLICIES,
    Backward,
    Observed,
    all_at_once,
    assert_nothing_left,
    compare,
    hooks_are_closed,
    observe,
    open_engine,
)
from tests.helpers.graphs import CHANGES, OPERATORS, Graph, Schedule, graphs, leaves, schedules
from tests.helpers.oracle import Oracle

LEAVES = leaves()
RATES = st.sampled_from([10.0, 1e3, 1e9])
WINDOWS = st.sampled_from([1, 200, 1 << 20])


def is_an_operand_that_changed(got: Observed) -> bool:
    """The one operation that is legal without hooks but refused with them: test_in_place.py and test_operands.py."""
    refusals = (
        "needed to recompute another tensor and was changed in place",
        "weight changed between the forward and the backward that recomputes",
    )
    return got.error is not None and any(refusal in got.message for refusal in refusals)


def check(
    graph: Graph,
    policy: str,
    tier: str,
    *,
    rate: float,
    window_bytes: int,
    thread: bool,
    backward: Backward = all_at_once,
) -> None:
    if isinstance(backward, Schedule) and backward.makes_graphs:
        thread = False  # autograd orders nodes by numbers that each thread counts alone: sums differ in the last bit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch raises this in ordinary training too
        # In a thread of its own plain autograd, too, sums in another order if a view was changed in place.
        expected = observe(graph, LEAVES, blocks=True, thread=thread, backward=backward)
        before = len(Oracle.alive)
        copied = observe(graph, LEAVES, "oracle", blocks=True, thread=thread, backward=backward)
        leaks = len(Oracle.alive) > before
        if expected.error is None:
            assert compare(expected, copied) == []
        with open_engine(policy, tier, rate=rate, window_bytes=window_bytes, verify=thread) as engine:
            for _ in range(2):  # the second time recipes are trusted
                got = observe(graph, LEAVES, engine, blocks=True, thread=thread, backward=backward)
                if not (engine.plan.recomputes and is_an_operand_that_changed(got)):
                    assert compare(expected, got) == []
                assert hooks_are_closed()
                if leaks:
                    return
                assert_nothing_left(engine)


POLICY = st.sampled_from(sorted(POLICIES))
TIER = st.sampled_from(["host", "host", "host", "disk"])


@settings(max_examples=200)
@given(graphs(), POLICY, RATES, WINDOWS, st.booleans())
def test_gradients_are_those_of_plain_training(
    graph: Graph, policy: str, rate: float, window_bytes: int, thread: bool
) -> None:
    check(graph, policy, "host", rate=rate, window_bytes=window_bytes, thread=thread)


@settings(max_examples=200)
@given(graphs(changes=True), POLICY, RATES, WINDOWS, st.booleans())
@example(
    Graph((("part_", 0, 0, 0), ("add", 0, 0, 0), ("add", 0, 0, 0), ("no_grad_", 3, 0, 0)), (0, 2, 3)),
    "auto",
    10,
    1,
    True,
)
def test_changes_in_place_raise_what_plain_training_raises(
    graph: Graph, policy: str, rate: float, window_bytes: int, thread: bool
) -> None:
    check(graph, policy, "host", rate=rate, window_bytes=window_bytes, thread=thread)


@settings(max_examples=200)
@given(graphs(), schedules(), POLICY, RATES, WINDOWS, st.booleans())
def test_several_backwards_in_any_order(
    graph: Graph, schedule: Schedule, policy: str, rate: float, window_bytes: int, thread: bool
) -> None:
    check(graph, policy, "host", rate=rate, window_bytes=window_bytes, thread=thread, backward=schedule)


@settings(max_examples=100)
@given(graphs(changes=True), schedules(touch=True), POLICY, WINDOWS, st.booleans())
def test_the_disk_gives_the_same_bits(
    graph: Graph, schedule: Schedule, policy: str, window_bytes: int, thread: bool
) -> None:
    check(graph, policy, "disk", rate=1, window_bytes=window_bytes, thread=thread, backward=schedule)


@pytest.mark.parametrize("name", [*OPERATORS, *CHANGES])
def test_every_operator_that_is_drawn_can_be_computed(name: str) -> None:
    """An operator that fails on every shape would only seem to be covered."""
    computed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for before in ("silu", "view", "sum", "to_fp64"):
            for k in range(3):
                graph = Graph(((before, 0, 1, k), (name, 0, 2, k), ("mul", 0, 1, 0)), (0,))
                computed += observe(graph, LEAVES, blocks=True).error is None
    assert computed


@pytest.mark.slow
@settings(max_examples=4000)
@given(graphs(changes=True, most=30), schedules(touch=True, most=6), POLICY, TIER, RATES, WINDOWS, st.booleans())
def test_long_graphs(
    graph: Graph, schedule: Schedule, policy: str, tier: str, rate: float, window_bytes: int, thread: bool
) -> None:
    check(graph, policy, tier, rate=rate, window_bytes=window_bytes, thread=thread, backward=schedule)


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_four_storages_and_a_window_that_holds_three(policy: str) -> None:
    graph = Graph((("add", 0, 0, 0), ("flip", 2, 0, 0), ("turn", 0, 0, 0), ("div", 2, 1, 0)), (1,))
    check(graph, policy, "host", rate=1000.0, window_bytes=200, thread=False)
