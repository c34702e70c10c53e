"""Reading and writing clips: real .mp4 and .webm, image folders, and unusable files."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import av
import numpy
import pytest
import torch
from PIL import ExifTags, Image, PngImagePlugin

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft import decode
from ebbtide_recipes.video import clips, shapes

CLIP = shapes.Drawn(shape="circle", color="red", ground="navy", way="right")


def film(frames: int = 9, height: int = 32, width: int = 48) -> torch.Tensor:
    return shapes.draw(CLIP, frames, height, width)


def record(
    path: Path, images: torch.Tensor, *, rate: int, codec: str = "mpeg4", times: Iterable[int] | None = None
) -> Path:
    """Write a video, with the times of its frames counted in the rate."""
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "abcdefgh"
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for time, image in zip(range(len(images)) if times is None else times, images, strict=True):
            frame = av.VideoFrame.from_ndarray(image.numpy(), format="rgb24")
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def sound(path: Path) -> Path:
    """Write an .mp4 with a second of silence and no picture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(numpy.zeros((1, 1024), dtype=numpy.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_what_is_written_is_read_back_nearly(tmp_path: Path) -> None:
    clips.write(tmp_path / "clip.mp4", film(), rate=16)
    back = clips.read(tmp_path / "clip.mp4", frames=9, rate=None)
    assert back.shape == film().shape and back.dtype == torch.uint8
    assert (back.float() - film().float()).abs().mean() < 6  # H.264 loses a little
    assert (back[0].float() - film()[8].float()).abs().mean() > 6  # and these are not all the same frame


def test_webm_is_read(tmp_path: Path) -> None:
    path = record(tmp_path / "clip.webm", film(), rate=8, codec="libvpx-vp9")
    assert clips.size_of(path, most=20, rate=None) == clips.Size(9, 32, 48)
    assert (clips.read(path, frames=9, rate=None).float() - film().float()).abs().mean() < 8


@pytest.mark.parametrize(("rate", "taken"), [(16.0, 9), (8.0, 5), (4.0, 3), (32.0, 18)])
def test_a_rate_skips_or_repeats_frames(tmp_path: Path, rate: float, taken: int) -> None:
    clips.write(tmp_path / "clip.mp4", film(), rate=16)
    assert clips.size_of(tmp_path / "clip.mp4", most=99, rate=rate).frames == taken
    whole = clips.read(tmp_path / "clip.mp4", frames=9, rate=None)
    second = clips.read(tmp_path / "clip.mp4", frames=2, rate=rate)[1]
    assert torch.equal(second, whole[round(16 / rate) if rate <= 16 else 0])


def test_a_rate_counts_from_the_first_frame(tmp_path: Path) -> None:
    """A clip cut out of a longer video begins later than at 0."""
    path = record(tmp_path / "cut.mkv", film(), rate=16, times=range(32, 41))
    assert clips.size_of(path, most=99, rate=16.0).frames == 9
    assert torch.equal(clips.read(path, frames=9, rate=16.0), clips.read(path, frames=9, rate=None))


@pytest.mark.parametrize("rate", [16.0, 8.0, 32.0])
def test_a_frame_is_shown_until_the_next_one_comes(tmp_path: Path, rate: float) -> None:
    """Recordings of a screen have no frame while nothing moves, and their .mkv and .webm no durations."""
    times = (0, 1, 2, 3, 19, 20)
    path = record(tmp_path / "screen.mkv", film(6), rate=16, times=times)
    whole = clips.read(path, frames=6, rate=None)
    shown = [sum(time <= sample * 16 / rate for time in times) - 1 for sample in range(int(20 * rate / 16))]
    assert torch.equal(clips.read(path, frames=len(shown), rate=rate), whole[shown])


@pytest.mark.parametrize("fps", [24, 30, 60])
def test_times_in_whole_milliseconds_keep_a_constant_rate(tmp_path: Path, fps: int) -> None:
    path = record(tmp_path / "clip.mkv", film(24), rate=fps)
    whole = clips.read(path, frames=24, rate=None)
    assert torch.equal(clips.read(path, frames=24, rate=fps), whole)
    assert torch.equal(clips.read(path, frames=12, rate=fps / 2), whole[::2])


def test_titles_in_an_old_encoding_are_no_error(tmp_path: Path) -> None:
    path = record(tmp_path / "clip.mp4", film(), rate=8)
    content = path.read_bytes()
    assert content.count(b"abcdefgh") == 1
    path.write_bytes(content.replace(b"abcdefgh", "éàüöäçèê".encode("latin-1")))
    assert clips.read(path, frames=9, rate=None).shape == film().shape
    assert decode.video(str(path), None)[0].shape == tuple(film().shape)


def test_a_folder_of_images_is_a_clip(tmp_path: Path) -> None:
    for number, image in enumerate(film(3)):
        Image.fromarray(image.numpy()).save(tmp_path / f"{number:03d}.png")
    assert torch.equal(clips.read(tmp_path, frames=3, rate=None), film(3))


def test_clips_are_turned_as_they_are_shown(tmp_path: Path) -> None:
    """A telephone held upright writes an angle instead of rotated pixels."""
    shown = film(2).rot90(-1, (1, 2))  # clockwise
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(film(2)[0].numpy()).save(tmp_path / "a.png", exif=exif)
    assert torch.equal(clips.read(tmp_path / "a.png", frames=1, rate=None), shown[:1])
    path = tmp_path / "clip.mp4"
    clips.write(path, film(2), rate=16)
    content = path.read_bytes()
    upright, turned = ((1, 0, 0, 0, 1, 0), (0, 1, 0, -1, 0, 0))
    track = content.index(b"tkhd")
    before, after = (struct.pack(">6i", *(number << 16 for number in matrix)) for matrix in (upright, turned))
    path.write_bytes(content[:track] + content[track:].replace(before, after, 1))
    assert clips.size_of(path, most=2, rate=None) == clips.Size(2, 48, 32)
    assert (clips.read(path, frames=2, rate=16.0).float() - shown.float()).abs().mean() < 6
    frames, facts = decode.video(str(path), None)
    assert (torch.from_numpy(frames).float() - shown.float()).abs().mean() < 6
    assert (facts["height"], facts["width"]) == (48, 32)


def test_a_clip_that_is_too_short_is_refused(tmp_path: Path) -> None:
    clips.write(tmp_path / "clip.mp4", film(5), rate=16)
    with pytest.raises(DataError, match=r"clip\.mp4 has 5 frames; expected 9 or more") as caught:
        clips.read(tmp_path / "clip.mp4", frames=9, rate=None)
    assert "--num_frames 5" in str(caught.value)


def test_a_clip_whose_frames_differ_in_size_is_refused(tmp_path: Path) -> None:
    for number, width in enumerate((48, 48, 40)):
        Image.fromarray(film(1, 32, width)[0].numpy()).save(tmp_path / f"{number}.png")
    assert clips.read(tmp_path, frames=2, rate=None).shape == (2, 32, 48, 3)
    with pytest.raises(DataError, match=f"{tmp_path} has frames of different sizes: 48 x 32 and 40 x 32 .*\nhint: "):
        clips.read(tmp_path, frames=3, rate=None)


def test_a_video_without_a_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sound\.mp4 has no video: it holds audio"):
        clips.read(sound(tmp_path / "sound.mp4"), frames=1, rate=None)


@pytest.mark.parametrize("left", [0, 40, 0.6])
def test_a_video_that_is_not_whole_is_refused(tmp_path: Path, left: float) -> None:
    clips.write(tmp_path / "clip.mp4", film(), rate=16)
    content = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "clip.mp4").write_bytes(content[: int(left if left >= 1 else left * len(content))])
    with pytest.raises(DataError, match=r"clip\.mp4 cannot be decoded") as caught:
        clips.read(tmp_path / "clip.mp4", frames=9, rate=None)
    assert "hint:" in str(caught.value)


def test_an_image_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(DataError, match=r"a\.png cannot be read"):
        clips.read(tmp_path / "a.png", frames=1, rate=None)


def test_an_image_that_pillow_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(film(1)[0].numpy()).save(tmp_path / "a.png")
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * 1000, zip=True)
    Image.fromarray(film(1)[0].numpy()).save(tmp_path / "b.png", pnginfo=text)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match=r"a\.png cannot be read: .*decompression bomb"):
        clips.read(tmp_path / "a.png", frames=1, rate=None)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 100)
    with pytest.raises(DataError, match=r"b\.png cannot be read: Decompressed data too large"):
        clips.read(tmp_path / "b.png", frames=1, rate=None)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 48), (40, 24)])
def test_a_clip_is_scaled_to_cover_and_cut_in_the_middle(height: int, width: int) -> None:
    fitted = clips.fitted(film(2), height, width)
    assert fitted.shape == (3, 2, height, width)
    assert fitted.min() >= -1 and fitted.max() <= 1
    exact = clips.fitted(film(2), 32, 48)
    assert torch.equal(clips.as_bytes(exact), film(2))


def test_drawn_clips_depend_on_the_seed_alone_and_move_as_they_say() -> None:
    assert shapes.clips(3, 4) == shapes.clips(3, 32)[:4] != shapes.clips(4, 4)
    for way, axis, sign in (("right", 1, 1), ("left", 1, -1), ("up", 0, -1), ("down", 0, 1)):
        drawn = shapes.draw(shapes.Drawn(shape="square", color="white", ground="black", way=way), 5, 32, 32)
        places = [(image.float().mean(-1) > 120).nonzero().float().mean(0)[axis] for image in drawn]
        assert all((after - before) * sign > 0 for before, after in zip(places, places[1:], strict=False))


def test_a_contact_sheet_shows_each_row(tmp_path: Path) -> None:
    clips.sheet(tmp_path / "sheet.png", [("one", film(3)), ("two", film(9))])
    with Image.open(tmp_path / "sheet.png") as page:
        colours = page.getcolors(1 << 20)
        assert page.width > 8 * 112 and page.height > 2 * 70
    assert colours is not None and len(colours) > 20
