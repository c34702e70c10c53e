"""Make the batches of any model of transformers: the arguments of its forward, recognised by their names.

Pictures and sounds of models that read them together with text replace placeholder tokens, as the model's own
processor would insert them: how many is found by calling ``get_image_features`` and its like.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.small_configs import VOCABULARY

LENGTHS = (24, 17, 24, 31, 17, 24)
"""Tokens in each step: two steps repeat the sizes of earlier ones, so that what is known of these is used."""

ROWS = (2, 2, 3, 2, 2, 3)
"""Rows of the batch in each step."""

AUDIO = 4000

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"labels": True},
    {"swapped": True},
    {"masks": True},
    {"swapped": True, "masks": True},
    {"alone": True},
    {"alone": True, "labels": True},
)
"""Ways to read ambiguous arguments: with labels; features with time first; with masks; the main input alone."""


WIDTHS: dict[str, str | int] = {
    "visual_feats": "visual_feat_dim",
    "visual_pos": "visual_pos_dim",
    "spectrogram": "model_in_dim",
    "states": "state_dim",
    "actions": "act_dim",
    "rewards": 1,
    "returns_to_go": 1,
}
"""Features of each token that a forward may read → their number, or the field that has it."""


class Unknown(Exception):
    """A forward needs an argument that nothing here makes."""


def find(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of some fields that a configuration, or one nested in it, has."""
    nested = [sub for sub in vars(config).values() if hasattr(sub, "to_dict")]
    for name in names:
        for one in (config, *nested):
            value = vars(one).get(name)
            if value is not None:
                return value
    for sub in nested:
        if (value := find(sub, *names)) is not None:
            return value
    return default


def batches(model: nn.Module, variant: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the batch of each step; rows and lengths change.

    Raises:
        Unknown: The forward needs an argument that nothing here makes.
    """
    for step, (length, rows) in enumerate(zip(LENGTHS, ROWS, strict=True)):
        yield Batch(model, variant, length, rows, torch.Generator().manual_seed(100 + step)).made()


class Batch:
    """One batch while it is made.

    Args:
        model: The model that will read it.
        variant: One of ``VARIANTS``.
        length: Tokens.
        rows: Rows.
        generator: Draws all values.
    """

    def __init__(
        self, model: nn.Module, variant: dict[str, Any], length: int, rows: int, generator: torch.Generator
    ) -> None:
        self.model, self.variant, self.length, self.rows, self.generator = model, variant, length, rows, generator
        self.config: Any = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.needed = [n for n, p in self.parameters.items() if p.default is p.empty and p.kind not in (2, 4)]
        self.made_now: dict[str, Any] = {}

    def made(self) -> dict[str, Any]:
        """Return the arguments."""
        main = getattr(self.model, "main_input_name", None)
        wanted = [n for n in self.parameters if n in self.needed or n == main or self._is_read(n)]
        if self.variant.get("alone"):
            wanted = list(dict.fromkeys([*self.needed, *([main] if main in self.parameters else [])]))
        wanted.sort(key=lambda n: (n != "input_ids", n in ("labels", "mm_token_type_ids", "attention_mask")))
        for name in wanted:
            if name in self.made_now:
                continue
            maker = getattr(self, f"_{name}", None)
            if maker is None and name in WIDTHS:
                maker = partial(self._tokens, WIDTHS[name])
            if maker is None:
                if name in self.needed:
                    raise Unknown(name)
                continue
            value = maker()
            if value is not None:
                self.made_now[name] = value
        if "input_ids" in self.made_now:
            self._insert_placeholders()
        if "attention_mask" in self.made_now:
            self.made_now["attention_mask"] = self._attention_mask()
        if "mm_token_type_ids" in self.parameters and "input_ids" in self.made_now:
            self.made_now["mm_token_type_ids"] = self._kinds()
        if self.variant.get("labels") and "labels" in self.parameters:
            self.made_now["labels"] = self._labels()
        return self.made_now

    def _is_read(self, name: str) -> bool:
        """Whether an argument that may be left out is given nevertheless."""
        if name in ("image_attention_mask", "image_embeds_position_mask"):
            return True
        if name.endswith("mask"):
            return bool(self.variant.get("masks")) and name in ("attention_mask", "input_features_mask", "padding_mask")
        pictures = ("pixel_values", "image_grid_thw", "bbox", "image_sizes", "image_position_ids", "spatial_shapes")
        sounds = ("input_features", "input_values", "audio_values")
        if name in ("pixel_values_videos", "video_grid_thw"):
            return False
        if name == "input_ids" and getattr(self.model, "main_input_name", "") == "pixel_values":
            return find(self.config, "vocab_size") is not None
        if name == "labels":
            return False
        if name == "image_sizes":
            return find(self.config, "image_grid_pinpoints") is not None
        others = ("input_ids", "decoder_input_ids", "future_time_features", "future_values", "timesteps")
        return name in (*pictures, *sounds, *others, *WIDTHS)

    def _is_main(self, name: str) -> bool:
        main = getattr(self.model, "main_input_name", "")
        return name in self.needed or main == name or (main == "inputs" and name == "input_values")

    def _numbers(self, *shape: int, low: int = 3, high: int | None = None) -> Tensor:
        return torch.randint(low, high or self._vocabulary(), shape, generator=self.generator)

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def _tokens(self, width: str | int) -> Tensor:
        return self._floats(self.rows, self.length, find(self.config, width) if isinstance(width, str) else width)

    def _timesteps(self) -> Tensor:
        return self._numbers(self.rows, self.length, low=0, high=16)

    def _vocabulary(self) -> int:
        size = find(self.config, "vocab_size", default=VOCABULARY)
        return max(8, min(size if isinstance(size, int) else VOCABULARY, VOCABULARY) - 64)

    # Text

    def _input_ids(self) -> Tensor:
        books = find(self.config, "num_codebooks", "num_channels_audio") if "codebook" in repr(self.config) else None
        if isinstance(books, int) and self.variant.get("swapped"):
            return self._numbers(self.rows, self.length, books)
        positions = find(self.config, "context_length") if self.variant.get("swapped") else None
        length = min(self.length, find(self.config, "max_position_embeddings", default=128), positions or 128)
        return self._numbers(self.rows, max(length, 4))

    def _decoder_input_ids(self) -> Tensor | None:
        if not (getattr(self.config, "is_encoder_decoder", False) or "decoder_input_ids" in self.needed):
            return None
        books = find(self.config, "num_codebooks", default=1) if hasattr(self.config, "audio_encoder") else 1
        return None if self.variant.get("labels") else self._numbers(self.rows * books, 11)

    def _labels(self) -> Tensor:
        ids = self.made_now.get("input_ids")
        if getattr(self.config, "is_encoder_decoder", False) or ids is None:
            return self._numbers(self.rows, 11)
        return ids.clone()

    def _inputs_embeds(self) -> Tensor:
        return self._floats(self.rows, self.length, find(self.config, "hidden_size", "d_model", "n_embd", "dim"))

    def _attention_mask(self) -> Tensor:
        for name in ("input_features", "input_values"):
            if name in self.made_now and "input_ids" not in self.made_now:
                value = self.made_now[name]
                return torch.ones(self.rows, value.shape[1 if self.variant.get("swapped") else -1], dtype=torch.long)
        return torch.ones(self.rows, self.made_now["input_ids"].shape[1], dtype=torch.long)

    def _token_type_ids(self) -> Tensor:
        return torch.zeros_like(self.made_now["input_ids"])

    def _bbox(self) -> Tensor:
        corner = self._numbers(self.rows, self.made_now["input_ids"].shape[1], 2, low=0, high=60)
        return torch.cat([corner, corner + 10], dim=-1) / (1.0 if self.model.config.model_type == "bros" else 1)

    def _qformer_input_ids(self) -> Tensor:
        return self._numbers(self.rows, 7)

    def _kinds(self) -> Tensor:
        ids, kinds = self.made_now["input_ids"], torch.zeros_like(self.made_now["input_ids"])
        for kind, names in enumerate((("image_token_id", "image_token_index"), ("video_token_id",)), start=1):
            token = find(self.config, *names)
            if isinstance(token, int):
                kinds[ids == token] = kind
        return kinds

    # Pictures

    def _side(self) -> list[int]:
        size = find(self.config, "image_size", "img_size", "crop_size", default=None)
        if size is None:
            patch = find(self.config, "patch_size", default=16)
            size = 4 * patch if isinstance(patch, int) and patch > 4 else 64
        if isinstance(size, dict):
            size = [size.get("height", 64), size.get("width", 64)]
        return list(size)[-2:] if isinstance(size, (list, tuple)) else [size, size]

    def _channels(self) -> int:
        found = find(self.config, "num_channels", "in_channels", "in_chans", default=3)
        return found if isinstance(found, int) and found < 16 else 3

    def _pixel_values(self) -> Tensor | None:
        pictures = find(self.config, "vision_config", "patch_size", "image_size", "num_channels", "backbone_config")
        if pictures is None and not self._is_main("pixel_values"):
            return None
        if "image_grid_thw" in self.parameters:
            return self._patches()
        if "spatial_shapes" in self.parameters:
            return self._flattened_patches(0)
        if "image_position_ids" in self.parameters:
            return self._flattened_patches(0, 36)
        side = self._side()
        if "num_frames" in vars(self.config) and getattr(self.config, "tubelet_size", None) is not None:
            return self._floats(self.rows, find(self.config, "num_frames"), self._channels(), *side)
        if self.variant.get("swapped") and find(self.config, "num_frames"):
            return self._floats(self.rows, find(self.config, "num_frames"), self._channels(), *side)
        if self.variant.get("swapped"):
            return self._floats(self.rows, 2, self._channels(), *side)
        return self._floats(self.rows, self._channels(), *side)

    def _grid(self) -> list[int]:
        merge = find(self.config, "spatial_merge_size", "merge_size", default=2)
        return [1, 2 * merge, 2 * merge]

    def _patches(self) -> Tensor:
        frames, high, wide = self._grid()
        patch = find(self.config, "patch_size", default=14)
        depth = find(self.config, "temporal_patch_size", default=1)
        return self._floats(self.rows * frames * high * wide, self._channels() * depth * patch * patch)

    def _image_grid_thw(self) -> Tensor:
        return torch.tensor([self._grid()] * self.rows)

    _grid_thw = _image_grid_thw

    def _spatial_shapes(self) -> Tensor:
        return torch.full((self.rows, 2), 4)

    def _pixel_attention_mask(self) -> Tensor:
        return torch.ones(self.rows, 16, dtype=torch.long)

    def _image_attention_mask(self) -> Tensor:
        return torch.ones(self.rows, self.length, self.made_now["pixel_values"].shape[1], dtype=torch.long)

    def _image_embeds_position_mask(self) -> Tensor:
        mask = torch.zeros(self.rows, self.length, dtype=torch.bool)
        mask[:, 1 : 1 + find(self.config, "latent_query_num")] = True
        return mask

    def _flattened_patches(self, positions: int = 2, count: int = 16) -> Tensor:
        width = find(self.config, "patch_embed_hidden_size")
        width = width or self._channels() * find(self.config, "patch_size", default=16) ** 2
        return torch.cat([torch.ones(self.rows, count, positions), self._floats(self.rows, count, width)], dim=-1)

    def _image_position_ids(self) -> Tensor:
        return torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(self.rows, 36, 2)

    def _image_sizes(self) -> Tensor:
        return torch.tensor([self._side()] * self.rows)

    def _image_merge_sizes(self) -> Tensor:
        return torch.full((self.rows,), self._grid()[1] // 2)

    def _pixel_values_videos(self) -> Tensor:
        frames = find(self.config, "num_frames", "frames_per_clip", default=4)
        return self._floats(self.rows, min(frames, 4), self._channels(), *self._side())

    def _pixel_mask(self) -> Tensor:
        return torch.ones(self.rows, *self._side(), dtype=torch.long)

    # Sound

    def _mels(self) -> int:
        return find(
            self.config,
            "num_mel_bins",
            "mel_dim",
            "feature_projection_input_dim",
            "input_feat_size",
            "feature_size",
            "input_dim",
            "input_size",
            default=80,
        )

    def _frames(self) -> int:
        if window := find(self.config, "n_window"):
            return 2 * window
        if each := find(self.config, "audio_length_per_tok"):
            return each * self.length
        positions = find(self.config, "max_source_positions")
        return 2 * positions if isinstance(positions, int) and positions <= 256 else 128

    def _input_features(self) -> Tensor | None:
        sounds = find(self.config, "audio_config", "num_mel_bins", "encoder_config", "speech_config", "input_size")
        if sounds is None and not self._is_main("input_features"):
            return None
        shape = (self._frames(), self._mels()) if self.variant.get("swapped") else (self._mels(), self._frames())
        return self._floats(self.rows, *shape)

    def _input_features_mask(self) -> Tensor:
        frames = self.made_now["input_features"].shape[1 if self.variant.get("swapped") else -1]
        return torch.ones(self.rows, frames, dtype=torch.long)

    _feature_attention_mask = _input_features_mask

    def _input_values(self) -> Tensor | None:
        if not self._is_main("input_values"):
            return None
        mels, length = find(self.config, "num_mel_bins"), find(self.config, "max_length")
        if isinstance(mels, int) and isinstance(length, int):
            return self._floats(self.rows, length, mels)
        if self.variant.get("swapped"):
            return self._floats(self.rows, find(self.config, "audio_channels", default=1), AUDIO)
        return self._floats(self.rows, AUDIO)

    # Time series

    def _past_values(self) -> Tensor:
        lags = find(self.config, "lags_sequence", default=[0])
        length = find(self.config, "context_length", default=32) + max(lags)
        channels = find(self.config, "num_input_channels", "input_size", default=1)
        if channels == 1 and not self.variant.get("swapped"):
            return self._floats(self.rows, length)
        return self._floats(self.rows, length, channels)

    def _past_time_features(self) -> Tensor:
        values = self.made_now["past_values"] if "past_values" in self.made_now else self._past_values()
        return self._floats(self.rows, values.shape[1], find(self.config, "num_time_features", default=1))

    def _future_time_features(self) -> Tensor:
        length = find(self.config, "prediction_length")
        return self._floats(self.rows, length, find(self.config, "num_time_features", default=1))

    def _past_observed_mask(self) -> Tensor:
        return torch.ones_like(self._past_values())

    def _future_values(self) -> Tensor | None:
        length = find(self.config, "prediction_length")
        return None if length is None else self._floats(self.rows, length, *self._past_values().shape[2:])

    # Placeholders

    def _insert_placeholders(self) -> None:
        """Replace the first tokens of each row by placeholders, one for each row of features."""
        ids: Tensor = self.made_now["input_ids"]
        for kind in ("image", "video", "audio"):
            token = find(self.config, f"{kind}_token_id", f"{kind}_token_index")
            if kind == "image":
                token = token if token is not None else find(self.config, "im_patch_id", "image_pad_token_id")
            count = self._features(kind) if isinstance(token, int) else 0
            if not count or count % self.rows:
                continue
            ids = torch.where(ids == token, token + 1, ids)
            marked = torch.full((self.rows, count // self.rows), token)
            ids = torch.cat([ids[:, :1], marked, ids[:, 1:]], dim=1)
        self.made_now["input_ids"] = ids

    def _features(self, kind: str) -> int:
        """Return the number of rows that a model computes from the pictures or sounds of the batch."""
        inner = [getattr(self.model, "model", None), self.model]
        method = next((m for one in inner if (m := getattr(one, f"get_{kind}_features", None))), None)
        if method is None:
            return 0
        names = inspect.signature(method).parameters
        given = {n: v for n, v in self.made_now.items() if n in names and n != "input_ids"}
        if not given:
            return 0
        for name, parameter in names.items():
            maker = getattr(self, f"_{name}", None)
            if parameter.default is parameter.empty and name not in given and maker is not None:
                given[name] = maker()
                if name in self.parameters or "kwargs" in self.parameters:
                    self.made_now[name] = given[name]
        with torch.no_grad():
            return _rows(method(**given))


def _rows(features: Any) -> int:
    """Return the number of rows of features, as a tensor, a list of tensors, or a model's output."""
    if hasattr(features, "keys"):
        found = features.get("pooler_output")
        features = found if found is not None else features["last_hidden_state"]
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    return sum(_rows(one) for one in features)
