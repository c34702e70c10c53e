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

import dataclasses
import hashlib
import json
import shutil
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ebbtide.base.errors import DataError
from ebbtide.base.files import json_object
from ebbtide_recipes.skeleton.diskfailure import disk_failure
from ebbtide_recipes.video.buckets import bucket_for
from ebbtide_recipes.video.clips import Size
from ebbtide_recipes.video.data import Clip
from ebbtide_recipes.video.families import Text, check_size
from ebbtide_recipes.video.source import Source, phase

MANIFEST = "latents.json"
_PARTS = ("vae", "text_encoder")
"""Settings that a pipeline lacks if it only uses latents."""


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
    def request(self) -> Mapping[str, Any]:
        """What they were made with."""
        return self.manifest["request"]

    @property
    def rate(self) -> float | None:
        """Frames per second that the clips were taken with; ``None``: as recorded."""
        return self.request["rate"]

    @property
    def buckets(self) -> list[Size]:
        """Each clip's bucket."""
        return [Size(item["frames"], item["height"], item["width"]) for item in self.items]

    def check(self, source: Source) -> None:
        """Reject latents of another VAE or other text encoders.

        Raises:
            DataError: Their identity, or their channels, differ.
        """
        made, channels = self.request, self.manifest["channels"]
        for what, key, now in (
            ("VAE", "vae", source.vae_identity()),
            ("text encoders", "text_encoder", source.text_identity()),
        ):
            if now is not None and made[key] != now:
                raise DataError(
                    f"{self.folder} holds latents of other {what} ({made['model']}: {str(made[key])[:12]})",
                    expected=f"{what} of {source.name}: {now[:12]}",
                    hint="name another --latents_dir, and the data to make them from, or use their pipeline",
                )
        if made["family"] != source.family.name or channels != source.channels:
            raise DataError(
                f"{self.folder} holds latents of {made['family']} with {channels} channels",
                expected=f"latents of {source.family.name} with {source.channels} channels",
                hint="name another --latents_dir, and the data to make them from",
            )


def collate(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch: latents ``[B, C, F, H, W]`` and the captions' tensors."""
    text = {name: torch.stack([item["text"][name] for item in items]) for name in items[0]["text"]}
    return {"latents": torch.stack([item["latents"] for item in items]), "text": text}


def is_made(folder: Path) -> bool:
    """Whether a folder holds complete latents."""
    return (folder / MANIFEST).is_file()


@dataclass(frozen=True, kw_only=True)
class Making:
    """What a folder's latents are made with.

    Attributes:
        folder: Where they are written.
        source: The pipeline.
        data: The data sets' names.
        size: Of the clips; with bucketing the most frames, and the approximate area of every bucket.
        rate: Frames per second; ``None``: as recorded.
        bucketing: Whether clips keep their proportions and lengths. See [Note: buckets].
        text_length: Tokens of a caption; ``None``: the family's.
        seed: Seed of generated clips.
        dtype: Type of the weights of the VAE and the text encoders.
    """

    folder: Path
    source: Source
    data: tuple[str, ...]
    size: Size
    rate: float | None = None
    bucketing: bool = False
    text_length: int | None = None
    seed: int = 42
    dtype: torch.dtype = torch.float32

    def check_size(self) -> None:
        """Raise ``ConfigError`` if the size does not make a whole number of tokens of the pipeline."""
        check_size(*dataclasses.astuple(self.size), ratios=self.source.ratios, patch=self.source.patch)

    def matches(self, clips: Sequence[Clip] = ()) -> bool:
        """Whether the folder's latents are those that would be made of these clips; without clips: of any."""
        if not is_made(self.folder):
            return False
        made = Latents(self.folder).request
        wanted = {key: value for key, value in self._settings.items() if not (key in _PARTS and value is None)}
        if clips:
            wanted["clips"] = _clips_hash(clips)
        return {key: made.get(key) for key in wanted} == wanted

    def make(
        self,
        clips: Sequence[Clip],
        *,
        captions: Sequence[str] = (),
        device: torch.device,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Write latents and embeddings of clips; ``finish`` names them.

        Args:
            clips: The clips.
            captions: Further captions to embed.
            device: Device of the VAE and the text encoders.
            share: Index of this process, and the number of processes.

        Raises:
            DataError: A clip cannot be read or is too short; the pipeline has no VAE or text encoder.
            ConfigError: The size does not make a whole number of tokens.
            DiskError: The disk is full, or fails.
        """
        self.check_size()
        self.folder.mkdir(parents=True, exist_ok=True)
        mine, step = share
        wanted = sorted({clip.caption for clip in clips} | set(captions) | {""})[mine::step]
        absent = [caption for caption in wanted if not _done(self.folder / _text_file(caption), self._settings_hash)]
        if absent:
            self._embed(absent, self.text_length, self._settings_hash, device)
        named = {self._request_of(clip): clip for clip in clips}
        with phase("vae"), torch.no_grad():
            vae = self.source.vae(self.dtype).to(device)
            for request, clip in list(named.items())[mine::step]:
                path = self.folder / _clip_file(request)
                if not _done(path, request):
                    film = clip.pixels(self._bucket(clip), rate=self.rate)
                    made = self.source.family.encode(vae, film[None].to(device, self.dtype))[0].cpu()
                    _write(path, {"latents": made}, request)
            del vae

    def add_captions(self, captions: Sequence[str], device: torch.device) -> None:
        """Embed captions that the folder lacks: prompts of samples, in as many tokens as its own."""
        absent = [caption for caption in captions if not (self.folder / _text_file(caption)).is_file()]
        if absent:
            self._embed(absent, Latents(self.folder).request["text_length"], "", device)

    def finish(self, clips: Sequence[Clip]) -> None:
        """Write the manifest, once all latents are written; then remove those of other clips or settings.

        See [Note: a folder of latents].

        Raises:
            DiskError: The disk is full, or fails.
        """
        items: list[dict[str, Any]] = []
        names, of_clips, channels = self.names_of(clips), _clips_hash(clips), self.source.channels
        for name, clip in zip(names, clips, strict=True):
            channels, *size = _shape(self.folder / name)
            bucket = dict(zip(("frames", "height", "width"), size, strict=True))
            items.append({"file": name, "caption": clip.caption, "clip": clip.name, **bucket})
        request = {"clips": of_clips, "model": self.source.name, "data": list(self.data), "seed": self.seed}
        manifest = {"schema": 1, "request": request | self._settings, "channels": channels, "items": items}
        with _draft_of(self.folder / MANIFEST) as draft:
            draft.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in [*self.others(names), *self.folder.glob("clip-*.part")]:  # drafts of runs that were killed, too
            path.unlink()
        for path in self.folder.glob("text-*.safetensors"):
            if not _done(path, self._settings_hash):
                path.unlink()

    def names_of(self, clips: Sequence[Clip]) -> list[str]:
        """Return the name of each clip's latents; a clip that has changed since has another."""
        return [_clip_file(self._request_of(clip)) for clip in clips]

    def others(self, names: Iterable[str]) -> list[Path]:
        """Return the folder's latents that have none of these names, which ``finish`` removes."""
        kept = set(names)
        return [path for path in self.folder.glob("clip-*.safetensors") if path.name not in kept]

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """All that each file depends on: names of pipelines and data are not among them."""
        return {
            "family": self.source.family.name,
            "vae": self.source.vae_identity(),
            "text_encoder": self.source.text_identity(),
            "size": list(dataclasses.astuple(self.size)),
            "rate": self.rate,
            "bucketing": self.bucketing,
            "text_length": self.text_length or self.source.family.text_length,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @cached_property
    def _settings_hash(self) -> str:
        return _hash(json.dumps(self._settings, sort_keys=True))

    def _request_of(self, clip: Clip) -> str:
        return _hash(self._settings_hash + clip.identity)

    def _bucket(self, clip: Clip) -> Size:
        """Return the frames and size that a clip is converted to."""
        recorded = clip.size(most=self.size.frames, rate=self.rate) if self.bucketing else None
        if recorded is None:
            return self.size
        patch, ratios = self.source.patch, self.source.ratios
        bucket = bucket_for(recorded, self.size, ratios=ratios, patch=patch)
        if bucket is None:
            raise DataError(
                f"{clip.name} has {recorded.frames} frames",
                expected=f"{(patch[0] - 1) * ratios[0] + 1} or more: one token",
                hint="remove the clip from the data",
            )
        return bucket

    def _embed(self, captions: list[str], length: int | None, request: str, device: torch.device) -> None:
        """Write the embeddings of captions."""
        with phase("text_encoder"), torch.no_grad():
            texts = self.source.encode(captions, length=length, device=device, dtype=self.dtype)
            for caption, text in zip(captions, texts, strict=True):
                _write(self.folder / _text_file(caption), text, request)


def _manifest(folder: Path) -> dict[str, Any]:
    path, expected = folder / MANIFEST, f"{MANIFEST}, which is written last"
    hint = "make them with --preprocess_only true, --dataset and this --latents_dir"
    manifest = json_object(path, str(path), expected=expected, hint=hint)
    if not (manifest.get("items") and manifest.get("request")):
        raise DataError(f"{path} cannot be read: it names no clip", expected=expected, hint=hint)
    return manifest


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
        failure = disk_failure(error, path.parent)
        draft.unlink(missing_ok=True)
        if failure is None:
            raise
        kind, reason = failure
        raise kind(
            f"{path} could not be written: {reason}",
            expected=f"space for latents ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free)",
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


def _clips_hash(clips: Sequence[Clip]) -> str:
    """Return a hash of clips with their captions, in their order."""
    return _hash(repr([(clip.identity, clip.caption) for clip in clips]))


def _clip_file(request: str) -> str:
    return f"clip-{request}.safetensors"


def _text_file(caption: str) -> str:
    return f"text-{_hash(caption)}.safetensors"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
