"""Distillation by distribution matching: a student of few steps, a frozen teacher, a critic.

[Note: three transformers]
The student denoises latents in one call. The critic learns, by flow matching, the velocity of the student's output; the
teacher knows that of the data. Where the two differ at a new noise level, the student's output is moved from the
critic's estimate towards the teacher's (DMD2, Yin et al. 2024, arXiv:2405.14867, without its adversarial loss and with
noisy data in place of backward simulation).

The critic learns in every step, the student in every ``student_interval``-th. The two losses share no parameter, so one
backward of their sum and one backward each give the same gradients; in a critic's step the student runs without
gradients and its ``grad`` stays ``None``, so the optimizer skips its weights and moments. The teacher has no gradients:
nothing of it is saved for backward or offloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ebbtide_recipes.skeleton.dropout import without_dropout
from ebbtide_recipes.video.families import Condition, Family, Text
from ebbtide_recipes.video.objective import STEPS, Denoiser, Draws, mix


class Distillation(Denoiser):
    """Student (``transformer``), teacher and critic, and their losses. See [Note: three transformers].

    Args:
        transformer: The student.
        teacher: The teacher, which is frozen here.
        critic: Learns the student's output.
        family: The family of all three.
        condition: What predictions depend on besides latents and text.
        draws: How timesteps are drawn.
        scheduler: The pipeline's scheduler.
        student_steps: Timesteps of the student, from 1 to 1000.
        empty: Embeddings of the empty caption.
    """

    def __init__(
        self,
        transformer: nn.Module,
        teacher: nn.Module,
        critic: nn.Module,
        family: Family,
        condition: Condition,
        draws: Draws,
        scheduler: Any,
        *,
        student_steps: Sequence[int],
        empty: Text | None = None,
    ) -> None:
        super().__init__(transformer, family, condition, draws, scheduler, empty=empty)
        self.teacher = teacher.requires_grad_(False).eval()
        self.critic = critic
        self.student_steps = tuple(student_steps)
        self.student_learns = True
        """Whether the coming forward returns the student's loss; the trainer sets it before each step."""

    def train(self, mode: bool = True) -> Distillation:
        """Keep the teacher in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(
        self, latents: torch.Tensor, text: Text, timestep: Sequence[float] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the losses of a batch: ``loss`` is their sum; or with a timestep the student's prediction."""
        if timestep is not None:
            return self.prediction_at(latents, timestep, text)
        text = self.dropped(text)
        latents = latents.float()
        with torch.set_grad_enabled(self.student_learns and torch.is_grad_enabled()):
            made = self._made(latents, text)
        losses = {"critic_loss": self.flow_loss(self.critic, made.detach(), text)}
        if self.student_learns:
            losses["student_loss"] = self._student_loss(made, text)
        return {"loss": torch.stack(list(losses.values())).sum(), **losses}

    def groups(self) -> list[list[nn.Parameter]]:
        """Return the trained parameters of the student, and of the critic."""
        return [[p for p in part.parameters() if p.requires_grad] for part in (self.transformer, self.critic)]

    def _made(self, latents: torch.Tensor, text: Text) -> torch.Tensor:
        """Return the student's output for noisy data at one of its timesteps."""
        steps = torch.tensor(self.student_steps, dtype=torch.float32, device=latents.device)
        sigmas = steps[torch.randint(0, len(steps), (len(latents),), device=latents.device)] / STEPS
        noisy = mix(latents, torch.randn_like(latents), sigmas)
        return _clean(noisy, self.predict(self.transformer, noisy, sigmas * STEPS, text), sigmas)

    def _student_loss(self, made: torch.Tensor, text: Text) -> torch.Tensor:
        """Return a loss whose gradient is the direction from the critic's estimate to the teacher's."""
        with torch.no_grad():
            sigmas = self.draws.sigmas(made, self.scheduler)
            noisy = mix(made, torch.randn_like(made), sigmas)
            with without_dropout(self.critic):
                theirs = _clean(noisy, self.predict(self.critic, noisy, sigmas * STEPS, text), sigmas)
            wanted = _clean(noisy, self.predict(self.teacher, noisy, sigmas * STEPS, text), sigmas)
            dimensions = tuple(range(1, made.dim()))
            scale = (made - wanted).abs().mean(dimensions, keepdim=True).clamp_min(1e-6)
            target = made - (theirs - wanted) / scale
        return 0.5 * nn.functional.mse_loss(made, target)


def _clean(noisy: torch.Tensor, velocity: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Return the clean latents that a velocity points to."""
    return noisy - sigmas.view(-1, *[1] * (noisy.dim() - 1)) * velocity
