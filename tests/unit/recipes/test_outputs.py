"""What a run may do to its output folder, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import checkpoints, launch, outputs, run
from ebbtide_recipes.skeleton.logging import logging_to, remove_earlier_lines

LOGGER = logging.getLogger("ebbtide.recipes")


def make(output: Path, step: int, *, sealed: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if sealed:
        checkpoints.seal(folder, SftConfig(), step=step, world_size=1)
    return folder


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a call that checks a run into ``out`` as the command does, without the data and the machine."""
    from ebbtide_recipes.sft.recipe import RECIPE

    for name in ("check_data", "check"):
        monkeypatch.setattr(type(RECIPE), name, lambda *_: None)
    monkeypatch.setattr(launch, "check_device", lambda *_: None)
    return lambda **changes: run.check(RECIPE, SftConfig(**{"output_dir": str(tmp_path / "out"), **changes}))


@pytest.mark.parametrize("flag", ["model", "adapters"])
def test_overwriting_what_the_run_loads_is_refused(check, tmp_path: Path, flag: str) -> None:
    made = make(tmp_path / "out", 4)
    (tmp_path / "out" / "run.jsonl").touch()
    changes = {flag: str(made), "train_type": "lora", "overwrite_output_dir": True}
    with pytest.raises(DataError, match=f"--{flag} .* is in .*checkpoint-4, which --overwrite_output_dir true removes"):
        check(**changes)
    check(**changes, output_dir=str(tmp_path / "other"))


@pytest.mark.parametrize("resumed", [None, "latest"])
@pytest.mark.parametrize(
    "name",
    ["checkpoint-4/pytorch_model.bin", "set-aside-checkpoint-4/x", "model.safetensors", "transformer/a.safetensors"],
)
def test_weights_of_another_program_are_not_replaced_unasked(
    check, tmp_path: Path, name: str, resumed: str | None
) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"of others")
    with pytest.raises(DataError, match=f"holds {name.removesuffix('/x').split('/py')[0]}, and no record of a run"):
        check(resume_from_checkpoint=resumed)
    check(resume_from_checkpoint=resumed, overwrite_output_dir=True)


@pytest.mark.parametrize("record", ["run.jsonl", "run-1.jsonl", "checkpoint-2/ebbtide.json"])
def test_a_first_checkpoint_that_a_killed_run_left_does_not_stop_the_next(check, tmp_path: Path, record: str) -> None:
    make(tmp_path / "out", 2, sealed=False)
    (tmp_path / "out" / record).write_text("")
    check(resume_from_checkpoint="latest")


def test_a_model_that_no_save_replaces_may_stay(check, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    check(save=False)


@pytest.mark.parametrize("changes", [{}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}])
@pytest.mark.parametrize(("flag", "part"), [("model", "."), ("model", "transformer"), ("adapters", ".")])
def test_an_output_folder_that_is_the_one_of_the_weights_is_refused(
    check, tmp_path: Path, flag: str, part: str, changes: dict
) -> None:
    source = tmp_path / "link" / part
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    source.mkdir(exist_ok=True)
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    changes = {flag: str(source), "train_type": "lora", **changes}
    with pytest.raises(DataError, match=f"--{flag} .* is where this run writes what it trained"):
        check(**changes)


@pytest.mark.parametrize("changes", [{"overwrite_output_dir": True}, {"resume_from_checkpoint": "latest"}])
@pytest.mark.parametrize("summed_up", [True, False])
def test_a_run_that_fails_while_it_loads_leaves_the_earlier_one_as_it_was(
    tmp_path: Path, changes: dict, summed_up: bool
) -> None:
    def fails(_config: object) -> None:
        assert "run_begin" in (tmp_path / "run.jsonl").read_text()
        raise ValueError("while it loads")

    make(tmp_path, 2)
    for name in ("run.jsonl", "run-1.jsonl", "outside.jsonl", *("summary.json", "report.html") * summed_up):
        (tmp_path / name).write_text(f"earlier {name}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = SftConfig(output_dir=str(tmp_path), **changes)
    with contextlib.ExitStack() as claimed, pytest.raises(ValueError, match="while it loads"):
        run.carry_out(SimpleNamespace(name="sft", prepare=fails), config, run.claim(config, claimed))  # type: ignore[arg-type]
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after.get(path) for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} == {".lock", "training.log"}


@pytest.mark.parametrize("failing", ["run.jsonl", "run-1.jsonl"])
def test_a_record_that_cannot_be_renamed_is_an_error_and_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_config: object) -> None:
        raise ValueError("while it loads")

    def rename(path: Path, target: Path) -> Path:
        if path.name == failing:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return real(path, target)

    real = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    (tmp_path / "run.jsonl").write_text("earlier")
    config, recipe = SftConfig(output_dir=str(tmp_path), overwrite_output_dir=True), SimpleNamespace(name="sft")
    recipe.prepare = fails
    kind, text = (DataError, "cannot be renamed") if failing == "run.jsonl" else (ValueError, "while it loads")
    with pytest.raises(kind, match=text):
        run.carry_out(recipe, config, tmp_path)  # type: ignore[arg-type]
    assert (tmp_path / failing).read_text() == "earlier"
    assert ("is not as it was" in caplog.text) == (failing == "run-1.jsonl")


def test_a_log_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "training.log").mkdir()
    with contextlib.ExitStack() as claimed, pytest.raises(DataError, match="cannot be written: Is a directory"):
        run.claim(SftConfig(output_dir=str(tmp_path)), claimed)


def test_a_start_that_fails_leaves_the_earlier_log(tmp_path: Path) -> None:
    def fails(_config: object) -> None:
        raise ValueError("while it loads")

    (tmp_path / "training.log").write_text("earlier\n")
    recipe = SimpleNamespace(name="sft", packages=(), check_data=id, check=id, prepare=fails)
    with pytest.raises(ValueError, match="while it loads"):
        run.main(recipe, SftConfig(output_dir=str(tmp_path), overwrite_output_dir=True))  # type: ignore[arg-type]
    assert (tmp_path / "training.log").read_text().startswith("earlier\n")


@pytest.mark.parametrize("append", [True, False])
def test_training_that_begins_replaces_the_earlier_log_unless_it_goes_on(tmp_path: Path, append: bool) -> None:
    log = tmp_path / "training.log"
    log.write_text("earlier\n")
    with logging_to(tmp_path, "info", append=append):
        LOGGER.info("it loads")
        remove_earlier_lines()
        LOGGER.info("it trains")
    lines = [line.split("recipes: ")[-1] for line in log.read_text().splitlines()]
    assert lines == [*["earlier"] * append, "it loads", "it trains"]


def test_a_full_disk_costs_lines_of_the_log_and_hides_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training.log").symlink_to("/dev/full")
    with pytest.raises(ValueError, match="the model"), logging_to(tmp_path, "info", append=True):
        LOGGER.info("one")
        LOGGER.info("two")
        raise ValueError("the model")
    lines = capsys.readouterr().err.splitlines()
    warning = f"WARNING {tmp_path / 'training.log'} lacks lines from here on: No space left on device"
    assert sorted(lines) == sorted(["INFO one", warning, "INFO two"])


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(check, tmp_path: Path) -> None:
    four = make(tmp_path / "out", 4)
    (four / "model.safetensors").write_bytes(b"0123456789")
    with pytest.raises(DataError, match=r"checkpoint-4/model.safetensors cannot be read: "):
        check(resume_from_checkpoint="latest")


def test_a_checkpoint_of_another_folder_is_resumed_only_where_no_run_is(check, tmp_path: Path) -> None:
    begin, own = make(tmp_path / "elsewhere", 2), make(tmp_path / "out", 1)
    (tmp_path / "link").symlink_to(own)
    with pytest.raises(DataError, match=r"holds an earlier run \(checkpoint-1\)"):
        check(resume_from_checkpoint=str(begin))
    check(resume_from_checkpoint=str(begin), output_dir=str(tmp_path / "new"))
    for resumed in (own, tmp_path / "link"):
        check(resume_from_checkpoint=str(resumed))
        outputs.clear(check(resume_from_checkpoint=str(resumed), overwrite_output_dir=True), tmp_path / "out")
    assert own.exists()
    outputs.clear(check(resume_from_checkpoint=str(begin), overwrite_output_dir=True), tmp_path / "out")
    assert not own.exists() and begin.exists()


def test_latest_does_not_replace_a_trained_model_by_one_from_the_first_step(check, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("run.jsonl", "model.safetensors"):
        (tmp_path / "out" / name).touch()
    with pytest.raises(DataError, match=r"holds model.safetensors, and no complete checkpoint to resume from"):
        check(resume_from_checkpoint="latest")
    check(resume_from_checkpoint="latest", overwrite_output_dir=True)
    check(resume_from_checkpoint="latest", save=False)
    make(tmp_path / "out", 2)
    check(resume_from_checkpoint="latest")


def test_making_latents_elsewhere_leaves_the_output_folder_alone(tmp_path: Path) -> None:
    from ebbtide_recipes.video.config import VideoConfig

    def prepares(_config: object) -> None:
        LOGGER.warning("latents are made")

    for folder in ("out", "latents"):  # in that of the latents there may be a run, too
        make(tmp_path / folder, 2)
        for name in ("run.jsonl", "summary.json", "training.log"):
            (tmp_path / folder / name).write_text(f"earlier {name}\n")
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    names = {"output_dir": str(tmp_path / "out"), "latents_dir": str(tmp_path / "latents")}
    config = VideoConfig(**names, preprocess_only=True)  # type: ignore[arg-type]
    recipe = SimpleNamespace(name="video", packages=(), check_data=id, check=id, prepare=prepares)
    run.main(recipe, config)  # type: ignore[arg-type]
    log = tmp_path / "latents" / "training.log"
    after = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after.pop(log).startswith(before.pop(log)) and "latents are made" in log.read_text()
    assert after == before and not (tmp_path / "out" / ".lock").exists()


MODEL = ("config.json", "generation_config.json", "chat_template.jinja", "model.safetensors")
SHARDS = ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin")
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
FILMS = ("pytorch_lora_weights.safetensors", "lora_ema/pytorch_lora_weights.safetensors")
PARTS = [f"{part}/{name}" for part in ("transformer", "transformer_ema", "critic")
         for name in ("config.json", "diffusion_pytorch_model.safetensors")]  # fmt: skip


def write(folder: Path, *names: str) -> set[str]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"earlier {name}")
    return set(names)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_model_of_an_overwritten_run_is_removed_and_no_other_file(tmp_path: Path) -> None:
    write(tmp_path, *MODEL, *SHARDS, *ADAPTERS, *FILMS, *PARTS)
    others = write(
        tmp_path, "run.jsonl", "README.md", "vae.safetensors", "model-best.safetensors", "model.py", "tokenizer.json",
        "checkpoint-2/config.json", "checkpoint-2/model.safetensors", "latents/model.safetensors", "critic/notes.txt",
        "lora_ema/adapter_model.safetensors", "transformer/model.safetensors", "samples/step-000002.png",
    )  # fmt: skip
    outputs.clear_model(SftConfig(overwrite_output_dir=True), tmp_path)
    assert files(tmp_path) == others
    assert not (tmp_path / "transformer_ema").exists()  # nothing else was in it


def test_a_run_that_goes_on_leaves_only_the_files_that_its_save_writes(tmp_path: Path) -> None:
    """An old file would be loaded in place of new shards."""
    write(tmp_path, *MODEL, *SHARDS, *ADAPTERS, *FILMS, *PARTS)
    replaced = {"model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"}
    before = files(tmp_path)
    outputs.clear_model(SftConfig(resume_from_checkpoint="latest"), tmp_path)
    assert files(tmp_path) == before - replaced
    outputs.clear_model(SftConfig(train_type="lora"), tmp_path)
    assert files(tmp_path) == before - replaced - {"adapter_model.safetensors", "pytorch_lora_weights.safetensors"}


def test_settings_without_weights_are_those_of_no_saved_model(tmp_path: Path) -> None:
    others = write(tmp_path, *MODEL[:3], "adapter_config.json", "transformer/config.json")
    outputs.clear_model(SftConfig(overwrite_output_dir=True), tmp_path)
    assert files(tmp_path) == others
    write(tmp_path, "adapter_model.safetensors")
    outputs.clear_model(SftConfig(overwrite_output_dir=True), tmp_path)
    assert files(tmp_path) == others - {"adapter_config.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    ("train_type", "saved", "found"),
    [
        ("lora", MODEL, "model.safetensors"),
        ("lora", SHARDS, "model-00001-of-00002.safetensors, model.safetensors.index.json, pytorch_model.bin"),
        ("full", ADAPTERS, "adapter_model.bin, adapter_model.safetensors"),
    ],
)
def test_a_model_of_the_other_kind_is_not_saved_next_to_one_unasked(
    check, tmp_path: Path, train_type: str, saved: tuple[str, ...], found: str
) -> None:
    write(tmp_path / "out", "run-1.jsonl", *saved)
    kind = "adapters" if train_type == "lora" else "all weights"
    with pytest.raises(DataError, match=f"/out holds {found}, and this run saves {kind}; .*\nhint: move it, or pass"):
        check(train_type=train_type)
    check(train_type="full" if train_type == "lora" else "lora")
    check(train_type=train_type, save=False)
    check(train_type=train_type, overwrite_output_dir=True)


@pytest.mark.parametrize("main", [True, False])
def test_the_main_rank_replaces_a_model_once_the_new_one_is_written(tmp_path: Path, main: bool) -> None:
    from ebbtide_recipes.skeleton.trainer import save

    kept = write(tmp_path, "README.md", *ADAPTERS)
    write(tmp_path / outputs.DRAFT, "model-00001-of-00001.safetensors")  # of a killed run

    def saves(folder: str) -> None:
        assert files(tmp_path) >= kept
        if main:
            assert files(Path(folder)) == {"README.md"}  # PEFT adds to it
            write(Path(folder), "model.safetensors", "transformer/config.json")

    trainer = SimpleNamespace(is_fsdp_enabled=False, args=SimpleNamespace(should_save=main), save_model=saves)
    save(SftConfig(overwrite_output_dir=True), trainer, tmp_path)  # type: ignore[arg-type]
    other_rank = {*kept, f"{outputs.DRAFT}/model-00001-of-00001.safetensors"}
    new = {"README.md", "model.safetensors", "transformer/config.json"}
    assert files(tmp_path) == (new if main else other_rank)
    assert main is not (tmp_path / outputs.DRAFT).exists()
