"""Flags of ``ebbtide video``. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ebbtide_recipes.skeleton.config import RecipeConfig
from ebbtide_recipes.video import fastvideo, rules


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
        logit_mean: Mean of the density logit_normal.
        logit_std: Standard deviation of the density logit_normal.
        mode_scale: Scale of the density mode.
        flow_shift: Shift of the noise levels; default: the pipeline scheduler's.
        embedded_guidance: Guidance scale given to transformers that embed it (HunyuanVideo).
        ema_decay: Decay of a moving average of the trained weights, such as 0.999.
        samples: Clips to sample before training, every --sample_steps and at the end; 0: none.
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
        output_dir: Folder for the run file, training.log, samples, checkpoints and the trained transformer.
    """

    unsupported: ClassVar[Mapping[str, str]] = fastvideo.UNSUPPORTED
    granted: ClassVar[Mapping[str, tuple[str, ...]]] = fastvideo.GRANTED
    aliases: ClassVar[Mapping[str, str]] = fastvideo.ALIASES

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
    embedded_guidance: float = 6.0
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
        rules.check_mesh(self)
        if (self.hsdp_shard_dim or 1) > 1 and self.fsdp_strategy == "none":
            hybrid = (self.hsdp_replicate_dim or 1) > 1
            object.__setattr__(self, "fsdp_strategy", "hybrid_shard" if hybrid else "full_shard")
        super().__post_init__()
        rules.check(self)

    @property
    def student_steps(self) -> tuple[int, ...]:
        """The student's timesteps as numbers."""
        return tuple(int(word) for word in self.student_timesteps.replace(",", " ").split())

    def without_effect(self) -> list[str]:
        """Return the given flags that have no effect in this mode."""
        idle: tuple[str, ...] = ()
        if not self.distill:
            idle += ("teacher", "critic", "student_timesteps", "student_interval", "critic_learning_rate", "backwards")
        if self.timestep_sampling != "logit_normal":
            idle += ("logit_mean", "logit_std")
        if self.timestep_sampling != "mode":
            idle += ("mode_scale",)
        if not self.samples:
            idle += ("sample_steps", "sample_prompts", "sampler_steps", "guidance_scale")
        return [*super().without_effect(), *(name for name in idle if self.is_set(name))]
