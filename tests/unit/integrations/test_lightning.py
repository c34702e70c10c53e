"""Without Lightning its module says what to install; with it, `tests/integrations/hosts/test_lightning.py` trains."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch

import ebbtide


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ebbtide.integrations.lightning", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ebbtide.EbbtideError, match="lightning is not installed; expected .*\nhint: pip install light"):
        importlib.import_module("ebbtide.integrations.lightning")


def test_a_used_callback_is_copied_as_its_settings_and_used_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "ebbtide.integrations.lightning"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.Callback = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules["ebbtide.integrations.lightning"]
    callback = importlib.import_module("ebbtide.integrations.lightning").OffloadCallback(policy="minimal")
    model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
    trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(model=model))
    callback.on_train_start(trainer, model)
    first = callback.handle
    copied = copy.deepcopy(callback)
    assert copied.handle is None and copied.options == callback.options
    callback.on_train_start(trainer, model)
    assert callback.handle is not first and not first.enabled
    callback.on_train_end(trainer, model)
