"""Each family is called like in diffusers' own pipeline, and its latents have the shape of its ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from huggingface_hub import constants

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.wrap import find_blocks
from ebbtide_recipes.skeleton import hubs
from ebbtide_recipes.video import adapters, objective, recipe, samples
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.families import Condition, check_size, family_of, nearest_frames
from ebbtide_recipes.video.opening import is_local, open_source
from ebbtide_recipes.video.source import Source
from tests.helpers import video_pipelines
from tests.unit.recipes.video.parts import CPU, quiet, text_of

SAMPLED = [name for name in video_pipelines.FAMILIES if name != "cosmos"]  # its pipeline needs a guard for prompts
EULER = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
UNIPC = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


@pytest.fixture(params=video_pipelines.FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return Source(video_pipelines.write(tmp_path, request.param))


def module_of(source: Source) -> objective.FineTuning:
    part = source.transformer(torch.float32)
    condition = Condition(ratios=source.ratios)
    return objective.FineTuning(part, source.family, condition, objective.Draws(), source.scheduler())


def latents_of(source: Source, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(1, source.channels, 3, 32 // source.ratios[1], 32 // source.ratios[1])


def test_latents_have_the_shape_of_the_ratios_and_decode_to_the_clip(source: Source) -> None:
    pixels = torch.rand(1, 3, 9, 32, 32) * 2 - 1
    vae = source.vae(torch.float32)
    with torch.no_grad():
        latents = source.family.encode(vae, pixels)
        decoded = source.family.decode(vae, latents)
    assert latents.shape == latents_of(source).shape
    assert decoded.shape == pixels.shape
    mean = vae.encode(pixels, return_dict=False)[0].mode()
    assert not torch.equal(latents, mean)  # the families' VAEs here all have a mean, a deviation or a factor


def test_a_cached_pipeline_is_opened_without_requests_where_there_is_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, offline = video_pipelines.write(tmp_path, "wan"), list[bool]()

    def download(name: str) -> Path:
        offline.append(constants.HF_HUB_OFFLINE)
        return folder

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hubs, "_is_known", lambda host: False)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", download)
    assert open_source("owner/name", seed=0).folder == folder
    assert offline == [True] and not constants.HF_HUB_OFFLINE


def test_the_loss_reaches_every_weight_and_repeats_with_its_seed(source: Source) -> None:
    module, latents, text = module_of(source), latents_of(source), text_of(source)
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(module(latents, text)["loss"])
    assert torch.equal(losses[0], losses[1])
    losses[0].backward()
    without = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert without == []


def test_adapters_and_shards_are_those_of_the_blocks(source: Source) -> None:
    module = module_of(source)
    names = {name for name, part in module.named_modules() if type(part).__name__ in module._no_split_modules}
    blocks = [block for block, _ in find_blocks(module.transformer)]
    assert {id(module.get_submodule(name)) for name in names} >= set(map(id, blocks))
    adapters.put_on(module.transformer, VideoConfig(train_type="lora", lora_rank=2))
    within = {id(part) for name in names for part in module.get_submodule(name).modules()}
    layers = [part for name, part in module.named_modules() if name.endswith(".lora_A.default")]
    assert layers and {id(layer) for layer in layers} <= within
    assert all(any(id(layer) in set(map(id, block.modules())) for layer in layers) for block in blocks)


@pytest.mark.parametrize(("version", "trained"), [(2, torch.float32), (1, torch.bfloat16)])
def test_adapters_stay_in_float32_where_shards_may_have_two_types(
    version: int, trained: torch.dtype, tmp_path: Path
) -> None:
    config = VideoConfig(train_type="lora", lora_rank=2, fsdp_strategy="full_shard", fsdp_version=version)
    module = module_of(Source(video_pipelines.write(tmp_path, "wan")))
    adapters.put_on(module.transformer, config)
    recipe._uniform(module, config, torch.bfloat16)
    types = {(parameter.requires_grad, parameter.dtype) for parameter in module.parameters()}
    assert types == {(False, torch.bfloat16), (True, trained)}


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [*((name, None) for name in SAMPLED), ("wan", EULER), ("ltx", UNIPC)],
    ids=[*SAMPLED, "wan, euler", "ltx, unipc"],
)
def test_samples_are_those_of_the_pipeline(name: str, scheduler: Any, tmp_path: Path) -> None:
    source = Source(video_pipelines.write(tmp_path, name))
    if scheduler is not None:
        scheduler.save_pretrained(tmp_path / "scheduler")
        index = json.loads((tmp_path / "model_index.json").read_text())
        index["scheduler"] = ["diffusers", type(scheduler).__name__]
        (tmp_path / "model_index.json").write_text(json.dumps(index))
    module, text = module_of(source), text_of(source)
    shape = tuple(latents_of(source).shape[1:])
    one = {key: value[0] for key, value in text.items()}

    def predict(latents: torch.Tensor, timestep: torch.Tensor, text: Any) -> torch.Tensor:
        with torch.no_grad():
            return module(latents, text, timestep=timestep.tolist())["prediction"]

    prompt = samples.Prompt(caption="", text=one, shape=shape)
    sampling = samples.Sampling(source=source, prompts=[prompt], steps=3)
    ours = samples.sample(predict, source.scheduler(), one, prompt, sampling, CPU)
    assert torch.equal(ours, _theirs(source, tmp_path, text, shape))


def test_one_step_makes_a_sample(source: Source) -> None:
    prompt = samples.Prompt(caption="", text={}, shape=tuple(latents_of(source).shape[1:]))
    sampling = samples.Sampling(source=source, prompts=[prompt], steps=1)
    made = samples.sample(lambda latents, *_: latents, source.scheduler(), {}, prompt, sampling, CPU)
    assert bool(made.isfinite().all())


def _theirs(source: Source, folder: Path, text: Any, shape: Any) -> torch.Tensor:
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(42))
    kind = getattr(diffusers, source.family.pipeline)
    arguments = {"guidance_scale": 1.0}
    if source.family.name == "hunyuan_video":
        arguments = {"guidance_scale": 6.0}
    elif source.family.name == "ltx":
        noise, arguments = kind._pack_latents(noise), {"guidance_scale": 1.0, "frame_rate": 16}
    elif source.family.name == "cogvideox":
        noise = noise.transpose(1, 2)
    with quiet():
        pipeline = kind.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 3}
        made = pipeline(latents=noise, output_type="latent", **size, **arguments, **text).frames
    if source.family.name == "ltx":
        return kind._unpack_latents(made, *shape[1:])
    return made.transpose(1, 2) if source.family.name == "cogvideox" else made


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("size", [(4, 16, 16), (16, 16, 16), (21, 16, 22)])
def test_ltx_is_trained_at_the_shift_of_its_sampler(kind: str, size: tuple[int, int, int], tmp_path: Path) -> None:
    """It grows with the latents of a clip."""
    from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

    scheduler = Source(video_pipelines.write(tmp_path, "ltx")).scheduler()
    scheduler.register_to_config(time_shift_type=kind)
    clips = torch.empty(64, 1, *size)

    def drawn(shift: float | None) -> torch.Tensor:
        torch.manual_seed(4)
        return objective.Draws(shift=shift).sigmas(clips, scheduler)

    mu = calculate_shift(clips[0].numel(), 256, 4096, 0.95, 2.05)  # as the pipeline calls it
    assert torch.allclose(drawn(None), scheduler.time_shift(mu, 1.0, drawn(1.0)))
    assert not torch.allclose(drawn(None), drawn(3.0))  # a shift that is set is used


def test_captions_are_embedded_by_the_pipelines_own_encoders(source: Source) -> None:
    with quiet():
        first, second = source.encode(["a red cat", "a blue dog"], length=24, device=CPU, dtype=torch.float32)
    assert tuple(first) == source.family.text
    assert {name: value.shape for name, value in first.items()} == {n: v[0].shape for n, v in text_of(source).items()}
    same = torch.equal(first["prompt_embeds"], second["prompt_embeds"])
    assert not same or source.family.name == "hunyuan_video"


@pytest.mark.parametrize(
    ("frames", "height", "width", "near"),
    [
        (9, 30, 32, "--height 32"),
        (9, 32, 57, "--width 64"),
        (10, 32, 32, "--num_frames 9"),
        (2, 32, 32, "--num_frames 1"),
    ],
)
def test_a_size_that_makes_no_whole_tokens_is_refused_with_the_nearest(
    frames: int, height: int, width: int, near: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_size(frames, height, width, ratios=(4, 8), patch=(1, 2))
    assert f"{near} is the nearest" in str(caught.value)


def test_a_familys_default_frames_make_whole_tokens(tmp_path: Path) -> None:
    folder = video_pipelines.write(tmp_path, "cogvideox")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "patch_size_t": 2}))  # like CogVideoX 1.5's
    source = Source(folder)
    check_size(*source.default_size, ratios=source.ratios, patch=source.patch)


@pytest.mark.parametrize("frames", range(1, 40))
@pytest.mark.parametrize("patch", [1, 2])
def test_the_nearest_frames_make_whole_tokens(frames: int, patch: int) -> None:
    check_size(nearest_frames(frames, ratios=(4, 8), patch=(patch, 1)), 8, 8, ratios=(4, 8), patch=(patch, 1))


def test_other_transformers_and_pipelines_are_refused_by_name() -> None:
    for other in ("FluxTransformer2DModel", "LTX2VideoTransformer3DModel"):  # a name like a family's is no typing error
        with pytest.raises(DataError, match=f"{other}.*\nhint: train other transformers with a script") as caught:
            family_of(other, None)
        assert "did you mean" not in str(caught.value)
    with pytest.raises(DataError, match="WanImageToVideoPipeline"):
        family_of("WanTransformer3DModel", "WanImageToVideoPipeline")
    with pytest.raises(DataError, match="CosmosTextToWorldPipeline"):
        family_of("CosmosTransformer3DModel", "CosmosTextToWorldPipeline")


def test_a_file_of_weights_is_no_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/wan2.1.safetensors").touch()
    for name in ("models/wan2.1.safetensors", str(tmp_path / "models/wan2.1.safetensors")):  # the first is like a hub's
        assert is_local(name)
        with pytest.raises(DataError, match="is a file; expected a pipeline folder.*\nhint: .*from_single_file"):
            open_source(name, seed=0)


def test_a_hub_name_that_is_like_a_folder_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> str:
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusers.DiffusionPipeline.download", unreachable)
    Path("models/wan-small").mkdir(parents=True)
    with pytest.raises(DataError, match="could not be fetched .*\nhint: did you mean 'wan-small'"):
        open_source("models/wan-smal", seed=0)
    with pytest.raises(DataError, match="could not be fetched .*\nhint: without a network"):
        open_source("other/wan-smal", seed=0)
