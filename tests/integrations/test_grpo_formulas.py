"""The formulas of verl's keys, written out, compared with the trainer's results for the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide_recipes.grpo.divergence import Divergence, only_if_judged
from ebbtide_recipes.grpo.recipe import RECIPE
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import grpo_config

RATIOS = (0.3, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 9.0, 40.0)
"""On both sides of every bound, and on none: there the gradient is any between two."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-formulas"))


def dual_clip(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, most: float) -> torch.Tensor:
    """Return the loss of each token: clipped, and bounded once more if the advantage is negative."""
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return torch.where(advantage < 0, torch.minimum(-advantage * most, clipped), clipped)


def loss_and_gradient(
    trainer: Any, log_ratio: torch.Tensor, advantages: torch.Tensor, **more: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the trainer's loss of some log-probabilities, and its gradient with respect to them."""
    log_probs = log_ratio.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.ones(log_ratio.shape, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": ids,
            "advantages": advantages, "old_per_token_logps": torch.zeros_like(log_ratio),
            "num_items_in_batch": torch.tensor(ids.numel()), **more,
        },
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("most", [3.0, 1.28, 10.0])
def test_delta_is_the_bound_of_dual_clipping(model: Path, tmp_path: Path, loss_type: Any, most: float) -> None:
    bounds = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": most}
    trainer = RECIPE.prepare(grpo_config(model, tmp_path, loss_type=loss_type, **bounds))
    log_ratio = torch.tensor(RATIOS).log().repeat(2, 1)
    advantages = torch.tensor([1.5, -0.5])
    log_probs = log_ratio.clone().requires_grad_()
    expected = dual_clip(log_probs.exp(), advantages[:, None], 0.2, 0.28, most).mean()
    (gradient,) = torch.autograd.grad(expected, log_probs)
    found = loss_and_gradient(trainer, log_ratio, advantages)
    torch.testing.assert_close(found, (expected.detach(), gradient))
    trainer.args.delta = None
    assert not torch.allclose(loss_and_gradient(trainer, log_ratio, advantages)[0], expected), "the bound has no effect"


def test_the_divergence_in_the_loss_is_k3(model: Path, tmp_path: Path) -> None:
    trainer = RECIPE.prepare(grpo_config(model, tmp_path, beta=0.5))
    reference = torch.tensor([[-1.0, 0.5, 2.0]])
    log_probs = torch.tensor([[0.1, 0.0, -0.1]], requires_grad=True)
    expected = 0.5 * (torch.exp(reference - log_probs) - (reference - log_probs) - 1).mean()
    (gradient,) = torch.autograd.grad(expected, log_probs)
    found = loss_and_gradient(trainer, log_probs.detach(), torch.zeros(1), ref_per_token_logps=reference)
    torch.testing.assert_close(found, (expected.detach(), gradient))


def log_probs(model: Any, made: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each token of the completions, from the model's logits."""
    ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
    mask = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -made["completion_ids"].size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, made["completion_ids"][..., None])[..., 0]


@pytest.mark.parametrize(
    "changes",
    [
        {},  # one update per rollout: TRL alone would score nothing
        {"beta": 0.04},
        {"num_iterations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 2},
        {"train_type": "lora", "lora_rank": 2},
    ],
    ids=["alone", "in the loss too", "several updates", "adapters"],
)
def test_the_reward_is_less_by_the_divergence_of_the_completion(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    trainer = RECIPE.prepare(grpo_config(model, tmp_path, kl_reward_coef=0.5, scale_rewards="none", **changes))
    assert trainer.beta == changes.get("beta", 0.0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.05 * parameter.requires_grad * torch.randn_like(parameter)
    trainer.model.train()
    rows = [trainer.train_dataset[n] for n in (0, 1) for _ in range(4)]
    made = trainer._generate_and_score_completions(rows)
    difference = log_probs(trainer.model, made) - log_probs(AutoModelForCausalLM.from_pretrained(model), made)
    divergence = (difference * made["completion_mask"]).sum(dim=1)
    assert divergence.abs().min() > 1e-3
    names = [name for name in trainer.reward_func_names if name != "kl"]
    scores = sum(torch.tensor(list(trainer._logs["rewards"][name])) for name in names)
    rewards = (scores - 0.5 * divergence).view(2, 4)
    torch.testing.assert_close(
        made["advantages"], (rewards - rewards.mean(1, keepdim=True)).flatten(), atol=1e-4, rtol=0
    )
    assert ("ref_per_token_logps" in made) is ("beta" in changes)


def test_a_completion_that_no_function_judges_has_no_divergence_and_neither_has_an_evaluation() -> None:
    rewards = torch.tensor([[1.0, torch.nan, 3.0], [torch.nan, torch.nan, 4.0]])
    found = only_if_judged(rewards)
    assert torch.equal(found.isnan(), torch.tensor([[False, True, False], [True, True, True]])) and found[0, 2] == 3.0
    divergence = Divergence()
    assert divergence(completions=["a", "b"], prompts=[]) == [None, None]
    divergence.values = [0.5, 1.0]
    assert divergence(completions=["a", "b"]) == [0.5, 1.0]
