"""Three transformers in one step: which have gradients when, one backward or two, and what is offloaded."""

from __future__ import annotations

import dataclasses
import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import ebbtide
from ebbtide_recipes.video import samples
from ebbtide_recipes.video.builtin import source as builtin_source
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.distill import Distillation
from ebbtide_recipes.video.families import Condition
from ebbtide_recipes.video.objective import Draws
from ebbtide_recipes.video.trainer import VideoTrainer
from tests.unit.recipes.video.parts import CPU, text_of

SOURCE = builtin_source("builtin:tiny-wan", seed=1)


def module_of() -> Distillation:
    parts = [builtin_source("builtin:tiny-wan", seed=seed).transformer(torch.float32) for seed in (1, 2, 3)]
    condition = Condition(ratios=SOURCE.ratios)
    return Distillation(
        *parts, SOURCE.family, condition, Draws(), SOURCE.scheduler(), student_steps=(1000, 500)
    ).train()


def losses_of(module: Distillation, seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    latents = torch.randn(2, 48, 3, 4, 4)
    text = text_of(SOURCE, 2)
    torch.manual_seed(seed)
    return module(latents, text)


def gradients(part: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in part.parameters()]


def same(first: list[Any], second: list[Any]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def showing(module: Distillation, folder: Path) -> Any:
    """Return as much of a trainer as makes samples."""
    trainer: Any = object.__new__(VideoTrainer)
    trainer.module = trainer.model = module
    trainer.average, trainer._shown_at, trainer.is_fsdp_enabled = None, -1, False
    trainer.state = SimpleNamespace(global_step=3)
    trainer.args = SimpleNamespace(device=CPU, should_save=True, output_dir=folder)
    trainer.accelerator = SimpleNamespace(wait_for_everyone=lambda: None)
    prompt = samples.Prompt(caption="a kite", text=dict(text_of(SOURCE)), shape=(48, 3, 4, 4))
    trainer.sampling = samples.Sampling(source=SOURCE, prompts=[prompt], rate=8.0)
    return trainer


def test_in_a_critics_step_the_student_has_no_gradients() -> None:
    module = module_of()
    module.student_learns = False
    losses = losses_of(module)
    assert set(losses) == {"loss", "critic_loss"}
    losses["loss"].backward()
    assert all(p.grad is None for p in (*module.transformer.parameters(), *module.teacher.parameters()))
    assert all(p.grad is not None for p in module.critic.parameters())


def test_the_two_losses_meet_in_no_parameter() -> None:
    together, apart = module_of(), module_of()
    losses_of(together)["loss"].backward()
    losses = losses_of(apart)
    losses["student_loss"].backward()
    assert all(p.grad is None for p in (*apart.critic.parameters(), *apart.teacher.parameters()))
    assert all(p.grad is not None for p in apart.transformer.parameters())
    losses["critic_loss"].backward()
    for name in ("transformer", "critic"):
        assert same(gradients(together.get_submodule(name)), gradients(apart.get_submodule(name)))


def test_the_student_is_pushed_from_the_critic_to_the_teacher() -> None:
    module = module_of()
    module.critic.load_state_dict(module.teacher.state_dict())
    losses = losses_of(module)
    assert losses["student_loss"].item() == 0  # where the two agree there is nothing to learn
    module = module_of()
    optimizer = torch.optim.AdamW(module.transformer.parameters(), lr=1e-3)
    told = []
    for _ in range(30):  # the critic stays: the student's output moves until the two agree on it
        loss = losses_of(module)["student_loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    assert min(told[-5:]) < told[0]


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_offloading_leaves_gradients_as_they_are_and_the_teacher_alone(policy: str, backwards: int) -> None:
    plain, ours = module_of(), module_of()
    losses_of(plain)["loss"].backward()
    with ebbtide.enable_activation_offloading(ours, policy=policy, min_bytes=0, target="disk", verify=True) as handle:
        losses = losses_of(ours)
        for name in ("loss",) if backwards == 1 else ("student_loss", "critic_loss"):
            losses[name].backward()
        stats, told = handle.stats(), handle.explain()
    for name in ("transformer", "teacher", "critic"):
        assert same(gradients(plain.get_submodule(name)), gradients(ours.get_submodule(name)))
    assert stats.packs > 0
    assert "teacher" not in told


def test_student_and_critic_are_clipped_each_by_its_own_norm(tmp_path: Path) -> None:
    from accelerate import Accelerator

    module, trainer = module_of(), object.__new__(VideoTrainer)
    trainer.module, trainer.accelerator, trainer.is_fsdp_enabled = module, Accelerator(cpu=True), False
    trainer.args = SimpleNamespace(max_grad_norm=1e-3)
    losses_of(module)["loss"].backward()
    before = [torch.cat([p.grad.flatten() for p in group if p.grad is not None]) for group in module.groups()]
    norm = trainer._clip_grad_norm(module)
    after = [torch.cat([p.grad.flatten() for p in group if p.grad is not None]) for group in module.groups()]
    assert norm.item() == pytest.approx(float(torch.cat(before).norm()), rel=1e-4)
    assert [float(each.norm()) for each in after] == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_the_teacher_stays_in_evaluation() -> None:
    module = module_of().train()
    assert module.transformer.training and module.critic.training and not module.teacher.training
    assert not any(p.requires_grad for p in module.teacher.parameters())
    assert [len(group) for group in module.groups()] == [len(list(module.critic.parameters()))] * 2


def test_biases_of_student_and_critic_do_not_decay_as_in_fine_tuning() -> None:
    module, trainer = module_of(), object.__new__(VideoTrainer)
    trainer.module, trainer.optimizer = module, None
    trainer.config = VideoConfig(distill=True, critic_learning_rate=1e-4)
    trainer.args = SimpleNamespace(learning_rate=1e-5, weight_decay=0.1)  # type: ignore[assignment]
    trainer.get_optimizer_cls_and_kwargs = lambda *_: (torch.optim.AdamW, {})  # type: ignore[assignment]
    groups = trainer.create_optimizer().param_groups
    assert [group["lr"] for group in groups] == [1e-5, 1e-5, 1e-4, 1e-4]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1, 0.0]
    names = {parameter: name for name, parameter in module.named_parameters()}
    decayed, others = ({names[p] for group in groups[first::2] for p in group["params"]} for first in (0, 1))
    assert decayed | others == {names[p] for group in module.groups() for p in group} and not decayed & others
    assert others >= {name for name in decayed | others if name.endswith(".bias")}
    assert "transformer.patch_embedding.weight" in decayed and "critic.proj_out.bias" in others


@pytest.mark.parametrize("mean", [-1.0, 0.0, 1.0])
def test_a_logit_mean_above_0_is_less_noise_as_in_diffusers(mean: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.training_utils import compute_density_for_timestep_sampling

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.manual_seed(0)
    places = compute_density_for_timestep_sampling("logit_normal", 4000, mean, 1.0)
    theirs = scheduler.timesteps[(places * 1000).long()] / 1000
    ours = Draws(logit_mean=mean).sigmas(torch.empty(4000, 1, 1, 1, 1), scheduler)
    assert float(ours.mean()) == pytest.approx(float(theirs.mean()), abs=0.02)


def test_a_student_is_sampled_at_its_own_steps() -> None:
    """A student that knows the clip is called once per step, with the noise level of its training."""
    clip, seen = torch.full((1, 4, 3, 16, 16), 5.0), []

    def predict(latents: torch.Tensor, timestep: torch.Tensor, text: Any) -> torch.Tensor:
        sigma = timestep.item() / 1000
        noise = (latents - (1 - sigma) * clip) / sigma
        seen.append((timestep.item(), noise))
        return noise - clip

    torch.manual_seed(3)
    before = torch.get_rng_state()
    prompt = samples.Prompt(caption="", text={}, shape=tuple(clip.shape[1:]))
    sampling = samples.Sampling(source=SOURCE, prompts=[prompt])
    made = samples.sample_student(predict, (1000, 757, 522), prompt, sampling, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(made, clip, atol=1e-4)
    assert [step for step, _ in seen] == [1000, 757, 522]
    assert all(abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1 for _, noise in seen)
    assert abs(torch.corrcoef(torch.stack([noise.flatten() for _, noise in seen]))[0, 1:]).max() < 0.1  # new each time


def test_a_group_without_gradients_has_no_norm() -> None:
    """For it torch returns a zero on the CPU, which cannot be stacked with a norm on a device."""
    module, asked = module_of(), []
    module.student_learns = False
    losses_of(module)["loss"].backward()

    def clip(group: list[torch.nn.Parameter], limit: float) -> torch.Tensor:
        asked.append(group)
        return torch.nn.utils.clip_grad_norm_(group, limit)

    trainer = SimpleNamespace(
        module=module, is_fsdp_enabled=False, args=SimpleNamespace(max_grad_norm=1e-3),
        accelerator=SimpleNamespace(clip_grad_norm_=clip),
    )  # fmt: skip
    norm = VideoTrainer._clip_grad_norm(trainer, module)  # type: ignore[arg-type]
    assert norm > 0 and [group[0] for group in asked] == [next(module.critic.parameters())]


def test_samples_are_made_at_the_timesteps_of_the_scheduler_where_inputs_are_cast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FSDP casts the tensors among the outermost module's inputs; bfloat16 has no 757."""
    module, seen = module_of(), list[float]()

    def cast(_module: object, arguments: Any, options: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda part: part.bfloat16() if part.is_floating_point() else part, (arguments, options)
        )

    def predict(part: Any, latents: torch.Tensor, timestep: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(timestep.item())
        return latents

    module.student_steps = (1000, 757)
    module.register_forward_pre_hook(cast, with_kwargs=True)
    monkeypatch.setattr(type(module.family), "predict", lambda _family, *arguments: predict(*arguments))
    trainer = showing(module, tmp_path)
    trainer.compute_loss_context_manager = nullcontext  # type: ignore[method-assign]
    trainer.args.should_save = False
    trainer.show()
    assert seen == [1000.0, 757.0]


@pytest.mark.parametrize("what", ["write", "vae"])
def test_samples_that_cannot_be_written_end_no_training_and_a_failing_vae_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str
) -> None:
    def failing(*_arguments: object, **_options: object) -> Any:
        raise OSError(errno.EIO, "a bad block")

    trainer = showing(module_of(), tmp_path)
    met: list[bool] = []
    trainer.accelerator.wait_for_everyone = lambda: met.append(True)
    source: Any = SimpleNamespace(vae_config={} if what == "vae" else None, vae=failing)
    trainer.sampling = dataclasses.replace(trainer.sampling, source=source)
    monkeypatch.setattr(samples, "sample_student", lambda *_: torch.zeros(1, 3, 2, 4, 4))
    monkeypatch.setattr(samples.clips, "write", failing)
    if what == "vae":
        with pytest.raises(OSError, match="a bad block"):
            trainer.show()
        assert "could not be written" not in caplog.text
    else:
        trainer.show()
        assert met == [True]
        assert "samples after step 3 could not be written: [Errno 5] a bad block" in caplog.text
