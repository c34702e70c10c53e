"""``video`` on tiny pipelines: losses of ordinary training, resume, latents, samples, adapters, averages, refusals."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.base.errors import ConfigError, DataError, EbbtideError
from ebbtide_recipes.skeleton import run
from ebbtide_recipes.video import clips, latents, shapes
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.recipe import RECIPE
from tests.helpers import video_pipelines

OURS = {"activation_cpu_offload": True}
MODES: dict[str, dict[str, Any]] = {
    "auto": OURS,
    "minimal": {**OURS, "gradient_checkpointing": True},
    "offload to disk": {**OURS, "policy": "offload", "offload_target": "disk", "verify": True},
    "checkpointing": {"gradient_checkpointing": True},
}


def train(folder: Path, /, **changes: Any) -> list[float]:
    """Train a few steps; return the losses."""
    values: dict[str, Any] = {
        "dataset": ("builtin:moving-shapes#3",),
        "max_steps": 5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "samples": 0,
        "save": False,
        "output_dir": str(folder),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of diffusers and transformers while they load pipelines
        run.main(RECIPE, VideoConfig(**{**values, **changes}))
    return [event["loss"] for event in events(folder) if event["event"] == "step"]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def saved(folder: Path) -> int:
    return [event["memory_saved_bytes"] for event in events(folder) if event["event"] == "stats"][-1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("plain"))


slow = pytest.mark.slow


@pytest.mark.parametrize("mode", ["auto", "minimal", "offload to disk", pytest.param("checkpointing", marks=slow)])
def test_losses_are_those_of_plain_training(plain: list[float], tmp_path: Path, mode: str) -> None:
    assert train(tmp_path, **MODES[mode]) == plain
    assert len(set(plain)) == 5
    if mode in ("minimal", "offload to disk"):
        assert saved(tmp_path) > 0


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "minimal"),
        ({"backwards": 2}, "plain"),
        pytest.param({}, "auto", marks=slow),
        pytest.param({}, "offload to disk", marks=slow),
        pytest.param({"backwards": 2}, "auto", marks=slow),
    ],
)
def test_three_models_lose_what_they_lose_without_offloading(
    three_models: list[float], tmp_path: Path, changes: dict[str, Any], mode: str
) -> None:
    told = train(tmp_path, distill=True, student_interval=2, **changes, **MODES.get(mode, {}))
    assert told == three_models


@pytest.fixture(scope="module")
def three_models(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("three"), distill=True, student_interval=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"ema_decay": 0.9},
        pytest.param(
            {"train_type": "lora", "lora_rank": 2, "lora_dropout": 0.1, "gradient_accumulation_steps": 2}, marks=slow
        ),
        pytest.param({"distill": True, "student_interval": 2}, marks=slow),
    ],
    ids=["full, average", "lora", "distillation"],
)
def test_a_run_that_goes_on_repeats_the_run_that_did_not_stop(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {**changes, **OURS, "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
    whole = train(tmp_path / "whole", **changes)
    half = tmp_path / "half"
    train(half, **{**changes, "max_steps": 2})
    assert train(half, **changes, resume_from_checkpoint="latest") == whole[2:]
    for path in (tmp_path / "whole" / "checkpoint-4").glob("*.safetensors"):
        assert path.read_bytes() == (half / "checkpoint-4" / path.name).read_bytes(), path.name


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_pipelines.write(tmp_path_factory.mktemp("wan"), "wan")


SMALL = {"num_frames": 5, "height": 16, "width": 32, "text_length": 32}


def test_a_pipeline_is_trained_sampled_and_saved_as_diffusers_loads_it(pipeline: Path, tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    losses = train(
        tmp_path, model=str(pipeline), **SMALL, samples=2, sample_steps=2, sampler_steps=2, save=True, ema_decay=0.5,
        guidance_scale=2.0, caption_dropout=0.5, max_steps=3, per_device_train_batch_size=2,
    )  # fmt: skip
    assert len(losses) == 3
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    sheets = [f"step-{step:06d}.png" for step in (0, 2, 3)]
    assert [name for name in names if name.endswith(".png")] == sheets
    assert len([name for name in names if name.endswith(".mp4")]) == 6
    before = WanTransformer3DModel.from_pretrained(pipeline / "transformer").state_dict()
    after = WanTransformer3DModel.from_pretrained(tmp_path / "transformer").state_dict()
    average = WanTransformer3DModel.from_pretrained(tmp_path / "transformer_ema").state_dict()
    assert before.keys() == after.keys() == average.keys()
    name = "blocks.0.attn1.to_q.weight"
    assert not torch.equal(before[name], after[name]) and not torch.equal(average[name], after[name])
    phases = [event["name"] for event in events(tmp_path) if event["event"] == "phase" and event["edge"] == "begin"]
    assert phases[:4] == ["load", "text_encoder", "vae", "sample"]  # each part is loaded only for its phase
    parts = next(event for event in events(tmp_path) if event["event"] == "parts")
    assert parts["optimizer_bytes"] > parts["weights"]["transformer"] == parts["gradient_bytes"] > 0
    assert [event["step"] for event in events(tmp_path) if event["event"] == "sample"] == [0, 2, 3]


@slow
@pytest.mark.parametrize("kind", ["drawn", "file"])
def test_a_few_clips_are_learned_by_heart(kind: str, tmp_path: Path) -> None:
    dataset = "builtin:moving-shapes#2"
    if kind == "file":
        (tmp_path / "clips").mkdir()
        drawn = shapes.draw(shapes.clips(3, 1)[0], 12, 48, 64)
        clips.write(tmp_path / "clips" / "one.mp4", drawn, rate=12)
        (tmp_path / "clips" / "one.txt").write_text("a shape that moves")
        dataset = str(tmp_path / "clips")
    options = {"dataset": (dataset,), "max_steps": 150, "learning_rate": 3e-3, "warmup_ratio": 0.1, **OURS}
    losses = train(tmp_path / "run", **options, height=16, width=16, samples=1, sampler_steps=4)
    print(sum(losses[:10]) / 10, sum(losses[-10:]) / 10)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    sheets = [(tmp_path / "run" / "samples" / f"step-{step:06d}.png").read_bytes() for step in (0, 150)]
    assert sheets[0] != sheets[1]


@slow
@pytest.mark.parametrize("family", ["hunyuan_video", "ltx", "cogvideox", "cosmos"])
def test_other_families_lose_what_they_lose_without_offloading(family: str, tmp_path: Path) -> None:
    folder = video_pipelines.write(tmp_path / "pipeline", family)
    size = {"num_frames": 9, "height": 32, "width": 32, "text_length": 24, "max_steps": 3}
    options = {"model": str(folder), **size, "latents_dir": str(tmp_path / "latents")}
    whole = train(tmp_path / "plain", **options, samples=1, sampler_steps=2)
    assert len(set(whole)) == 3
    assert train(tmp_path / "auto", **options, **OURS) == whole
    assert train(tmp_path / "minimal", **options, **MODES["minimal"], samples=0) == whole
    assert (tmp_path / "plain" / "samples" / "step-000003.png").is_file()


def test_samples_do_not_change_what_is_trained(plain: list[float], tmp_path: Path) -> None:
    assert train(tmp_path, samples=1, sample_steps=1, sampler_steps=2) == plain


def test_ltx_is_trained_at_the_shift_of_its_scheduler(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": str(video_pipelines.write(tmp_path / "pipeline", "ltx")), "max_steps": 1}
    options |= {**SMALL, "latents_dir": str(tmp_path / "latents")}
    tokens = 2 * 4 * 8
    shift = math.exp(0.95 + (tokens - 256) * (2.05 - 0.95) / (4096 - 256))
    plain = train(tmp_path / "plain", **options)
    assert train(tmp_path / "same", **options, flow_shift=shift) == pytest.approx(plain, rel=1e-6)
    assert train(tmp_path / "other", **options, flow_shift=3.0) != pytest.approx(plain, rel=1e-3)


def test_a_vae_that_draws_does_not_change_what_is_trained(tmp_path: Path) -> None:
    """As LTX 0.9.1's does; a checkpoint at a step that is sampled resumes exactly, too."""
    from diffusers import AutoencoderKLLTXVideo as Vae

    folder = video_pipelines.write(tmp_path / "pipeline", "ltx")
    drawing = {"timestep_conditioning": True, "decoder_inject_noise": [True] * 5}
    Vae.from_config({**Vae.load_config(folder / "vae"), **drawing}).save_pretrained(folder / "vae")
    options: dict[str, Any] = {"model": str(folder), **SMALL, "num_frames": 9, "height": 32, "max_steps": 4}
    options |= {"latents_dir": str(tmp_path / "latents"), "lr_scheduler_type": "constant"}
    plain = train(tmp_path / "plain", **options)
    shown = {"samples": 1, "sample_steps": 1, "sampler_steps": 2, "save_steps": 2}
    assert train(tmp_path / "shown", **options, **shown) == plain
    assert train(tmp_path / "half", **{**options, "max_steps": 2}, **shown) == plain[:2]
    assert train(tmp_path / "half", **options, **shown, resume_from_checkpoint="latest") == plain[2:]


def test_adapters_are_saved_as_the_pipeline_loads_them(pipeline: Path, tmp_path: Path) -> None:
    import diffusers

    train(
        tmp_path, model=str(pipeline), **SMALL, train_type="lora", lora_rank=2, target_modules=("to_q", "to_v"),
        save=True, max_steps=2, bf16=True, torch_dtype="bfloat16", lora_alpha=12,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = diffusers.WanPipeline.from_pretrained(pipeline)
        loaded.load_lora_weights(tmp_path)
    weights = {name: p for name, p in loaded.transformer.named_parameters() if "lora_B" in name}
    assert len(weights) == 8 and all(p.abs().sum() > 0 for p in weights.values())  # 2 blocks, 2 attentions, 2 modules
    scales = [m.scaling for m in loaded.transformer.modules() if hasattr(m, "scaling") and hasattr(m, "lora_B")]
    assert scales == [{"default_0": 6.0}] * 8  # lora_alpha over lora_rank, as it was trained


def test_the_parts_of_an_overwritten_run_are_removed_when_the_new_ones_are_saved(tmp_path: Path) -> None:
    def models() -> set[str]:
        found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors")}
        return {str(path) for path in found if path.parts[0] != "latents"}

    once: dict[str, Any] = {**SMALL, "max_steps": 1, "save": True}
    train(tmp_path, **once, distill=True, ema_decay=0.5)
    whole = {f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "transformer_ema", "critic")}
    assert models() == whole
    train(tmp_path, **once, train_type="lora", lora_rank=2, ema_decay=0.5, overwrite_output_dir=True)
    adapters = "pytorch_lora_weights.safetensors"
    assert models() == {adapters, f"lora_ema/{adapters}"}
    assert not any((tmp_path / part).exists() for part in ("transformer", "transformer_ema", "critic"))
    train(tmp_path, **once, overwrite_output_dir=True)
    assert models() == {"transformer/diffusion_pytorch_model.safetensors"}
    assert (tmp_path / "transformer" / "config.json").is_file()


def test_latents_are_made_once_and_refused_by_another_vae(pipeline: Path, tmp_path: Path) -> None:
    made = tmp_path / "latents"
    options = {"latents_dir": str(made), **SMALL}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = VideoConfig(
            model=str(pipeline), dataset=("builtin:moving-shapes#3",), preprocess_only=True,
            output_dir=str(tmp_path / "a"), **options,
        )  # fmt: skip
        run.main(RECIPE, config)
    assert not (tmp_path / "a" / "run.jsonl").exists()
    files = {path.name: path.stat().st_mtime_ns for path in made.iterdir()}
    first = train(tmp_path / "b", model=str(pipeline), **options)
    assert {path.name: path.stat().st_mtime_ns for path in made.iterdir()} == files
    assert first == train(tmp_path / "c", model=str(pipeline), **SMALL)
    other = video_pipelines.write(tmp_path / "other", "wan", seed=1)
    with pytest.raises(DataError, match="holds latents of other VAE"):
        train(tmp_path / "d", model=str(other), **options)


def test_clips_and_captions_that_changed_are_made_by_the_next_preprocessing(tmp_path: Path) -> None:
    folder, made = tmp_path / "clips", tmp_path / "latents"
    folder.mkdir()

    def put(name: str, caption: str) -> None:
        clips.write(folder / f"{name}.mp4", shapes.draw(shapes.clips(1, 1)[0], 5, 16, 32), rate=8)
        (folder / f"{name}.txt").write_text(caption)

    def preprocess(**changes: Any) -> list[tuple[str, int]]:
        values: dict[str, Any] = {**SMALL, "dataset": (str(folder),), "latents_dir": str(made), **changes}
        run.main(RECIPE, VideoConfig(**values, preprocess_only=True, output_dir=str(tmp_path / "a")))
        items = latents.Latents(made).items
        return [(item["caption"], (made / item["file"]).stat().st_mtime_ns) for item in items]

    def warned(name: str, **changes: Any) -> bool:
        train(tmp_path / name, **{"latents_dir": str(made), "max_steps": 1, **changes})
        return "was made with other flags or of other clips" in (tmp_path / name / "training.log").read_text()

    put("one", "a circle")
    first = preprocess()
    unset: Any = {"dataset": VideoConfig().dataset}
    assert not warned("b", **unset) and not warned("c", dataset=(str(folder),)) and warned("d", **unset, height=32)
    put("two", "a square")
    assert warned("e", dataset=(str(folder),))
    assert preprocess(**unset) == first
    second = preprocess()
    assert [caption for caption, _ in second] == ["a circle", "a square"] and second[0] == first[0]
    assert not warned("f", dataset=(str(folder),))
    (folder / "one.txt").write_text("a red circle")
    assert [caption for caption, _ in preprocess()] == ["a red circle", "a square"]
    kept = {made for _, made in preprocess()}
    put("another", "a triangle")  # comes first
    assert [made in kept for _, made in preprocess(dataset=(f"{folder}/",))] == [False, True, True]
    with pytest.raises(ConfigError, match="made with other flags: all of them would be replaced"):
        preprocess(torch_dtype="bfloat16")
    assert {made for _, made in preprocess(num_frames=None, height=None, width=None)} > kept
    before = (made / latents.MANIFEST).read_text()
    (folder / "z.mp4").write_bytes(b"cut off")
    (folder / "z.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"z\.mp4 cannot be decoded"):
        preprocess()
    assert (made / latents.MANIFEST).read_text() == before and warned("h", dataset=(str(folder),))
    (folder / "z.mp4").unlink()
    (folder / "one.txt").unlink()  # training needs no clips
    assert not warned("g", dataset=(str(folder),))


def test_latents_keep_the_rate_that_they_were_made_with(tmp_path: Path) -> None:
    pipeline = video_pipelines.write(tmp_path / "ltx", "ltx", seed=0)
    options = {"latents_dir": str(tmp_path / "latents"), **SMALL, "model": str(pipeline)}
    first = train(tmp_path / "a", **options, frame_rate=8.0)
    assert train(tmp_path / "b", **options) == first
    assert train(tmp_path / "c", **{**options, "latents_dir": None}) != first


def test_latents_are_used_without_vae_and_text_encoder(pipeline: Path, tmp_path: Path) -> None:
    import shutil

    options = {"latents_dir": str(tmp_path / "latents"), **SMALL, "model": str(pipeline)}
    whole = train(tmp_path / "a", **options)
    bare = shutil.copytree(
        pipeline, tmp_path / "bare", ignore=shutil.ignore_patterns("vae", "text_encoder", "tokenizer")
    )
    options["model"] = str(bare)
    assert train(tmp_path / "b", **options, samples=1, sampler_steps=2, max_steps=5) == whole
    shown = [event for event in events(tmp_path / "b") if event["event"] == "sample"]
    assert [event["decoded"] for event in shown] == [False, False]
    for part, found in (("vae", "has no VAE"), ("text_encoder", "has no text_encoder/")):
        without = shutil.copytree(pipeline, tmp_path / f"no {part}", ignore=shutil.ignore_patterns(part))
        with pytest.raises(DataError, match=found):
            train(tmp_path / "c", **SMALL, model=str(without))
    others: dict[str, Any] = {**options, "dataset": ("builtin:moving-shapes#4",), "preprocess_only": True}
    with pytest.raises(DataError, match="does not hold the latents of these clips"):
        train(tmp_path / "d", **others)
    assert latents.is_made(tmp_path / "latents")


def test_a_making_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = latents._write, []

    def stopping(path: Path, *args: Any) -> None:
        calls.append(path.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        real(path, *args)

    monkeypatch.setattr(latents, "_write", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    written = calls[:5]
    train(tmp_path)
    assert not set(written) & set(calls[6:])
    assert latents.is_made(tmp_path / "latents")


def test_unfinished_latents_are_not_replaced_by_those_of_the_built_in_data(tmp_path: Path) -> None:
    folder, made = tmp_path / "clips", tmp_path / "latents"
    folder.mkdir()
    clips.write(folder / "one.mp4", shapes.draw(shapes.clips(1, 1)[0], 5, 16, 32), rate=8)
    (folder / "one.txt").write_text("a circle")
    own: dict[str, Any] = {"dataset": (str(folder),), "latents_dir": str(made), "max_steps": 1, **SMALL}
    train(tmp_path / "a", **own)
    (made / latents.MANIFEST).unlink()  # as if interrupted
    [clip] = made.glob("clip-*")
    unset: Any = {"dataset": VideoConfig().dataset}
    with pytest.raises(ConfigError, match=r"holds 1 latent file of other clips or flags, and no.*\nhint: set"):
        train(tmp_path / "b", **{**own, **unset})
    assert clip.exists() and not latents.is_made(made)
    train(tmp_path / "c", **own)
    clip.unlink()
    (made / latents.MANIFEST).unlink()
    train(tmp_path / "d", **{**own, **unset})  # nothing is replaced
    (made / latents.MANIFEST).unlink()
    train(tmp_path / "e", **{**own, **unset})  # unfinished clips of the built-in data


def test_latents_of_other_flags_stay_until_the_new_ones_are_made(tmp_path: Path) -> None:
    def messages() -> int:
        return (tmp_path / "training.log").read_text().count("until the new ones are made")

    train(tmp_path, **SMALL, max_steps=1)
    before = len(list((tmp_path / "latents").glob("clip-*")))
    assert before and not messages()
    train(tmp_path, **{**SMALL, "num_frames": 9}, max_steps=1, overwrite_output_dir=True)
    assert f"keeps {before} latent files of other clips or flags (" in (tmp_path / "training.log").read_text()
    assert len(list((tmp_path / "latents").glob("clip-*"))) == before and messages() == 1


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"height": 29}, r"height is 29; expected a multiple of 4 .*\n.*--height 28 is the nearest"),
        ({"dataset": ("nowhere",)}, "data set 'nowhere' does not exist"),
        ({"model": "builtin:tiny-want"}, "there is no model 'builtin:tiny-want'"),
        ({"model": "./nowhere"}, "there is no folder './nowhere'"),
        ({"teacher": "builtin:tiny-wan"}, "teacher or critic is set without distill"),
        ({"eval_dataset": ("builtin:moving-shapes",)}, "eval_dataset is"),
        ({"train_type": "lora", "target_modules": ("to_z",)}, "target_modules names 'to_z'"),
        ({"distill": True, "teacher": "./nowhere"}, "there is no folder './nowhere'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    with pytest.raises(EbbtideError, match=found) as caught:
        train(tmp_path, **changes)
    assert "hint:" in str(caught.value)
    assert not (tmp_path / "run.jsonl").exists() and not (tmp_path / "latents").exists()
