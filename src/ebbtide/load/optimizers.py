"""Rebinding an optimizer that was made before sharding: it holds old parameters and gets the new ones."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.base.errors import ConfigError
from ebbtide.load.targets import owners_of, tensor_of


class Rebinding:
    """Remembers an optimizer's parameters by name, to find them in the sharded model.

    Args:
        model: Before it is sharded.
        optimizer: Made of its parameters; ``None``: nothing to do.

    Raises:
        ConfigError: The optimizer has taken a step, or holds foreign parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._names: list[list[str]] = []
        if optimizer is None:
            return
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}", expected="a torch optimizer", hint="pass it unwrapped"
            )
        if optimizer.state:
            raise ConfigError(
                "the optimizer already has state",
                expected="an optimizer without steps",
                hint="load the weights first, then the optimizer's state",
            )
        names = {id(tensor_of(owner)): name for name, owner in reversed(owners_of(model).items())}
        for group in optimizer.param_groups:
            if any(id(parameter) not in names for parameter in group["params"]):
                raise ConfigError(
                    "the optimizer holds a parameter that is not the model's",
                    expected="an optimizer of this model's parameters",
                    hint="create the optimizer from model.parameters()",
                )
            self._names.append([names[id(parameter)] for parameter in group["params"]])

    def rebind(self, model: nn.Module) -> None:
        """Give the optimizer the parameters that the model has after it was loaded.

        Raises:
            ConfigError: The wrapper keeps several parameters as one.
        """
        if self._optimizer is None:
            return
        now = {name: tensor_of(owner) for name, owner in owners_of(model).items()}
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            if absent := [name for name in names if name not in now]:
                raise ConfigError(
                    f"{absent[0]!r} is part of a flat parameter",
                    expected="named parameters",
                    hint="pass use_orig_params=True to FSDP, or create the optimizer after loading",
                )
            group["params"] = [now[name] for name in names]
