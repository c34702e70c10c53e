"""A pipeline's parts, each loaded separately: transformer, VAE, text encoders, scheduler."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ebbtide.base.errors import DataError
from ebbtide.base.events import BUS
from ebbtide.base.files import json_object
from ebbtide_recipes.video.families import Config, Family, Text, family_of, nearest_frames

INDEX = "model_index.json"
_WEIGHTS = (".safetensors", ".bin")
_PROBES, _PROBE_BYTES = 64, 1 << 16


class Source:
    """A pipeline folder in diffusers' layout.

    Args:
        folder: Holds ``transformer/`` and, for making latents and samples, ``vae/``, the text encoders and tokenizers,
            ``scheduler/`` and ``model_index.json``.

    Raises:
        DataError: There is no supported transformer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)
        self.index = self._config(INDEX) or {}
        config = self._config("transformer/config.json")
        if config is None:
            raise DataError(
                f"{folder} has no transformer/config.json",
                expected="diffusers' layout: transformer/, vae/, text_encoder/, scheduler/, model_index.json",
                hint=_layout_hint(folder),
            )
        self.transformer_config = config
        self.family: Family = family_of(config.get("_class_name"), self.index.get("_class_name"))
        self.family.check(config, self.index)
        self.vae_config = self._config("vae/config.json")
        self._check_channels()

    def _config(self, name: str) -> dict[str, Any] | None:
        return _config(self.folder / name) if (self.folder / name).is_file() else None

    @property
    def ratios(self) -> tuple[int, int]:
        """Frames, and pixels along a side, per latent; diffusers' defaults without a VAE."""
        return self.family.ratios(self.vae_config or {"block_out_channels": [0] * 4})

    @property
    def patch(self) -> tuple[int, int]:
        """Latents in time, and along a side, per token."""
        return self.family.patch(self.transformer_config)

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        return self.family.channels(self.transformer_config)

    @property
    def default_size(self) -> tuple[int, int, int]:
        """Default frames, height and width."""
        frames, height, width = self.family.size
        return nearest_frames(frames, ratios=self.ratios, patch=self.patch), height, width

    def outline(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return the transformer that the config describes, without weights: on the meta device.

        Raises:
            DataError: It describes none.
        """
        import diffusers

        name = self.transformer_config["_class_name"]
        kind: Any = getattr(diffusers, name)
        try:
            with torch.device("meta"):
                made = kind.from_config(dict(self.transformer_config))
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{self.name} describes no transformer: {error}",
                expected=f"a config of {name}",
                hint="use the config.json of the weights",
            ) from error
        for parameter in made.parameters():
            parameter.data = parameter.data.to(dtype)
        return made

    def transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        """Load the transformer."""
        return self._load("transformer", self.transformer_config, dtype)

    def vae(self, dtype: torch.dtype) -> torch.nn.Module:
        """Load the VAE, frozen.

        Raises:
            DataError: The pipeline has none.
        """
        if self.vae_config is None:
            raise DataError(
                f"{self.name} has no VAE (vae/config.json)",
                expected="the VAE",
                hint="fetch the complete pipeline, or use existing latents: --latents_dir",
            )
        return self._load("vae", self.vae_config, dtype).requires_grad_(False).eval()

    def scheduler(self) -> Any:
        """Return the pipeline's scheduler; without one, flow matching's with its defaults."""
        import diffusers

        name = "scheduler/scheduler_config.json"
        config = self._config(name)
        if config is None:
            if not self.family.velocity:
                raise DataError(
                    f"{self.name} has no scheduler",
                    expected=f"{name}: the noise levels that the transformer was trained with",
                    hint="fetch the complete pipeline",
                )
            return diffusers.FlowMatchEulerDiscreteScheduler()
        kind = getattr(diffusers, str(config.get("_class_name")), None)
        if kind is None:
            found = f"{self.folder / name} names the scheduler {config.get('_class_name')!r}"
            raise DataError(found, expected="a scheduler of diffusers", hint="update it")
        return kind.from_pretrained(self.folder, subfolder="scheduler")

    def encode(
        self, captions: Sequence[str], *, length: int | None, device: torch.device, dtype: torch.dtype
    ) -> Iterable[Text]:
        """Yield the text encoders' tensors of each caption. The encoders are loaded at the first, and freed at the end.

        Raises:
            DataError: The pipeline has no text encoder or no tokenizer.
        """
        pipeline = self._text_pipeline(device, dtype)
        arguments: dict[str, Any] = {"max_sequence_length": length or self.family.text_length}
        if "do_classifier_free_guidance" in inspect.signature(pipeline.encode_prompt).parameters:
            arguments["do_classifier_free_guidance"] = False
        for caption in captions:
            returned = pipeline.encode_prompt(prompt=caption, device=device, **arguments)
            yield {name: part[0].cpu() for name, part in zip(self.family.text, returned, strict=False)}

    def vae_identity(self) -> str | None:
        """Return an identifier of this VAE; ``None`` without one."""
        return None if self.vae_config is None else _identity([self.folder / "vae"])

    def text_identity(self) -> str | None:
        """Return an identifier of these text encoders; ``None`` without one."""
        folders = [self.folder / name for name in self._text_parts() if (self.folder / name).is_dir()]
        return _identity(folders) if folders else None

    def _text_parts(self) -> list[str]:
        names = [name for name in self.index if name.startswith(("text_encoder", "tokenizer"))]
        return sorted(names) or ["text_encoder", "tokenizer"]

    def _text_pipeline(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Make the pipeline with only its text encoders."""
        import diffusers

        for name in self._text_parts():
            if not (self.folder / name).is_dir():
                raise DataError(
                    f"{self.name} has no {name}/",
                    expected="the text encoder and the tokenizer that embed captions",
                    hint="fetch the complete pipeline, or use existing latents: --latents_dir",
                )
        kind = getattr(diffusers, self.family.pipeline)
        absent: dict[str, Any] = {"transformer": None, "scheduler": None}
        absent["vae"] = self.vae(dtype) if self.family.captions_need_vae else None
        absent |= {name: None for name in ("transformer_2",) if name in self.index}
        if "safety_checker" in inspect.signature(kind.__init__).parameters:
            absent["safety_checker"] = torch.nn.Identity()  # without this argument, Cosmos loads a guard for prompts
        pipeline = kind.from_pretrained(self.folder, dtype=dtype, **absent)
        for name in self._text_parts():
            part = getattr(pipeline, name)
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False).eval().to(device)
        return pipeline

    def _load(self, part: str, config: Config, dtype: torch.dtype) -> torch.nn.Module:
        """Load a model of diffusers from its folder."""
        import diffusers

        name = config.get("_class_name")
        kind = getattr(diffusers, str(name), None)
        if kind is None:
            raise DataError(
                f"{self.folder / part} is a {name!r}",
                expected="a model of diffusers",
                hint="`pip install -U diffusers` may know it",
            )
        try:
            return kind.from_pretrained(self.folder, subfolder=part, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self.folder / part} cannot be loaded: {str(error)[:300]}",
                expected="config.json and its weights",
                hint="fetch it again",
            ) from error

    def _check_channels(self) -> None:
        """Reject a transformer with more input channels than the VAE's: it is image-to-video."""
        if self.vae_config is None:
            return
        made = self.family.vae_channels(self.vae_config)
        if made != self.channels:
            raise DataError(
                f"the transformer takes {self.channels} channels, and the VAE makes {made}",
                expected="a text-to-video transformer and its own VAE",
                hint="image-to-video transformers take the image in further channels; they are not supported",
            )


@contextmanager
def phase(name: str) -> Generator[None, None, None]:
    """Mark a phase of the run in which parts of the pipeline are loaded, and free them afterwards."""
    from diffusers.training_utils import free_memory

    BUS.emit("phase", name=name, edge="begin", step=None)
    try:
        yield
    finally:
        free_memory()
        BUS.emit("phase", name=name, edge="end", step=None)


def quiet_bars() -> None:
    """Hide the progress bars of diffusers and transformers off a terminal."""
    from diffusers.utils import logging as diffusers_logging

    from ebbtide_recipes.skeleton.logging import interactive

    if not interactive():
        diffusers_logging.disable_progress_bar()


def _config(path: Path) -> dict[str, Any]:
    return json_object(path, str(path), expected="a config", hint="fetch it again")


def _layout_hint(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return "this is one model's folder: pass the folder above it"
    inner = [path.parent.parent.name for path in folder.glob("*/transformer/config.json")]
    return f"{folder / inner[0]} has one" if inner else "pass the folder that holds model_index.json"


def _identity(folders: Sequence[Path]) -> str:
    """Return a hash of configs, and of the size and 64 samples of each weight file."""
    found = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        found.update(f"{path.parent.name}/{path.name}".encode())
        if path.name == "config.json":
            config = _config(path)
            kept = {key: value for key, value in config.items() if not key.startswith("_") or key == "_class_name"}
            found.update(json.dumps(kept, sort_keys=True).encode())
        elif path.suffix in _WEIGHTS:
            found.update(str(size).encode())
            with path.open("rb") as file:
                for probe in range(_PROBES):
                    file.seek(max(0, (size - _PROBE_BYTES) * probe // (_PROBES - 1)))
                    found.update(file.read(_PROBE_BYTES))
    return found.hexdigest()
