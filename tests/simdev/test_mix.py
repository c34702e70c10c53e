"""``Minimal`` tries a mix on an accelerator: each bit of every step, and no more memory than checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

import ebbtide
from ebbtide.engine.spans import Span
from ebbtide.planner.profile import Rates
from ebbtide.planner.table import TablePlan
from ebbtide.profiling.minimal import MOST_SKIPPED, ROUNDS, MinimalPlan
from ebbtide.profiling.trials import Method, Range, Trial
from tests.gpu.test_first_light import _batch, _model
from tests.helpers.models import Tiny
from tests.helpers.oracle import differences
from tests.helpers.recipes_only import measured_minimal
from tests.simdev.device import configured
from tests.simdev.test_memory import big, peak_of
from tests.simdev.test_policies import LATE

RATES = {"fast": 1e13, "slow": 1e6, "measured": None}
TRIALS = 2 + 2 * ROUNDS + 2
"""Steps until the choice, of which two are measured, and two after it."""


def choosing(wanted: Method, took: Mapping[Method, Range]) -> Method:
    assert set(took) in ({Method.CHECKPOINT, Method.MIXED}, {Method.RECIPES, Method.MIXED})
    return wanted if wanted in took else Method.RECIPES


def train(tiny: Tiny, plain: Tiny, handle: ebbtide.Handle) -> None:
    """Compare each step until the choice, and two more; steps in which recipes are verified do not count."""
    expected, plan, left = plain.step(), handle._engine.plan, 2
    assert isinstance(plan, MinimalPlan)
    for number in range(TRIALS + MOST_SKIPPED):
        assert differences(expected, tiny.step()) == [], number
        left -= plan.judged
        if not left:
            return
    raise AssertionError(f"no choice: {plan.explain()}")


@pytest.fixture(autouse=True)
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try every mix, however slow it is predicted to be, because times are noise here; and with less memory to spare.

    Here 3 % of a peak are as much as a block's inputs.
    """
    monkeypatch.setattr("ebbtide.profiling.solutions.FASTER", -1e9)
    monkeypatch.setattr("ebbtide.profiling.solutions.RESERVE", 0.01)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mix have more memory than checkpoints, so that it is always tried and always may stay.

    Here a mix takes within a percent of what checkpoints take, and the first step with them takes a percent more.
    """

    def peak_bytes(plan: MinimalPlan, span: Span) -> int:
        return 0 if plan.reads_kept_bytes else int(1.05 * (span.peak_bytes or 0))

    monkeypatch.setattr(MinimalPlan, "_peak_bytes", peak_bytes)


def cases(*often: tuple[object, ...], among: Iterable[tuple[object, ...]]) -> list[Any]:
    """Return cases, of which the others are slow."""
    return [pytest.param(*case, marks=[] if case in often else pytest.mark.slow) for case in among]


@pytest.mark.parametrize(
    ("name", "link", "wanted"),
    cases(
        ("llama", "fast", Method.MIXED),
        ("llama", "slow", Method.MIXED),
        ("qwen3", "measured", Method.CHECKPOINT),
        among=product(["llama", "qwen3"], RATES, [Method.MIXED, Method.CHECKPOINT]),
    ),
)
@pytest.mark.usefixtures("roomy")
def test_each_bit_while_a_mix_is_tried_and_afterwards(
    name: str, link: str, wanted: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = RATES[link]
    if rate is not None:
        rates = Rates(out_bytes_per_second=rate, in_bytes_per_second=rate)
        monkeypatch.setattr("ebbtide.profiling.trials.measured_rates", lambda tier: rates)
    monkeypatch.setattr("ebbtide.profiling.minimal.fastest", functools.partial(choosing, wanted))
    tiny, plain = big(name), big(name)
    with (
        measured_minimal(),
        ebbtide.enable_activation_offloading(tiny.model, policy="minimal", min_bytes=0, window=1) as handle,
        configured(**LATE["copies"]),
    ):
        train(tiny, plain, handle)
        text = handle.explain()
        assert text.count("kept, offloaded or recomputed tensor by tensor") == (2 if wanted is Method.MIXED else 1)
        found = handle.stats()
        assert (found.checkpointed_blocks > 0) is (wanted is Method.CHECKPOINT)
        assert found.live_tickets == found.store_bytes == 0


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("late", LATE)
def test_the_times_of_a_trial_are_those_of_its_method(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host is passes ahead of the device, and so begins the next pass before it knows the time."""
    monkeypatch.setattr("ebbtide.profiling.minimal.fastest", functools.partial(choosing, Method.MIXED))
    tried: list[bool] = []
    noted = MinimalPlan._note

    def note(plan: MinimalPlan, trial: Trial, span: Span) -> None:
        tried.append(bool(trial.checkpointed))
        assert [block.checkpointed for block in span.blocks] == [tried[-1]] * len(span.blocks)
        noted(plan, trial, span)

    monkeypatch.setattr(MinimalPlan, "_note", note)
    model, x = _model(width=64), _batch(width=64)  # its input needs no gradient: as after frozen embeddings
    with (
        measured_minimal(),
        ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window=1) as handle,
        configured(**LATE[late]),
    ):
        for _ in range(2 * TRIALS + MOST_SKIPPED):
            model.zero_grad()
            model(x).square().mean().backward()
        plan = handle._engine.plan
        assert isinstance(plan, MinimalPlan) and plan.judged and tried == [True, False] * (ROUNDS - 1)
        assert "Block blocks are kept, offloaded or recomputed tensor by tensor: a block took" in handle.explain()


@pytest.mark.usefixtures("roomy")
def test_a_mix_for_one_kind_of_blocks_only_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was not measured."""

    wanted = iter([Method.MIXED])
    monkeypatch.setattr("ebbtide.profiling.minimal.fastest", lambda took: next(wanted, Method.CHECKPOINT))
    tiny, plain = big("bart"), big("bart")
    layers = [len(tiny.model.get_submodule(f"model.{part}.layers")) for part in ("encoder", "decoder")]
    with (
        measured_minimal(),
        ebbtide.enable_activation_offloading(tiny.model, policy="minimal", min_bytes=0, window=1) as handle,
    ):
        train(tiny, plain, handle)
        assert handle.explain().count("a mix is not faster for all kinds of blocks") == 2, handle.explain()
        assert handle.stats().checkpointed_blocks == sum(layers) > 0


@pytest.mark.parametrize(
    ("name", "link"),
    cases(("llama", "fast"), ("bart", "slow"), among=product(["llama", "qwen3", "bart"], ["fast", "slow"])),
)
def test_the_peak_of_a_mix_is_at_most_that_of_checkpoints(
    name: str, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates(out_bytes_per_second=RATES[link] or 0.0, in_bytes_per_second=RATES[link] or 0.0)
    monkeypatch.setattr("ebbtide.profiling.trials.measured_rates", lambda tier: rates)
    peaks: dict[Method, int] = {}
    for wanted in (Method.CHECKPOINT, Method.MIXED):
        monkeypatch.setattr("ebbtide.profiling.minimal.fastest", functools.partial(choosing, wanted))
        tiny, plain = big(name), big(name)
        with (
            measured_minimal(),
            ebbtide.enable_activation_offloading(tiny.model, policy="minimal", min_bytes=0, window=1) as handle,
        ):
            train(tiny, plain, handle)
            mixed = isinstance(getattr(handle._engine.plan, "current", None), TablePlan)
            assert mixed is (wanted is Method.MIXED), handle.explain()
            peaks[wanted] = peak_of(tiny.step)
    print(name, link, peaks)
    assert 0 < peaks[Method.MIXED] <= peaks[Method.CHECKPOINT]
