"""A step that differs from the previous one is treated as if nothing were remembered of it. [Note: memo]."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.base.actions import Action
from ebbtide.engine import Engine
from tests.helpers.engines import ByTable, Observed, assert_nothing_left, compare, observe, open_engine
from tests.helpers.graphs import Graph, graphs, leaves
from tests.property.test_engine_graphs import is_an_operand_that_changed

LEAVES = leaves()
ACTIONS = [Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE]


class Settled(ByTable):
    """Any action for any site; for some sites it promises in advance not to recompute."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda c: ACTIONS[self.number(c) % 3])
        self._seed = seed

    def number(self, candidate: Any) -> int:
        return zlib.crc32(f"{self._seed} {candidate.site}".encode())

    def needs_recipe(self, candidate: Any) -> bool:
        return self.number(candidate) % 3 == 2 or bool(self.number(candidate) & 64)


class Sparing(ByTable):
    """Keeps what fits into a few bytes, and announces its actions in advance."""

    def __init__(self, most: int) -> None:
        super().__init__(lambda c: Action.KEEP if c.kept_bytes + c.nbytes <= most else Action.OFFLOAD)

    def needs_recipe(self, candidate: Any) -> bool:
        return False


def plan_of(seed: int) -> ByTable:
    return Sparing(100 * seed) if seed % 4 == 0 else Settled(seed)


@st.composite
def changed(draw: st.DrawFn) -> tuple[Graph, Graph]:
    """A graph, and a copy with an instruction left out, added, or replaced."""
    graph, other = draw(graphs(changes=True)), draw(graphs(changes=True, most=5))
    where = draw(st.integers(0, len(graph.steps)))
    end = where + draw(st.integers(0, 1))
    new = other.steps[: draw(st.integers(0, 2))]
    return graph, Graph((*graph.steps[:where], *new, *graph.steps[end:]), graph.heads)


def step(graph: Graph, engine: Engine) -> tuple[Observed, object]:
    got = observe(graph, LEAVES, engine, blocks=True)
    done = engine.last_pass
    counts = {name: getattr(done.tally, name) for name in done.tally.__slots__ if name != "replayed"}
    kept_bytes = engine.kept.total if got.error is None else None  # a failed pass is released when the next one begins
    return got, (counts, {key: value for key, value in done.sites.items() if value[0]}, kept_bytes)


@settings(max_examples=300)
@given(
    changed(),
    st.lists(st.booleans(), min_size=2, max_size=4),
    st.integers(0, 99),
    st.sampled_from([0, 1, 100, 1 << 20]),
)
def test_a_changed_graph_is_analysed_again(
    pair: tuple[Graph, Graph], order: list[bool], seed: int, window_bytes: int
) -> None:
    """The same bits, and the same bytes under the same actions at the same sites, as without any memo."""
    with (
        warnings.catch_warnings(),
        open_engine(plan_of(seed), window_bytes=window_bytes or 1, min_bytes=0 if window_bytes else 64) as engine,
        open_engine(plan_of(seed), window_bytes=window_bytes or 1, min_bytes=0 if window_bytes else 64) as anew,
    ):
        warnings.simplefilter("ignore")
        anew.replays = False
        for graph in (pair[0], *(pair[second] for second in order)):
            expected = observe(graph, LEAVES, blocks=True)
            got, counted = step(graph, engine)
            without, counted_anew = step(graph, anew)
            assert (counted, got.message) == (counted_anew, without.message)
            if not is_an_operand_that_changed(got):
                assert compare(expected, got) == []
            assert_nothing_left(engine)
        assert anew.stats().replayed == 0


def test_an_unchanged_step_is_recognised() -> None:
    graph = Graph((("silu", 0, 0, 0), ("exp", 0, 0, 0), ("|", 0, 0, 0), ("tanh", 0, 0, 0), ("mul", 0, 1, 0)), (0,))
    with open_engine("offload") as engine:
        found = []
        for _ in range(3):
            step(graph, engine)
            found.append((engine.stats().packs, engine.stats().replayed))
    assert found[0] == (6, 0) and found[1] == found[2] == (6, 6), found
