"""Latents and embeddings on disk: made once, in separate phases, and read while training.

[Note: a folder of latents]
``clip-<hash>.safetensors`` holds the latents of one clip, named by the clip and the settings, and
``text-<hash>.safetensors`` the embeddings of one caption. Each names what it was made of, so an interrupted run goes on
with complete files, even if clips came or went. ``latents.json`` is written last and names them all, with the identity
of the VAE and of the text encoders: a folder without it is unfinished, and latents of another VAE are refused. When
clips come or go, it stays until all new latents are made: a clip that cannot be decoded leaves the others usable. A run
that makes latents loads the VAE and the text encoders one after the other, and frees each before training begins.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ebbtide.base.errors import DataError, DiskFullError
from ebbtide_recipes.skeleton.diskfailure import says_full
from ebbtide_recipes.video.buckets import Bucket, bucket_for
from ebbtide_recipes.video.data import Clip
from ebbtide_recipes.video.families import Text, check_size
from ebbtide_recipes.video.source import Source, phase

LOGGER = logging.getLogger("ebbtide.video")

MANIFEST = "latents.json"


@dataclass(frozen=True, kw_only=True)
class Making:
    """How latents are made.

    Attributes:
        data: The data sets' names.
        frames: Frames of a clip; with bucketing the maximum.
        height: Pixels; with bucketing, height times width is the approximate area of every bucket.
        width: Pixels.
        rate: Frames per second; ``None``: as recorded.
        bucketing: Whether clips keep their proportions and lengths. See [Note: buckets].
        text_length: Tokens of a caption; ``None``: the family's.
        seed: Seed of generated clips.
        dtype: Type of the weights of the VAE and the text encoders.
    """

    data: tuple[str, ...]
    frames: int
    height: int
    width: int
    rate: float | None = None
    bucketing: bool = False
    text_length: int | None = None
    seed: int = 42
    dtype: torch.dtype = torch.float32

    def check_size(self, source: Source) -> None:
        """Raise ``ConfigError`` if the size does not make a whole number of tokens of a pipeline."""
        check_size(self.frames, self.height, self.width, ratios=source.ratios, patch=source.patch)


class Latents(Dataset[dict[str, Any]]):
    """The clips of a folder of latents.

    Args:
        folder: Holds ``latents.json``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = _manifest(folder)
        self.items: list[Mapping[str, Any]] = self.manifest["items"]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.items[index]
        return {"latents": _read(self.folder / item["file"])["latents"], "text": self.text(item["caption"])}

    def text(self, caption: str) -> Text:
        """Return the embeddings of a caption."""
        return _read(self.folder / _text_file(caption))

    @property
    def rate(self) -> float | None:
        """Frames per second that the clips were taken with; ``None``: as recorded."""
        return self.manifest["request"]["rate"]

    @property
    def buckets(self) -> list[Bucket]:
        """Each clip's bucket."""
        return [Bucket(item["frames"], item["height"], item["width"]) for item in self.items]


def collate(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch: latents ``[B, C, F, H, W]`` and the captions' tensors."""
    text = {name: torch.stack([item["text"][name] for item in items]) for name in items[0]["text"]}
    return {"latents": torch.stack([item["latents"] for item in items]), "text": text}


def is_made(folder: Path) -> bool:
    """Whether a folder holds complete latents."""
    return (folder / MANIFEST).is_file()


def matches(folder: Path, source: Source, making: Making, clips: Sequence[Clip] | None) -> bool:
    """Whether a folder's latents are those that these settings would make of these clips; ``None``: of any."""
    if not is_made(folder):
        return False
    made = _without_name(_manifest(folder)["request"])
    wanted = _request(source, making, clips)
    wanted |= {part: made[part] for part in ("vae", "text_encoder") if wanted[part] is None}
    if clips is None:
        made.pop("clips", None)
    return made == _without_name(wanted)


def check(folder: Path, source: Source) -> None:
    """Reject latents of another VAE or other text encoders.

    Raises:
        DataError: Their identity, or their channels, differ.
    """
    manifest = _manifest(folder)
    made = manifest["request"]
    for what, key, now in (
        ("VAE", "vae", source.vae_identity()),
        ("text encoders", "text_encoder", source.text_identity()),
    ):
        if now is not None and made[key] != now:
            raise DataError(
                f"{folder} holds latents of other {what} ({made['model']}: {str(made[key])[:12]})",
                expected=f"{what} of {source.name}: {now[:12]}",
                hint="name another --latents_dir, and the data to make them from, or use their pipeline",
            )
    if made["family"] != source.family.name or manifest["channels"] != source.channels:
        raise DataError(
            f"{folder} holds latents of {made['family']} with {manifest['channels']} channels",
            expected=f"latents of {source.family.name} with {source.channels} channels",
            hint="name another --latents_dir, and the data to make them from",
        )


def make(
    clips: Sequence[Clip],
    folder: Path,
    source: Source,
    making: Making,
    *,
    captions: Sequence[str] = (),
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Write latents and embeddings of clips; ``finish`` names them.

    Args:
        clips: The clips.
        folder: Where they are written.
        source: The pipeline.
        making: The settings.
        captions: Further captions to embed.
        device: Device of the VAE and the text encoders.
        share: Index of this process, and the number of processes.

    Raises:
        DataError: A clip cannot be read or is too short; the pipeline has no VAE or text encoder.
        ConfigError: The size does not make a whole number of tokens.
        DiskFullError: The disk is full.
    """
    making.check_size(source)
    folder.mkdir(parents=True, exist_ok=True)
    request = _hash_of(source, making)
    mine, step = share
    wanted = sorted({clip.caption for clip in clips} | set(captions) | {""})[mine::step]
    absent = [caption for caption in wanted if not _done(folder / _text_file(caption), request)]
    _embed(folder, source, absent, making.text_length, request, device=device, dtype=making.dtype)
    named = {_clip_request(request, clip): clip for clip in clips}
    with phase("vae"), torch.no_grad():
        vae = source.vae(making.dtype).to(device)
        for its_request, clip in list(named.items())[mine::step]:
            path = folder / _clip_file(its_request)
            if not _done(path, its_request):
                bucket = _bucket(clip, source, making)
                film = clip.pixels(frames=bucket.frames, height=bucket.height, width=bucket.width, rate=making.rate)
                made = source.family.encode(vae, film[None].to(device, making.dtype))[0].cpu()
                _write(path, {"latents": made.contiguous()}, its_request)
        del vae


def finish(clips: Sequence[Clip], folder: Path, source: Source, making: Making) -> None:
    """Write the manifest, once all processes have written their latents; then remove files of other clips or settings.

    See [Note: a folder of latents].

    Raises:
        DiskFullError: The disk is full.
    """
    items: list[dict[str, Any]] = []
    channels, request, names = source.channels, _request(source, making, clips), names_of(clips, source, making)
    for name, clip in zip(names, clips, strict=True):
        channels, *size = _shape(folder / name)
        bucket = dict(zip(("frames", "height", "width"), size, strict=True))
        items.append({"file": name, "caption": clip.caption, "clip": clip.name, **bucket})
    manifest = {"schema": 1, "request": request, "channels": channels, "items": items}
    with _draft_of(folder / MANIFEST) as draft:
        draft.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in [*others(folder, names), *folder.glob("clip-*.part")]:  # drafts of runs that were killed, too
        path.unlink()
    settings = _hash_of(source, making)
    for path in folder.glob("text-*.safetensors"):
        if not _done(path, settings):
            path.unlink()


def names_of(clips: Sequence[Clip], source: Source, making: Making) -> list[str]:
    """Return the name of each clip's latents; a clip that has changed since has another."""
    settings = _hash_of(source, making)
    return [_clip_file(_clip_request(settings, clip)) for clip in clips]


def others(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return a folder's latents that have none of these names, which ``finish`` removes."""
    kept = set(names)
    return [path for path in folder.glob("clip-*.safetensors") if path.name not in kept]


def add_captions(
    folder: Path,
    source: Source,
    captions: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Embed captions that a folder of latents lacks: prompts of samples, in as many tokens as its own."""
    absent = [caption for caption in captions if not (folder / _text_file(caption)).is_file()]
    _embed(folder, source, absent, _manifest(folder)["request"]["text_length"], "", device=device, dtype=dtype)


def _embed(folder: Path, source: Source, captions: list[str], length: int | None, request: str, **options: Any) -> None:
    """Write the embeddings of captions; the text encoders are loaded if there is one."""
    if captions:
        with phase("text_encoder"), torch.no_grad():
            for caption, text in zip(captions, source.encode(captions, length=length, **options), strict=True):
                _write(folder / _text_file(caption), text, request)


def _bucket(clip: Clip, source: Source, making: Making) -> Bucket:
    """Return the frames and size that a clip is converted to."""
    largest = Bucket(making.frames, making.height, making.width)
    shape = clip.shape(most=making.frames, rate=making.rate) if making.bucketing else None
    if shape is None:
        return largest
    bucket = bucket_for(shape, largest, ratios=source.ratios, patch=source.patch)
    if bucket is None:
        raise DataError(
            f"{clip.name} has {shape.frames} frames",
            expected=f"{(source.patch[0] - 1) * source.ratios[0] + 1} or more: one token",
            hint="remove the clip from the data",
        )
    return bucket


def _request(source: Source, making: Making, clips: Sequence[Clip] | None = None) -> dict[str, Any]:
    """Return everything that latents depend on: the settings and, if given, the clips with their captions."""
    of_clips = {} if clips is None else {"clips": _hash(repr([(clip.identity, clip.caption) for clip in clips]))}
    return of_clips | {
        "model": source.name,
        "family": source.family.name,
        "vae": source.vae_identity(),
        "text_encoder": source.text_identity(),
        "data": list(making.data),
        "size": [making.frames, making.height, making.width],
        "rate": making.rate,
        "bucketing": making.bucketing,
        "text_length": making.text_length or source.family.text_length,
        "seed": making.seed,
        "dtype": str(making.dtype).removeprefix("torch."),
    }


def _without_name(request: Mapping[str, Any]) -> dict[str, Any]:
    """Omit the names of the pipeline and the data, and its seed: identities distinguish their parts."""
    return {key: value for key, value in request.items() if key not in ("model", "data", "seed")}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["items"] and manifest["request"]["family"]:
            return manifest
        found = "names no clip"
    except FileNotFoundError:
        found = "does not exist"
    except (OSError, ValueError, KeyError, TypeError):
        found = "cannot be read"
    raise DataError(
        f"{path} {found}",
        expected=f"{MANIFEST}, which is written last",
        hint="make them with --preprocess_only true, --dataset and this --latents_dir",
    )


def _write(path: Path, tensors: Mapping[str, torch.Tensor], request: str) -> None:
    """Write a file atomically."""
    from safetensors.torch import save_file

    with _draft_of(path) as draft:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft, metadata={"request": request})


@contextmanager
def _draft_of(path: Path) -> Generator[Path]:
    """Yield the path of a draft that replaces a file once it is written."""
    from safetensors import SafetensorError

    draft = path.with_suffix(f".{uuid.uuid4().hex[:8]}.part")  # other runs may embed the same caption now
    try:
        yield draft
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        if not says_full(error):
            raise
        free = shutil.disk_usage(path.parent).free
        raise DiskFullError(
            f"{path} could not be written: {str(error)[:200]}",
            expected=f"space for latents in {path.parent} ({free / 2**20:.0f} MiB are free)",
            hint="free some space, name another --latents_dir, or use fewer clips; finished latents are kept",
        ) from error


def _read(path: Path) -> Text:
    from safetensors.torch import load_file

    with _reading(path):
        return load_file(path)


def _shape(path: Path) -> list[int]:
    """Return the shape of a clip's latents, from the head of its file."""
    from safetensors import safe_open

    with _reading(path), safe_open(path, framework="pt") as opened:
        return opened.get_slice("latents").get_shape()


@contextmanager
def _reading(path: Path) -> Generator[None, None, None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        hint = f"remove {MANIFEST} and make what is missing or damaged: --preprocess_only true --dataset ..."
        found = f"{path} cannot be read: {str(error)[:200]}"
        raise DataError(found, expected="latents as they were written", hint=hint) from error


def _done(path: Path, request: str) -> bool:
    """Whether an earlier, interrupted run with the same settings wrote this file; one that cannot be read is none."""
    from safetensors import safe_open

    try:
        with _reading(path), safe_open(path, framework="pt") as opened:
            return (opened.metadata() or {}).get("request") == request
    except DataError:
        return False


def _hash_of(source: Source, making: Making) -> str:
    """Return a hash of the settings that each file depends on: names of pipelines and data are not among them."""
    return _hash(json.dumps(_without_name(_request(source, making)), sort_keys=True))


def _clip_request(request: str, clip: Clip) -> str:
    return _hash(request + clip.identity)


def _clip_file(request: str) -> str:
    return f"clip-{request}.safetensors"


def _text_file(caption: str) -> str:
    return f"text-{_hash(caption)}.safetensors"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
