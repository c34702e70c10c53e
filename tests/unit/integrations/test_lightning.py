"""Without Lightning its module says what to install; with it, `tests/integrations/hosts/test_lightning.py` trains."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

import ebbtide


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ebbtide.integrations.lightning", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ebbtide.EbbtideError, match="lightning is not installed; expected .*\nhint: pip install light"):
        importlib.import_module("ebbtide.integrations.lightning")


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("lightning", "lightning.pytorch", "ebbtide.integrations.lightning"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.Callback = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules["ebbtide.integrations.lightning"]
    return importlib.import_module("ebbtide.integrations.lightning").OffloadCallback(policy="minimal", min_bytes=0)


class Trained(torch.nn.Sequential):
    automatic_optimization = True

    def training_step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self:
            x = layer(x)
        return {"loss": x.square().mean()}


def test_training_step_delimits_a_pass_if_no_strategy_wraps_the_module(callback: Any) -> None:
    model = Trained(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)], torch.nn.Linear(8, 8))
    trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(model=model))
    callback.on_train_start(trainer, model)
    model.training_step(torch.randn(3, 8))["loss"].backward()
    stats = callback.handle.stats()  # of this very pass
    assert stats.packs and stats.coverage_percent is not None
    callback.on_train_end(trainer, model)
    assert "training_step" not in vars(model)


def test_a_used_callback_is_copied_as_its_settings_and_used_a_second_time(callback: Any) -> None:
    model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
    trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(model=model))
    callback.on_train_start(trainer, model)
    first = callback.handle
    copied = copy.deepcopy(callback)
    assert copied.handle is None and copied.options == callback.options
    callback.on_train_start(trainer, model)
    assert callback.handle is not first and not first.enabled
    callback.on_train_end(trainer, model)
