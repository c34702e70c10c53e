"""A checkpoint is complete, or is not one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from ebbtide.base.errors import ConfigError, DataError, DiskError, DiskFullError
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.language import adapters
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import checkpoints, outputs, run
from ebbtide_recipes.skeleton import trainer as trainer_module
from ebbtide_recipes.skeleton.config import RecipeConfig
from ebbtide_recipes.skeleton.diskfailure import disk_failure, says_full
from ebbtide_recipes.skeleton.resuming import ResumedTrainer
from ebbtide_recipes.video.config import VideoConfig
from tests.helpers.locked import locked


def make(output: Path, step: int, *, sealed: bool = True, **changes: object) -> Path:
    folder = output / f"checkpoint-{step}"
    (folder / "part").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "part" / ".metadata").write_bytes(b"meta")
    if sealed:
        checkpoints.seal(folder, SftConfig(**changes), step=step, world_size=2)
    return folder


def find(output: Path, asked: object = "latest", **changes: object) -> Path | None:
    return checkpoints.find(SftConfig(output_dir=str(output), resume_from_checkpoint=str(asked), **changes))


def test_latest_is_the_newest_whole_one(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    make(tmp_path, 2)
    nine = make(tmp_path, 9)
    make(tmp_path, 10, sealed=False)
    (tmp_path / "checkpoint-x").mkdir()
    assert find(tmp_path) == find(tmp_path, "true") == find(tmp_path, nine) == nine
    assert find(tmp_path, "none") is None


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / checkpoints.SEAL).unlink(), "has no ebbtide.json, which is written last"),
        (lambda folder: (folder / checkpoints.SEAL).write_text("{"), "has an ebbtide.json that cannot be read"),
        (lambda folder: (folder / checkpoints.SEAL).write_text("[]"), "has an ebbtide.json that cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w"), "holds 1 bytes of model.safetensors, not 7"),
        (lambda folder: (folder / "part" / ".metadata").unlink(), "lacks part/.metadata"),
    ],
)
def test_a_half_written_one_is_refused_and_the_last_whole_one_named(
    tmp_path: Path, break_it: object, said: str
) -> None:
    four, six = make(tmp_path, 4), make(tmp_path, 6)
    break_it(six)
    with pytest.raises(DataError, match=f"{said}; expected .*\nhint: the last complete one is {four}"):
        find(tmp_path, six)
    assert find(tmp_path) == four


@pytest.mark.parametrize("failing", [checkpoints.SEAL, "model.safetensors", "checkpoint-4"])
@pytest.mark.parametrize("named", ["latest", "checkpoint-4"])
def test_one_that_the_disk_does_not_read_is_not_taken_for_incomplete(
    failing: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(call: Callable[..., object]) -> Callable[..., object]:
        def first(path: Path, *args: object, **kwargs: object) -> object:
            if path.name == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(path, *args, **kwargs)

        return first

    make(tmp_path, 2)
    make(tmp_path, 4)
    for name in ("stat", "read_text"):
        monkeypatch.setattr(Path, name, fails(getattr(Path, name)))
    with pytest.raises(DataError, match=r"cannot be read \(Input/output error\)") as raised:
        find(tmp_path, named if named == "latest" else tmp_path / named)
    assert raised.value.expected and raised.value.hint and isinstance(raised.value.__cause__, OSError)


def test_a_name_that_is_none_is_refused_with_the_nearest(tmp_path: Path) -> None:
    make(tmp_path, 40)
    with pytest.raises(DataError, match="there is no checkpoint .*\nhint: did you mean 'checkpoint-40'"):
        find(tmp_path, tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_type": "lora"}, "written with train_type 'full', and this run has 'lora'.*\nhint: --train_type full"),
        ({"fsdp_strategy": "full_shard"}, "written with sharding 'none', and .* 'fsdp2'.*\nhint: --fsdp_strategy none"),
    ],
)
def test_another_kind_of_run_is_refused(tmp_path: Path, changes: dict, said: str) -> None:
    make(tmp_path, 4)
    with pytest.raises(ConfigError, match=said):
        find(tmp_path, **changes)


def test_another_kind_of_adapters_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 4, train_type="adapter", adapter_config="boft")
    said = "written with adapters 'BOFT', and this run has 'VERA'.*\nhint: --adapter_config boft"
    with pytest.raises(ConfigError, match=said):
        find(tmp_path, train_type="adapter", adapter_config="vera")
    assert find(tmp_path, train_type="adapter", adapter_config="boft") is not None


def test_another_number_of_processes_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 4)
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest")
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        assert checkpoints.find(config, world_size=2) is not None
        assert caplog.text == ""
        assert checkpoints.find(config, world_size=1) is not None
    two, one = ("processes 2, rows of a step 2", "processes 1, rows of a step 1")
    assert f"was written with {two} and is resumed with {one}" in caplog.text


def test_other_rows_seeds_and_batches_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make(tmp_path, 4, sealed=False)
    checkpoints.seal(folder, SftConfig(), step=4, world_size=2, rows=40)
    config = {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    changed = SftConfig(**config, seed=7, per_device_train_batch_size=2)
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        checkpoints.find(SftConfig(**config), world_size=2, rows=40)
        checkpoints.find(SftConfig(**config, max_length=64), world_size=2, rows=40)  # cuts rows, and keeps their order
        assert caplog.text == ""
        checkpoints.find(changed, world_size=2, rows=39)
        before, now = "seed 42, rows of a step 2, rows 40", "seed 7, rows of a step 4, rows 39"
        assert f"was written with {before} and is resumed with {now}: the order of rows" in caplog.text
        caplog.clear()
        seal = json.loads((folder / checkpoints.SEAL).read_text())
        (folder / checkpoints.SEAL).write_text(json.dumps({k: v for k, v in seal.items() if k != "order"}))
        assert checkpoints.find(changed, world_size=2, rows=39) == folder  # an older seal lacks these
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (GrpoConfig(), GrpoConfig(dataset_shuffle=False), ("dataset_shuffle True", "dataset_shuffle False")),
        (
            VideoConfig(per_device_train_batch_size=2),
            VideoConfig(gradient_accumulation_steps=2),
            ("clips_of_a_batch 2", "clips_of_a_batch 1"),
        ),
    ],
)
def test_what_changes_the_order_of_one_recipe_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: RecipeConfig, now: RecipeConfig, found: tuple[str, str]
) -> None:
    folder = make(tmp_path, 4, sealed=False)
    checkpoints.seal(folder, before, step=4, world_size=1, rows=40)
    for config in (before, now):
        config = dataclasses.replace(config, output_dir=str(tmp_path), resume_from_checkpoint="latest")
        assert caplog.text == ""
        assert checkpoints.find(config, world_size=1, rows=40) == folder
    assert "was written with {} and is resumed with {}: the order of rows".format(*found) in caplog.text


def test_the_rates_of_all_groups_are_compared_with_the_checkpoints(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a student and a critic may have the same maximum."""

    def load(trainer: ResumedTrainer, checkpoint: str) -> None:
        trainer.optimizer.param_groups[0]["initial_lr"] = 1e-5

    monkeypatch.setattr(transformers.Trainer, "_load_optimizer_and_scheduler", load)
    trainer: Any = ResumedTrainer.__new__(ResumedTrainer)
    trainer.args, trainer.state = None, SimpleNamespace(max_steps=4, compute_steps=lambda *values: None)
    groups = [{"initial_lr": rate, "weight_decay": 0.1} for rate in (2e-5, 1e-4)]
    trainer.optimizer = SimpleNamespace(param_groups=groups)
    trainer._load_optimizer_and_scheduler("checkpoint-2")
    kept, ours = "learning_rate 1e-05, 0.0001 and", "learning_rate 2e-05, 0.0001 and weight_decay 0.1"
    assert f"is resumed with {kept} weight_decay 0.1, not with this run's {ours}" in caplog.text


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make(tmp_path, step, sealed=step != 4)
    make(tmp_path, 10, sealed=False)
    checkpoints.prune(tmp_path, None)
    assert len(list(tmp_path.iterdir())) == 5
    checkpoints.prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-6", "checkpoint-8"]


def reported(error: Exception, folder: Path, output: Path) -> Exception:
    """Return what a save that fails with ``error`` raises."""
    with pytest.raises(Exception) as found, checkpoints.writing(folder, output, remove_failed=True):
        raise error
    return found.value


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_a_full_disk_names_the_checkpoint_to_resume_from(tmp_path: Path, error: Exception) -> None:
    new = tmp_path / "checkpoint-4"
    first = reported(error, new, tmp_path)
    assert isinstance(first, DiskFullError) and "no checkpoint was written before" in first.hint
    old = make(tmp_path, 2)
    assert f"resume from {old}" in str(reported(error, new, tmp_path))


def test_a_failed_save_is_not_the_checkpoint_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seal has its name before the folder is flushed."""
    new = make(tmp_path, 4, sealed=False)

    def fsync(number: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{number}")) == tmp_path:
            assert checkpoints.complete(tmp_path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskFullError) as found, checkpoints.writing(new, tmp_path, remove_failed=True):
        checkpoints.seal(new, SftConfig(), step=4, world_size=1)
    assert not new.exists()
    assert "no checkpoint was written before" in found.value.hint and "name another --output_dir" in found.value.hint


def torch_error(path: Path) -> Exception:
    """Return the error of ``torch.save`` that may not write more than a page."""
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        torch.save(torch.zeros(9999), path)
    except Exception as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    raise RuntimeError("it was written")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, None])
def test_the_reason_that_torch_loses_is_found_by_writing_another_file(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_number: int) -> None:
        if code is not None:
            raise OSError(code, os.strerror(code))

    error = torch_error(tmp_path / "optimizer.pt")
    assert not says_full(error)
    monkeypatch.setattr(os, "fsync", fsync)
    found = reported(error, tmp_path / "checkpoint-4", tmp_path)
    assert isinstance(found, DiskError)
    assert isinstance(found, DiskFullError) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert (os.strerror(code) if code else "torch.save does not report why") in found.found and found.hint


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO)),
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        RuntimeError("Error while serializing: I/O error: Input/output error (os error 5)"),
    ],
)
def test_a_disk_that_fails_everywhere_is_reported(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    new = make(tmp_path, 4)
    for name in ("disk_usage", "rmtree"):
        monkeypatch.setattr(shutil, name, fail)
    monkeypatch.setattr(Path, "unlink", fail)
    monkeypatch.setattr(Path, "iterdir", fail)
    found = reported(error, new, tmp_path)
    assert type(found) is DiskError and found.__cause__ is error
    assert str(error) in found.found and "cannot be read (Input/output error)" in found.hint


def test_the_free_space_is_named_if_the_disk_tells_it(tmp_path: Path) -> None:
    found = reported(OSError(errno.EIO, "Input/output error"), tmp_path / "checkpoint-4", tmp_path)
    assert type(found) is DiskError and re.search(r"Input/output error \([\d.]+ [KMGT]iB are free\)", found.found)


def test_an_error_that_is_its_own_cause_is_read_once(tmp_path: Path) -> None:
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    assert disk_failure(error, tmp_path) is None


def test_the_systems_reason_is_used_if_torch_chains_it(tmp_path: Path) -> None:
    error = RuntimeError("unexpected pos 704 vs 598")  # as for a file whose name has letters beyond ASCII
    error.__context__ = OSError(errno.EFBIG, "File too large")
    found = reported(error, tmp_path / "checkpoint-4", tmp_path)
    assert isinstance(found, DiskFullError) and "File too large" in found.found


def test_a_run_without_a_checkpoint_reads_no_generator_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = object.__new__(trainer_module.RecordedTrainer)
    trainer.args = SimpleNamespace(device=torch.device("meta"), process_index=0)  # pyright: ignore
    monkeypatch.chdir(tmp_path)
    (tmp_path / "device_rng_state_0.pth").write_bytes(b"no generator")
    trainer._load_rng_state(None)


def test_another_failure_stays_what_it_is(tmp_path: Path) -> None:
    error = KeyError("state")
    assert reported(error, tmp_path / "checkpoint-4", tmp_path) is error


@pytest.mark.parametrize("sealed", [True, False])
def test_an_interrupt_names_the_checkpoint_to_continue_from(
    sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    made = make(tmp_path, 100, sealed=sealed)
    monkeypatch.setattr(run, "_record", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run, "_prepared", interrupted)
    with caplog.at_level(logging.INFO, logger="ebbtide.recipes"), pytest.raises(KeyboardInterrupt):
        run.carry_out(SimpleNamespace(), SftConfig(), tmp_path)  # type: ignore[arg-type]
    found = [record.getMessage() for record in caplog.records]
    assert found == [f"{made} is complete: --resume_from_checkpoint latest continues from it"] * sealed


def test_checkpoints_beyond_the_one_that_is_resumed_are_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [make(tmp_path, step) for step in (1, 2, 3)]
    make(tmp_path, 4, sealed=False)
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=str(made[1]))
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        checkpoints.set_aside_later(config)
    assert "the run is resumed at step 2" in caplog.text and "set-aside-checkpoint-3" in caplog.text
    three = make(tmp_path, 3)
    checkpoints.prune(tmp_path, 1)
    assert [one.folder for one in checkpoints.complete(tmp_path)] == [three] and find(tmp_path) == three
    make(tmp_path, 2)
    checkpoints.set_aside_later(config)  # the same name again
    names = {"checkpoint-2", "set-aside-checkpoint-3", "set-aside-checkpoint-4"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("name", ["checkpoint-5", "best"])
def test_later_ones_are_set_aside_whatever_folder_and_name_the_resumed_one_has(tmp_path: Path, name: str) -> None:
    """Pruning would otherwise remove each checkpoint of the new run at once, as older than those of the last run."""
    output = tmp_path / "here"
    for step in (1, 6, 7):
        make(output, step)
    begin = make(tmp_path / "elsewhere", 5).rename(tmp_path / name)
    checkpoints.set_aside_later(SftConfig(output_dir=str(output), resume_from_checkpoint=str(begin)))
    new = make(output, 6)
    checkpoints.prune(output, 1)
    assert [one.folder for one in checkpoints.complete(output)] == [new]


def test_a_copy_with_a_later_number_is_not_set_aside_before_it_is_read(tmp_path: Path) -> None:
    begin = make(tmp_path, 5).rename(tmp_path / "checkpoint-9")
    checkpoints.set_aside_later(SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=str(begin)))
    assert begin.exists()


@pytest.mark.parametrize("asked", ["latest", "none", None])
def test_nothing_else_is_set_aside(tmp_path: Path, asked: str | None) -> None:
    here = [make(tmp_path, step) for step in (1, 2)]
    checkpoints.set_aside_later(SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=asked))
    assert all(path.exists() for path in here)


def test_checkpoints_are_set_aside_when_training_begins_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails while it loads must leave the newest to the next one."""
    four, six = make(tmp_path, 4), make(tmp_path, 6)
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=str(four), activation_cpu_offload=False)
    with contextlib.ExitStack() as claimed:
        assert run.claim(config, claimed) == tmp_path
    assert six.exists()

    def train(**_options: object) -> None:
        assert not six.exists() and (tmp_path / "set-aside-checkpoint-6").exists()
        raise ValueError("began")

    trainer = SimpleNamespace(
        model=None, args=SimpleNamespace(world_size=1), train_dataset=[0], accelerator=SimpleNamespace(reduce=id),
        record_with=lambda _recorder: None, train=train, add_callback=id, remove_callback=id,
    )  # fmt: skip
    monkeypatch.setattr("ebbtide_recipes.skeleton.precision.warn_of_lost_steps", lambda *_: None)
    with pytest.raises(ValueError, match="began"):
        run._train(SimpleNamespace(), config, trainer, tmp_path)  # type: ignore[arg-type]


def test_a_newer_one_that_is_incomplete_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    four, six = make(tmp_path, 4), make(tmp_path, 6)
    (six / "model.safetensors").write_bytes(b"w")
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest")
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        assert checkpoints.find(config, world_size=2) == four
    assert f"{six} holds 1 bytes of model.safetensors, not 7: {four} is resumed" in caplog.text


def test_a_link_is_pruned_and_the_checkpoint_behind_it_kept(tmp_path: Path) -> None:
    archived = make(tmp_path / "archive", 2)
    output = tmp_path / "out"
    make(output, 4)
    (output / "checkpoint-2").symlink_to(archived)
    checkpoints.prune(output, 1)
    assert [path.name for path in output.iterdir()] == ["checkpoint-4"]
    assert checkpoints.read_seal(archived)[0] is not None


def test_overwriting_removes_what_runs_wrote_and_nothing_else(tmp_path: Path) -> None:
    for step in (2, 4):
        make(tmp_path, step)
    make(tmp_path, 3).rename(tmp_path / "set-aside-checkpoint-3")
    make(tmp_path, 6).rename(tmp_path / "checkpoint-best")
    for name in ("run.jsonl", "run-2.jsonl", "run-notes.jsonl"):
        (tmp_path / name).write_text("")
    outputs.clear(SftConfig(output_dir=str(tmp_path), overwrite_output_dir=True), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-best", "run.jsonl", "run-notes.jsonl"}


def test_a_record_is_put_aside_beyond_the_highest_number(tmp_path: Path) -> None:
    for name in ("run.jsonl", "run-2.jsonl"):
        (tmp_path / name).write_text(name)
    outputs.Earlier(SftConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest"), tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"run-2.jsonl": "run-2.jsonl", "run-3.jsonl": "run.jsonl"}


def test_a_run_that_may_not_record_leaves_the_record_of_the_other(tmp_path: Path) -> None:
    for name in ("run.jsonl", "summary.json"):
        (tmp_path / name).write_text("of the other")
    with pytest.raises(DataError, match="already holds a run"):
        run.carry_out(SimpleNamespace(name="sft"), SftConfig(), tmp_path)  # type: ignore[arg-type]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("run.jsonl", "summary.json"), "of the other"
    )


def test_a_folder_that_another_process_writes_into_is_refused(tmp_path: Path) -> None:
    """Even if this run may overwrite or resume."""
    made = make(tmp_path, 2)
    config = SftConfig(output_dir=str(tmp_path), overwrite_output_dir=True)
    with contextlib.ExitStack() as own:
        words = "(?s)another run .process {} on .*expected one run.*hint: "
        with locked(tmp_path) as other, pytest.raises(DataError, match=words.format(other)):
            run.claim(config, own)
        run.claim(config, own)
    assert made.exists()


def test_a_file_system_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.lockf", refused)
    with contextlib.ExitStack() as claimed:
        assert run.claim(SftConfig(output_dir=str(tmp_path)), claimed) == tmp_path


def saving(output: Path, monkeypatch: pytest.MonkeyPatch, writes: Callable[[Path], object]) -> Callable[[], None]:
    """Return a call that saves the checkpoint of step 4, with a function that writes its files."""
    trainer = object.__new__(trainer_module.RecordedTrainer)
    trainer.config = SftConfig(save_total_limit=1)
    trainer.args = SimpleNamespace(should_save=True, world_size=1)  # type: ignore[assignment]
    trainer.state = SimpleNamespace(global_step=4)  # type: ignore[assignment]
    trainer.accelerator = SimpleNamespace(wait_for_everyone=lambda: None)
    trainer.train_dataset = [0]  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "_get_output_dir", lambda _trial: str(output))
    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", lambda *_: writes(output / "checkpoint-4"))
    return lambda: trainer._save_checkpoint(None, None)


def test_files_are_on_the_disk_before_the_seal_and_before_older_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a later crash of the node could lose both the new checkpoint and the old."""
    old, order = make(tmp_path, 2), list[str]()
    fsync, replace, remove = os.fsync, Path.replace, checkpoints.remove

    def flushed(opened: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{opened}"))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", lambda one, other: (order.append("sealed"), replace(one, other))[1])
    monkeypatch.setattr(checkpoints, "remove", lambda folder: (order.append("removed"), remove(folder))[1])
    saving(tmp_path, monkeypatch, lambda _folder: make(tmp_path, 4, sealed=False))()
    new = tmp_path / "checkpoint-4"
    files = [new / "model.safetensors", new / "part" / ".metadata", new / "part", new / f"{checkpoints.SEAL}.part"]
    assert {str(path) for path in files} <= set(order[: order.index("sealed")])
    assert {str(new), str(tmp_path)} <= set(order[order.index("sealed") : order.index("removed")])
    assert not old.exists() and find(tmp_path) == new


def test_a_failed_save_raises_its_own_error_and_a_full_disk_the_one_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = KeyError("state")

    def fails(_folder: Path) -> None:
        raise failure

    with pytest.raises(KeyError) as caught:
        saving(tmp_path, monkeypatch, fails)()
    assert caught.value is failure and failure.__cause__ is None  # tools that follow causes would loop

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "seal", full)
    with pytest.raises(DiskFullError, match="hint: free some space"):
        saving(tmp_path, monkeypatch, lambda _folder: make(tmp_path, 4, sealed=False))()
    assert not (tmp_path / "checkpoint-4").exists()


@pytest.mark.parametrize("asked", ["none", "False", None])
def test_a_folder_with_checkpoints_is_not_used_unasked(tmp_path: Path, asked: str | None) -> None:
    make(tmp_path, 2)
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=asked)
    with pytest.raises(DataError, match=r"holds an earlier run \(checkpoint-2\)"):
        outputs.check(config)
    outputs.check(SftConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest"))


@pytest.mark.parametrize(("word", "resumed"), [("no", False), ("Off", False), ("false", False), ("yes", True)])
def test_words_of_a_settings_file_resume_or_do_not(tmp_path: Path, word: str, resumed: bool) -> None:
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=word)
    assert checkpoints.resumes(config) is resumed and checkpoints.find(config) is None


LORA: dict[str, object] = {"train_type": "lora", "lora_rank": 4, "target_modules": ("q_proj", "v_proj")}


@pytest.mark.parametrize(
    ("changes", "found", "hint"),
    [
        ({"freeze_vit": False}, "with freeze_vit true, and this run has false", "--freeze_vit true"),
        ({"lora_rank": 8}, "with r 4, and this run has 8", "--lora_rank 4"),
        ({"target_modules": ("o_proj",)}, "target_modules q_proj v_proj, .* o_proj", "--target_modules q_proj v_proj"),
        (
            {"target_modules": ("q_proj",), "lora_alpha": 2},
            "target_modules q_proj v_proj, .* q_proj",
            "--target_modules q_proj v_proj",
        ),
        ({"model": "org/other"}, "on the model 'org/one', and this run has 'org/other'", "--model org/one"),
    ],
)
def test_one_of_other_adapters_is_refused(changes: dict[str, object], found: str, hint: str, tmp_path: Path) -> None:
    made = make(tmp_path, 2, model="org/one", **LORA)
    assert find(tmp_path, model="org/one", **{**LORA, "target_modules": ("v_proj", "q_proj")}) == made
    with pytest.raises(ConfigError, match=f"{made} was written .*{found}; expected .*\nhint: {hint}"):
        find(tmp_path, **{"model": "org/one", **LORA, **changes})


def test_other_settings_of_adapters_are_compared_as_well(tmp_path: Path) -> None:
    def config(name: str, **changes: object) -> dict[str, object]:
        file = tmp_path / name
        file.write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **changes}))
        return {"train_type": "adapter", "adapter_config": str(file)}

    made = make(tmp_path, 2, **config("one.json", use_rslora=False))
    assert find(tmp_path, **config("two.json")) == made
    with pytest.raises(ConfigError, match="with use_dora None, and this run has true"):
        find(tmp_path, **config("three.json", use_dora=True))


def test_values_that_fit_other_settings_are_resumed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, moved = tmp_path / "base", tmp_path / "moved"
    base.mkdir()
    made = make(tmp_path, 2, model=str(base), **LORA)
    link = tmp_path / "link"
    link.symlink_to(base)

    def found(**changes: object) -> Path | None:
        config = {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest", "model": str(base), **LORA}
        return checkpoints.find(SftConfig(**{**config, **changes}), world_size=2)

    assert found(model=str(link)) == found() == made
    assert not caplog.messages
    assert found(lora_alpha=1, lora_dropout=0.5) == made
    assert f"{made} was written with lora_alpha 32, lora_dropout 0.0" in caplog.text
    moved.mkdir()
    with pytest.raises(ConfigError, match=f"and this run has '{moved}'"):
        found(model=str(moved))
    base.rmdir()
    assert found(model=str(moved)) == made
    assert f"on the model '{base}' and is resumed on '{moved}'" in caplog.text


def test_one_is_resumed_with_its_own_adapters_and_old_seals_tell_nothing(tmp_path: Path) -> None:
    made = make(tmp_path, 2, **LORA)
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["model.layers.0.q_proj"]}
    (made / "adapter_config.json").write_text(json.dumps(settings))
    (made / "adapter_model.safetensors").write_bytes(b"")
    assert find(tmp_path, train_type="lora", adapters=str(made)) == made
    old = json.loads((made / checkpoints.SEAL).read_text())
    for name in ("settings", "model"):
        del old[name]
    (made / checkpoints.SEAL).write_text(json.dumps(old))
    assert find(tmp_path, train_type="lora", lora_rank=64, model="org/other") == made


@pytest.mark.parametrize("flag", ["adapters", "adapter_config"])
def test_a_seal_has_the_adapters_that_are_trained_whatever_their_file_became(tmp_path: Path, flag: str) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    (folder / "adapter_model.safetensors").touch()
    config = SftConfig(train_type="adapter", **{flag: str(folder if flag == "adapters" else file)})
    adapters.check(config)
    if flag == "adapters":
        shutil.rmtree(folder)  # as by --save_total_limit
    else:
        file.write_text(json.dumps({"peft_type": "VERA", "r": 8}))
    saved = tmp_path / "checkpoint-2"
    saved.mkdir()
    checkpoints.seal(saved, config, step=2, world_size=1)
    sealed, _ = checkpoints.read_seal(saved)
    assert sealed is not None and (sealed.adapters, sealed.adapted["settings"]["r"]) == ("LORA", 4)


def test_full_weights_are_resumed_on_any_model_named(tmp_path: Path) -> None:
    made = make(tmp_path, 2, model="org/one")
    assert find(tmp_path, model="org/other", lora_rank=2) == made
