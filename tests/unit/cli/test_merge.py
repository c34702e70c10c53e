import pytest

from ebbtide.cli.merge import latest_complete_round, loss_equal, medians, merge, step_ratio

MIB = 1024**2


def summary(seconds=1.0, loss=(1.0, 0.5), activation=100, **fields):
    activation *= MIB
    outside = {"activation_bytes": activation, "peak_bytes": 2 * activation}
    return {"step_seconds_median": seconds, "loss": list(loss), "device": "cpu", "outside": outside, **fields}


@pytest.mark.parametrize(
    ("values", "joined"),
    [
        ([3, 1, 2], 2),
        ([1, 2], 1.5),
        ([1, 3], 2),
        ([1.0, None, 2.0], None),
        ([True, False], False),
        (["a", "b"], "b"),
        ([{"x": 1, "y": None}, {"x": 5, "y": None}], {"x": 3, "y": None}),
        ([{"x": 1}, None], None),
        ([None, {"x": 1}], None),
        ([[1, 2], [3]], [3]),
        ([None, None], None),
    ],
)
def test_rounds_join_to_medians_of_what_all_know(values, joined):
    result = medians(values)
    assert result == joined and type(result) is type(joined)


def test_step_times_are_compared_within_a_round():
    rounds = {
        1: {"plain": summary(1.0), "ebbtide": summary(1.1)},
        2: {"plain": summary(10.0), "ebbtide": summary(12.0)},
    }
    rounds[3] = {"ebbtide": summary(99.0)}
    assert step_ratio(rounds, "ebbtide") == {"median": pytest.approx(1.15), "low": 1.1, "high": 1.2}
    assert step_ratio({1: {"ebbtide": summary()}}, "ebbtide") is None


def test_ordinary_training_twice_is_one_yardstick():
    """Of two equal runs, one may be slower throughout."""

    def steps(*seconds):
        return summary(seconds[0], step_seconds=list(seconds), lockstep=True)

    rounds = {1: {"plain": steps(3.0, 6.0), "ebbtide": steps(2.2, 4.4), "plain-again": steps(1.0, 2.0)}}
    for mode, ratio in (("ebbtide", 1.1), ("plain", 1.5), ("plain-again", 0.5)):
        assert step_ratio(rounds, mode) == {key: pytest.approx(ratio) for key in ("median", "low", "high")}
    one_by_one = {1: {mode: summary(found["step_seconds"][0]) for mode, found in rounds[1].items()}}
    assert step_ratio(one_by_one, "ebbtide")["median"] == pytest.approx(1.1)
    assert step_ratio({1: {"ebbtide": steps(1.0)}}, "ebbtide") is None


@pytest.mark.parametrize(
    ("plain", "ours", "equal"),
    [
        ([[1.0, 0.5], [1.0, 0.5]], [[1.0, 0.5], [1.0, 0.5]], True),
        ([[1.0, 0.5], [1.0, 0.5]], [[1.0, 0.5], [1.0, 0.5000000000000001]], False),
        ([[1.0, 0.5], [1.0, 0.6]], [[1.0, 0.5], [1.0, 0.5]], False),
        ([[1.0, 0.5]], [[1.0]], False),
        ([[1.0, None]], [[1.0, None]], None),
        ([[]], [[]], None),
        ([["nan"]], [["nan"]], True),
    ],
)
def test_losses_are_equal_only_if_every_one_of_every_round_is(plain, ours, equal):
    rounds = {
        turn: {"plain": summary(loss=p), "ebbtide": summary(loss=o)}
        for turn, (p, o) in enumerate(zip(plain, ours, strict=True))
    }
    assert loss_equal(rounds, "ebbtide") is equal


def test_a_mode_that_never_ended_well_is_listed_with_its_failures():
    rounds = {1: {"plain": summary(activation=100), "ebbtide": summary(activation=25)}}
    modes = merge(rounds, ["plain", "checkpointing", "ebbtide"], {"checkpointing": ["round 1: exit code 3"]})
    assert [mode["mode"] for mode in modes] == ["plain", "checkpointing", "ebbtide"]
    assert [mode["status"] for mode in modes] == ["ok", "error", "ok"]
    assert [mode["rounds"] for mode in modes] == [1, 0, 1]
    assert [mode["saved_percent"] for mode in modes] == [None, None, 75.0]
    assert modes[1]["failures"] == ["round 1: exit code 3"]


def test_pictures_show_the_last_round_that_is_whole_else_the_last_of_each():
    assert latest_complete_round({1: {"a": 1, "b": 2}, 2: {"a": 3}}, ["a", "b"]) == [1, 2]
    assert latest_complete_round({1: {"b": 2}, 2: {"a": 3}, 3: {"a": 4}}, ["a", "b", "c"]) == [4, 2]
    assert latest_complete_round({}, ["a"]) == []


@pytest.mark.parametrize(
    ("plain", "ours", "saved"),
    [(100, 25, 75.0), (100, -5, 100.0), (1, 2, None), (-5, 1, None)],
    ids=["less", "below the floor", "both are noise", "unknown"],
)
def test_savings_never_exceed_the_baseline(plain, ours, saved):
    """GRPO reported 107 %: the floor still held memory of the generation, which the forward reused."""
    rounds = {1: {"plain": summary(activation=plain), "ebbtide": summary(activation=ours)}}
    assert merge(rounds, ["plain", "ebbtide"], {})[1]["saved_percent"] == saved
