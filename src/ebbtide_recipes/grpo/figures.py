"""Figures of rewards: a completion's sum, groups without a difference, and the means of an evaluation."""

from __future__ import annotations

import torch


def summed(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the reward of each completion, NaN where no function has judged.

    Args:
        rewards: ``[B, functions]``, NaN where a function has not judged.
        weights: ``[functions]``.
    """
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def equal_in_groups(totals: torch.Tensor, size: int) -> bool:
    """Whether the rewards in each group of ``size`` completions are equal, as far as they are judged."""
    groups = totals.view(-1, size)
    spread = groups.nan_to_num(-torch.inf).amax(dim=1) - groups.nan_to_num(torch.inf).amin(dim=1)
    return bool((spread <= 1e-8).all())


class Evaluation:
    """The rewards of an evaluation so far, in the order of its rows.

    The mean of its batches' means would count the rows of a smaller last batch too often, and the rows with which
    accelerate fills that batch up for all ranks.
    """

    def __init__(self) -> None:
        self._batches: list[torch.Tensor] = []

    def add(self, rewards: torch.Tensor, figures: dict[str, list[float]]) -> None:
        """Take the rewards ``[B, functions]`` of a batch of all ranks; the first of an evaluation starts over.

        Args:
            rewards: NaN where a function has not judged.
            figures: TRL's, of this evaluation, with those of this batch.
        """
        if len(figures["reward"]) == 1:
            self._batches.clear()
        self._batches.append(rewards)

    def means(self, completions: int, names: list[str], weights: torch.Tensor) -> dict[str, list[float]]:
        """Return the figures that are means over the completions, by TRL's names."""
        rewards = torch.cat(self._batches)[:completions]
        figures = {f"rewards/{name}/mean": [rewards[:, n].nanmean().item()] for n, name in enumerate(names)}
        return {**figures, "reward": [summed(rewards, weights).nanmean().item()]}
