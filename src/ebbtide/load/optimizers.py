"""Rebinding an optimizer that was made before sharding: it holds old parameters and gets the new ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ebbtide.base.errors import ConfigError
from ebbtide.load.targets import owners_of, tensor_of


def rebinding(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[[nn.Module], None]:
    """Remember an optimizer's parameters by name, to find them in the sharded model.

    Args:
        model: Before it is sharded.
        optimizer: Made of its parameters; ``None``: nothing to do.

    Returns:
        Gives the optimizer the parameters of the model as it was loaded; raises ``ConfigError`` if the wrapper keeps
        several parameters as one.

    Raises:
        ConfigError: The optimizer has taken a step, or holds foreign parameters.
    """
    if optimizer is None:
        return lambda loaded: None
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
    by_id = {id(tensor_of(owner)): name for name, owner in reversed(owners_of(model).items())}
    groups = optimizer.param_groups
    if any(id(parameter) not in by_id for group in groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds a parameter that is not the model's",
            expected="an optimizer of this model's parameters",
            hint="create the optimizer from model.parameters()",
        )
    names_of = [[by_id[id(parameter)] for parameter in group["params"]] for group in groups]

    def rebind(loaded: nn.Module) -> None:
        now = {name: tensor_of(owner) for name, owner in owners_of(loaded).items()}
        for group, names in zip(optimizer.param_groups, names_of, strict=True):
            if absent := [name for name in names if name not in now]:
                raise ConfigError(
                    f"{absent[0]!r} is part of a flat parameter",
                    expected="named parameters",
                    hint="pass use_orig_params=True to FSDP, or create the optimizer after loading",
                )
            group["params"][:] = [now[name] for name in names]  # in place: LBFGS keeps the list itself

    return rebind
