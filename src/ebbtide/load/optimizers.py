"""Rebinding an optimizer that was made before sharding: it holds old parameters and gets the new ones."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.base.errors import ConfigError
from ebbtide.load.targets import owners_of


class Rebinding:
    """An optimizer's parameters by name, to find them in the sharded model.

    Args:
        model: Before it is sharded.
        optimizer: Made of its parameters; ``None``: nothing to do.

    Raises:
        ConfigError: The optimizer has taken a step, or holds foreign parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._names_of = [] if optimizer is None else _names_of(model, optimizer)

    def check(self, sharded: nn.Module) -> None:
        """Refuse a model without some of the parameters, before anything is read for it.

        Raises:
            ConfigError: The wrapper keeps several parameters as one.
        """
        now = owners_of(sharded)
        if absent := [name for names in self._names_of for name in names if name not in now]:
            raise ConfigError(
                f"{absent[0]!r} is part of a flat parameter",
                expected="named parameters",
                hint="pass use_orig_params=True to FSDP, or create the optimizer after loading",
            )

    def rebind(self, loaded: nn.Module) -> None:
        """Give the optimizer the parameters of a model that was checked and loaded."""
        if self._optimizer is None:
            return
        now = {name: owner.tensor for name, owner in owners_of(loaded).items()}
        for group, names in zip(self._optimizer.param_groups, self._names_of, strict=True):
            group["params"][:] = [now[name] for name in names]  # in place: LBFGS keeps the list itself


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group."""
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
    by_id = {id(owner.tensor): name for name, owner in reversed(owners_of(model).items())}
    groups = optimizer.param_groups
    if any(id(parameter) not in by_id for group in groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds a parameter that is not the model's",
            expected="an optimizer of this model's parameters",
            hint="create the optimizer from model.parameters()",
        )
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in groups]
