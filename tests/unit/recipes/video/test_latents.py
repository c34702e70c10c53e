"""Latents on disk: a full disk, broken files, and the identity of a VAE."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from ebbtide.base.errors import ConfigError, DataError, DiskError, DiskFullError
from ebbtide.base.runs import LOCK_FILE
from ebbtide_recipes.skeleton import run
from ebbtide_recipes.video import clips, data, latents, recipe, shapes
from ebbtide_recipes.video.builtin import source as builtin_source
from ebbtide_recipes.video.clips import Size
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.latents import Making
from ebbtide_recipes.video.source import Source
from tests.helpers import video_pipelines
from tests.helpers.locked import locked
from tests.unit.recipes.video.parts import CPU

DATA = ("builtin:moving-shapes#2",)
SIZE = Size(3, 16, 16)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    import signal

    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def making_in(folder: Path, **changes: Any) -> Making:
    source = builtin_source("builtin:tiny-wan", seed=1)
    return Making(**{"folder": folder, "source": source, "data": DATA, "size": SIZE, **changes})


def make(folder: Path, **changes: Any) -> latents.Latents:
    making = making_in(folder, **changes)
    loaded = data.load(making.data, seed=1)
    making.make(loaded, device=CPU)
    making.finish(loaded)
    return latents.Latents(folder)


def test_a_clip_and_its_caption_are_read_back(tmp_path: Path) -> None:
    made, source = make(tmp_path), builtin_source("builtin:tiny-wan", seed=1)
    clip = data.load(DATA, seed=1)[1]
    pixels = clip.pixels(SIZE, rate=None)
    assert torch.equal(source.family.decode(source.vae(torch.float32), made[1]["latents"][None])[0], pixels)
    assert made.items[1]["caption"] == clip.caption
    assert not torch.equal(made[0]["text"]["prompt_embeds"], made[1]["text"]["prompt_embeds"])
    batch = latents.collate([made[0], made[1]])
    assert batch["latents"].shape == (2, 48, 3, 4, 4) and batch["text"]["prompt_embeds"].shape[0] == 2


def test_no_file_is_to_be_removed_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the clips in use have names of the same form, and are not made twice."""
    other = tmp_path / "clip-0.safetensors"
    other.write_bytes(bytes(2048))
    with caplog.at_level(logging.INFO, logger="ebbtide.video"):
        recipe._check_others(VideoConfig(), tmp_path, [other], logs=True)
        recipe._check_others(VideoConfig(), tmp_path, [other], logs=False)
    found = f"{tmp_path} keeps 1 latent file of other clips or flags (2.0 KiB) until the new ones are made"
    assert [record.getMessage() for record in caplog.records] == [found]


def test_a_clip_that_is_touched_at_the_end_keeps_its_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tmp_path / "clips"
    files.mkdir()
    film = files / "one.mp4"
    clips.write(film, shapes.draw(shapes.clips(1, 1)[0], 5, 16, 16), rate=8)
    film.with_suffix(".txt").write_text("a circle")
    real = Path.replace

    def touching(path: Path, target: Path) -> Path:
        if target.name == latents.MANIFEST:
            os.utime(film, ns=(1, 1))
        return real(path, target)

    monkeypatch.setattr(Path, "replace", touching)
    made = make(tmp_path / "latents", data=(str(files),))
    assert film.stat().st_mtime_ns == 1
    assert made[0]["latents"].ndim == 4


def test_a_refusal_counts_latents_of_other_flags_too(tmp_path: Path) -> None:
    others = [tmp_path / f"clip-{number}.safetensors" for number in range(2)]
    with pytest.raises(
        ConfigError, match="holds 2 latent files of other clips or flags, and no --dataset is set"
    ) as it:
        recipe._check_others(VideoConfig(latents_dir=str(tmp_path)), tmp_path, others, logs=False)
    assert "finish" not in str(it.value) and "set --dataset to replace them" in it.value.hint


def test_captions_added_later_have_the_length_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, text_length=8)
    making, lengths = making_in(tmp_path), []
    encode = making.source.encode

    def recorded(captions: list[str], *, length: int | None, **kwargs: object) -> object:
        lengths.append(length)
        return encode(captions, length=length, **kwargs)

    monkeypatch.setattr(making.source, "encode", recorded)
    making.add_captions(["a kite"], CPU)
    assert lengths == [8]


def test_embeddings_are_written_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, encoded = builtin_source("builtin:tiny-wan", seed=1), []

    class Pipeline:
        def encode_prompt(self, prompt: str, **options: object) -> tuple[torch.Tensor]:
            encoded.append(prompt)
            if len(encoded) == 3:
                raise MemoryError
            return (torch.zeros(1, 8, 4),)

    monkeypatch.setattr(source, "_text_pipeline", lambda *args: Pipeline())
    monkeypatch.setattr(source, "encode", partial(Source.encode, source))
    clips = data.load(DATA, seed=1)
    with pytest.raises(MemoryError):
        making_in(tmp_path, source=source).make(clips, captions=["a kite", "a boat"], device=CPU)
    assert len(list(tmp_path.glob("text-*.safetensors"))) == 2


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only process of a run."""
    only = SimpleNamespace(process_index=0, num_processes=1, wait_for_everyone=lambda: None)
    only.is_main_process = only.is_local_main_process = True
    monkeypatch.setattr("accelerate.PartialState", lambda: only)
    return only


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("samples", [0, 1])
def test_prompts_are_embedded_if_they_are_sampled(tmp_path: Path, samples: int) -> None:
    source, settings = builtin_source("builtin:tiny-wan", seed=1), {"num_frames": 3, "height": 16, "width": 16}
    for prompt in ("a kite", "a boat"):  # with the latents, and later
        config = VideoConfig(
            dataset=DATA, output_dir=str(tmp_path), samples=samples, sample_prompts=(prompt,), **settings
        )
        made = recipe._latents(config, source, CPU)
        assert (made.folder / latents._text_file(prompt)).is_file() is bool(samples)


@pytest.mark.parametrize("rank", ["of the run", "of another node"])
def test_prompts_that_come_later_are_embedded_in_each_copy_of_the_latents(
    tmp_path: Path, process: SimpleNamespace, rank: str
) -> None:
    make(tmp_path)
    process.is_main_process = rank == "of the run"
    config = VideoConfig(latents_dir=str(tmp_path), sample_prompts=("a kite",))
    made = recipe._latents(config, builtin_source("builtin:tiny-wan", seed=1), CPU)
    assert made.text("a kite")["prompt_embeds"].any()


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("inside", [False, True])
def test_one_run_at_a_time_makes_latents_in_a_folder(tmp_path: Path, inside: bool) -> None:
    """Its own lock on the output folder stays, wherever the latents are."""
    source = builtin_source("builtin:tiny-wan", seed=1)
    settings = {"num_frames": 3, "height": 16, "width": 16, "samples": 0}
    out, folder = tmp_path / "out", tmp_path / ("out" if inside else "latents")
    config = VideoConfig(dataset=DATA, output_dir=str(out), latents_dir=str(folder), **settings)
    folder.mkdir()
    with contextlib.ExitStack() as claimed:
        if not inside:
            with locked(folder) as other, pytest.raises(DataError, match=f"another run .process {other} on ") as it:
                recipe._latents(config, source, CPU)
            assert {path.name for path in folder.iterdir()} == {LOCK_FILE} and "hint: wait" in str(it.value)
        run.claim(config, claimed)
        assert len(recipe._latents(config, source, CPU)) == 2
        with pytest.raises(AssertionError), locked(out):
            pass


def test_two_runs_may_embed_one_caption_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, save, written = tmp_path / "text-1.safetensors", safetensors.torch.save_file, list[object]()

    def saving(*args: object, **options: object) -> None:
        save(*args, **options)  # type: ignore[arg-type]
        written.append(args)
        if len(written) == 1:  # the other one begins later and ends earlier
            latents._write(path, {"prompt_embeds": torch.ones(2)}, "")

    monkeypatch.setattr("safetensors.torch.save_file", saving)
    latents._write(path, {"prompt_embeds": torch.ones(2)}, "")
    assert len(written) == 2 and latents._read(path)["prompt_embeds"].eq(1).all()
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_disk_full_of_latents_is_an_error_and_finished_ones_are_kept(tmp_path: Path) -> None:
    with files_at_most(6000), pytest.raises(DiskFullError, match=r"clip-\w{16}\.safetensors could not be") as caught:
        make(tmp_path)
    assert "--latents_dir" in str(caught.value) and "MiB are free" in str(caught.value)
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("text-*.safetensors")}
    assert len(kept) == 3 and not list(tmp_path.glob("*.part")) and not latents.is_made(tmp_path)
    make(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("text-*.safetensors")} == kept


def test_a_disk_that_fails_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(DiskError, match=r"safetensors could not be written: .*Input/output error") as caught:
        make(tmp_path)
    assert "hint:" in str(caught.value) and not list(tmp_path.glob("*.part"))


def test_a_disk_full_at_the_manifest_is_an_error_too(tmp_path: Path) -> None:
    making, clips = making_in(tmp_path), data.load(("builtin:moving-shapes#4",), seed=1)
    making.make(clips, device=CPU)
    with files_at_most(10), pytest.raises(DiskFullError, match="could not be written") as caught:
        making.finish(clips)
    assert "--latents_dir" in str(caught.value) and not list(tmp_path.glob("*.part")) and not latents.is_made(tmp_path)
    making.finish(clips)
    assert latents.is_made(tmp_path)


def test_an_interrupted_run_goes_on_although_a_clip_was_removed(tmp_path: Path) -> None:
    making, clips = making_in(tmp_path), data.load(("builtin:moving-shapes#4",), seed=1)
    source = making.source
    making.make(clips, device=CPU)  # not finished
    fewer = [clips[0], *clips[2:]]
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("clip-*")}
    assert len(before) == 4
    making.make(fewer, device=CPU)
    making.finish(fewer)
    read = latents.Latents(tmp_path)
    for number, clip in enumerate(fewer):
        pixels = clip.pixels(SIZE, rate=None)
        assert torch.equal(source.family.decode(source.vae(torch.float32), read[number]["latents"][None])[0], pixels)
        assert read.items[number]["caption"] == clip.caption
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("clip-*")}
    assert len(kept) == 3 and kept.items() <= before.items()


def test_latents_of_other_clips_or_captions_are_replaced(tmp_path: Path) -> None:
    make(tmp_path)
    making, clips = making_in(tmp_path), data.load(DATA, seed=1)
    assert making.matches(clips) and making.matches()
    other = dataclasses.replace(clips[0], caption="another caption")
    assert not making.matches([other, clips[1]]) and not making.matches(clips[::-1])
    for changes in ({"size": Size(5, 16, 16)}, {"dtype": torch.bfloat16}, {"rate": 8.0}):
        assert not making_in(tmp_path, **changes).matches()
    bare = builtin_source("builtin:tiny-wan", seed=1)
    bare.vae_identity = bare.text_identity = lambda: None  # a pipeline without them
    assert making_in(tmp_path, source=bare).matches(clips)


def test_the_manifest_needs_only_the_heads_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make(tmp_path).manifest
    monkeypatch.setattr(latents, "_read", lambda path: pytest.fail(f"{path} was read whole"))
    making_in(tmp_path).finish(data.load(DATA, seed=1))
    assert latents.Latents(tmp_path).manifest == before and before["channels"] == 48
    (tmp_path / before["items"][1]["file"]).write_bytes(b"cut off")
    with pytest.raises(DataError, match="cannot be read"):
        making_in(tmp_path).finish(data.load(DATA, seed=1))


def test_a_file_that_changed_is_another_clip(tmp_path: Path) -> None:
    film, frames = tmp_path / "a.mp4", tmp_path / "frames"
    film.write_bytes(b"film")
    frames.mkdir()
    (frames / "0.png").write_bytes(b"frame")
    for origin, inside in ((film, film), (frames, frames / "0.png")):
        before = data.Clip(caption="c", origin=origin).identity
        assert before == data.Clip(caption="c", origin=origin).identity
        inside.write_bytes(b"changed it")
        assert data.Clip(caption="c", origin=origin).identity != before


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    made = make(tmp_path)
    (tmp_path / made.items[1]["file"]).write_bytes(b"short")
    with pytest.raises(DataError, match=f"{made.items[1]['file']} cannot be read"):
        made[1]
    (tmp_path / latents.MANIFEST).write_text("{}")
    with pytest.raises(DataError, match=r"latents\.json cannot be read"):
        latents.Latents(tmp_path)


@pytest.mark.parametrize("part", ["weights", "config"])
def test_another_vae_has_another_identity(tmp_path: Path, part: str) -> None:
    first = video_pipelines.write(tmp_path / "first", "wan")
    second = shutil.copytree(first, tmp_path / "second")
    assert Source(first).vae_identity() == Source(second).vae_identity()
    if part == "weights":
        file = next((second / "vae").glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        file = second / "vae" / "config.json"
        file.write_text(file.read_text().replace("0.1,", "0.2,", 1))
    assert Source(first).vae_identity() != Source(second).vae_identity()
    assert Source(first).text_identity() == Source(second).text_identity()


@pytest.mark.parametrize("name", ["model_index.json", "scheduler/scheduler_config.json", "text_encoder/config.json"])
def test_a_damaged_config_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (video_pipelines.write(tmp_path, "wan") / name).write_text("{")
    with pytest.raises(DataError, match=name) as caught:
        source = Source(tmp_path)
        source.scheduler()
        source.text_identity()
    assert "hint: fetch it again" in str(caught.value)


def test_an_image_to_video_transformer_is_refused(tmp_path: Path) -> None:
    folder = video_pipelines.write(tmp_path, "wan")
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"in_channels": 4', '"in_channels": 9'))
    with pytest.raises(DataError, match="takes 9 channels, and the VAE makes 4"):
        Source(folder)


def test_a_folder_above_or_inside_a_pipeline_is_named(tmp_path: Path) -> None:
    video_pipelines.write(tmp_path / "wan", "wan")
    with pytest.raises(DataError, match="has no transformer/config.json") as caught:
        Source(tmp_path)
    assert f"{tmp_path / 'wan'} has one" in str(caught.value)
    with pytest.raises(DataError, match="the folder above it"):
        Source(tmp_path / "wan" / "transformer")
