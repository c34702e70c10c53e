"""The formulas that verl's keys stand for, written out, and what the trainer computes from the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.grpo.recipe import RECIPE
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import grpo_values

RATIOS = (0.3, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 9.0, 40.0)
"""On both sides of every bound, and on none: there the gradient is any between two."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-formulas"))


def dual_clip(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, most: float) -> torch.Tensor:
    """Return the loss of each token: clipped, and bounded once more where the advantage is negative."""
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantage < 0, torch.minimum(-advantage * most, clipped), clipped)


def loss_and_gradient(trainer: Any, log_ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the trainer's loss of given log-probabilities, and its gradient with respect to them."""
    log_probs = log_ratio.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.ones(log_ratio.shape, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": ids,
            "advantages": advantages, "old_per_token_logps": torch.zeros_like(log_ratio),
            "num_items_in_batch": torch.tensor(ids.numel()),
        },
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("most", [3.0, 1.28, 10.0])
def test_delta_is_the_bound_of_dual_clipping(model: Path, tmp_path: Path, loss_type: Any, most: float) -> None:
    values = grpo_values(str(model), str(tmp_path))
    config = GrpoConfig(**{**values, "loss_type": loss_type, "epsilon": 0.2, "epsilon_high": 0.28, "delta": most})
    trainer = RECIPE.prepare(config)
    log_ratio = torch.tensor(RATIOS).log().repeat(2, 1)
    advantages = torch.tensor([1.5, -0.5])
    log_probs = log_ratio.clone().requires_grad_()
    expected = dual_clip(log_probs.exp(), advantages[:, None], 0.2, 0.28, most).mean()
    (gradient,) = torch.autograd.grad(expected, log_probs)
    found = loss_and_gradient(trainer, log_ratio, advantages)
    torch.testing.assert_close(found, (expected.detach(), gradient))
    trainer.args.delta = None
    assert not torch.allclose(loss_and_gradient(trainer, log_ratio, advantages)[0], expected), "the bound has no effect"
