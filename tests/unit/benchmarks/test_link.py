"""The suite of the link: the bytes of its bare copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.suites import link
from ebbtide.base.actions import Action


@pytest.mark.parametrize(("sizes", "expected"), [([100], [100]), ([30, 30], [30, 30]), ([30] * 8, [30, 30])])
def test_bare_copies_are_at_most_so_many_bytes_or_one_storage(
    sizes: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One storage larger than the limit must not loop for ever."""
    monkeypatch.setattr(link, "MOST_RAW_BYTES", 64)
    sites = {(number, Action.OFFLOAD): (1, size) for number, size in enumerate(sizes)}
    handle: Any = SimpleNamespace(_engine=SimpleNamespace(last_pass=SimpleNamespace(sites=sites)))
    assert link.moved_sizes(handle) == expected
