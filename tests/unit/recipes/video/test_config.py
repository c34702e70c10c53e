"""The flags of ``ebbtide video``: FastVideo's names, their meaning, and refused values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.cli.arguments import read_arguments
from ebbtide_recipes.video import fastvideo
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.recipe import RECIPE
from tests.helpers import video_pipelines


def read(*words: str) -> VideoConfig:
    config = read_arguments(VideoConfig, words, prog="ebbtide video")
    assert config is not None
    return config


FASTVIDEO: dict[tuple[str, ...], dict[str, Any]] = {
    ("--activation-offloading",): {"activation_cpu_offload": True},
    ("--enable-gradient-checkpointing-type", "full"): {"gradient_checkpointing": True, "mode": "checkpointing"},
    ("--hsdp-shard-dim", "8", "--hsdp-replicate-dim", "1"): {"fsdp_strategy": "full_shard"},
    ("--hsdp-shard-dim", "4", "--hsdp-replicate-dim", "2"): {"fsdp_strategy": "hybrid_shard"},
    ("--hsdp-shard-dim", "1", "--hsdp-replicate-dim", "8"): {"fsdp_strategy": "none"},
    ("--num-frames", "81", "--num-height", "480", "--num-width", "832"): {
        "num_frames": 81, "height": 480, "width": 832,
    },
    ("--pretrained-model-name-or-path", "wan"): {"model": "wan"},
    ("--data-path", "clips"): {"dataset": ("clips",)},
    ("--max-train-steps", "7", "--train-batch-size", "2"): {"max_steps": 7, "per_device_train_batch_size": 2},
    ("--gradient-accumulation-steps", "3", "--learning-rate", "1e-5"): {
        "gradient_accumulation_steps": 3, "learning_rate": 1e-5,
    },
    ("--ema-decay", "0.999", "--validation-steps", "100"): {"ema_decay": 0.999, "sample_steps": 100},
    ("--training-state-checkpointing-steps", "50"): {"save_steps": 50},
    ("--dmd-denoising-steps", "1000,757,522", "--generator-update-interval", "5"): {
        "student_steps": (1000, 757, 522), "student_interval": 5,
    },
    ("--num-gpus", "4", "--training-cfg-rate", "0.1"): {"nproc_per_node": 4, "caption_dropout": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("words", FASTVIDEO, ids=lambda words: words[0])
def test_fastvideos_flags_are_read(words: tuple[str, ...]) -> None:
    config = read(*words)
    assert {name: getattr(config, name) for name in FASTVIDEO[words]} == FASTVIDEO[words]


@pytest.mark.parametrize("name", sorted(fastvideo.UNSUPPORTED))
def test_other_flags_are_refused_by_name_with_a_hint(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"--{name}", "4")
    assert f"--{name} 4 is not supported" in str(caught.value) and "hint:" in str(caught.value)


def test_no_alias_is_a_flag_of_its_own_and_each_names_one() -> None:
    fields = set(VideoConfig.__dataclass_fields__)
    assert not set(fastvideo.ALIASES) & fields
    assert set(fastvideo.ALIASES.values()) <= fields
    assert not set(fastvideo.UNSUPPORTED) & (fields | set(fastvideo.ALIASES))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--student_timesteps", "1000,0"), "student_timesteps is '1000,0'"),
        (("--student_timesteps", "1000,²"), "student_timesteps is '1000,²'"),
        (("--distill", "--student_timesteps", "522,757,1000"), "student_timesteps is '522,757,1000'"),
        (("--distill", "--student_timesteps", "900,500"), "student_timesteps is '900,500'"),
        (("--timestep_sampling", "mode", "--mode_scale", "-2"), "mode_scale is -2.0"),
        (("--timestep_sampling", "mode", "--mode_scale", "1.8"), "mode_scale is 1.8"),
        (("--backwards", "3"), "backwards is 3"),
        (("--ema_decay", "1"), "ema_decay is 1.0"),
        (("--caption_dropout", "2"), "caption_dropout is 2.0"),
        (("--samples", "-1"), "samples is -1"),
        (("--frame_rate", "0"), "frame_rate is 0.0"),
        (("--distill", "--train_type", "lora"), "train_type is 'lora' with distill"),
        (("--train_type", "qlora"), "--train_type is 'qlora'"),
        (("--hsdp_shard_dim", "1", "--fsdp_strategy", "full_shard"), "hsdp_shard_dim is 1"),
        (("--hsdp_shard_dim", "2", "--hsdp_replicate_dim", "2", "--fsdp_strategy", "full_shard"), "hsdp_replicate_dim"),
        (("--hsdp_replicate_dim", "2", "--fsdp_strategy", "full_shard"), "hsdp_replicate_dim is 2"),
        (("--ema_decay", "0.9", "--fsdp_strategy", "full_shard", "--fsdp_version", "1"), "fsdp_version 1"),
        (("--fp16",), "fp16 is True"),
        (("--enable_gradient_checkpointing_type", "ops"), "is 'ops'"),
    ],
)
def test_values_that_make_no_run_are_refused(words: tuple[str, ...], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert found in str(caught.value) and "hint:" in str(caught.value)


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("shards", "copies", "mesh"), [(2, None, (2, 2)), (None, 2, (2, 2)), (4, 1, (1, 4)), (None, None, (1, 4))]
)
def test_fastvideos_numbers_make_the_mesh(shards: int | None, copies: int | None, mesh: tuple[int, int]) -> None:
    from ebbtide_recipes.skeleton.trainer import _hybrid
    from ebbtide_recipes.video.trainer import _shards

    config = VideoConfig(hsdp_shard_dim=shards, hsdp_replicate_dim=copies, fsdp_strategy="hybrid_shard")
    made = _hybrid(config, _shards(config))["parallelism_config"]
    assert (made.dp_replicate_size, made.dp_shard_size) == mesh


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"hsdp_shard_dim": 2, "hsdp_replicate_dim": 3}, "hsdp_shard_dim 2 and hsdp_replicate_dim 3 with 4 processes"),
        ({"hsdp_shard_dim": 2}, "hsdp_shard_dim 2 and hsdp_replicate_dim 1 with 4 processes"),
        ({"hsdp_shard_dim": 3, "fsdp_strategy": "hybrid_shard"}, "hsdp_shard_dim 3 and hsdp_replicate_dim 1 with 4"),
        ({"hsdp_shard_dim": 2, "hsdp_replicate_dim": 2, "fsdp_version": 1}, "hybrid_shard and fsdp_version 1"),
        ({"hsdp_replicate_dim": 4, "fsdp_strategy": "hybrid_shard"}, "4 processes and 1 for each copy"),
    ],
)
def test_numbers_that_would_train_other_shards_are_refused(flags: dict[str, Any], found: str) -> None:
    from ebbtide_recipes.video.trainer import arguments

    with pytest.raises(ConfigError, match=found) as caught:
        arguments(VideoConfig(**flags))
    assert "hint:" in str(caught.value)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("local", ["1", "3"])
def test_nodes_of_one_process_make_no_hybrid_shards(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide_recipes.skeleton.trainer import _hybrid

    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(ConfigError, match=f"4 processes and {local} for each copy .*\nhint: --fsdp_strategy full"):
        _hybrid(VideoConfig(fsdp_strategy="hybrid_shard"), None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert _hybrid(VideoConfig(fsdp_strategy="hybrid_shard"), None)["parallelism_config"].dp_shard_size == 1


def test_copies_alone_are_ddp_on_any_number_of_processes() -> None:
    from ebbtide_recipes.video.trainer import _shards

    assert _shards(VideoConfig(hsdp_replicate_dim=8)) is None


def test_flags_without_effect_are_named() -> None:
    assert set(read("--mode_scale", "1.5", "--samples", "0", "--guidance_scale", "3").without_effect()) == {
        "mode_scale", "guidance_scale",
    }  # fmt: skip
    student = read("--distill", "--sampler_steps", "4", "--guidance_scale", "3")
    assert set(student.without_effect()) == {"sampler_steps", "guidance_scale"}


@pytest.mark.parametrize(
    ("name", "words", "found"),
    [
        ("cogvideox", ("--flow_shift", "3"), "flow_shift is 3.0"),
        ("cogvideox", ("--timestep_sampling", "uniform"), "timestep_sampling is 'uniform'"),
        ("cogvideox", ("--logit_mean", "0.5"), "logit_mean is 0.5"),
        ("cogvideox", ("--distill", "true"), "distill is True"),
        ("cogvideox", ("--embedded_guidance", "6"), "embedded_guidance is 6.0"),
        ("ltx", ("--embedded_guidance", "6"), "embedded_guidance is 6.0"),
        ("wan", ("--embedded_guidance", "4"), "embedded_guidance is 4.0"),
    ],
)
def test_flags_that_the_family_does_not_use_are_refused(
    name: str, words: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    folder = video_pipelines.write(tmp_path, name)
    with pytest.raises(ConfigError) as caught:
        RECIPE.check(read("--model", str(folder), *words))
    assert found in str(caught.value) and "hint: leave --" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"), [("hunyuan_video", ("--embedded_guidance", "4")), ("ltx", ("--flow_shift", "3"))]
)
def test_flags_that_the_family_uses_are_taken(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    folder = video_pipelines.write(tmp_path, name)
    size = ("--num_frames", "9", "--height", "32", "--width", "32")
    RECIPE.check(read("--model", str(folder), *words, *size))


def test_a_critic_of_another_family_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    folder = video_pipelines.write(tmp_path, "ltx")
    with pytest.raises(DataError, match="the critic is .*: ltx with .*, as the student\nhint: --critic with another"):
        RECIPE.check(read("--distill", "true", "--critic", str(folder)))
    RECIPE.check(read("--distill", "true", "--critic", "owner/name"))  # a hub's is looked at in the run


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NNODES": "2"}, ("--nproc_per_node", "1")),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ("--nproc_per_node", "1")),
        ({"NPROC_PER_NODE": "2"}, ()),
    ],
)
def test_two_backwards_are_refused_where_several_processes_train(
    environment: dict[str, str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launching process, too, on any number of nodes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="backwards is 2 with several processes"):
        RECIPE.check(read("--distill", "true", "--backwards", "2", *words))
