"""Finding clips and their captions, and putting them into buckets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.skeleton.rows import FIRST_ROWS
from ebbtide_recipes.video import clips, data, listings, shapes
from ebbtide_recipes.video.buckets import BucketSampler, bucket_for
from ebbtide_recipes.video.clips import Size
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.latents import MANIFEST
from ebbtide_recipes.video.recipe import RECIPE

CLIP = shapes.Drawn(shape="circle", color="red", ground="navy", way="right")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.mp4", "a.mp4"):
        clips.write(tmp_path / name, shapes.draw(CLIP, 3, 16, 16), rate=8)
    return tmp_path


def loaded(name: str | Path) -> list[tuple[str, str]]:
    return [(Path(clip.name).name, clip.caption) for clip in data.load([str(name)], seed=1)]


def test_captions_are_in_text_files_next_to_the_clips(folder: Path) -> None:
    (folder / "a.txt").write_text(" a cat \n")
    (folder / "b.txt").write_text("a dog")
    (folder / "frames").mkdir()
    (folder / "frames" / "0.png").write_bytes(b"")
    (folder / "frames" / "caption.txt").write_text("a bird")
    assert loaded(folder) == [("a.mp4", "a cat"), ("b.mp4", "a dog"), ("frames", "a bird")]
    assert loaded(f"{folder}#1") == [("a.mp4", "a cat")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.jsonl", '{"video": "b.mp4", "caption": "x"}\n\n{"path": "a.mp4", "cap": ["y", "z"]}\n'),
        ("videos2caption.json", json.dumps([{"path": "b.mp4", "cap": ["x"]}, {"path": "a.mp4", "cap": "y"}])),
        ("metadata.csv", "file_name,text\nb.mp4,x\na.mp4,y\n"),
    ],
)
def test_listings_name_clips_and_captions(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert loaded(folder) == loaded(folder / name) == [("b.mp4", "x"), ("a.mp4", "y")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.jsonl", '{"video": "b.mp4", "caption": "a kite\u2028flies\x85up"}\r\n'),
        ("metadata.csv", 'video,caption\nb.mp4,"a kite\u2028flies\x85up"\n'),
    ],
)
def test_only_ends_of_lines_end_a_row(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode())
    assert loaded(folder / name) == [("b.mp4", "a kite\u2028flies\x85up")]


def test_a_caption_in_quotes_may_have_several_lines(folder: Path) -> None:
    (folder / "rows.csv").write_text('video,caption\nb.mp4,"a red kite\nflies"\na.mp4,y\n')
    assert loaded(folder / "rows.csv") == [("b.mp4", "a red kite\nflies"), ("a.mp4", "y")]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"video": "a.mp4"}, "row 1 of .* has no caption"),
        ({"video": "a.mp4", "caption": " "}, "row 1 of .* has no caption"),
        ({"caption": "x"}, "row 1 of .* names no video"),
        ({"video": "c.mp4", "caption": "x"}, r"names 'c\.mp4', which does not exist"),
        (["a.mp4"], "row 1 of .* is"),
    ],
)
def test_rows_that_name_no_clip_are_refused(folder: Path, row: object, found: str) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=found) as caught:
        loaded(folder / "rows.jsonl")
    assert "hint:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("rows.jsonl", '{"video": "a.mp4", "caption": "x"}\n{"video": \n', "line 2 of .* is not JSON"),
        ("rows.jsonl", '{"video": "a.mp4"}\n', "row 1 of .* has no caption"),
        ("rows.jsonl", '{"video": "c.mp4", "caption": "x"}\n', "row 1 of .* names 'c.mp4', which does not exist"),
        ("rows.json", '{"video": "a.mp4", "caption": "x"}', "holds a JSON dict"),
        ("rows.csv", "file,text\na.mp4,x\n", "row 1 of .* names no video"),
        ("rows.csv", "", "has no clip"),
        ("metadata.jsonl", "nothing", "is not JSON"),
    ],
)
def test_the_first_rows_of_a_listing_are_read_before_anything_is_loaded(
    folder: Path, name: str, content: str, found: str
) -> None:
    (folder / name).write_text(content)
    place = str(folder if name == "metadata.jsonl" else folder / name)
    config = VideoConfig(model="builtin:small-wan", dataset=(place,))
    with pytest.raises(DataError, match=found):
        RECIPE.check_data(config)
    latents = folder / "latents"
    latents.mkdir()
    (latents / MANIFEST).write_text("{}")
    RECIPE.check_data(VideoConfig(model="builtin:small-wan", dataset=(place,), latents_dir=str(latents)))


def test_listings_are_read_without_torch() -> None:
    code = "import sys, ebbtide_recipes.video.recipe, ebbtide_recipes.video.listings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_rest_of_a_listing_is_left_to_the_load(folder: Path) -> None:
    row = '{"video": "a.mp4", "caption": "x"}\n'
    (folder / "rows.jsonl").write_text(row * FIRST_ROWS + "{")
    listings.check([str(folder / "rows.jsonl"), str(folder), "builtin:moving-shapes#2"])
    with pytest.raises(DataError, match=f"line {FIRST_ROWS + 1} of .* is not JSON"):
        loaded(folder / "rows.jsonl")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "a.mp4 has no caption; expected a.txt in its folder"),
        (b"", "a.mp4 has no caption; expected a.txt"),
        (b" \n", "has no caption"),
        (b"caf\xe9", "a.txt is not UTF-8"),
    ],
)
def test_a_clip_without_a_caption_is_refused(folder: Path, content: bytes | None, found: str) -> None:
    if content is not None:
        (folder / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=found.replace(".", r"\.")):
        loaded(folder)


def test_places_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    for name, found in (
        (str(tmp_path / "nowhere"), "does not exist"),
        (str(folder / "a.mp4"), "ends in '.mp4'"),
        ("builtin:moving-shape", "there is no data set"),
    ):
        with pytest.raises(DataError, match=found):
            listings.checked(name)
    with pytest.raises(ConfigError, match="ends in #many"):
        listings.checked("builtin:moving-shapes#many")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no clip"):
        loaded(tmp_path / "empty")


def test_folders_of_videos_in_a_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.mp4").touch()
    with pytest.raises(DataError, match=f"hint: .*--dataset {tmp_path / 'inner'}"):
        loaded(tmp_path)
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "0.png").touch()
    (tmp_path / "frames.txt").write_text("x")
    assert loaded(tmp_path) == [("frames", "x")]
    (record,) = caplog.records
    assert "(inner)" in record.getMessage()
    assert "hint:" in record.getMessage()


@pytest.mark.parametrize(
    ("clip", "bucket"),
    [
        (Size(99, 480, 640), Size(9, 56, 72)),
        (Size(7, 100, 100), Size(5, 64, 64)),
        (Size(1, 1080, 1920), Size(1, 48, 88)),
        (Size(9, 1920, 1080), Size(9, 88, 48)),
        (Size(0, 9, 9), None),
    ],
)
def test_clips_go_to_the_bucket_of_their_proportions(clip: Size, bucket: Size | None) -> None:
    assert bucket_for(clip, Size(9, 64, 64), ratios=(4, 8), patch=(1, 1)) == bucket


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_batch_is_of_one_bucket_and_no_clip_is_left_out(batch: int) -> None:
    buckets = [Size(1 + index % 3, 8, 8) for index in range(11)]
    sampler = BucketSampler(buckets, batch=batch, seed=4)
    order = list(sampler)
    assert len(order) == len(sampler) and len(order) % batch == 0
    assert set(order) == set(range(11))
    batches = [order[begin : begin + batch] for begin in range(0, len(order), batch)]
    assert all(len({buckets[index] for index in one}) == 1 for one in batches)
    assert Counter(order).most_common(1)[0][1] <= 2
    assert order == list(BucketSampler(buckets, batch=batch, seed=4))
    sampler.set_epoch(1)
    assert order != list(sampler)
