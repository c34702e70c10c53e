"""Wrappers that forward attributes to the inner module, like Lightning Fabric's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.wrap.forward import StandIn
from tests.helpers.models import build, outputs_of
from tests.helpers.oracle import same_bits


class Forwarding(nn.Module):
    """Like ``lightning.fabric.wrappers._FabricModule``: sets attributes on the inner module too, if it has them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_forward_module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_forward_module" in self.__dict__.get("_modules", {}) and hasattr(self._forward_module, name):
            setattr(self._forward_module, name, value)
        super().__setattr__(name, value)


def by_fabric(module: nn.Module) -> nn.Module:
    fabric = pytest.importorskip("lightning.fabric", reason="lightning is not installed")
    return fabric.Fabric(accelerator="cpu", devices=1).setup(module)


@pytest.mark.parametrize("wrap", [Forwarding, by_fabric], ids=["forwarding", "lightning.fabric"])
@pytest.mark.parametrize("name", ["block", "lstm"])
@pytest.mark.parametrize("policy", ["auto", "minimal"])
def test_the_wrapper_and_the_module_inside_stay_apart(wrap: Any, name: str, policy: str) -> None:
    tiny = build(name)
    weights = list(tiny.model.parameters())

    def grads(model: nn.Module) -> list[torch.Tensor]:
        (output,) = outputs_of(model(**tiny.inputs)).values()
        return list(torch.autograd.grad(output.square().sum(), weights))

    expected = grads(tiny.model)
    model = wrap(tiny.model)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
        for _ in range(3):
            assert all(map(same_bits, grads(model), expected))
        assert handle.stats().unique_bytes > 0 and handle.stats().coverage_percent == 100.0
        twin = copy.deepcopy(model)
    assert not any(isinstance(v, StandIn) for m in (*model.modules(), *twin.modules()) for v in vars(m).values())
    assert all(map(same_bits, grads(model), expected))


def test_globs_know_the_module_by_the_name_it_had() -> None:
    model = Forwarding(build("block").model)
    with ebbtide.enable_activation_offloading(model, blocks=["layers.1"]) as handle:
        assert handle._attachment.block_names == ["layers.1"]
