"""The KL divergence from the reference as a part of the reward.

[Note: the divergence in the reward]
A completion's reward is lowered by a weight times the sum over its tokens of ``log p - log p_reference``, with the
log-probabilities of the weights that generated it: verl's ``use_kl_in_reward`` with ``kl_penalty=kl``. TRL has no such
part, but sums weighted reward functions. So it is one more of them, with a negative weight; its values are computed
before the reward functions are called. An evaluation has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Divergence:
    """A reward function that returns what was computed last. See [Note: the divergence in the reward].

    Attributes:
        values: One per completion; empty: there is none, as in an evaluation.
    """

    __name__ = "kl"

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, *, completions: Sequence[Any], **_: Any) -> Sequence[float | None]:
        """Return a number per completion, or ``None``."""
        return self.values or [None] * len(completions)


def of_completions(log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """Return the divergence of each completion.

    Args:
        log_probs: ``[B, S]``, of the generating weights.
        reference: ``[B, S]``, of the reference.
        mask: ``[B, S]``, 1 for a completion's tokens.
    """
    return ((log_probs - reference) * mask).sum(dim=1).tolist()


def only_if_judged(rewards: torch.Tensor) -> torch.Tensor:
    """Return rewards ``[B, functions]`` without a divergence (the last) where no other function has judged."""
    unjudged = rewards[:, :-1].isnan().all(dim=1)
    return torch.cat([rewards[:, :-1], rewards[:, -1:].masked_fill(unjudged[:, None], torch.nan)], dim=1)
