"""Plain attributes of modules that hold tensors: second names of parameters, lists of them, scratch memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def rename(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors, by identity, in plain attributes such as second names of parameters."""
    seen: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for name, value in _plain_attributes(module):
            vars(module)[name] = _replaced(value, lambda tensor: new.get(id(tensor), tensor), seen)


def on_meta(model: nn.Module) -> dict[str, bool]:
    """Return the plain attributes with tensors on meta, which nothing gives values, and whether a container has them.

    Empty tensors in lists, dicts, tuples and sets have no values to lose.
    """
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, bool] = {}
    seen: dict[int, tuple[Any, Any]] = {}
    for prefix, module in model.named_modules():
        kept = {*module._parameters, *module._buffers}
        for name, value in _plain_attributes(module):
            # Weight norm, spectral norm and pruning compute such an attribute in each forward; RNNs update their list.
            is_list_of_rnn = name == "_flat_weights" and isinstance(module, nn.RNNBase)
            if is_list_of_rnn or kept.intersection((f"{name}_g", f"{name}_orig")):
                continue
            path, held = plain_name(f"{prefix}.{name}" if prefix else name), not isinstance(value, torch.Tensor)

            def note(tensor: torch.Tensor, path: str = path, held: bool = held) -> torch.Tensor:
                if tensor.is_meta and id(tensor) not in owned and not (held and tensor.numel() == 0):
                    found[path] = held
                return tensor

            _replaced(value, note, seen)
    return found


def _plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(n, v) for n, v in vars(module).items() if n not in ("_parameters", "_buffers", "_modules")]


def _replaced(value: Any, function: Callable[[torch.Tensor], torch.Tensor], seen: dict[int, tuple[Any, Any]]) -> Any:
    """Return a value with its tensors replaced by the function's, also in containers, of which ``seen`` has the new."""
    pending: list[Any] = []

    def made_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if not isinstance(value, (list, dict, tuple, set)):
            return value
        if id(value) not in seen:
            seen[id(value)] = (value, value)
            if isinstance(value, tuple):
                items: list[Any] = [made_of(item) for item in value]
                if any(new is not old for new, old in zip(items, value, strict=True)):
                    kind: Any = type(value)  # its own function may take other arguments
                    made = tuple.__new__(kind, items) if inspect.isfunction(kind.__new__) else kind(items)
                    seen[id(value)] = (value, made)
            else:
                pending.append(value)
        return seen[id(value)][1]

    result = made_of(value)
    while pending:
        held = pending.pop()
        items = list(dict.items(held) if isinstance(held, dict) else enumerate(held))
        changed = {key: new for key, old in items if (new := made_of(old)) is not old}
        if isinstance(held, dict):
            dict.update(held, changed)
        elif isinstance(held, list):
            for index, new in changed.items():
                list.__setitem__(held, index, new)
        elif changed:
            set.clear(held)
            set.update(held, [changed.get(index, old) for index, old in items])
    return result
