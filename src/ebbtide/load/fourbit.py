"""4-bit base weights of bitsandbytes (QLoRA): quantised tensor by tensor while they are loaded, and sharded.

[Note: 4-bit weights]
On meta, a 4-bit weight has the shape of the weight that it is made from. Quantised it is a column of packed numbers,
two per byte, and its module has a state with the scales. Wrappers cut what they find, so the column is put on meta
before the model is sharded. Scales may themselves be quantised, and then each depends on all of the tensor; so every
rank reads a tensor whole, has its library quantise it, keeps its part of the column and the scales (an eighth of the
column at most), and drops the rest before the next tensor. A checkpoint that has columns and scales is cut like any
other, and its scales are read whole. Nothing is imported here: the model brings its library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.load.attributes import plain_name
from ebbtide.load.header import CheckpointEntry
from ebbtide.load.layout import Conversion, SourceLayout
from ebbtide.load.targets import Target, owners_of

_SCALES = re.compile(r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))")


def is_four_bit(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a 4-bit weight of bitsandbytes."""
    return type(tensor).__name__ == "Params4bit"


@dataclass(kw_only=True, eq=False)
class _Weight:
    """A 4-bit weight: its module, and the parameter that was on meta, in its shape before it is quantised."""

    module: nn.Module
    attribute: str
    old: Any
    scales: dict[str, str] = field(default_factory=dict[str, str])  # their keys in the checkpoint
    column: nn.Parameter | None = None  # on meta
    state: Any = None  # the scales in memory
    flat: bool = False  # FSDP1 makes it a part of a flat parameter

    def parameter(self, data: torch.Tensor, **options: Any) -> nn.Parameter:
        """Return a parameter of the library's class that differs from the one on meta in its data and these options."""
        options = vars(self.old) | {"requires_grad": False} | options
        return cast("nn.Parameter", type(self.old)(data, **options))

    def quantised(self, column: torch.Tensor) -> nn.Parameter:
        """Return a parameter of a column."""
        return self.parameter(column, quant_state=self.state, bnb_quantized=True)


class FourBit:
    """The 4-bit weights of a model. See [Note: 4-bit weights].

    Args:
        model: On meta, not yet sharded.
        dtype: In which weights are quantised; ``None``: the one that most of the other parameters have, or of the
            weight on meta.

    Raises:
        ConfigError: A weight is quantised already.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._dtype = dtype or _usual_dtype(model)
        self._weights: dict[str, _Weight] = {}
        self._scales: dict[str, dict[str, str]] = {}
        self._packed = False
        for name, owner in owners_of(model).items():
            old: Any = owner.tensor
            if is_four_bit(old):
                if getattr(old, "bnb_quantized", False) or not old.is_meta:
                    raise ConfigError(
                        f"{name!r} is quantised (Params4bit)",
                        expected="a 4-bit weight on meta that has not been quantised yet",
                        hint="build the model on meta and let load_sharded quantise it while it is loaded",
                    )
                self._weights[name] = _Weight(module=owner.module, attribute=owner.name, old=old)

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def oriented(self, name: str, layout: SourceLayout) -> SourceLayout:
        """Return the layout of a weight's column, or that it is quantised from: that of a ``Conv1D`` is transposed.

        Raises:
            DataError: The checkpoint has the column in another dtype than the model.
        """
        weight = self._weights[name]
        if not self._packed:
            source = getattr(weight.module, "source_cls", None)
            return layout.transpose(0, 1) if source is not None and source.__name__ == "Conv1D" else layout
        stored = weight.old.quant_storage
        if layout.keys[0] in self._scales and layout.dtype != stored:
            raise DataError(
                f"{name!r} is packed as {layout.dtype} in the checkpoint and as {stored} in the model",
                expected="one dtype: a conversion would destroy the packed numbers",
                hint=f"set bnb_4bit_quant_storage={layout.dtype}",
            )
        return layout

    def without_scales(self, entries: Mapping[str, CheckpointEntry]) -> dict[str, CheckpointEntry]:
        """Return a checkpoint's entries without scales; if it has scales, weights are columns from here on."""
        if not self._weights:
            return dict(entries)
        for key in entries:
            if (found := _SCALES.fullmatch(key)) and found[1] in entries:
                self._scales.setdefault(found[1], {})[found[2]] = key
        if self._scales:
            self._pack()
        scales = {key for keys in self._scales.values() for key in keys.values()}
        return {key: entry for key, entry in entries.items() if key not in scales}

    def learn_sources(self, sources: Mapping[str, SourceLayout | Conversion]) -> None:
        """Learn where weights come from, and put columns on meta if they are not there yet.

        Raises:
            DataError: A weight is not in the checkpoint.
        """
        if absent := sorted(self._weights.keys() - sources.keys()):
            raise DataError(
                f"{len(absent)} 4-bit weights are not in the checkpoint: {', '.join(absent[:4])}",
                expected="a checkpoint of the model's weights",
                hint="4-bit weights are frozen, so they cannot be initialised",
            )
        for name, weight in self._weights.items():
            weight.scales = self._scales.get(sources[name].keys[0], {})
        if not self._packed:
            self._pack()

    def _pack(self) -> None:
        self._packed = True
        for weight in self._weights.values():
            old = weight.old
            rows = -(-old.numel() // (2 * old.quant_storage.itemsize))
            column = torch.empty((rows, 1), dtype=old.quant_storage, device="meta")
            weight.column = weight.module._parameters[weight.attribute] = weight.quantised(column)

    def undo(self) -> None:
        """Put weights back in place of columns, unless the model was sharded, so that it may be loaded again."""
        for weight in self._weights.values():
            module: Any = weight.module
            if weight.column is not None and module._parameters.get(weight.attribute) is weight.column:
                module._parameters[weight.attribute], module.quant_state = weight.old, None

    def scales_of(self, name: str) -> dict[str, str]:
        """Return the keys of a weight's scales in the checkpoint, by what they are; none: it is to be quantised."""
        return self._weights[name].scales

    def empty(self, name: str) -> torch.Tensor:
        """Return memory for a whole weight, in the dtype in which it is quantised."""
        old = self._weights[name].old
        return torch.empty(old.shape, dtype=self._dtype or old.dtype)

    def quantise(self, target: Target, tensor: torch.Tensor) -> None:
        """Give a target its part of a weight's column, and keep the scales; ``empty`` made the weight's memory."""
        weight = self._weights[target.name]
        device = target.local.device
        made: Any = weight.parameter(tensor.to(device)).to(device)
        target.fill(made.data)
        weight.state, weight.flat = made.quant_state, target.old is None

    def restore(self, target: Target, scales: Mapping[str, torch.Tensor]) -> None:
        """Keep the scales that a checkpoint has.

        Raises:
            DataError: They make no state.
        """
        weight = self._weights[target.name]
        device = target.local.device
        try:
            made = type(weight.old).from_prequantized(target.local, dict(scales), device=device, module=weight.module)
        except Exception as error:
            raise DataError(
                f"{target.name!r} has scales that its library rejects ({type(error).__name__}: {error})",
                expected="a 4-bit checkpoint saved by a known version of bitsandbytes",
                hint="quantise it again from the full-precision checkpoint",
            ) from error
        weight.state, weight.flat = made.quant_state, target.old is None

    def check(self, targets: Mapping[str, Target]) -> None:
        """Refuse a sharded model that converts columns.

        Raises:
            ConfigError: They were converted when it was sharded, or would be when they are gathered.
        """
        for name, weight in self._weights.items():
            if (target := targets.get(name)) is None:
                continue  # another rank holds it
            stored: torch.dtype = weight.old.quant_storage
            found = target.local.dtype
            if found == stored and stored.is_floating_point:  # integers are gathered as they are
                found = target.gathered or stored
            if found != stored:
                raise ConfigError(
                    f"{name!r} is packed as {stored} and would be {found} in the sharded model",
                    expected="one dtype: a conversion would destroy the packed numbers",
                    hint=f"set bnb_4bit_quant_storage={found}, or no param_dtype in the policy of mixed precision, and "
                    "convert only other parameters in the function passed as shard=",
                )

    def finish(self) -> None:
        """Give modules the scales of their weights, once columns are in the model."""
        for weight in self._weights.values():
            module: Any = weight.module
            module.quant_state = weight.state
            found: Any = module._parameters.get(weight.attribute)
            if hasattr(found, "device_mesh"):  # PEFT reads from a shard, too, how it was quantised
                found.compress_statistics, found.quant_type = weight.old.compress_statistics, weight.old.quant_type
            elif not weight.flat:
                module._parameters[weight.attribute] = weight.quantised(found.data)


def scales_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the scales of a model's 4-bit weights, by the names under which their library saves them.

    Raises:
        ConfigError: Weights are packed for inference on a CPU.
    """
    for prefix, module in model.named_modules():
        state: Any = getattr(module, "quant_state", None)
        if state is None:
            continue
        name = plain_name(f"{prefix}.weight" if prefix else "weight")
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"{name!r} was re-packed for inference on the CPU",
                expected="a 4-bit weight in its training layout",
                hint="save the model before it runs in eval mode",
            )
        found: Mapping[str, torch.Tensor] = state.as_dict(packed=True)
        yield from ((f"{name}.{kind}", value) for kind, value in found.items())


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    numels: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() and not is_four_bit(parameter):
            numels[parameter.dtype] += parameter.numel()
    return max(numels, key=lambda dtype: numels[dtype]) if numels else None
