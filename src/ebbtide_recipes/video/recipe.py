"""The recipe ``video``: latents, transformers and trainer from a config."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.errors import ConfigError, DataError, counted
from ebbtide.base.runs import only_writer
from ebbtide.base.units import format_size
from ebbtide_recipes.skeleton import launch, outputs
from ebbtide_recipes.skeleton.recipe import Recipe
from ebbtide_recipes.video.config import VideoConfig

if TYPE_CHECKING:
    import torch

    from ebbtide_recipes.video.data import Clip
    from ebbtide_recipes.video.latents import Latents, Making
    from ebbtide_recipes.video.objective import Denoiser
    from ebbtide_recipes.video.samples import Sampling
    from ebbtide_recipes.video.source import Source
    from ebbtide_recipes.video.trainer import VideoTrainer

_DENSITIES = ("logit_mean", "logit_std", "mode_scale")
LOGGER = logging.getLogger("ebbtide.video")


class Video(Recipe[VideoConfig]):
    """Fine-tuning and distillation of video transformers."""

    name = "video"
    packages = ("torch", "transformers", "diffusers", "peft", "accelerate", "av", "PIL", "rich", "psutil")
    extra = "video"

    def check_data(self, config: VideoConfig) -> None:
        """Reject data sets that do not exist, and listings whose first rows name no clip or no caption.

        Raises:
            EbbtideError: A data set is unusable.
        """
        from ebbtide_recipes.video import listings

        if not _has_latents(config):
            listings.check(config.dataset)

    def check(self, config: VideoConfig) -> None:
        """Reject unusable pipelines, sizes and latents.

        Raises:
            EbbtideError: One of them is unusable.
        """
        from ebbtide_recipes.video.opening import is_local, open_source

        if is_local(config.model):
            source = open_source(config.model, seed=config.seed, use_hf=config.use_hf)
            _check_flags(config, source)
            if all(is_local(name) for name in (config.teacher, config.critic) if name is not None):
                _others(config, source)
            existing = _existing(config)
            if existing is not None and _has_latents(config):
                existing.check(source)
            else:
                _making(config, source, existing).check_size()
        if config.backwards == 2 and launch.total(config) > 1:
            raise ConfigError(
                "backwards is 2 with several processes",
                expected="one backward: their gradients are averaged in it",
                hint="leave --backwards out",
            )

    def prepare(self, config: VideoConfig) -> VideoTrainer | None:
        """Make latents if there are none; then load the transformers and make the trainer.

        Returns:
            The trainer; ``None`` if nothing is trained.

        Raises:
            EbbtideError: The pipeline, the data or the latents cannot be used.
        """
        from accelerate import PartialState

        from ebbtide_recipes.video import adapters, trainer
        from ebbtide_recipes.video.opening import open_source
        from ebbtide_recipes.video.source import quiet_bars

        options = trainer.arguments(config)  # also joins the other ranks
        quiet_bars()
        with PartialState().main_process_first():  # fetch once
            source = open_source(config.model, seed=config.seed, use_hf=config.use_hf)
        _check_flags(config, source)
        with PartialState().main_process_first():
            others = _others(config, source)
        if config.trains_adapters and not config.preprocess_only:  # before the hours that latents may take
            adapters.targets_of(source.outline(_dtype(config)), config.target_modules)
        dataset = _latents(config, source, options.device)
        if config.preprocess_only:
            return None
        module = _module(config, source, others, dataset)
        return trainer.build(config, module, dataset, _sampling(config, source, dataset), options)

    def finish(self, config: VideoConfig, trainer: Any, folder: Path) -> None:
        """Sample the trained transformer."""
        trainer.show()


RECIPE = Video()


def _check_flags(config: VideoConfig, source: Source) -> None:
    """Refuse flags that the pipeline's family has no use for."""
    family, unused = source.family, []
    if not family.velocity:
        unused += [(name, "flow matching") for name in ("distill", "timestep_sampling", "flow_shift", *_DENSITIES)]
    if not family.embeds_guidance(source.transformer_config):
        unused.append(("embedded_guidance", "a transformer that embeds the guidance scale, as HunyuanVideo's"))
    for name, expected in unused:
        if config.is_set(name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, and {source.name} ({family.name}) does not use it",
                expected=expected,
                hint=f"leave --{name} out",
            )


def _dtype(config: VideoConfig, *, frozen: bool | None = None) -> torch.dtype:
    """Return the type of the trained transformer's weights, or of frozen ones: of VAE, text encoders and a teacher."""
    import torch

    from ebbtide_recipes.skeleton.precision import dtype_name

    return getattr(torch, dtype_name(config, frozen=frozen))


def _rate(config: VideoConfig, source: Source, dataset: Latents) -> float:
    """Return the frames per second of the clips: what their latents were made with says it best."""
    return dataset.rate or config.frame_rate or source.family.frame_rate


def _has_latents(config: VideoConfig) -> bool:
    """Whether ``--latents_dir`` holds complete latents that are used as they are, so that no data set is needed."""
    if config.latents_dir is None or (config.preprocess_only and config.is_set("dataset")):
        return False
    from ebbtide_recipes.video import latents

    return latents.is_made(_latents_folder(config))


def _latents_folder(config: VideoConfig) -> Path:
    folder = config.latents_dir
    return Path(folder).expanduser() if folder is not None else Path(config.output_dir).expanduser() / "latents"


def _existing(config: VideoConfig) -> Latents | None:
    """Return the latents in ``--latents_dir``; ``None``: there are none."""
    from ebbtide_recipes.video import latents

    folder = _latents_folder(config)
    return latents.Latents(folder) if config.latents_dir and latents.is_made(folder) else None


def _making(config: VideoConfig, source: Source, existing: Latents | None) -> Making:
    """Return how latents are made, or existing ones would be: a flag that is not set is theirs."""
    from ebbtide_recipes.video.clips import Size
    from ebbtide_recipes.video.latents import Making

    made = {} if existing is None else existing.request
    frames, height, width = made.get("size", source.default_size)

    def value(flag: str, name: str) -> Any:
        return getattr(config, flag) if config.is_set(flag) or name not in made else made[name]

    return Making(
        folder=_latents_folder(config),
        source=source,
        data=tuple(value("dataset", "data")),
        size=Size(config.num_frames or frames, config.height or height, config.width or width),
        rate=value("frame_rate", "rate"),
        bucketing=value("bucketing", "bucketing"),
        text_length=value("text_length", "text_length"),
        seed=value("seed", "seed"),
        dtype=_dtype(config, frozen=True),
    )


def _latents(config: VideoConfig, source: Source, device: torch.device) -> Latents:
    """Return the latents to train on; if there are none, every process makes a share of them."""
    from accelerate import PartialState

    from ebbtide_recipes.video import data, latents

    state, folder, existing = PartialState(), _latents_folder(config), _existing(config)
    used = _has_latents(config)
    if existing is not None:
        existing.check(source)
    making = _making(config, source, existing)
    if existing is not None and not used and not making.matches():
        raise ConfigError(
            f"{folder} holds latents that were made with other flags: all of them would be replaced",
            expected=f"the flags that {latents.MANIFEST} names",
            hint=f"name another --latents_dir, or remove {latents.MANIFEST} to make all of them again",
        )
    clips: list[Clip] = []
    if not used:
        clips = data.load(config.dataset, seed=config.seed)
    elif config.is_set("dataset") and state.is_main_process:  # for a warning; the clips may be on another machine
        with contextlib.suppress(DataError, OSError):
            clips = data.load(config.dataset, seed=config.seed)
    same = making.matches(clips)
    if used and not same:
        LOGGER.warning(
            "%s was made with other flags or of other clips and captions: those are used; "
            "hint: --preprocess_only true with this --dataset makes what has changed",
            folder,
        )
        same = True
    same = _everywhere(config, folder, same)
    if not same and not (source.vae_identity() and source.text_identity()):
        raise DataError(
            f"{source.name} has no VAE or no text encoder, and {folder} does not hold the latents of these clips",
            expected="both, to make them",
            hint="fetch the complete pipeline, or name existing latents: --latents_dir",
        )
    if not same:
        _make(config, making, clips, device)
    for embeds in (state.is_main_process, state.is_local_main_process):  # another node may have a copy of the folder
        if embeds:
            making.add_captions(config.shown_prompts, device)
        state.wait_for_everyone()
    return latents.Latents(folder)


def _make(config: VideoConfig, making: Making, clips: Sequence[Clip], device: torch.device) -> None:
    """Make the latents of clips, every process a share of them; one run at a time does so in a folder."""
    from accelerate import PartialState

    from ebbtide_recipes.video.latents import MANIFEST

    state, folder = PartialState(), making.folder
    _check_others(config, folder, making.others(making.names_of(clips)), logs=state.is_main_process)
    with contextlib.ExitStack() as claimed:
        # A second lock of one process on the same folder would release both.
        if state.is_main_process and folder.resolve() != outputs.place(config).resolve():
            folder.mkdir(parents=True, exist_ok=True)
            claimed.enter_context(only_writer(folder))
        state.wait_for_everyone()  # before one of them begins to write
        if state.is_main_process and not making.matches():
            (folder / MANIFEST).unlink(missing_ok=True)  # captions are embedded under the same names
        state.wait_for_everyone()
        share = (state.process_index, state.num_processes)
        making.make(clips, captions=config.shown_prompts, device=device, share=share)
        state.wait_for_everyone()
        if state.is_main_process:
            making.finish(clips)
            LOGGER.info("latents of %d clips are in %s", len(clips), folder)


def _everywhere(config: VideoConfig, folder: Path, same: bool) -> bool:
    """Return whether all processes see the latents; else each makes a share, in a folder that all see.

    Raises:
        DataError: The folder is not the same on all nodes.
    """
    from accelerate.utils import gather_object

    if all(gather_object([same])):
        return True
    flag = "output_dir" if config.latents_dir is None else "latents_dir"
    outputs.check_shared(folder, flag, "share of the latents", "a copy of made latents on each: --latents_dir")
    return False


def _check_others(config: VideoConfig, folder: Path, others: Sequence[Path], *, logs: bool) -> None:
    """Refuse to replace latents by those of a data set that is not set; log their space."""
    if not others:
        return
    found = f"{counted(len(others), 'latent file')} of other clips or flags"
    if config.latents_dir is not None and not config.is_set("dataset"):
        raise ConfigError(
            f"{folder} holds {found}, and no --dataset is set",
            expected=f"a data set that is set: the clips of {config.dataset[0]} would replace them",
            hint="set --dataset to replace them, or name another --latents_dir",
        )
    if logs:
        LOGGER.info(
            "%s keeps %s (%s) until the new ones are made",
            *(folder, found),
            format_size(sum(path.stat().st_size for path in others)),
        )


def _others(config: VideoConfig, source: Source) -> list[Source]:
    """Open the pipelines of teacher and critic, if there are any; nothing is loaded.

    Raises:
        DataError: One cannot be opened, or does not fit the student.
    """
    from ebbtide_recipes.video.opening import open_source

    if not config.distill or config.preprocess_only:
        return []
    opened, teacher = {config.model: source}, config.teacher or config.model
    others = {"teacher": teacher, "critic": config.critic or teacher}
    for what, name in others.items():
        if name not in opened:
            opened[name] = open_source(name, seed=config.seed, use_hf=config.use_hf)
        other = opened[name]
        if other.family.name != source.family.name or other.channels != source.channels:
            raise DataError(
                f"the {what} is {other.name}: {other.family.name} with {other.channels} channels",
                expected=f"{source.family.name} with {source.channels} channels, as the student",
                hint=f"--{what} with another pipeline of the student's family",
            )
    return [opened[name] for name in others.values()]


def _module(config: VideoConfig, source: Source, others: Sequence[Source], dataset: Latents) -> Denoiser:
    """Load the transformers and wrap them in their loss."""
    from ebbtide_recipes.video.distill import Distillation
    from ebbtide_recipes.video.families import GUIDANCE, Condition
    from ebbtide_recipes.video.objective import Draws, FineTuning

    dtype = _dtype(config)
    shared: dict[str, Any] = {
        "family": source.family,
        "condition": Condition(
            frame_rate=_rate(config, source, dataset),
            guidance=config.embedded_guidance or GUIDANCE,
            ratios=source.ratios,
        ),
        "draws": Draws(
            scheme=config.timestep_sampling,
            logit_mean=config.logit_mean,
            logit_std=config.logit_std,
            mode_scale=config.mode_scale,
            shift=config.flow_shift,
            caption_dropout=config.caption_dropout,
        ),
        "scheduler": source.scheduler(),
        "empty": dataset.text(""),
    }
    transformer = source.transformer(dtype).train()
    if not config.distill:
        if config.trains_adapters:
            from ebbtide_recipes.video import adapters

            adapters.put_on(transformer, config)
        return _uniform(FineTuning(transformer, **shared), config, dtype)
    # FSDP gathers a block's parameters in one piece, of one type.
    teacher = others[0].transformer(_dtype(config, frozen=True) if config.fsdp_strategy == "none" else dtype)
    critic = others[1].transformer(dtype).train()
    module = Distillation(transformer, teacher, critic, student_steps=config.student_steps, **shared)
    return _uniform(module, config, dtype)


def _uniform(module: Denoiser, config: VideoConfig, dtype: torch.dtype) -> Denoiser:
    """Convert all weights to one type if FSDP gathers a block's parameters in one piece."""
    # FSDP2 needs one type of the trained ones alone, so adapters stay in float32, where small steps are not lost.
    if config.fsdp_strategy != "none":
        apart = config.trains_adapters and config.fsdp_version == 2
        for parameter in module.parameters():
            if not (apart and parameter.requires_grad):
                parameter.data = parameter.data.to(dtype)
    return module


def _sampling(config: VideoConfig, source: Source, dataset: Latents) -> Sampling:
    from ebbtide_recipes.video.samples import Prompt, Sampling

    shape = tuple(dataset[0]["latents"].shape)
    prompts = [Prompt(caption=caption, text=dataset.text(caption), shape=shape) for caption in config.shown_prompts]
    for number in range(min(config.samples, len(dataset)) if config.sample_prompts is None else 0):
        clip = dataset[number]
        latents, caption = clip["latents"], dataset.items[number]["caption"]
        prompts.append(Prompt(caption=caption, text=clip["text"], shape=tuple(latents.shape), reference=latents))
    return Sampling(
        source=source,
        prompts=prompts,
        every=config.sample_steps,
        steps=config.sampler_steps,
        guidance=config.guidance_scale,
        rate=_rate(config, source, dataset),
        seed=config.seed,
        dtype=_dtype(config, frozen=True),
    )
