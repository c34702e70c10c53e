"""Make the default configuration of any model of transformers small.

No rule knows a model: fields are recognised by their names, in nested configurations as well. Counts (layers,
experts, vocabulary, positions, pictures) always shrink. For widths and heads there are several ``METHODS``, because
models relate them in different ways; whoever calls takes the first with which a model can be built and trained.

- ``table``: one value for each kind of name; equal widths everywhere fit most models that are made of several.
- ``heads/N``: widths and numbers of heads divided by N; the width of a head, and what depends on it, stays.
- ``widths/N``: widths divided by N; numbers of heads stay, as in hierarchies whose stages have 3, 6, 12 heads.
- ``counts``: widths stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

LAYERS = 2
VOCABULARY = 256
PICTURE = 32
PATCH = 8

COEFFICIENTS = {"width_coefficient": 0.25, "depth_coefficient": 1.0}
"""What all widths, or all depths, of a model are multiplied by."""

METHODS = (
    "table",
    "heads/32",
    "heads/16",
    "heads/12",
    "heads/8",
    "heads/14",
    "widths/8",
    "heads/4",
    "widths/4",
    "widths/2",
    "counts",
)

_IS_LAYERS = re.compile(r"(^|_)(n_layers?|layers?|depth|num_blocks|num_hidden_groups)$")
_NOT_LAYERS = re.compile(r"feature_layer|insert_layer|max_window|every_n|proj_layers|no_rope|select_layer")
_IS_DEPTHS = re.compile(r"^(depths?|layers|num_blocks|stage_num_blocks|block_sizes|num_block_repeats|.*_blocks)$")
_IS_VOCABULARY = re.compile(r"vocab_size|vocab_size_per|group_vocab$|^codebook_size$|^num_embeddings$|hash_buckets$")
_IS_TOKEN = re.compile(r"(token_id|token_index|_token)$")
_IS_EXPERTS = re.compile(r"(^|_)(experts|num_experts|num_local_experts|moe_num_experts|routed_experts)$")
_IS_CHOSEN = re.compile(r"experts_per_tok(en)?$|^(moe_)?top_?k$|^moe_k$|num_selected_experts|moe_router_topk")
_IS_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_groups?|moe_topk_group)$")
_IS_FEW = re.compile(
    r"^(num_queries|latent_query_num|num_denoising|two_stage_num_proposals|mm_tokens_per_image|index_topk|index_kpool|"
    r"num_frames)$"
)
_IS_POSITIONS = re.compile(r"position_embeddings$|^n_positions$|^max_seq_len|^n_ctx$|max_\w+_positions$|max_length$")
_IS_PICTURE = re.compile(r"^(image_size|img_size|max_img_size|crop_size|pretrain_image_size|resolution)$")
_IS_WINDOW = re.compile(r"^(sliding_window|attention_window|local_window_size|attention_chunk_size)$")
_IS_HEADS = re.compile(r"(^|_)(n_heads?|num_heads|heads|nheads|n_head)$|attention_heads$|num_(key|value)_heads$")
_IS_KV_HEADS = re.compile(r"kv_heads?$|key_value_heads$")
_IS_HEAD_WIDTH = re.compile(r"head_dim|_head_dim$|^d_kv$|^dim_head$|^kv_channels$|qk_\w+_dim$|d_head$|^rotary_dim$")
_IS_INNER = re.compile(r"intermediate|ffn|^d_ff$|^n_inner$|^dim_ff|feedforward|mlp_dim|moe_\w*size$")
_IS_RANK = re.compile(r"rank$")
_IS_WIDTH = re.compile(
    r"hidden_size|hidden_dim|hidden_channels|d_model|n_embd|embed_dim|embed_size|embedding_(size|dim)|embeds?_hidden|"
    r"^dim$|^width$|_dims?$|_channels$|^(out|proj|project|neck)\w*_(size|dim|channels)$|^projection_(dim|size)|_width$|"
    r"^conv_dim$|^channels$|output_dim|^filter_size$|base_channels|_units$|_hidden$|^hidden$|upsample_groups|^adapter_input_size$|^d_latents$|^bottleneck_features$"
)
_NOT_WIDTH = re.compile(
    r"kernel|patch_size|stride|num_channels|^in_channels|^num_|coordinate|dim_bbox|scale|codebook_dim|state|"
    r"type_vocab|in_chans|feature_projection_input|input_channels|rope|mel_dim|d_conv|expand|query_dim|mask_input"
)


@dataclass
class Shrinking:
    """How one tree of configurations shrinks.

    Attributes:
        method: One of ``METHODS``.
        layers: Layers that a stack keeps; more where the configuration picks layers by their numbers.
        reads_pictures: Whether a part of the tree reads pictures.
        tokens: Special tokens beyond the small vocabulary → their new numbers, the same in every nested configuration.
    """

    method: str
    layers: int = LAYERS
    reads_pictures: bool = False
    tokens: dict[int, int] = field(default_factory=dict)

    @property
    def factor(self) -> int:
        """What the method divides by; 1 for the others."""
        return int(self.method.partition("/")[2] or 1)

    def token(self, value: int) -> int:
        """Return the number of a special token within the small vocabulary."""
        if value < VOCABULARY - 64:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens) % 60)


def small(cls: type, method: str, changes: dict[str, Any] | None = None) -> Any:
    """Return a small configuration.

    Args:
        cls: The class of configuration; its defaults are read.
        method: One of ``METHODS``.
        changes: Fields that are set after the rules; a dict for a nested configuration.
    """
    changes = changes or {}
    base = cls(**changes)
    return _small(base, Shrinking(method), changes)


def _small(base: Any, how: Shrinking, changes: dict[str, Any]) -> Any:
    passed = own(base)
    nested = {name: sub for name, sub in vars(base).items() if hasattr(sub, "to_dict")}
    for name, sub in getattr(base, "sub_configs", {}).items():
        if nested.get(name) is None and getattr(base, name, None) is None and hasattr(sub, "model_type"):
            try:
                nested[name] = sub()
            except (ValueError, TypeError, AttributeError):
                continue
    how.reads_pictures = how.reads_pictures or "vision_config" in nested
    for name in sorted(nested, key=lambda name: name != "text_config"):
        passed[name] = _small(nested[name], how, changes.get(name, {}) | _fitting(nested[name], passed))
    passed |= changed(base, how)
    passed |= {name: value for name, value in changes.items() if name not in nested}
    for left_out in ((), ("head_dim",), ("head_dim", "num_key_value_heads"), tuple(n for n in passed if "token" in n)):
        try:
            return type(base)(**{name: value for name, value in passed.items() if name not in left_out})
        except Exception as error:
            reason = error
    raise reason


def names(base: Any) -> set[str]:
    """Return the fields of a configuration that its class can be called with."""
    known = {x.name for x in fields(base)} if is_dataclass(base) else set(vars(base))
    known -= {name for name in known if isinstance(getattr(type(base), name, None), property)}
    return {name for name in known & set(vars(base)) if not name.startswith(("_", "id2"))}


def own(base: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as in a part whose whole has defaults of its own for it."""
    try:
        default = vars(type(base)())
    except Exception:
        return {}
    values = {name: vars(base)[name] for name in names(base)}
    return {n: v for n, v in values.items() if not hasattr(v, "to_dict") and (n not in default or v != default[n])}


def _fitting(part: Any, passed: dict[str, Any]) -> dict[str, int]:
    """Return the fields of a part that must equal the width of the text model, whatever the defaults are."""
    text = passed.get("text_config")
    width = vars(text).get("hidden_size") if text is not None else None
    return {"out_hidden_size": width} if isinstance(width, int) and "out_hidden_size" in vars(part) else {}


def changed(base: Any, how: Shrinking) -> dict[str, Any]:
    """Return the fields of one configuration that shrink, with their new values."""
    values = {name: vars(base)[name] for name in sorted(names(base))}
    before = next((v for n, v in values.items() if n in ("num_hidden_layers", "num_layers", "n_layer", "depth")), None)
    if len(stages := getattr(base, "_out_indices", None) or ()) > 1:
        values["out_indices"] = stages
    lists = {n: v for n, v in values.items() if isinstance(v, (list, tuple)) and v}
    kept = picked(list(range(before)), lists, how.layers) if isinstance(before, int) else []
    found: dict[str, Any] = {}
    if isinstance(values.get("in_channels"), (list, tuple)):
        values.pop("out_channels", None)  # of one stage after the other: both stay
    for name, value in values.items():
        if isinstance(value, bool) or value is None or hasattr(value, "to_dict"):
            continue
        new: Any = value
        if isinstance(value, int):
            new = number(name, value, how, values)
            if _is_layers(name) and value == before and kept:
                new = len(kept)
        elif name in COEFFICIENTS:
            new = COEFFICIENTS[name]
        elif name in lists:
            new = sequence(name, list(value), how, kept, before)
            new = type(value)(new)
        elif name == "rope_parameters" and how.reads_pictures and how.method == "table" and "rope_type" in value:
            new = value | {"mrope_section": sections(value.get("partial_rotary_factor", 1.0))}
        if new != value or name == "out_indices":
            found[name] = new
    if "use_cache" in values:
        found["use_cache"] = False
    return found | filled(values | found)


def sections(part: float) -> list[int]:
    """Return how many frequencies of a head of 16 turn with time, height and width, if a part of the head turns."""
    half = int(16 * part) // 2
    return [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that some models read although their default is None: what None stands for elsewhere."""
    found = {"num_experts_per_tok": 2, "image_token_index": VOCABULARY - 1, "vocab_size": VOCABULARY}
    found |= {"mask_token_id": 4, "prediction_length": 4, "n_routed_experts": 4, "n_shared_experts": 1}
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int):
        found |= {"layer_types": ["full_attention"] * layers, "mlp_layer_types": ["sparse"] * layers}
    if "layer_types" in values:
        found |= {"sliding_window": 8}
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        found |= {"num_key_value_heads": heads}
        if not any(name.startswith("qk_") for name in values):
            found |= {"head_dim": width // heads}
    return {name: value for name, value in found.items() if name in values and values[name] is None}


def picked(numbers: list[int], lists: dict[str, Any], layers: int) -> list[int]:
    """Return the numbers of the layers that are kept: the first of each kind, then the first ones.

    Args:
        numbers: All layers.
        lists: The configuration's lists; those with an entry for each layer tell layers apart.
        layers: How many are kept, unless there are more kinds.
    """
    per_layer = [value for value in lists.values() if len(value) == len(numbers)]
    indices = [v for v in lists.values() if len(v) < len(numbers) and _are_indices(v, len(numbers))]
    first: dict[str, int] = {}
    for number_ in numbers:
        first.setdefault(repr([value[number_] for value in per_layer]), number_)
    count = max([layers, *(len(v) + 1 for v in indices if len(v) < 5)])
    kept = sorted(first.values())[:6]
    more = [n for n in numbers if n not in kept]
    return sorted(kept + more[: max(0, min(count, len(numbers)) - len(kept))])


def _are_indices(values: Any, layers: int) -> bool:
    """Whether a list names layers by their numbers, in order."""
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return (
        whole
        and len(values) > 1
        and all(a < b for a, b in zip(values, values[1:], strict=False))
        and values[-1] <= layers
    )


def _is_layers(name: str) -> bool:
    return bool(_IS_LAYERS.search(name)) and not _NOT_LAYERS.search(name)


def number(name: str, value: int, how: Shrinking, values: dict[str, Any]) -> int:
    """Return the new value of a whole number, by its name."""
    if _IS_TOKEN.search(name):
        return how.token(value)
    if _IS_VOCABULARY.search(name):
        return min(value, VOCABULARY)
    if _is_layers(name):
        return min(value, how.layers)
    if name == "first_k_dense_replace":
        return min(value, 1)
    if _IS_EXPERTS.search(name):
        return min(value, 4)
    if _IS_CHOSEN.search(name):
        return min(value, 2)
    if _IS_GROUPS.search(name):
        return 1
    if _IS_POSITIONS.search(name):
        return min(value, 128)
    if name == "window_size" and ("depths" in values or "image_size" in values):
        return min(value, 2)
    if _IS_WINDOW.search(name):
        return min(value, 8)
    if _IS_PICTURE.search(name):
        return _picture(value, how, values)
    if _IS_FEW.search(name):
        return min(value, 4)
    if name == "num_filters":
        return min(value, 8)
    if name == "num_pos_feats":
        return _width("hidden_size", 2 * value, how, values) // 2
    if name == "patch_size" and how.method == "table" and value > PATCH:
        return PATCH
    return _width(name, value, how, values)


def _picture(value: int, how: Shrinking, values: dict[str, Any]) -> int:
    patch = values.get("patch_size")
    if not isinstance(patch, int) or patch < 2:
        return min(value, 64)
    if how.method == "table" and patch >= PATCH:
        return PICTURE
    return min(value, 4 * patch if patch >= PATCH else max(64, 16 * patch))


def _width(name: str, value: int, how: Shrinking, values: dict[str, Any]) -> int:
    """Return the new value of a width or of a number of heads."""
    heads = _IS_KV_HEADS.search(name) or _IS_HEADS.search(name)
    widths = not _NOT_WIDTH.search(name) and (_IS_WIDTH.search(name) or _IS_INNER.search(name) or _IS_RANK.search(name))
    if how.method == "table":
        if _IS_KV_HEADS.search(name):
            equal = value in [v for n, v in values.items() if _IS_HEADS.search(n) and not _IS_KV_HEADS.search(n)]
            return min(value, 4 if equal else 2)
        if heads:
            return 4
        if _IS_HEAD_WIDTH.search(name):
            return 8 if "rope" in name or "nope" in name or "rotary" in name else 16
        if not widths or value <= 16:
            return value
        return 96 if _IS_INNER.search(name) else 16 if _IS_RANK.search(name) else 64
    if how.method.startswith("heads") and heads:
        return max(1, value // how.factor)
    if how.method == "counts" or not widths or heads or value <= 16:
        return value
    if _IS_HEAD_WIDTH.search(name) and not how.method.startswith("widths"):
        return value
    return max(value // how.factor, 8)


def sequence(name: str, values: list[Any], how: Shrinking, kept: list[int], before: int | None) -> list[Any]:
    """Return the new value of a list, by its name and its entries.

    Args:
        name: The field.
        values: Its entries.
        how: The method.
        kept: The numbers of the layers that are kept.
        before: How many layers there were.
    """
    if kept and len(values) == before:
        return [values[n] for n in kept]
    if kept and before and _are_indices(values, before):
        last = len(kept) - 1
        return sorted(last - n for n in range(min(len(values), max(1, last))))
    if name == "backbone_feature_sizes":
        return [[16, 16], [8, 8], [4, 4]]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return values
    if name == "vision_feature_layer" and min(values) > 0:
        return [-1 - n for n in range(len(values))]
    if name.startswith("window_size"):
        return [min(v, 2) for v in values]
    if _IS_DEPTHS.search(name):
        return [min(v, 2) for v in values]
    if _IS_PICTURE.search(name):
        return [min(v, 64) for v in values]
    if _IS_TOKEN.search(name):
        return [how.token(v) for v in values]
    if how.method == "table" and _IS_HEADS.search(name):
        return [min(v, 4) for v in values]
    if _IS_HEADS.search(name) or not re.search(r"size|dim|channel|hidden|width", name):
        return values
    if _NOT_WIDTH.search(name):
        return values
    if re.search(r"kernel|patch|stride|window|group", name) or max(values) < 32:
        return values
    if how.method == "table":
        return [64 if v >= 32 else v for v in values]
    return [max(v // how.factor, 8) if v >= 32 else v for v in values]
