"""Reading frames of videos and image folders, and writing videos, by PyAV and Pillow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import DataError, counted
from ebbtide_recipes.video.listings import IMAGES

_CODECS = (("libx264", {"crf": "18"}), ("mpeg4", {"qscale": "3"}))
"""Encoders in the order of preference, with their options."""
_ROUNDED_SECONDS = 0.001
"""Times in .mkv and .webm are whole milliseconds."""


@dataclass(frozen=True, order=True)
class Size:
    """Frames, height and width: of a clip as recorded, or of what is made of it."""

    frames: int
    height: int
    width: int


def read(path: Path, *, frames: int, rate: float | None) -> torch.Tensor:
    """Return the first frames of a clip.

    Args:
        path: A video, an image, or a folder whose images are the frames, in the order of their names.
        frames: How many frames.
        rate: Frames per second; ``None``: every recorded frame. A folder of images has no rate.

    Returns:
        ``[F, H, W, 3]``, bytes.

    Raises:
        DataError: The clip cannot be read, has no picture, is shorter than that, or changes its size.
    """
    film: list[torch.Tensor] = []
    for image in _pictures(path, rate):
        if film and image.shape != film[0].shape:
            sizes = (f"{width} x {height}" for height, width, _ in (film[0].shape, image.shape))
            raise DataError(
                f"{path} has frames of different sizes: {' and '.join(sizes)} pixels",
                expected="frames of one size",
                hint="scale or crop them to one size, or remove the clip from the data",
            )
        film.append(image)
        if len(film) == frames:
            return torch.stack(film)
    at = "" if rate is None else f" at {rate:g} frames per second"
    fewer = f"--num_frames {len(film)} or fewer" if len(film) > 1 else "--num_frames 1"
    raise DataError(
        f"{path} has {counted(len(film), 'frame')}{at}",
        expected=f"{frames} or more",
        hint=f"{fewer}, --bucketing true, or remove the clip from the data",
    )


def size_of(path: Path, *, most: int, rate: float | None) -> Size:
    """Return the size of a clip, with its frames counted up to ``most``.

    Raises:
        DataError: The clip cannot be read or has no picture.
    """
    count, height, width = 0, 0, 0
    for image in _pictures(path, rate):
        count, (height, width) = count + 1, image.shape[:2]
        if count == most:
            break
    if not count:
        raise DataError(f"{path} has no frame", expected="one or more", hint="remove it from the data")
    return Size(count, height, width)


def fitted(film: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scale frames to cover a size, and crop equally on both sides.

    Args:
        film: ``[F, H, W, 3]``, bytes.
        height: Pixels.
        width: Pixels.

    Returns:
        ``[3, F, height, width]`` from -1 to 1.
    """
    pixels = film.permute(0, 3, 1, 2).float()
    share = max(height / pixels.shape[2], width / pixels.shape[3])
    size = (max(height, round(pixels.shape[2] * share)), max(width, round(pixels.shape[3] * share)))
    if size != tuple(pixels.shape[2:]):
        pixels = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    pixels = pixels[:, :, top : top + height, left : left + width]
    return (pixels / 127.5 - 1).clamp(-1, 1).transpose(0, 1).contiguous()


def as_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Return ``[F, H, W, 3]`` bytes of pixels ``[3, F, H, W]`` from -1 to 1."""
    return ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).cpu()


def write(path: Path, film: torch.Tensor, *, rate: float) -> None:
    """Write frames ``[F, H, W, 3]`` as an .mp4 that browsers play.

    Raises:
        DataError: This build of PyAV has neither H.264 nor MPEG-4.
    """
    from fractions import Fraction

    import av

    found = [(name, options) for name, options in _CODECS if name in av.codecs_available]
    if not found:
        raise DataError("PyAV encodes neither libx264 nor mpeg4", expected="one of them", hint="pip install av")
    height, width = film.shape[1:3]
    film = film[:, : height - height % 2, : width - width % 2]  # yuv420p subsamples colour by two
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(found[0][0], rate=Fraction(rate).limit_denominator(1000))
        stream.height, stream.width = film.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", found[0][1]
        for image in film:
            frame = av.VideoFrame.from_ndarray(image.contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def sheet(path: Path, rows: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write a contact sheet: for each clip, under its name, a row of frames that are spread over it.

    Args:
        path: A .png.
        rows: Name and frames ``[F, H, W, 3]`` of each clip.
    """
    from PIL import Image, ImageDraw

    side, gap, line, columns = 112, 4, 14, 8
    width = max(min(columns, len(film)) for _, film in rows) * (side + gap) + gap
    heights = [max(1, round(side * film.shape[1] / film.shape[2])) for _, film in rows]
    page = Image.new("RGB", (width, sum(heights) + len(rows) * (line + 2 * gap) + gap), (28, 28, 30))
    pen, top = ImageDraw.Draw(page), gap
    for (name, film), height in zip(rows, heights, strict=True):
        pen.text((gap, top), name, fill=(220, 220, 220))
        top += line + gap
        shown = torch.linspace(0, len(film) - 1, min(columns, len(film))).round().long().tolist()
        for column, number in enumerate(shown):
            image = Image.fromarray(film[number].numpy()).resize((side, height), Image.Resampling.NEAREST)
            page.paste(image, (gap + column * (side + gap), top))
        top += height + gap
    page.save(path)


def _pictures(path: Path, rate: float | None) -> Iterator[torch.Tensor]:
    if path.is_dir():
        for inner in sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGES):
            yield _image(inner)
    elif path.suffix.lower() in IMAGES:
        yield _image(path)
    else:
        yield from _decoded(path, rate)


def _image(path: Path) -> torch.Tensor:
    import numpy
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            return torch.from_numpy(numpy.array(ImageOps.exif_transpose(opened).convert("RGB")))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"image {path} cannot be read: {error}", expected="an image", hint="take it out") from error


def _decoded(path: Path, rate: float | None) -> Iterator[torch.Tensor]:
    """Yield the frames of a video; with a rate, the frame shown at each of its times."""
    import av

    try:
        with av.open(str(path), metadata_errors="replace") as container:  # titles in an old encoding
            kinds = sorted({stream.type for stream in container.streams})
            if not kinds:
                raise _broken(path, "nothing in it is whole")
            if not container.streams.video:
                raise DataError(
                    f"{path} has no video: it holds {', '.join(kinds)}",
                    expected="frames",
                    hint="remove it from the data",
                )
            stream = container.streams.video[0]
            taken, began = 0, None
            frames: Iterator[Any] = container.decode(stream)
            pairs: Iterable[tuple[Any, Any]] = itertools.pairwise(itertools.chain(frames, (None,)))
            if rate is None:  # times do not matter: no frame is decoded that nobody reads
                pairs = ((frame, None) for frame in frames)
            for frame, following in pairs:
                image = torch.from_numpy(frame.to_ndarray(format="rgb24")).rot90(round(frame.rotation / 90))
                if rate is None or frame.time is None:
                    yield image
                    continue
                began = frame.time if began is None else began  # what was cut out of another may begin late
                while taken / rate < _until(frame, following, stream) - began - 1e-6:
                    taken += 1
                    yield image
    except av.error.FFmpegError as error:
        raise _broken(path, str(error.strerror or error)) from error


def _broken(path: Path, found: str) -> DataError:
    return DataError(
        f"video {path} cannot be decoded: {found}",
        expected="a whole .mp4, .webm or other video that FFmpeg reads",
        hint="play it to see where it ends; remove it from the data or fetch it again",
    )


def _until(frame: Any, following: Any, stream: Any) -> float:
    """Return the time until which a frame is shown: that of the following frame, if there is one."""
    # A block of .mkv or .webm has no duration: FFmpeg fills in that of the mean rate.
    shown = float(frame.duration * frame.time_base) if frame.duration else 1.0 / float(stream.average_rate or 25)
    until = float(frame.time) + shown
    if following is None or following.time is None:
        return until
    # Its time may be rounded up: at a constant rate the duration says better how long the frame is shown.
    return min(following.time, max(until, following.time - _ROUNDED_SECONDS))
