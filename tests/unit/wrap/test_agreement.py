"""A decision of all ranks is revoked by all of them, or it is an error."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ebbtide
from ebbtide.base.errors import ConfigError
from ebbtide.engine.stats import Tally
from ebbtide.wrap import agreement, checkpointable
from ebbtide.wrap.agreement import RARELY, Vote, Votes
from ebbtide.wrap.called import Called
from ebbtide.wrap.collectives import Collectives


class Parted(nn.Module):
    """Has a part that may be a separate unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The votes of this rank, which all others share."""
    wishes: list[str] = []
    monkeypatch.setattr(Votes, "_ask", staticmethod(lambda about, groups, wish: (wishes.append(wish), wish)[1]))
    return wishes


def test_a_rank_that_cannot_go_on_ends_what_all_decided_with_the_others(asked: list[str]) -> None:
    votes, block, ranks = Votes(()), nn.Linear(2, 2), [(0, 1)]
    votes.stop("Layer", block, ranks, "draw")
    assert asked == [], "nothing was decided"
    assert votes.decide("Layer", block, Vote.CHECKPOINT, ranks)
    for _ in range(2):
        votes.stop("Layer", block, ranks, "draw")
        assert not votes.decide("Layer", block, Vote.CHECKPOINT, ranks)
    assert asked == [Vote.CHECKPOINT, Vote.NEVER], "the others are met once, and the answer is final"
    votes.stop("Layer", block, (), "draw")
    assert votes.decide("Layer", block, Vote.CHECKPOINT), "alone a rank may begin again"


def test_a_vote_for_later_is_held_once_more_and_others_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Vote.LATER, Vote.CHECKPOINT]
    monkeypatch.setattr(Votes, "_ask", staticmethod(lambda about, groups, wish: answers.pop(0)))
    votes, block, ranks = Votes(()), nn.Linear(2, 2), [(0, 1)]
    wishes = Vote.CHECKPOINT, Vote.NO, Vote.NEVER
    assert [votes.decide("Layer", block, wish, ranks) for wish in wishes] == [False, True, True]


def test_while_no_rank_has_seen_an_input_with_a_gradient_votes_get_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = 0
    voted: list[int] = []

    def ask(about: str, groups: Sequence[Sequence[int]], wish: str) -> str:
        voted.append(blocks)
        return Vote.CHECKPOINT if blocks >= 5 * RARELY else wish

    monkeypatch.setattr(Votes, "_ask", staticmethod(ask))
    votes, block, ranks = Votes(()), nn.Linear(2, 2), [(0, 1)]
    for _ in range(6 * RARELY):
        assert votes.decide("Layer", block, Vote.UNSEEN, ranks) == (blocks >= 5 * RARELY), "as another rank wishes"
        blocks += 1
    assert voted == [0, *(2**power for power in range(8)), *range(RARELY, 5 * RARELY + 1, RARELY)]
    assert not votes.decide("Layer", block, Vote.UNSEEN), "alone, it is no vote"
    assert votes.decide("Layer", block, Vote.CHECKPOINT)


def test_a_rank_that_stops_alone_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(about: str, groups: Sequence[Sequence[int]], wish: str) -> str:
        if wish is Vote.NEVER:
            raise ConfigError("rank 1 did not stop", expected="the same calls", hint="check its log")
        return wish

    monkeypatch.setattr(Votes, "_ask", staticmethod(ask))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    votes, block, ranks = Votes(()), nn.Linear(2, 2), [(0, 1)]
    assert votes.decide("Layer", block, Vote.CHECKPOINT, ranks)
    with pytest.raises(ConfigError, match="rank 0 stops, since its Layer blocks draw"):
        votes.stop("Layer", block, ranks, "draw")


@pytest.mark.parametrize(("at_the_vote", "wishes"), [(False, [Vote.CHECKPOINT]), (True, [Vote.LATER, Vote.CHECKPOINT])])
def test_a_doubt_of_one_rank_ends_nothing_that_all_decided(
    at_the_vote: bool, wishes: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ranks that have no doubt, and that never vote."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with ebbtide.enable_activation_offloading(model, min_bytes=0, enable_ckpt=True, blocks=["*"]) as handle:
        model(torch.randn(2, 4)).sum().backward()
        monkeypatch.setattr(Collectives, "groups", lambda *_: [(0, 1)])
        checkpointable: Any = handle._attachment._checkpointable
        block, seen = handle._attachment._blocks[0][1], SimpleNamespace(input_bytes=1, must_keep=2**40)
        decisions: list[bool] = []
        for doubt in (at_the_vote, not at_the_vote):
            checkpointable._in_doubt = {block.kind} if doubt else set()
            decisions.append(checkpointable.decide(block, model[0], seen, Called(model[0], (), {}), None, tried=False))
        assert decisions == [not at_the_vote, True]
    assert asked == wishes


def test_a_rank_without_tokens_votes_on_blocks_that_are_known_to_hold_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks, which have tokens, wait for it, also where no forward has shown a collective."""
    asked: list[str] = []

    def ask(about: str, groups: Sequence[Sequence[int]], wish: str) -> str:
        asked.append(wish)
        return Vote.CHECKPOINT

    monkeypatch.setattr(Votes, "_ask", staticmethod(ask))
    monkeypatch.setattr(checkpointable, "shared_groups", lambda: [dist])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with ebbtide.enable_activation_offloading(model, min_bytes=0, policy="minimal", blocks=["*"]) as handle:
        model(torch.randn(0, 4)).sum().backward()
        attachment: Any = handle._attachment
        attachment._agreement.voting.append((0, 1))
        block, decide = attachment._blocks[0][1], attachment._checkpointable.decide
        for holds_collectives in (False, True):
            for module in (agreement, checkpointable):
                monkeypatch.setattr(module, "has_collectives", lambda block, holds=holds_collectives: holds)
            assert decide(block, model[0], Tally(), Called(model[0], (), {}), None, tried=False) is holds_collectives
    assert asked == [Vote.UNSEEN]


@pytest.mark.parametrize("policy", ["offload", "minimal"])
def test_ranks_of_the_fake_backend_meet_nobody(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nor are collectives counted, by which a block shows that it needs others: it is not checkpointed."""
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        model = nn.Sequential(*(Parted() for _ in range(3)))
        mesh = init_device_mesh("cpu", (8,))
        for layer in model.children():
            fully_shard(layer.up, mesh=mesh)  # pyright: ignore[reportAttributeAccessIssue]
        fully_shard(model, mesh=mesh)
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0) as handle:
            for _ in range(2):
                model(torch.randn(2, 16)).sum().backward()
            assert handle.stats().packs > 0
            assert handle.stats().checkpointed_blocks == 0
            assert ("collectives of fake groups are not counted" in caplog.text) is (policy == "minimal")
    finally:
        dist.destroy_process_group()
