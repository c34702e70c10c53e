"""Read images with Pillow, frames of videos and samples of sounds with PyAV, for a model's processor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbtide.base.errors import DataError, first_line
from ebbtide.base.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

Sampler = Callable[[Any], Sequence[int]]
"""Returns which frames are wanted of a video with this ``transformers`` ``VideoMetadata``."""
_TURNED = range(5, 9)
"""EXIF's orientations of images whose width is their height."""


def image(path: str) -> Image:
    """Return an image as it is shown.

    Raises:
        DataError: The file cannot be read.
    """
    from PIL import ImageOps

    with _picture(path) as file:
        return ImageOps.exif_transpose(file)


def size(path: str) -> tuple[int, int]:
    """Return an image's height and width as it is shown, from the head of its file.

    Raises:
        DataError: The file cannot be read.
    """
    from PIL import ExifTags

    with _picture(path) as file:
        turned = file.getexif().get(ExifTags.Base.Orientation) in _TURNED
        return file.size if turned else file.size[::-1]


@contextmanager
def _picture(path: str) -> Generator[Image]:
    import PIL.Image

    try:
        with PIL.Image.open(path) as file:
            yield file
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {first_line(error)}",
            expected="a file with an image",
            hint="check whether it is complete",
        ) from error


def video(path: str, sampler: Sampler | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Return frames of a video, and their metadata for the processor.

    Args:
        path: The file.
        sampler: Chooses the frames; ``None``: all of them.

    Returns:
        ``[F, H, W, 3]``, bytes; and the fields of transformers' ``VideoMetadata``.

    Raises:
        DataError: The file cannot be read, has no picture or no frame rate, or fewer frames than its header says.
        ValueError: The processor cannot sample this video.
    """
    from transformers.video_utils import VideoMetadata

    with _opened(path, "video") as container:
        stream = container.streams.video[0]
        count = stream.frames or _count(container, stream, lambda packet: True)  # some headers do not count them
        if not stream.average_rate or not count:
            raise DataError(
                f"{path} has {count} frames and the frame rate {stream.average_rate}",
                expected="a video with frames and a rate",
                hint="convert it, for example with ffmpeg -i FILE -r 24 NEW.mp4",
            )
        rate = float(stream.average_rate)
        facts: dict[str, Any] = {
            "total_num_frames": count, "fps": rate, "duration": count / rate, "video_backend": "pyav",
            "height": stream.height, "width": stream.width,
        }  # fmt: skip
        wanted = _wanted(sampler, VideoMetadata(**facts))
        frames = _frames(container, set(wanted))
        # A clip cut without encoding begins with frames that the header counts and no player shows.
        if set(wanted) - set(frames) and (unseen := _count(container, stream, lambda packet: packet.is_discard)):
            facts |= {"total_num_frames": count - unseen, "duration": (count - unseen) / rate}
            wanted = _wanted(sampler, VideoMetadata(**facts))
            frames = _frames(container, set(wanted))
    if missing := sorted(set(wanted) - set(frames)):
        raise DataError(
            f"{path} has no frame {missing[0]}, though its header says {count} frames",
            expected="as many frames as the header says",
            hint="the file is cut off: replace it, or remove the row",
        )
    film = np.stack([frames[index] for index in wanted])
    return film, {**facts, "frames_indices": list(wanted), "height": film.shape[1], "width": film.shape[2]}


def sound(path: str, rate: int) -> np.ndarray:
    """Return the resampled samples of a sound; the mean of several channels.

    Args:
        path: A sound, or a video with one.
        rate: Sampling rate of the processor.

    Returns:
        ``[N]``, float32 from -1 to 1.

    Raises:
        DataError: The file cannot be read, or has no sound.
    """
    with _opened(path, "audio") as container:
        import av

        resampler = av.AudioResampler(format="fltp", rate=rate)  # PyAV's mix of channels may exceed 1
        pieces = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
        pieces += resampler.resample(None)
        samples = [piece.to_ndarray().mean(0) for piece in pieces]
    if not sum(len(part) for part in samples):
        raise DataError(f"{path} has no samples", expected="a sound", hint="remove the row")
    return np.concatenate(samples)


@contextmanager
def _opened(path: str, kind: str) -> Generator[Any]:
    av = require("av", extra="media", use=f"reading {kind}s")
    try:
        with av.open(path, metadata_errors="replace") as container:  # titles in an old encoding
            if not getattr(container.streams, kind):
                raise DataError(f"{path} holds no {kind}", expected=f"a file with {kind}", hint="remove the row")
            yield container
    except (av.FFmpegError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as {kind}: {error}",
            expected="a file that PyAV decodes",
            hint="check whether it is complete, or convert it with ffmpeg",
        ) from error


def _count(container: Any, stream: Any, counts: Callable[[Any], bool]) -> int:
    """Count some of the frames of a file, by its packets."""
    container.seek(0)
    count = sum(1 for packet in container.demux(stream) if packet.size and counts(packet))
    container.seek(0)
    return count


def _wanted(sampler: Sampler | None, facts: Any) -> list[int]:
    """Return the chosen frames, without those past the end: Qwen2-VL's choice may have one."""
    count = facts.total_num_frames
    return [index for index in map(int, range(count) if sampler is None else sampler(facts)) if index < count]


def _frames(container: Any, wanted: set[int]) -> dict[int, np.ndarray]:
    """Decode the wanted frames, by their number."""
    found: dict[int, np.ndarray] = {}
    for index, frame in enumerate(container.decode(video=0)):
        if index in wanted:
            found[index] = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
        if len(found) == len(wanted):
            break
    return found
