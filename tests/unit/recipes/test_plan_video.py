"""What training a video transformer would need, from its config alone."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

import ebbtide
from ebbtide.base.errors import ConfigError, DataError
from ebbtide.cli.arguments import read_arguments
from ebbtide.planner.table import load_plan
from ebbtide_recipes.plan import main as recipe
from ebbtide_recipes.plan import page
from ebbtide_recipes.plan.config import PlanConfig
from ebbtide_recipes.plan.page import Result
from ebbtide_recipes.video.config import VideoConfig
from tests.helpers import video_pipelines

SIZE = {"num_frames": 29, "height": 128, "width": 128}


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    return {family: video_pipelines.write(folder / family, family) for family in video_pipelines.FAMILIES}


@functools.cache
def found(model: Path, **changes: Any) -> Result:
    """Return the prediction; simulating a model takes seconds, so results are cached by value."""
    given = {"recipe": "video", "model": str(model), "gpu": "h200", "text_length": 24, **SIZE, **changes}
    return recipe.main(PlanConfig(**given))


@pytest.mark.parametrize("family", video_pipelines.FAMILIES)
def test_every_family_has_a_plan(pipelines: dict[str, Path], family: str) -> None:
    result = found(pipelines[family])
    by_name = {option.name: option for option in result.options}
    plain, checkpointing = by_name["plain"], by_name["checkpointing"]
    assert plain.peak_bytes is not None
    assert checkpointing.peak_bytes is not None
    assert checkpointing.peak_bytes < plain.peak_bytes
    assert all(option.problem == "" for option in result.options)
    assert f"{SIZE['num_frames']} frames of {SIZE['width']} x {SIZE['height']} pixels" in page.text(result)


def test_tokens_follow_from_the_size_of_the_clip(pipelines: dict[str, Path]) -> None:
    # Wan: 4 frames and 8 x 8 pixels per latent, 2 x 2 latents per token.
    assert found(pipelines["wan"]).outline.tokens == 8 * 8 * 8
    assert found(pipelines["wan"], num_frames=17, per_device_train_batch_size=2).outline.tokens == 2 * 5 * 8 * 8


def test_more_frames_take_more(pipelines: dict[str, Path]) -> None:
    short, long = (found(pipelines["wan"], num_frames=frames).options[0].peak_bytes for frames in (17, 29))
    assert short is not None
    assert long is not None
    assert short < long


def test_a_transformers_config_alone_is_enough(pipelines: dict[str, Path], tmp_path: Path) -> None:
    source = pipelines["wan"] / "transformer" / "config.json"
    shutil.copy(source, tmp_path / "config.json")
    whole = found(pipelines["wan"])
    for place in (tmp_path, tmp_path / "config.json"):
        assert [option.peak_bytes for option in found(place).options] == [option.peak_bytes for option in whole.options]


def test_adapters_take_less_than_full_training(pipelines: dict[str, Path]) -> None:
    full, lora = found(pipelines["wan"]), found(pipelines["wan"], train_type="lora", lora_rank=2)
    assert 0 < lora.outline.trained < full.outline.trained == full.outline.weights
    assert lora.options[0].peak_bytes is not None
    assert full.options[0].peak_bytes is not None
    assert lora.options[0].peak_bytes < full.options[0].peak_bytes


def test_the_command_line_trains_that_way(pipelines: dict[str, Path]) -> None:
    result = found(pipelines["wan"])
    for option in result.options:
        words = page.command(result, option).split()
        assert words[:2] == ["ebbtide", "video"]
        config = read_arguments(VideoConfig, words[2:], prog="ebbtide video")
        assert config is not None
        assert (config.num_frames, config.height, config.width, config.text_length) == (29, 128, 128, 24)
        assert config.mode == {"plain": "plain", "checkpointing": "checkpointing"}.get(option.name, "ebbtide")
    for name in ("transformer", "transformer/config.json"):
        config = dataclasses.replace(result.config, model=str(pipelines["wan"] / name))
        assert f"--model {pipelines['wan']} " in page.command(dataclasses.replace(result, config=config), option)


def test_the_plan_that_is_saved_is_for_the_transformer(pipelines: dict[str, Path], tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel

    path = tmp_path / "plan.json"
    recipe.save(found(pipelines["wan"]), str(path))
    transformer = WanTransformer3DModel.from_pretrained(pipelines["wan"], subfolder="transformer")
    with ebbtide.enable_activation_offloading(transformer, policy=str(path)) as handle:
        assert {name for name, _ in load_plan(path).actions} == set(handle._attachment.block_names)


def test_sizes_that_make_no_whole_tokens_are_refused(pipelines: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)height is 129.*hint: --height 128"):
        found(pipelines["wan"], height=129)


def test_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    with pytest.raises(DataError, match=r"(?s)the transformer is a UNet2DModel.*hint: "):
        found(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match=r"(?s)config.json has no _class_name; expected one of .*hint: "):
        found(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"(?s)is not JSON.*hint: "):
        found(tmp_path)


def test_flags_of_the_other_recipe_have_no_effect_and_are_named(pipelines: dict[str, Path]) -> None:
    lines: list[str] = []
    config = PlanConfig(recipe="video", model=str(pipelines["wan"]), gpu="h200", max_length=64, text_length=24, **SIZE)
    recipe.main(config, lines.append)
    assert any("--max_length has no effect" in line for line in lines)
    assert PlanConfig(height=32).without_effect() == ["height"]
