"""float16 with loss scaling: with offloading exactly the same steps overflow and are skipped."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import ebbtide
from tests.helpers.oracle import same_bits
from tests.helpers.parts import gated_model


def train(policy: str | None) -> tuple[list[Tensor], list[float]]:
    """Train five steps in float16 under a scaler that begins too high; return losses and weights, and the scales."""
    torch.manual_seed(3)
    model, scaler = gated_model(), torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    width = next(p.shape[-1] for p in model.parameters() if p.dim() == 2)
    handle = nullcontext()
    if policy is not None:
        handle = ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0)
    losses: list[Tensor] = []
    scales: list[float] = []
    with handle:
        for _ in range(5):
            x = torch.randn(4, width)
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
    return [*losses, *(p.detach().clone() for p in model.parameters())], scales


@pytest.mark.parametrize("policy", ["auto", "offload", "minimal"])
def test_scaled_losses_in_float16_are_bitwise_those_of_plain_training(policy: str) -> None:
    (plain, plain_scales), (ours, scales) = train(None), train(policy)
    assert scales == plain_scales and scales[0] < 2.0**40, "no step overflowed"
    assert len(ours) == len(plain) and all(map(same_bits, ours, plain))
