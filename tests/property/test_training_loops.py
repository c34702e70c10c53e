"""Training loops under every policy are bitwise ordinary training, step for step. Invariants 1, 4, 6 and 7.

See [Note: a program] in ``loop_programs`` and [Note: verdict] in ``loops``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.helpers.loop_limits import LIMITS, Limit, excuse
from tests.helpers.loop_parts import WIDTH
from tests.helpers.loop_programs import (
    CALLS,
    EVENTS,
    LOOPS,
    OPTIMIZERS,
    PARTS,
    PRECISIONS,
    TRAINS,
    Event,
    Part,
    Program,
    Setting,
    programs,
    settings_of_ebbtide,
)
from tests.helpers.loops import Failure, check, difference, identity_hooks, judge, shrunk, train

SEED = int(os.environ.get("EBBTIDE_TEST_SEED", "20"))
REFUSED = {"part:in_place:2", "part:in_place:5", "loop:two_losses", "loop:gan_d_first", "event:noise_copied",
           "event:ema_copied_between", "event:loaded_between", "event:input_changed_between",
           "event:stepped_between"}  # fmt: skip
"""Features that plain training refuses when they are alone in a program."""


def hunt(shard: int, examples: int, most: int) -> None:
    """Draw programs; the first that fails is shrunk and printed with the command that repeats it."""

    @seed(SEED * 1000 + shard)
    @settings(max_examples=examples, database=None, phases=[Phase.generate], print_blob=False)
    @given(programs(most=most), settings_of_ebbtide())
    def run(program: Program, setting: Setting) -> None:
        verdict = check(program, setting)
        if verdict and not verdict.startswith("excused"):
            least = shrunk(program, setting)
            pytest.fail(
                f"{verdict}\ndrawn: {program!r} {setting!r}\n"
                f'again: python -m tests.helpers.loops "{least[0]!r}" "{least[1]!r}"',
                pytrace=False,
            )

    run()


@pytest.mark.parametrize("shard", [0, 1, *(pytest.param(shard, marks=pytest.mark.slow) for shard in (2, 3))])
def test_training_programs_give_the_bits_of_plain_training(shard: int) -> None:
    hunt(shard, 40, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(100, 110))
def test_thousands_of_training_programs(shard: int) -> None:
    hunt(shard, 500, 4)


def once(*parts: str | tuple[str, int], late: int = 0, block: int = 0, **given: object) -> Program:
    """Return a program of parts by name, and of events by name."""
    pairs = [(p, 0) if isinstance(p, str) else p for p in parts]
    made = tuple(Part(kind=k, variant=v, step=late, block=block) for k, v in pairs) or (Part(kind="mlp"),)
    events = tuple(Event(kind=str(e)) for e in given.pop("events", ()))  # type: ignore[attr-defined]
    return Program(parts=made, events=events, **given)  # type: ignore[arg-type]


ONCE_WRONG = {
    "fused step before the generator's backward": once(
        loop="gan_d_first", optimizer="adamw_fused", precision="autocast"
    ),
    "fused step between two losses": once(
        "norm", ("mlp", 1), loop="two_losses", optimizer="sgd_fused", trains="biases"
    ),
    "noise on weights through data": once(events=["weight_noise"]),
    "adapters merged between": once("adapters", events=["merged_between"]),
    "absent bias of a functional norm": once("functional_norm", trains="no_biases"),
    "frozen weight by shape, pruned": once("masked", late=1, trains="biases", precision="autocast"),
    "frozen weight by shape, weight norm": once("made_weight", loop="gan", precision="autocast"),
    "functional call, re-run whole": once(loop="functional"),
    "fast weights, re-run whole": once(loop="fast_weights"),
    "adapters switched between": once("adapters", events=["switched_between"]),
    "a tuple set before each call": once("states", calls="shared", blocks=3),
    "memory of the call before": once("memory"),
    "a generator of one's own in a list": once(("generators", 1)),
    "a generator of Python's": once(("generators", 4)),
    "a generator of a module": once(("generators", 3)),
    "parameters swapped between": once(events=["swapped_parameters"]),
    "changed in place after it was saved, late": once(("in_place", 2), late=2, steps=4),
    "frozen between": once(events=["frozen_between"]),
    "a parameter decayed in forward": once("decay", late=2, steps=5),
    "a merged weight kept over a step": once("cached", trains="no_stem", steps=5),
    "two steps in one autocast": once(loop="one_autocast"),
    "precision of convolutions around forward": once(("conv", 1), ("regions", 5), events=["conv_precision"]),
    "data assigned between": once("norm", events=["data_assigned"]),
    "a copy made by a cast to the same dtype": once("copied"),
    "a clamp in deeper blocks only": once("clamped", block=1),
    "TF32 asked for by the current setting": once(events=["tf32_asked"]),
    "jagged attention": once(("attention", 3)),
    "deterministic with warnings only": once(events=["deterministic"]),
    "statistics of a functional batch norm": once("functional_norm"),
    "a buffer replaced late": once(("memory", 3), late=2, steps=4),
    "fused steps in backward, a retained graph": once(("conv", 1), loop="retained", optimizer="in_backward_fused"),
}
"""Programs that were found to train with wrong gradients, to raise where plain training trains, or the reverse."""


@pytest.mark.parametrize("policy", ["auto", "minimal", "offload", "checkpoint"])
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_once_wrong(name: str, policy: str) -> None:
    verdict = check(ONCE_WRONG[name], Setting(policy=policy))
    assert not verdict or verdict.startswith("excused"), verdict


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name)
def test_a_documented_limit_still_shows(limit: Limit) -> None:
    """A limit that does not show must be deleted, in ``loop_limits`` and in the documentation."""
    assert check(limit.example, limit.setting) == f"excused: {limit.name}"


def singles() -> list[Program]:
    """Return a program for every feature that can be drawn."""
    parts = [Part(kind=k, variant=v, step=1, block=1) for k, count in PARTS.items() for v in range(count)]
    return [
        *(Program(parts=(part,), steps=2, lengths=(4, 6)) for part in parts),
        *(Program(loop=loop, steps=2) for loop in LOOPS),
        *(Program(events=(Event(kind=event),), parts=(Part(kind="adapters"),), steps=2) for event in EVENTS),
        *(Program(optimizer=optimizer, steps=2) for optimizer in OPTIMIZERS),
        *(Program(calls=calls, parts=(Part(kind="states"),), steps=2) for calls in dict.fromkeys(CALLS)),
        *(Program(trains=trains, parts=(Part(kind="norm"),), steps=2) for trains in dict.fromkeys(TRAINS)),
        *(Program(precision=precision, steps=2) for precision in dict.fromkeys(PRECISIONS)),
    ]


def test_every_feature_that_is_drawn_trains_plainly() -> None:
    """A feature that always fails would only seem to be covered."""
    for program in singles():
        failure = train(program).failure
        assert (failure is not None) == bool(program.features & REFUSED), f"{program}: {failure}"


@seed(SEED)
@settings(max_examples=40, database=None)
@given(programs(most=2), st.booleans())
def test_plain_training_repeats_itself(program: Program, hooks: bool) -> None:
    """Else a difference would say nothing about ebbtide. Hooks that change nothing must not change a training."""
    one, other = train(program), train(program, around=identity_hooks) if hooks else train(program)
    if one.failure is None or not hooks:
        assert str(one.failure) == str(other.failure)
        assert not any(difference(a, b) for a, b in zip(one.steps, other.steps, strict=True))


def test_a_training_that_differs_is_reported() -> None:
    program, setting = Program(steps=2), Setting()
    plain, got = train(program), train(program, setting)
    assert judge(program, setting, plain, got) == ""
    name = "gradient of stem.weight"
    assert plain.steps[1][name].shape == (WIDTH, WIDTH)
    plain.steps[1][name][0, 0] *= 1.0000002
    assert judge(program, setting, plain, got).startswith("step 1: WRONG BITS: 1 of ")
    failed = Failure(step=1, phase="backward", kind="RuntimeError", text="planted", own=False)
    ended = type(got)(steps=got.steps[:1], failure=failed, left="")
    assert judge(program, setting, got, ended).startswith("CRASH")
    assert judge(program, setting, ended, got).startswith("MISSING ERROR")
    assert judge(program, setting, ended, ended) == ""
    assert excuse(program, setting, "ModifiedInPlaceError") == ""
