"""Saving, resuming, evaluating, and failures on the way."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ebbtide.base.errors import DataError, DiskFullError, TrainingError
from ebbtide_recipes.sft.recipe import main
from ebbtide_recipes.sft.trainer import SftTrainer
from ebbtide_recipes.skeleton import checkpoints, outputs
from tests.integrations.ranks import sft_config


def train(model: Path, folder: Path, /, **changes: object) -> dict[int, float]:
    main(sft_config(model, folder, **{"max_steps": 4, "lr_scheduler_type": "constant", **changes}))
    return {event["step"]: event["loss"] for event in events(folder) if event["event"] == "step"}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"train_type": "lora"}, marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_a_run_that_goes_on_repeats_the_run_that_did_not_stop(
    tiny_model: Path, tmp_path: Path, changes: dict, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(tiny_model, tmp_path / "whole", save_steps=2, activation_cpu_offload=True, **changes)
    half = tmp_path / "half"
    latest: dict[str, object] = {"resume_from_checkpoint": "latest", "activation_cpu_offload": True, **changes}
    train(tiny_model, half, max_steps=2, save_steps=2, **latest)
    assert caplog.text.count("holds no complete checkpoint: the run starts at the first step") == 1
    rest = train(tiny_model, half, **latest)
    assert rest == {step: whole[step] for step in (3, 4)}
    before = [json.loads(line) for line in (half / "run-1.jsonl").read_text().splitlines()]
    assert [event["step"] for event in before if event["event"] == "step"] == [1, 2]
    assert (half / "training.log").read_text().count(" steps done") == 2
    assert not (half / "README.md").exists()  # TRL's card of a model without a name


def test_a_resumed_run_saves_by_its_own_flags_and_names_the_rates_it_keeps(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(tiny_model, tmp_path / "whole", save_steps=2)
    changes = {"save_steps": 1, "learning_rate": 1e-3, "weight_decay": 0.5}
    resumed = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    assert train(tiny_model, tmp_path / "rest", **changes, **resumed) == {step: whole[step] for step in (3, 4)}
    assert [one.step for one in checkpoints.complete(tmp_path / "rest")] == [3, 4]
    kept, ours = "learning_rate 0.01 and weight_decay 0", "learning_rate 0.001 and weight_decay 0.5"
    assert f"is resumed with {kept}, not with this run's {ours}" in caplog.text


def test_a_run_that_is_done_does_no_step_more(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: dict[str, object] = {"max_steps": 2, "save_steps": 2, "save": True, "activation_cpu_offload": True}
    train(tiny_model, tmp_path, **changes)
    done = weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    caplog.clear()
    assert train(tiny_model, tmp_path, **changes, resume_from_checkpoint="latest") == {}
    assert "nothing left to train: step 2 is done, and max_steps is 2; hint: " in caplog.text
    assert "nothing was offloaded" not in caplog.text
    assert weights(tmp_path) == done
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "ok"


@pytest.mark.slow
def test_old_checkpoints_go_when_newer_ones_are_whole(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, save_steps=1, save_total_limit=2)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert all((p / "ebbtide.json").exists() for p in tmp_path.glob("checkpoint-*"))


@pytest.mark.slow
def test_an_overwritten_run_leaves_no_checkpoint_to_go_on_from(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, save_steps=2)
    train(tiny_model, tmp_path, max_steps=1, overwrite_output_dir=True)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_half_written_checkpoint_is_refused_before_anything_is_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide_recipes.language import models

    train(tiny_model, tmp_path, save_steps=2)
    half = tmp_path / "checkpoint-4"
    (half / "optimizer.pt").write_bytes(b"half")
    monkeypatch.setattr(models, "look_up", lambda config: pytest.fail("a model was looked up"))
    with pytest.raises(DataError, match=f"holds 4 bytes of optimizer.pt.*\nhint: .*{tmp_path / 'checkpoint-2'}"):
        train(tiny_model, tmp_path, resume_from_checkpoint=str(half))


@pytest.mark.parametrize(("train_type", "name"), [("full", "model.safetensors"), ("lora", "adapter_model.safetensors")])
def test_a_checkpoint_that_lacks_weights_is_refused(
    tiny_model: Path, tmp_path: Path, train_type: str, name: str
) -> None:
    train(tiny_model, tmp_path, max_steps=1, save_steps=1, train_type=train_type)
    file = tmp_path / "checkpoint-1" / name
    file.write_bytes(file.read_bytes().replace(b"q_proj", b"k_prok", 1))
    with pytest.raises(DataError, match=r"checkpoint-1 has no values of .*layers.0.self_attn.q_proj.*, or others"):
        train(tiny_model, tmp_path, max_steps=2, resume_from_checkpoint="latest", train_type=train_type)


def test_a_checkpoint_of_a_model_of_another_size_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Weights have the sizes of the run's model, whatever config.json in the checkpoint says."""
    train(tiny_model, tmp_path, max_steps=1, save_steps=1)
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[128,64]', b'"shape":[64,128]', 1))
    config = tmp_path / "checkpoint-1" / "config.json"
    config.write_bytes(config.read_bytes().replace(b'"hidden_size": 64', b'"hidden_size": 96'))
    with pytest.raises(DataError, match=r"checkpoint-1 has no values of model.layers.0.mlp.\w+.weight, or .*\nhint: "):
        train(tiny_model, tmp_path, max_steps=2, resume_from_checkpoint="latest")


def test_a_disk_that_fills_while_saving_leaves_the_old_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tiny_model, tmp_path / "whole")
    real = torch.save

    def full(thing: object, path: Any, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(thing, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DiskFullError, match="checkpoint-4 could not be written.*\nhint: .*checkpoint-2"):
        train(tiny_model, tmp_path / "run", save_steps=2, save_total_limit=1)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    rest = train(tiny_model, tmp_path / "run", resume_from_checkpoint="latest")
    assert rest == {step: whole[step] for step in (3, 4)}


@pytest.mark.parametrize("changes", [{"resume_from_checkpoint": "latest"}, {"overwrite_output_dir": True}])
def test_a_disk_that_fills_while_the_model_is_saved_leaves_the_earlier_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    train(tiny_model, tmp_path, max_steps=1, save_steps=1, save=True)
    (tmp_path / "README.md").write_text("mine")
    earlier = {path.name: path.read_bytes() for path in tmp_path.glob("*.*") if path.suffix in (".safetensors", ".md")}
    saved = PreTrainedModel.save_pretrained

    def full(model: PreTrainedModel, folder: str, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-" in folder:
            saved(model, folder, *args, **kwargs)
        else:
            (Path(folder) / "model.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(DiskFullError, match=r"could not be written.*\nhint: "):
        patched.setattr(PreTrainedModel, "save_pretrained", full)
        train(tiny_model, tmp_path, max_steps=2, save_steps=1, save=True, **changes)
    assert {name: (tmp_path / name).read_bytes() for name in earlier} == earlier and "model.safetensors" in earlier
    assert not (tmp_path / outputs.DRAFT).exists()
    train(tiny_model, tmp_path, max_steps=2, save=True, resume_from_checkpoint="latest")
    assert weights(tmp_path) not in earlier.values() and (tmp_path / "README.md").read_text() == "mine"
    assert not (tmp_path / outputs.DRAFT).exists()


def spoil(monkeypatch: pytest.MonkeyPatch, step: int, micro_batch: int = 0) -> None:
    real, computed = SftTrainer.compute_loss, []

    def spoiled(self: SftTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = real(self, *args, **kwargs)
        computed.append(self.state.global_step + 1)
        return loss * float("nan") if computed[-1] == step and computed.count(step) == micro_batch + 1 else loss

    monkeypatch.setattr(SftTrainer, "compute_loss", spoiled)


def logged(folder: Path) -> dict[int, float | None]:
    lines = re.findall(r"step (\d)/\d (\{.*\})", (folder / "training.log").read_text())
    return {int(step): json.loads(line)["loss"] for step, line in lines}


def test_a_loss_that_is_no_number_stops_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 2)
    with pytest.raises(
        TrainingError, match="the loss of step 2 is nan; expected a finite number\nhint: .*nan_loss skip"
    ):
        train(tiny_model, tmp_path)
    assert [event["step"] for event in events(tmp_path) if event["event"] == "step"] == [1]
    assert events(tmp_path)[-1]["status"] == "error"


def test_a_step_whose_loss_is_no_number_can_be_skipped(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_model, tmp_path / "one", max_steps=1, save=True, weight_decay=0.1)
    spoil(monkeypatch, 2)
    losses = train(tiny_model, tmp_path / "two", max_steps=2, save=True, weight_decay=0.1, nan_loss="skip")
    assert losses[2] == "nan"  # its form in strict JSON
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    assert "the loss of step 2 is nan: the step is skipped" in (tmp_path / "two" / "training.log").read_text()


class Spoiled(torch.autograd.Function):
    """Passes a value through, and returns a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


@pytest.mark.parametrize("clipping", [1.0, 0.0])
def test_gradients_that_are_not_finite_count_as_such_a_loss(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clipping: float
) -> None:
    real = SftTrainer.compute_loss

    def spoiled(self: SftTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = real(self, *args, **kwargs)
        return Spoiled.apply(loss) if self.state.global_step == 1 else loss

    monkeypatch.setattr(SftTrainer, "compute_loss", spoiled)
    saving = {"save_steps": 1, "save_total_limit": 1, "max_grad_norm": clipping}
    with pytest.raises(TrainingError, match="norm of its gradients is (nan|inf); expected a finite number\nhint: "):
        train(tiny_model, tmp_path / "stops", max_steps=2, **saving)
    assert [one.step for one in checkpoints.complete(tmp_path / "stops")] == [1]
    train(tiny_model, tmp_path / "skips", max_steps=2, nan_loss="skip", **saving)
    first, second = (tmp_path / name / f"checkpoint-{step}" for name, step in (("stops", 1), ("skips", 2)))
    assert weights(first) == weights(second)


def test_the_steps_after_a_skipped_one_log_their_own_loss(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 1)
    losses = train(tiny_model, tmp_path, max_steps=3, nan_loss="skip", logging_steps=1)
    assert losses[1] == "nan"
    assert logged(tmp_path) == {1: None, **{step: pytest.approx(losses[step], rel=1e-4) for step in (2, 3)}}


def test_a_skipped_step_is_left_out_of_the_mean_loss_with_all_its_micro_batches(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 3, micro_batch=1)
    changes = {"nan_loss": "skip", "gradient_accumulation_steps": 2, "logging_steps": 4}
    losses = train(tiny_model, tmp_path, **changes)
    assert losses[3] == "nan"
    assert logged(tmp_path)[4] == pytest.approx((losses[2] + losses[4]) / 2, rel=1e-4)


@pytest.mark.parametrize(
    "changes", [{"eval_steps": 2}, pytest.param({}, marks=pytest.mark.slow)], ids=["every second step", "at the end"]
)
def test_rows_that_were_kept_back_are_evaluated_on(tiny_model: Path, tmp_path: Path, changes: dict) -> None:
    plain = train(tiny_model, tmp_path / "plain", split_dataset_ratio=0.1, **changes)
    ours = train(tiny_model, tmp_path / "ours", split_dataset_ratio=0.1, activation_cpu_offload=True, **changes)
    assert ours == plain
    found = [[e for e in events(tmp_path / name) if e["event"] == "evaluation"] for name in ("plain", "ours")]
    assert [event["step"] for event in found[0]] == ([2, 4] if changes else [4])
    values = [[(e["step"], e["loss"], e["token_accuracy"]) for e in run] for run in found]
    assert values[0] == values[1]
    log = (tmp_path / "ours" / "training.log").read_text()
    assert f'evaluation after step 4 {{"eval_loss": {found[1][-1]["loss"]}' in log


def test_a_run_that_evaluates_trains_the_values_of_one_that_does_not(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "It returns the value of the argument. " * 20}) + "\n")
    dropout = {"train_type": "lora", "lora_dropout": 0.5}
    without = train(tiny_model, tmp_path / "without", **dropout)
    assert train(tiny_model, tmp_path / "with", **dropout, eval_dataset=(str(rows),), eval_steps=1) == without


def test_an_evaluation_that_fails_at_the_end_does_not_lose_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: SftTrainer, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SftTrainer, "evaluate", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tiny_model, tmp_path, max_steps=1, split_dataset_ratio=0.1, save=True)
    assert weights(tmp_path)


def test_another_data_set_is_evaluated_on(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "It returns the value of the argument. " * 20}) + "\n")
    train(tiny_model, tmp_path / "out", dataset=(str(rows),), eval_dataset=(str(rows),), max_steps=1)
    assert [e["step"] for e in events(tmp_path / "out") if e["event"] == "evaluation"] == [1]


KILLS = {
    "one process": ("sft", 1, 10, 40),
    "two ranks of FSDP2": ("sft", 2, 6, 30),
    "grpo": ("grpo", 1, 6, 24),
    "grpo on two ranks of FSDP2": ("grpo", 2, 4, 16),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("recipe", "ranks", "kills", "steps"), KILLS.values(), ids=KILLS)
def test_kills_at_drawn_instants_lose_nothing(
    tiny_model: Path, tmp_path: Path, seed: int, recipe: str, ranks: int, kills: int, steps: int
) -> None:
    command = [sys.executable, "-m", "tests.integrations.killed", str(tiny_model), str(tmp_path), "--seed", str(seed)]
    command += ["--recipe", recipe, "--ranks", str(ranks), "--kills", str(kills), "--steps", str(steps)]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1450, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.splitlines()[-1])
    print(f"seed {seed}:", [run["kill"] for run in said["runs"]])
    whole, runs = said["whole"], said["runs"]
    assert list(whole) == [str(step) for step in range(1, steps + 1)]
    assert [run["killed"] for run in runs] == [True] * kills + [False]
    assert any(run["half"] for run in runs)  # some were killed while a checkpoint was written or removed
    done: set[str] = set()
    for run in runs:
        assert run["losses"] == {step: whole[step] for step in run["losses"]}
        # It resumes after the last complete checkpoint, and no checkpoint is lost: the step never decreases.
        assert list(run["losses"])[:1] in ([], [str(run["from"] + 1)])
        done |= set(run["losses"])
    assert done == set(whole)
    assert [run["from"] for run in runs] == sorted(run["from"] for run in runs)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    strategy = "single-device" if ranks == 1 else "FSDP2"
    assert f"for {strategy} strategy" in (tmp_path / "killed" / "training.log").read_text()
