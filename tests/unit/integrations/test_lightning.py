"""Without Lightning its module says what to install; with it, `tests/integrations/hosts/test_lightning.py` trains."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

import ebbtide


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ebbtide.integrations.lightning", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ebbtide.EbbtideError, match="lightning is not installed; expected .*\nhint: pip install light"):
        importlib.import_module("ebbtide.integrations.lightning")
