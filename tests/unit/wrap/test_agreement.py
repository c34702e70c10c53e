"""A decision of all ranks is ended by all of them, or it is an error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn

from ebbtide.wrap.agreement import AGAIN, NEVER, Votes


def test_a_rank_that_cannot_go_on_ends_what_all_decided_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Sequence[Sequence[int]], str]] = []

    def ask(about: str, groups: Sequence[Sequence[int]], wish: str) -> str:
        asked.append((about, groups, wish))
        return wish

    monkeypatch.setattr(Votes, "_ask", staticmethod(ask))
    votes, block, ranks = Votes(()), nn.Linear(2, 2), [(0, 1)]
    votes.stop("Layer", block, ranks)
    assert asked == [], "nothing was decided"
    assert votes.decide("Layer", block, AGAIN, ranks)
    for _ in range(2):
        votes.stop("Layer", block, ranks)
        assert not votes.decide("Layer", block, AGAIN, ranks)
    assert [wish for _, _, wish in asked] == [AGAIN, NEVER], "the others are met once, and the answer stands"
    votes.stop("Layer", block, ())
    assert votes.decide("Layer", block, AGAIN), "alone a rank may begin again"
