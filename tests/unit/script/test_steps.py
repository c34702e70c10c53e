"""Which process of a script records the training."""

from __future__ import annotations

import pytest

from ebbtide.script.request import Request
from ebbtide.script.steps import ScriptSteps


@pytest.mark.parametrize(("rank", "records"), [(None, True), ("", True), ("0", True), ("1", False)])
def test_the_first_rank_records(monkeypatch: pytest.MonkeyPatch, rank: str | None, records: bool) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert ScriptSteps(Request(mode="plain", folder="", record=False)).is_main() is records
