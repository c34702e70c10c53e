"""A checkpoint is whole or is none."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbtide.base.errors import ConfigError, DataError, DiskFullError
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import checkpoints, run


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


def test_latest_is_the_newest_whole_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        assert find(tmp_path) is None
    assert "holds no complete checkpoint" in caplog.text
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
        (lambda folder: (folder / "part" / ".metadata").unlink(), "misses part/.metadata"),
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


def test_other_processes_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 4)
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest")
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        assert checkpoints.find(config, world_size=2) is not None
        assert caplog.text == ""
        assert checkpoints.find(config, world_size=1) is not None
    two, one = ("processes 2, rows of a step 2", "processes 1, rows of a step 1")
    assert f"was written with {two} and is resumed with {one}" in caplog.text


def test_other_rows_seeds_and_batches_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make(tmp_path, 4, sealed=False)
    checkpoints.seal(folder, SftConfig(), step=4, world_size=2, rows=40)
    config = {"output_dir": str(tmp_path), "resume_from_checkpoint": "latest"}
    changed = SftConfig(**config, seed=7, per_device_train_batch_size=2)
    with caplog.at_level(logging.WARNING, logger="ebbtide.recipes"):
        checkpoints.find(SftConfig(**config), world_size=2, rows=40)
        checkpoints.find(
            SftConfig(**config, max_length=64), world_size=2, rows=40
        )  # cuts rows, and leaves them in order
        assert caplog.text == ""
        checkpoints.find(changed, world_size=2, rows=39)
        before, now = "seed 42, rows of a step 2, rows 40", "seed 7, rows of a step 4, rows 39"
        assert f"was written with {before} and is resumed with {now}: the order of rows" in caplog.text
        caplog.clear()
        seal = json.loads((folder / checkpoints.SEAL).read_text())
        (folder / checkpoints.SEAL).write_text(json.dumps({k: v for k, v in seal.items() if k != "order"}))
        assert checkpoints.find(changed, world_size=2, rows=39) == folder  # an older seal says nothing of these
    assert caplog.text == ""


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make(tmp_path, step, sealed=step != 4)
    make(tmp_path, 10, sealed=False)
    checkpoints.prune(tmp_path, None)
    assert len(list(tmp_path.iterdir())) == 5
    checkpoints.prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_a_full_disk_is_told_with_what_can_be_gone_on_from(tmp_path: Path, error: Exception) -> None:
    new = tmp_path / "checkpoint-4"
    first = checkpoints.not_saved(error, new, tmp_path)
    assert isinstance(first, DiskFullError) and "no checkpoint was written before" in first.hint
    old = make(tmp_path, 2)
    assert f"resume from {old}" in str(checkpoints.not_saved(error, new, tmp_path))


def test_another_failure_stays_what_it_is(tmp_path: Path) -> None:
    error = KeyError("state")
    assert checkpoints.not_saved(error, tmp_path, tmp_path) is error


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
    checkpoints.set_aside_later(config)  # the same name again
    assert {path.name for path in tmp_path.iterdir()} == {"set-aside-checkpoint-3", "set-aside-checkpoint-4"}


@pytest.mark.parametrize("asked", ["latest", "none", None, "elsewhere"])
def test_nothing_else_is_set_aside(tmp_path: Path, asked: str | None) -> None:
    here = [make(tmp_path / "here", step) for step in (1, 2)]
    elsewhere = make(tmp_path / "elsewhere", 1)
    name = str(elsewhere) if asked == "elsewhere" else asked
    checkpoints.set_aside_later(SftConfig(output_dir=str(tmp_path / "here"), resume_from_checkpoint=name))
    assert all(path.exists() for path in here)


@pytest.mark.parametrize("asked", ["none", "False", None])
def test_a_folder_with_checkpoints_is_not_used_unasked(tmp_path: Path, asked: str | None) -> None:
    make(tmp_path, 2)
    config = SftConfig(output_dir=str(tmp_path), resume_from_checkpoint=asked)
    with pytest.raises(DataError, match=r"holds an earlier run \(checkpoint-2\)"):
        run._check_output(config)
    run._check_output(SftConfig(output_dir=str(tmp_path), resume_from_checkpoint="latest"))
