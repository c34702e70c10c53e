"""Scripts without ebbtide, switched from outside: each shape of a loop, bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.cli.run import _ending
from ebbtide.script.request import why_uncounted, why_untrained
from ebbtide.script.steps import MOST_LOSSES
from tests.helpers.switched import run_switched

SCRIPTS = Path(__file__).with_name("scripts")
LOOP, TRAINERS = SCRIPTS / "loop.py", SCRIPTS / "trainers.py"

SHAPES = {
    "plain": ["Layers"],
    "accumulated": ["Layers"],
    "closure": ["Layers"],
    "released": ["Layers"],
    "released_each": ["Layers"],
    "adversaries": ["Layers", "Layers"],
    "passed": ["Layers", "Layers"],
    "outer": ["Layers", "Sequential"],
    "compiled": ["Layers"],
    "compiled_step": ["Layers"],
    "accelerated": ["Layers"],
    "iterated": ["Layers"],
    "actor_critic": ["Sequential", "Sequential"],
    "folds": ["Layers"] * 2,
    "method": ["ModuleList", "Layers", "Layers"],
}
"""Shape of the loop → the models that are switched, in their order."""


def models(notes) -> list[str]:
    return [note["model"] for note in notes if note["event"] == "model"]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_mode_trains_the_same_bits(shape: str, tmp_path: Path) -> None:
    left = {
        mode: run_switched(LOOP, shape, folder=tmp_path / mode, mode=mode, steps=4)
        for mode in ("plain", "checkpointing", "ebbtide-minimal")
    }
    for mode, run in left.items():
        assert run.code == 0, run.output
        assert models(run.notes) == SHAPES[shape], mode
        assert "the script's last line" not in run.output  # ended after four steps
        assert "ebbtide/script" not in run.output, "Dynamo warns of our code"
        assert [event["step"] for event in run.all("step")] == [1, 2, 3, 4]
        assert run.events[-1]["status"] == "ok"
    plain = left["plain"]
    assert None not in plain.losses and len(set(plain.losses)) == 4
    assert [run.losses for run in left.values()] == [plain.losses] * 3
    assert [run.checksum for run in left.values()] == [plain.checksum] * 3
    passes = left["ebbtide-minimal"].all("pass_end")
    assert passes and all(event["kept_bytes"] < event["unique_bytes"] for event in passes if event["unique_bytes"])
    assert not plain.all("pass_end")


@pytest.mark.parametrize("shape", ["plain", "closure", "accumulated_closure", "method"])
def test_phases_follow_the_loop(shape: str, tmp_path: Path) -> None:
    run = run_switched(LOOP, shape, folder=tmp_path / "run", mode="plain", steps=3)
    parts = 2 if shape == "accumulated_closure" else 1
    edges = [(e["name"], e["edge"], e["step"]) for e in run.all("phase")]
    # A closure's step contains the other two.
    names = ["forward", "backward"] * parts + ["optimizer"] * (shape in ("plain", "method"))
    assert edges == [(n, edge, step) for step in (1, 2, 3) for n in names for edge in ("begin", "end")]
    assert [event["step"] for event in run.all("trim")] in ([3] * parts, [])  # none on another C library
    assert run.all("parts")[0]["gradient_bytes"] > 0


@pytest.mark.parametrize("mode", ["plain", "checkpointing", "ebbtide-minimal"])
def test_phases_of_a_model_that_is_compiled_whole(mode: str, tmp_path: Path) -> None:
    run = run_switched(LOOP, "compiled_whole", folder=tmp_path / "run", mode=mode, steps=2)
    assert run.code == 0, run.output
    assert [event["name"] for event in run.all("phase")[::2]] == ["forward", "backward", "optimizer"] * 2


def test_a_loss_that_is_an_edge_of_the_graph_is_not_recorded(tmp_path: Path) -> None:
    run = run_switched(LOOP, "edges", folder=tmp_path / "run", mode="ebbtide-minimal")
    assert run.code == 0, run.output
    assert run.losses == [None] * 6


@pytest.mark.parametrize("shape", ["scaled", "sharded_scaler"])
def test_losses_under_a_scaler_are_those_of_the_script(shape: str, tmp_path: Path) -> None:
    run = run_switched(LOOP, shape, folder=tmp_path / "run", mode="ebbtide")
    assert run.code == 0, run.output
    printed = [float(line.split()[1]) for line in run.output.splitlines() if line.startswith("loss ")]
    assert run.losses == [loss for loss in printed if loss != float("inf")] and len(run.losses) == 5


def test_a_later_stage_with_an_optimizer_of_its_own_counts(tmp_path: Path) -> None:
    """From its second step on: the first could belong to an adversary."""
    run = run_switched(LOOP, "stages", folder=tmp_path / "run", mode="ebbtide", steps=4)
    assert run.code == 0 and "the script's last line" not in run.output, run.output
    printed = [float(line.split()[1]) for line in run.output.splitlines() if line.startswith("loss ")]
    assert len(printed) == 5 and run.losses == [*printed[:2], *printed[3:]]


def test_losses_of_training_that_does_not_count_do_not_pile_up(tmp_path: Path) -> None:
    """Beyond a bound the step has no loss; the next ones have theirs."""
    run = run_switched(LOOP, "probed", folder=tmp_path / "run", mode="plain")
    assert run.code == 0, run.output
    lines = [line.split() for line in run.output.splitlines()]
    printed = [float(line[-1]) for line in lines if line[0] == "loss"]
    assert run.losses == [*printed[:3], None, *printed[4:]] and len(printed) == 6
    assert max(int(line[-1]) for line in lines if line[0] == "more") <= MOST_LOSSES + 8


def test_a_forked_child_is_left_alone(tmp_path: Path) -> None:
    run = run_switched(LOOP, "forked", folder=tmp_path / "run", mode="ebbtide-minimal", steps=6)
    assert run.code == 0 and "the child's last line" in run.output, run.output
    assert [event["step"] for event in run.all("step")] == [1, 2, 3, 4, 5, 6]
    assert len(run.all("pass_end")) == 6
    assert len([note for note in run.notes if note["event"] == "end"]) == 1


@pytest.mark.parametrize(
    ("when", "around", "missed"), [("before", "there", 0), ("after", "there", 0), ("after", "torch", 1)]
)
def test_a_scripts_own_patch_of_calls_stays(when: str, around: str, missed: int, tmp_path: Path) -> None:
    """One that does not call the replacement displaces it, and the model is found in the second step."""
    expected = run_switched(LOOP, "doubled", folder=tmp_path / "doubled", mode="plain")
    run = run_switched(LOOP, "patched", when, around, folder=tmp_path / "patched", mode="ebbtide-minimal")
    assert run.code == 0 and models(run.notes) == ["Layers"], run.output
    assert len(expected.losses) == 6 and run.losses == expected.losses[missed:]
    assert run.output == expected.output and run.checksum == expected.checksum
    assert any(event["kept_bytes"] < event["unique_bytes"] for event in run.all("pass_end"))


@pytest.mark.parametrize("shape", ["plain", "abrupt", "replaced"])
def test_a_script_that_ends_is_recorded_to_its_end(shape: str, tmp_path: Path) -> None:
    """By itself, by ``os._exit``, or where another program takes its process over."""
    run = run_switched(LOOP, shape, folder=tmp_path / "run", mode="ebbtide")
    assert run.code == 0 and "the script's last line" in run.output
    assert ("the next program" in run.output) is (shape == "replaced")
    assert len(run.all("step")) == 6 and run.checksum and run.events[-1]["status"] == "ok"


def test_models_of_earlier_folds_are_freed(tmp_path: Path) -> None:
    run = run_switched(LOOP, "folds", "6", folder=tmp_path / "run", mode="ebbtide-minimal")
    assert run.code == 0 and "models left: 1" in run.output, run.output
    assert models(run.notes) == ["Layers"] * 6


def test_layers_that_are_called_one_by_one_are_named(tmp_path: Path) -> None:
    run = run_switched(LOOP, "listed", folder=tmp_path / "run", mode="ebbtide-minimal", compared=False)
    assert run.code == 0, run.output
    assert [note["alike"] for note in run.notes if note["event"] == "more"] == [True]
    assert any("enable_activation_offloading(model)" in line for line in _ending(run.notes, 0))


def test_the_checksum_covers_what_is_around_layers_that_are_called_one_by_one(tmp_path: Path) -> None:
    seeds = ("1", "2")
    runs = [run_switched(LOOP, "method", at, folder=tmp_path / at, mode="plain", steps=2) for at in seeds]
    assert [run.code for run in runs] == [0, 0], runs[0].output
    assert runs[0].losses == runs[1].losses and runs[0].checksum != runs[1].checksum
    parts = [run.all("parts")[0] for run in runs]
    assert parts[0]["gradient_bytes"] == parts[1]["gradient_bytes"] > 0 and parts[0]["weights"]["trained"] > 0


def test_two_models_of_a_class_have_a_name_each(tmp_path: Path) -> None:
    run = run_switched(LOOP, "adversaries", folder=tmp_path / "run", mode="plain", steps=2)
    first, second = run.all("parts")
    assert set(first["weights"]) == {"Layers", "Layers 2"}
    assert second["optimizer_bytes"] > 2 * first["optimizer_bytes"] > 0, "each has an optimizer of its own"


def test_parameters_without_bytes_are_not_compared_and_end_no_run(tmp_path: Path) -> None:
    run = run_switched(LOOP, "unreadable", folder=tmp_path / "run", mode="plain", steps=2)
    assert run.code == 0 and not run.all("parameters")
    assert run.events[-1]["status"] == "ok" and "the trained parameters are not compared: " in run.output


def test_a_script_that_fails_keeps_its_error_and_its_record(tmp_path: Path) -> None:
    run = run_switched(LOOP, "crash", folder=tmp_path / "run", mode="ebbtide-minimal")
    assert run.code == 1
    assert "ValueError: the script's own error" in run.output
    assert len(run.all("step")) == 3 and run.events[-1]["event"] == "run_end"


@pytest.mark.parametrize(
    ("shape", "found", "to_do"),
    [
        ("inference", "made no optimizer", "enable_activation_offloading"),
        ("by_hand", "made no optimizer", "enable_activation_offloading"),
        ("copies", "no model that was called has its parameters", "enable_activation_offloading"),
        ("compiled_function", "called only inside a compiled function", "block.compile()"),
    ],
)
def test_a_script_in_which_no_model_is_found_is_named(shape: str, found: str, to_do: str, tmp_path: Path) -> None:
    run = run_switched(LOOP, shape, folder=tmp_path / "run", mode="ebbtide")
    assert run.code == 0 and "the script's last line" in run.output
    what, hint = why_untrained(run.notes) or ("", "")
    assert found in what and to_do in hint


def test_updates_that_are_no_steps_are_named(tmp_path: Path) -> None:
    run = run_switched(LOOP, "fused", folder=tmp_path / "run", mode="ebbtide", compared=False)
    assert run.code == 0 and not run.all("step"), run.output
    assert any("no step was counted" in line for line in _ending(run.notes, 0))
    assert why_uncounted([*run.notes[:-1], {**run.notes[-1], "failed": True}]) is None


def test_a_script_with_ebbtide_in_it_is_not_compared_but_runs(tmp_path: Path) -> None:
    compared = run_switched(LOOP, "own", folder=tmp_path / "compared", mode="plain")
    assert compared.code == 1
    assert "ConflictError: the script itself enables ebbtide on Layers" in compared.output
    run = run_switched(LOOP, "own", folder=tmp_path / "run", mode="ebbtide", compared=False)
    assert run.code == 0, run.output
    assert [note["model"] for note in run.notes if note["event"] == "own"] == ["Layers"]
    assert not models(run.notes)


@pytest.mark.timeout(1200)  # each TRL process imports it again
@pytest.mark.parametrize(
    "name", ["trainer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "sft-lora"))]
)
def test_trainers_train_the_same_bits(name: str, tiny_model: Path, tmp_path: Path) -> None:
    left = {
        mode: run_switched(
            TRAINERS, name, str(tiny_model), str(tmp_path / f"out-{mode}"), folder=tmp_path / mode, mode=mode, steps=4
        )
        for mode in ("plain", "checkpointing", "ebbtide-minimal")
    }
    for run in left.values():
        assert run.code == 0, run.output
        assert models(run.notes) == ["PeftModel" if name == "sft-lora" else "LlamaForCausalLM"]
        assert len(run.losses) == 4
        if name == "trainer":  # TRL and PEFT use the older names themselves
            assert "gradient_checkpointing" not in run.output, "a warning of a deprecated name, because of us"
    assert len({tuple(run.losses) for run in left.values()}) == 1
    assert len({run.checksum for run in left.values()}) == 1


def test_a_script_that_checkpoints_itself_is_noted(tiny_model: Path, tmp_path: Path) -> None:
    run = run_switched(
        TRAINERS, "sft-checkpointed", str(tiny_model), str(tmp_path / "out"), folder=tmp_path / "run", mode="plain",
        steps=2,
    )  # fmt: skip
    assert run.code == 0, run.output
    assert [note["checkpoints_itself"] for note in run.notes if note["event"] == "model"] == [True]
