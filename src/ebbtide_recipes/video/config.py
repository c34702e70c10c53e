"""Flags of ``ebbtide video``. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.skeleton.config import RecipeConfig
from ebbtide_recipes.skeleton.rules import at_least, within
from ebbtide_recipes.video import fastvideo

_COUNTS: Mapping[str, str] = {
    "num_frames": "1 trains on single images",
    "height": "leave it out for the family's default",
    "width": "leave it out for the family's default",
    "text_length": "leave it out for the family's default",
    "sample_steps": "leave it out to sample only before training and at the end",
    "sampler_steps": "20 is the default",
    "student_interval": "1: the student learns in every step",
    "hsdp_shard_dim": "leave it out, or 1 for whole weights on each device",
    "hsdp_replicate_dim": "leave it out, or 1 for one copy",
}
_POSITIVE = ("frame_rate", "logit_std", "flow_shift", "critic_learning_rate", "embedded_guidance")
_LARGEST_MODE_SCALE = 2 / (math.pi - 2)
_SAMPLES = "use samples instead: --samples, --sample_steps, --sample_prompts"
_FIXED: Mapping[str, str] = {
    "eval_dataset": _SAMPLES,
    "split_dataset_ratio": _SAMPLES,
    "memory_efficient_init": "each process loads the transformer whole before it is sharded",
    "fp16": "--bf16 true needs no loss scaling",
}
"""Flags of other recipes that this one cannot serve."""


@dataclass(frozen=True, kw_only=True)
class VideoConfig(RecipeConfig):
    """Fine-tune or distil a video transformer of diffusers; see where its memory goes.

    --activation_cpu_offload alone is ebbtide with the policy Auto, --gradient_checkpointing alone diffusers' own
    checkpointing, both together are ebbtide with the policy Minimal, neither is ordinary training.

    Attributes:
        model: Pipeline to train: a folder in diffusers' layout, a hub name, builtin:tiny-wan or builtin:small-wan. Wan,
            HunyuanVideo, LTX, CogVideoX and Cosmos 2.5, from text to video.
        dataset: Clips with captions: builtin:moving-shapes, a folder, or a .jsonl, .json or .csv file with video and
            caption; NAME#100 takes the first hundred. Several may be given.
        num_frames: Frames of a clip (with bucketing, the maximum); default: the family's.
        height: Pixels; default: the family's.
        width: Pixels; default: the family's.
        frame_rate: Frames to read per second; default: every recorded frame.
        bucketing: Let clips keep their proportions and lengths; a batch is of one bucket.
        text_length: Tokens of a caption; default: the family's.
        latents_dir: Folder of latents and embeddings, made there if missing; default: the output folder's latents/.
        preprocess_only: Make latents and embeddings, and stop.
        train_type: Train all weights of the transformer (full) or low-rank adapters (lora).
        caption_dropout: Share of the clips trained with the empty caption, for guidance; 0.1 is one in ten.
        timestep_sampling: Density of the trained noise levels.
        logit_mean: Mean of the density logit_normal; above 0 there is less noise.
        logit_std: Standard deviation of the density logit_normal.
        mode_scale: Scale of the density mode.
        flow_shift: Shift of the noise levels; default: the pipeline scheduler's.
        embedded_guidance: Guidance scale given to transformers that embed it (HunyuanVideo); default: 6.
        ema_decay: Decay of a moving average of the trained weights, such as 0.999.
        samples: Clips to sample before training, every --sample_steps and at the end, unless --sample_prompts names
            them; 0: none.
        sample_steps: Steps between two samplings; default: only before training and at the end.
        sample_prompts: Captions to sample; default: those of the first clips.
        sampler_steps: Steps of the sampler.
        guidance_scale: Classifier-free guidance of the samples; 1 is none.
        distill: Train a student of few steps from a teacher, with a critic; --model is the student.
        teacher: Pipeline of the frozen teacher; default: --model.
        critic: Initial pipeline of the critic; default: the teacher's.
        student_timesteps: Timesteps, from 1000 down, at which the student is called.
        student_interval: The student learns in every n-th step, the critic in all.
        critic_learning_rate: Learning rate of the critic; default: --learning_rate.
        backwards: 1: one backward of the sum of both losses; 2: one for each.
        hsdp_shard_dim: FastVideo's flag: processes that share one copy of the weights; more than 1 is FSDP.
        hsdp_replicate_dim: FastVideo's flag: copies of the weights; more than 1 with shards is hybrid_shard.
        enable_gradient_checkpointing_type: FastVideo's flag: full is --gradient_checkpointing true.
        per_device_train_batch_size: Clips in a micro-batch.
        eval_dataset: Refused; use --samples, --sample_steps and --sample_prompts.
        split_dataset_ratio: Refused; use --samples, --sample_steps and --sample_prompts.
        memory_efficient_init: Refused; each process loads the transformer whole before it is sharded.
        fp16: Refused; --bf16 true needs no loss scaling.
        output_dir: Folder for the run file, training.log, samples, checkpoints and the trained transformer.
    """

    unsupported: ClassVar[Mapping[str, str]] = fastvideo.UNSUPPORTED
    granted: ClassVar[Mapping[str, tuple[str, ...]]] = fastvideo.GRANTED
    aliases: ClassVar[Mapping[str, str]] = fastvideo.ALIASES
    page: ClassVar[str] = "docs/reference/video-flags.md"

    model: str = "builtin:tiny-wan"
    dataset: tuple[str, ...] = ("builtin:moving-shapes",)
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    frame_rate: float | None = None
    bucketing: bool = False
    text_length: int | None = None
    latents_dir: str | None = None
    preprocess_only: bool = False
    train_type: Literal["full", "lora"] = "full"
    caption_dropout: float = 0.0
    timestep_sampling: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    flow_shift: float | None = None
    embedded_guidance: float | None = None
    ema_decay: float | None = None
    samples: int = 2
    sample_steps: int | None = None
    sample_prompts: tuple[str, ...] | None = None
    sampler_steps: int = 20
    guidance_scale: float = 1.0
    distill: bool = False
    teacher: str | None = None
    critic: str | None = None
    student_timesteps: str = "1000,757,522"
    student_interval: int = 5
    critic_learning_rate: float | None = None
    backwards: int = 1
    hsdp_shard_dim: int | None = None
    hsdp_replicate_dim: int | None = None
    enable_gradient_checkpointing_type: Literal["full", "none"] | None = None
    output_dir: str = "runs/video"

    def __post_init__(self) -> None:
        if self.enable_gradient_checkpointing_type == "full":
            object.__setattr__(self, "gradient_checkpointing", True)
        _check_mesh(self)
        if (self.hsdp_shard_dim or 1) > 1 and self.fsdp_strategy == "none":
            hybrid = (self.hsdp_replicate_dim or 1) > 1
            object.__setattr__(self, "fsdp_strategy", "hybrid_shard" if hybrid else "full_shard")
        super().__post_init__()
        _check(self)

    @property
    def student_steps(self) -> tuple[int, ...]:
        """The student's timesteps as numbers."""
        return tuple(int(word) for word in self.student_timesteps.replace(",", " ").split())

    @property
    def shown_prompts(self) -> tuple[str, ...]:
        """The captions of ``sample_prompts`` that are sampled."""
        return (self.sample_prompts or ()) if self.samples else ()

    @property
    def clips_of_a_batch(self) -> int:
        """Clips that are drawn together, from one bucket."""
        return self.per_device_train_batch_size

    def without_effect(self) -> list[str]:
        """Return the given flags that have no effect in this mode."""
        idle: tuple[str, ...] = ()
        if not self.distill:
            idle += ("teacher", "critic", "student_timesteps", "student_interval", "critic_learning_rate", "backwards")
        if self.timestep_sampling != "logit_normal":
            idle += ("logit_mean", "logit_std")
        if self.timestep_sampling != "mode":
            idle += ("mode_scale",)
        if self.distill:  # samples are made in the student's own steps
            idle += ("sampler_steps", "guidance_scale")
        if not self.samples:
            idle += ("sample_steps", "sample_prompts", "sampler_steps", "guidance_scale")
        return [*super().without_effect(), *(name for name in idle if self.is_set(name))]


def _check_mesh(config: VideoConfig) -> None:
    """Reject FastVideo's numbers of shards and copies if another flag contradicts them."""
    if config.hsdp_shard_dim == 1 and config.fsdp_strategy != "none":
        raise ConfigError(
            f"hsdp_shard_dim is 1 with fsdp_strategy {config.fsdp_strategy}",
            expected="more than one shard, or no FSDP",
            hint="leave one of the two out",
        )
    # Without a strategy, copies alone are DDP.
    if (config.hsdp_replicate_dim or 1) > 1 and config.fsdp_strategy not in ("none", "hybrid_shard"):
        raise ConfigError(
            f"hsdp_replicate_dim is {config.hsdp_replicate_dim} with fsdp_strategy {config.fsdp_strategy}",
            expected="hybrid_shard, which has copies of shards",
            hint="leave --fsdp_strategy out",
        )


def _check(config: VideoConfig) -> None:
    for name, hint in _COUNTS.items():
        at_least(name, getattr(config, name), 1, hint)
    at_least("samples", config.samples, 0, "0 makes no samples")
    for name in _POSITIVE:
        within(name, getattr(config, name), "(0, inf)", "a number above zero", f"leave {name} out")
    within("caption_dropout", config.caption_dropout, "[0, 1]", "a share from 0 to 1", "0.1 is usual")
    expected = f"a number from -1 to {_LARGEST_MODE_SCALE:.2f}: others leave the noise levels 0 to 1"
    within("mode_scale", config.mode_scale, f"[-1, {_LARGEST_MODE_SCALE}]", expected, "1.29 is usual")
    within("ema_decay", config.ema_decay, "[0, 1)", "a share from 0 to below 1", "0.999 is usual")
    for name, hint in _FIXED.items():
        if getattr(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}", expected="a flag that this recipe supports", hint=hint
            )
    if config.ema_decay is not None and config.fsdp_strategy != "none" and config.fsdp_version == 1:
        raise ConfigError(
            "ema_decay is set with fsdp_version 1",
            expected="FSDP2",
            hint="leave --fsdp_version out",
        )
    _check_distillation(config)


def _check_distillation(config: VideoConfig) -> None:
    """Reject a student without timesteps, and flags that distillation cannot be combined with."""
    words = config.student_timesteps.replace(",", " ").split()
    steps = config.student_steps if all(map(str.isdecimal, words)) else ()
    if steps[:1] != (1000,) or steps[-1] < 1 or any(one <= other for one, other in itertools.pairwise(steps)):
        raise ConfigError(
            f"student_timesteps is {config.student_timesteps!r}",
            expected="numbers with commas between them: 1000, where there is only noise, then lower ones down to 1",
            hint="1000,757,522 are three steps of the student",
        )
    within("backwards", config.backwards, "[1, 2]", "1 or 2", "both give the same gradients")
    if not config.distill and (config.teacher is not None or config.critic is not None):
        raise ConfigError(
            "teacher or critic is set without distill",
            expected="--distill true with them",
            hint="leave them out to fine-tune",
        )
    if config.distill and config.train_type == "lora":
        raise ConfigError(
            "train_type is 'lora' with distill",
            expected="full: student and critic are complete transformers",
            hint="leave --train_type out",
        )
