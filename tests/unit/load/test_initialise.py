"""What each initialising call of a model writes, found on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.load.initialise import Initialiser, _Watch


class Reached(TorchDispatchMode):
    """Notes which operators are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_operators_that_set_all_of_a_tensor_on_meta_are_noted_and_not_executed() -> None:
    whole, real = torch.empty(4, 3, device="meta"), torch.zeros(2)
    names, numels = {whole.untyped_storage()._cdata: "whole"}, {"whole": 12}
    with Reached() as reached, _Watch(names, numels) as watch:
        assert whole.normal_(0, 1) is whole
        whole.mul_(2)
        real.fill_(5)
    assert watch.writes == {"whole": True}
    assert reached.names == ["mul_", "fill_"]
    assert real.eq(5).all()
    with _Watch(names, numels) as watch:
        whole[1].zero_()
    assert watch.writes == {"whole": False}


def test_only_calls_that_write_a_wanted_tensor_are_made() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    initialiser = Initialiser(model, None, seed=1)
    made = dict(initialiser.values(["1.running_var"], torch.device("cpu")))
    assert list(made) == ["1.running_var"] and made["1.running_var"].eq(1).all()
    assert [(call.name, sorted(call.writes)) for call in initialiser._calls or ()] == [
        ("0.reset_parameters", ["0.bias", "0.weight"]),
        ("1.reset_parameters", ["1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"]),
    ]


def test_values_on_the_cpu_leave_the_random_numbers_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    state = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("accelerators were seeded, too"))
    made = dict(Initialiser(model, None, seed=1).values(["weight"], torch.device("cpu")))
    assert made["weight"].std() > 0 and torch.equal(torch.get_rng_state(), state)
