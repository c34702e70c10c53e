"""Follows the conversions that transformers applies while it loads: renamed, fused, stacked and transposed weights.

The library's own functions are run, on layouts where those follow and on whole tensors where they do not: see
[Note: layouts]. Nothing is imported here that a transformers model has not imported already.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbtide.base.errors import DataError, few
from ebbtide.base.extras import check_version
from ebbtide.load.layout import Conversion, Source, SourceLayout

logger = logging.getLogger("ebbtide.load")


@dataclass(kw_only=True)
class _Group:
    """The input of one conversion: the checkpoint's keys, by the converter's own patterns."""

    converter: Any
    name: str
    keys: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def run(self, model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert tensors by key; returns results by name."""
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                # The default of a late-bound name would be the last one's.
                converter.add_tensor(self.name, key, pattern, lambda tensor=tensors[key]: tensor)
        found: Mapping[str, Any] = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def converted(
    model: Any | None, wanted: Mapping[str, torch.Tensor], layouts: Mapping[str, SourceLayout]
) -> tuple[dict[str, list[Source]], list[str]]:
    """Return the sources by the names of a model, and the unused keys.

    A name has several sources where several keys become it: with and without the model's prefix, say.

    Args:
        model: Of transformers, or built like one of them; ``None``: a checkpoint has the model's names.
        wanted: The model's tensors.
        layouts: The checkpoint's tensors.

    Raises:
        DataError: A conversion fails.
        EbbtideError: transformers is older than the tested versions.
    """
    if model is None:
        return _renamed("", wanted, layouts)
    check_version("transformers")
    try:
        core: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # a model of another library, built like one of transformers
        return _renamed(f"{model.base_model_prefix}.", wanted, layouts)
    transforms = list(mapping.get_model_conversion_mapping(model))
    renamings = [t for t in transforms if isinstance(t, core.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    names, prefix = dict(wanted), model.base_model_prefix
    sources: dict[str, list[Source]] = {}
    groups: dict[str, _Group] = {}
    unexpected: list[str] = []
    for key in sorted(layouts, key=core.dot_natural_key):
        name, pattern = core.rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:  # it has the new name already
            name, pattern = core.rename_source_key(key, [], [], prefix, names)
        if name not in names:
            unexpected.append(key)
        elif pattern is None:
            sources.setdefault(name, []).append(layouts[key])
        else:
            group = groups.setdefault(name, _Group(converter=by_pattern[pattern], name=name))
            group.keys.setdefault(pattern, []).append(key)
    for group in groups.values():
        for name, source in _followed(model, group, layouts).items():
            sources.setdefault(name, []).append(source)
    return sources, unexpected


def _renamed(
    prefix: str, wanted: Mapping[str, torch.Tensor], layouts: Mapping[str, SourceLayout]
) -> tuple[dict[str, list[Source]], list[str]]:
    """Return what ``converted`` does, where keys are names with the prefix or without."""
    sources: dict[str, list[Source]] = {}
    unexpected: list[str] = []
    for key, layout in layouts.items():
        near = (key, prefix + key, key.removeprefix(prefix))
        name = next((n for n in near if n in wanted), None)
        if name is None:
            unexpected.append(key)
        else:
            sources.setdefault(name, []).append(layout)
    return sources, unexpected


def _followed(model: Any, group: _Group, layouts: Mapping[str, SourceLayout]) -> dict[str, Source]:
    keys = [key for keys in group.keys.values() for key in keys]
    try:
        made = group.run(model, layouts)
        if all(isinstance(layout, SourceLayout) for layout in made.values()):
            return dict(made)
    except Exception as error:  # what a layout cannot do, a tensor may: the same is tried with shapes only
        logger.debug("%s is converted in one piece: %s", group.name, repr(error))
    try:
        meta = {k: torch.empty(layouts[k].shape, dtype=layouts[k].dtype, device="meta") for k in keys}
        shapes = group.run(model, meta)
    except Exception as error:
        raise DataError(
            f"{group.name!r} cannot be made of {few(map(repr, keys), count=2)} "
            f"({type(error).__name__}: {str(error):.120})",
            expected="tensors that this version of transformers can convert",
            hint="check that the checkpoint is complete and belongs to this type of model",
        ) from error
    conversion = Conversion(
        keys=tuple(keys),
        shapes={name: tensor.shape for name, tensor in shapes.items()},
        convert=lambda tensors: group.run(model, tensors),
    )
    return dict.fromkeys(shapes, conversion)
