"""Matching a model's parameters and buffers with a checkpoint's tensors.

[Note: names]
Names in the model and in the checkpoint differ where adapters wrap modules, where a base model got a head, and where
a library converts old layouts while it loads. Everything is matched here, before a byte is read: missing, unexpected
and misshapen tensors are reported in one error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConfigError, DataError, few, nearest
from ebbtide.load.conversions import converted
from ebbtide.load.fourbit import FourBit
from ebbtide.load.header import CheckpointEntry
from ebbtide.load.layout import Conversion, Source, SourceLayout
from ebbtide.load.targets import names_by_tensor, owners_of

UNSAVED = "(buffer) "
"""Before the name of a non-persistent buffer among the values of a given model: no checkpoint has one."""

SHOWN = 8
"""Names of one kind that an error or a warning lists."""

_COPY = re.compile(r"(?<=\.)(?:modules_to_save|ln_tuning_layers)\.[^.]+\.")


@dataclass(frozen=True, kw_only=True)
class Match:
    """A tensor of the model that the checkpoint has.

    Args:
        names: In the model; a tied tensor has several.
        base: The name that its library knows it by.
        dtype: Before the model is sharded.
        source: Of its values.
        twins: Other sources of it, which must be equal.
    """

    names: tuple[str, ...]
    base: str
    dtype: torch.dtype
    source: Source
    twins: tuple[SourceLayout, ...] = ()


@dataclass(kw_only=True)
class NameMap:
    """The tensors that model and checkpoint have, by the first of their names in the model, and the mismatches."""

    matches: dict[str, Match] = field(default_factory=dict[str, Match])
    missing: list[str] = field(default_factory=list[str])
    kept: list[str] = field(default_factory=list[str])
    """Parameters and persistent buffers that the checkpoint lacks and that have values in the model."""
    unexpected: list[str] = field(default_factory=list[str])
    doubled: list[str] = field(default_factory=list[str])
    """Names with several sources that cannot be compared."""
    misshaped: list[str] = field(default_factory=list[str])
    uncast: list[str] = field(default_factory=list[str])

    @property
    def sourced(self) -> set[str]:
        """All names of the tensors that the checkpoint has."""
        return {name for match in self.matches.values() for name in match.names}


def wanted_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters and persistent buffers by name; tied ones under each of their names."""
    return {name: owner.tensor for name, owner in owners_of(model).items() if owner.is_saved}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of a model in memory: parameters and all buffers, also those that are not saved."""
    unsaved = {UNSAVED + name: owner.tensor for name, owner in owners_of(model).items() if not owner.is_saved}
    return {name: tensor.detach() for name, tensor in (wanted_of(model) | unsaved).items()}


def adapters_of(model: nn.Module) -> set[str]:
    """Return the names of parameters that adapters add: no checkpoint of the base model has them."""
    found: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        layers: Sequence[str] = getattr(module, "adapter_layer_names", ())
        for layer in layers if isinstance(layers, tuple) else ():
            for name in [n for n, _ in module.named_parameters(remove_duplicate=False)]:
                if name.split(".")[0] == layer and ".base_layer." not in f".{name}":
                    found.add(f"{prefix}.{name}" if prefix else name)
    return found


def is_copy(name: str) -> bool:
    """Whether a name is of a trained copy of a base's module, which begins with the base's values."""
    return _COPY.search(name) is not None


def base_name(name: str) -> str:
    """Return the name that a parameter of an adapted model has in the base model."""
    name = re.sub(r"^base_model\.(?:model\.)?", "", name) if name.startswith("base_model.model.") else name
    name = _COPY.sub("", name)
    # One adapter may lie in another: those on two parameters of one module do.
    return re.sub(r"(?:\.base_layer)+(?=\.)", "", name.replace(".original_module.", "."))


def _by_base(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names in the base model by those in the model.

    Raises:
        ConfigError: Two weights of an adapted model have one name in the base.
    """
    if not any(
        type(module).__module__.startswith("peft.") or isinstance(getattr(module, "adapter_layer_names", None), tuple)
        for module in model.modules()
    ):  # names like PEFT's are the model's own
        return {name: name for name in names}
    bases = {name: base_name(name) for name in names}
    owners, first = owners_of(model), dict[str, str]()
    for name, base in bases.items():
        other = first.setdefault(base, name) if not is_copy(name) else name
        if owners[other].tensor is not owners[name].tensor:
            raise ConfigError(
                f"{other} and {name} are two weights, and both are {base!r} in a checkpoint of the base model",
                expected="one weight for each name once the names that PEFT adds are removed",
                hint="rename one of the two modules, or load the weights before the adapters are added",
            )
    return bases


def match_names(model: nn.Module, entries: Mapping[str, CheckpointEntry], four: FourBit) -> NameMap:
    """Match a checkpoint's tensors with the names of a model that is on meta and not sharded yet.

    Raises:
        ConfigError: Two weights of an adapted model have one name in the base.
        DataError: A conversion of the model's library fails.
    """
    layouts = {k: SourceLayout.of(k, e.shape, e.dtype) for k, e in four.without_scales(entries).items()}
    wanted = wanted_of(model)
    copies = {name for name, tensor in wanted.items() if is_copy(name) and tensor.is_meta}
    adapters = adapters_of(model) - (copies - layouts.keys())  # these begin with the base's values, as in PEFT
    base_of = _by_base(model, [name for name in wanted if name not in adapters])
    by_base: dict[str, list[str]] = {}
    for name, base in base_of.items():
        by_base.setdefault(base, []).append(name)
    base_model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    host = base_model if hasattr(base_model, "base_model_prefix") and hasattr(base_model, "config") else None
    # A checkpoint of the adapted model itself has its names.
    direct = {k: layout for k, layout in layouts.items() if base_of.get(k, k) != k or k in adapters}
    # Buffers on meta that a given model has and no checkpoint would; real ones keep theirs.
    tensors = {name: owner.tensor for name, owner in owners_of(model).items()}
    computed = {n: layouts[UNSAVED + n] for n, tensor in tensors.items() if tensor.is_meta and UNSAVED + n in layouts}
    others = {k: layout for k, layout in layouts.items() if k not in direct and not k.startswith(UNSAVED)}
    found, unexpected = converted(host, {b: wanted[n[0]] for b, n in by_base.items()}, others)
    plan = NameMap(unexpected=_not_ignored(base_model, unexpected, hosted=host is not None))
    by_base |= {name: [name] for name in adapters & direct.keys()}
    for name, source in direct.items():
        found.setdefault(base_of.get(name, name), []).append(source)
    by_base |= {name: [name] for name in computed}
    found |= {name: [source] for name, source in computed.items()}
    for name in four:
        sources = found.get(base := base_of.get(name, name), [])
        if len(sources) > 1:  # quantized values are not compared
            plan.doubled.append(_all_keys(name, found.pop(base)))
            del by_base[base]
        elif sources and isinstance(source := sources[0], SourceLayout):
            found[base] = [four.oriented(name, source)]
    _assign(plan, names_by_tensor(model), tensors, by_base, found)
    plan.kept = _reported(model, host, plan.kept)
    return plan


def _assign(
    plan: NameMap,
    all_names: Mapping[int, Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    by_base: Mapping[str, Sequence[str]],
    found: Mapping[str, Sequence[Source]],
) -> None:
    """Match the tensors of a model; ``all_names`` has each tensor's, also those that no checkpoint has."""
    names_of: dict[int, list[str]] = {}
    base_of = {name: base for base, names in by_base.items() for name in names}
    for name in base_of:
        names_of.setdefault(id(tensors[name]), []).append(name)
    for names in names_of.values():
        first, tensor = names[0], tensors[names[0]]
        bases = dict.fromkeys(base_of[n] for n in names if base_of[n] in found)
        if not bases:
            # What has values keeps them, which is reported: they may differ between ranks.
            (plan.missing if tensor.is_meta else plan.kept).append(first)
            continue
        base, *others = bases
        source, *same = found[base]
        shape = _shape(source, base)
        shapes = [(n, tuple(_shape(s, base_of[n]))) for n in names for s in found.get(base_of[n], ())]
        odd = next((f"{n} is {s} in the checkpoint" for n, s in shapes if s != tuple(tensor.shape)), "")
        if same and any(isinstance(s, Conversion) or _shape(s, base) != shape for s in found[base]):
            plan.doubled.append(_all_keys(first, found[base]))
        elif odd:
            plan.misshaped.append(f"{odd} and {tuple(tensor.shape)} in the model")
        elif isinstance(source, SourceLayout) and not castable(source.dtype, tensor.dtype):
            plan.uncast.append(
                f"{first} is {word(source.dtype)} in the checkpoint and {word(tensor.dtype)} in the model"
            )
        else:
            same += [twin for other in others for twin in found[other]]
            plan.matches[first] = Match(
                names=tuple(dict.fromkeys([*names, *all_names[id(tensor)]])),
                base=base,
                dtype=tensor.dtype,
                source=source,
                twins=tuple(twin for twin in same if isinstance(twin, SourceLayout)),
            )


def _shape(source: Source, name: str) -> torch.Size:
    return source.shape if isinstance(source, SourceLayout) else source.shapes[name]


def _all_keys(name: str, sources: Iterable[Source]) -> str:
    return f"{name} from {' and '.join(few(source.keys) for source in sources)}"


def castable(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype mean the same in another: numbers of 8 bits and fewer come with scales."""
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return found == wanted or (found in plain and wanted in plain)


def check_names(plan: NameMap, name: str, *, missing: str, unexpected: str) -> None:
    """Raise one error for all mismatches.

    Args:
        plan: The matched names.
        name: The checkpoint.
        missing: ``"error"`` or ``"initialize"``.
        unexpected: ``"error"`` or ``"ignore"``.

    Raises:
        DataError: There is a mismatch.
    """
    problems = [
        ("missing", [*plan.missing, *plan.kept] if missing == "error" else []),
        ("unexpected", plan.unexpected if unexpected == "error" else []),
        ("from several tensors", plan.doubled),
        ("of another shape", plan.misshaped),
        ("of a dtype that cannot be converted", plan.uncast),
    ]
    lines = [f"{len(names)} {kind}: {few(names, count=SHOWN)}" for kind, names in problems if names]
    if not lines:
        return
    hints = [_prefix_hint(plan)]
    if problems[0][1] and plan.matches:  # else the checkpoint is another model's
        close = nearest(problems[0][1][0], plan.unexpected)
        hints.append(close or "missing='initialize' initializes missing weights with the model's own code")
    if problems[1][1] and plan.matches:
        hints.append("unexpected='ignore' skips the rest of the checkpoint")
    if plan.uncast:
        hints.append(
            "convert them in the checkpoint: integers and numbers of 8 bits may have scales that belong to them"
        )
    raise DataError(
        f"the checkpoint {name!r} does not fit the model: " + "; ".join(lines),
        expected="each parameter and persistent buffer of the model once, in its shape",
        hint="; ".join(filter(None, hints)) or "build the model from the configuration in the checkpoint's folder",
    )


def _prefix_hint(plan: NameMap) -> str:
    """Return a hint if the missing names are in the checkpoint with another prefix, such as one that wrappers add."""
    missing, unused = [*plan.missing, *plan.kept], set(plan.unexpected)
    for name in plan.unexpected if missing else []:
        if (more := name.removesuffix(missing[0])) != name and all(more + one in unused for one in missing):
            return (
                f"the checkpoint's names begin with {more!r}: save the model without its wrapper, or pass a state dict "
                "with the names of the model"
            )
        fewer = missing[0].removesuffix(f".{name}") + "."
        if missing[0].endswith(f".{name}") and all(one.removeprefix(fewer) in unused for one in missing):
            return f"the model's names begin with {fewer!r}: load the module inside, model.{fewer[:-1]}"
    return ""


def word(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the module torch."""
    return str(dtype).removeprefix("torch.")


def _reported(model: nn.Module, host: Any | None, kept: Sequence[str]) -> list[str]:
    """Leave out tensors that no checkpoint needs to have: by the model's library, of adapters, of older torches."""
    # load_state_dict takes checkpoints without this counter of batch norms.
    patterns = [r"(^|\.)num_batches_tracked$", *(getattr(host, "_keys_to_ignore_on_load_missing", None) or ())]
    owners = owners_of(model) if kept else {}
    base = [name for name in kept if not type(owners[name].module).__module__.startswith("peft.")]
    return [name for name in base if not any(re.search(p, base_name(name)) for p in patterns)]


def _not_ignored(base: nn.Module, unexpected: Sequence[str], *, hosted: bool) -> list[str]:
    """Leave out tensors that the model's library, transformers (``hosted``) or diffusers, declares unused."""
    patterns: list[str] = list(getattr(base, "_keys_to_ignore_on_load_unexpected", None) or [])
    if hosted:  # buffers that older versions saved and that are computed now
        patterns += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    return [key for key in unexpected if not any(re.search(p, key) for p in patterns)]
