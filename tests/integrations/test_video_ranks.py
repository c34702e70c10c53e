"""The video recipe on ranks: FSDP2, HSDP and DDP, adapters, three models, averages; and resuming."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.spawn import CaseResult, run_cases
from tests.integrations.video_ranks import apart_case, video_case

pytestmark = pytest.mark.slow

FULL = {"fsdp_strategy": "full_shard"}
OURS = {"activation_cpu_offload": True}
MINIMAL = {**OURS, "gradient_checkpointing": True}
LORA = {"train_type": "lora", "lora_rank": 2, "torch_dtype": "bfloat16"}  # the adapters are float32
THREE = {"distill": True, "student_interval": 2}
SAVING = {**FULL, **OURS, "max_steps": 4, "save_steps": 2, "ema_decay": 0.9, "lr_scheduler_type": "constant"}

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": FULL,
    "fsdp2 auto": {**FULL, **OURS, "samples": 1, "sample_steps": 1, "sampler_steps": 2, "save": True, "ema_decay": 0.9},
    "fsdp2 minimal": {"hsdp_shard_dim": 2, "hsdp_replicate_dim": 1, **MINIMAL},
    "lora": {**FULL, **LORA},
    "lora auto": {**FULL, **LORA, **OURS, "save": True},
    "three": {**FULL, **THREE},
    "three minimal": {**FULL, **THREE, **MINIMAL},
    "ddp": THREE,
    "ddp auto": {**OURS, **THREE, "samples": 1, "sampler_steps": 2},
    "saving": SAVING,
    "lora saving": {**SAVING, **LORA},
    "three saving": {**SAVING, **THREE, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
}
RESUMED = ("saving", "lora saving", "three saving")
LIKE = {
    "fsdp2 auto": "fsdp2",
    "fsdp2 minimal": "fsdp2",
    "lora auto": "lora",
    "three minimal": "three",
    "ddp auto": "ddp",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("video-ranks")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, CaseResult]:
    cases = {name: (video_case, (str(folder / name), changes)) for name, changes in CASES.items()}
    for name in RESUMED:
        going_on = {**CASES[name], "resume_from_checkpoint": str(folder / name / "checkpoint-2")}
        cases[f"{name}, going on"] = (video_case, (str(folder / f"{name}, going on"), going_on))
    return run_cases(cases, 2, timeout_seconds=120)


@pytest.mark.parametrize("name", LIKE)
def test_losses_and_weights_are_those_of_plain_training(results: dict[str, CaseResult], name: str) -> None:
    ours, plain = results[name].values(), results[LIKE[name]].values()
    assert {rank["wrapped"] for rank in (*ours, *plain)} == {"ddp" if name.startswith("ddp") else "fsdp2"}
    assert ours[0]["losses"] == plain[0]["losses"]
    assert len(set(plain[0]["losses"].values())) == 3
    assert [rank["state"] for rank in ours] == [rank["state"] for rank in plain]
    assert ours[0]["trained"] == plain[0]["trained"] == {"torch.float32"}


def test_two_copies_of_two_shards_train_as_without_offloading(tmp_path: Path) -> None:
    hybrid = {"hsdp_shard_dim": 2, "hsdp_replicate_dim": 2}
    cases = {
        name: (video_case, (str(tmp_path / name), {**hybrid, **changes}))
        for name, changes in {"plain": {}, "auto": OURS, "minimal": MINIMAL}.items()
    }
    found = {name: result.values() for name, result in run_cases(cases, 4, timeout_seconds=240).items()}
    plain = found["plain"]
    assert len(set(plain[0]["losses"].values())) == 3
    for ranks in found.values():
        assert [rank["wrapped"] for rank in ranks] == ["fsdp2"] * 4
        assert ranks[0]["losses"] == plain[0]["losses"]
        assert [rank["state"] for rank in ranks] == [rank["state"] for rank in plain]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_goes_on_repeats_the_run_that_did_not_stop(
    results: dict[str, CaseResult], folder: Path, name: str
) -> None:
    whole, rest = results[name].values(), results[f"{name}, going on"].values()
    assert rest[0]["losses"] == {step: whole[0]["losses"][step] for step in (3, 4)}
    assert [rank["state"] for rank in rest] == [rank["state"] for rank in whole]
    for rank in (0, 1):  # each process's part of the average
        part = Path("checkpoint-4", f"ema-{rank}.safetensors")
        assert (folder / name / part).read_bytes() == (folder / f"{name}, going on" / part).read_bytes()


def test_checkpoints_of_shards_hold_what_is_trained(results: dict[str, CaseResult], folder: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    assert results["lora saving"].values() and results["three saving"].values()
    reader = FileSystemReader(folder / "lora saving" / "checkpoint-2" / "pytorch_model_fsdp_0")
    names = reader.read_metadata().state_dict_metadata
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    whole = torch.load(folder / "three saving" / "checkpoint-2" / "pytorch_model_fsdp.bin", weights_only=True)
    assert {name.partition(".")[0] for name in whole} == {"transformer", "critic"}


def test_shards_are_gathered_for_what_is_saved_and_sampled(results: dict[str, CaseResult], folder: Path) -> None:
    from diffusers import WanTransformer3DModel

    assert results["fsdp2 auto"].values()[0]["losses"]
    for name in ("transformer", "transformer_ema"):
        loaded = WanTransformer3DModel.from_pretrained(folder / "fsdp2 auto" / name)
        assert loaded.patch_embedding.weight.shape == (64, 48, 1, 1, 1)
    sheets = sorted(path.name for path in (folder / "fsdp2 auto" / "samples").glob("*.png"))
    assert sheets == [f"step-{step:06d}.png" for step in range(4)]
    assert (folder / "lora auto" / "pytorch_lora_weights.safetensors").is_file()


def test_nodes_that_share_no_folder_make_no_latents(tmp_path: Path) -> None:
    """Each would lack those of the other; with a copy of complete ones on each they train, and add new prompts."""
    made = [tmp_path / "made" / "latents", tmp_path / "copy"]
    one = run_cases({"made": (video_case, (str(made[0].parent), {"max_steps": 1}))}, 2, timeout_seconds=120)
    assert one["made"].values()
    shutil.copytree(*made)
    missing = tmp_path / "missing"
    cases = {
        "apart": (apart_case, (str(tmp_path / "apart"), [None, None])),
        "on one": (apart_case, (str(tmp_path / "on one"), [str(made[0]), str(missing)])),
        "copies": (apart_case, (str(tmp_path / "copies"), [*map(str, made)], ("a kite",))),
    }
    found = {name: result.values() for name, result in run_cases(cases, 2, timeout_seconds=60).items()}
    assert found["copies"] == [("", [])] * 2
    for name, flag in (("apart", "output_dir"), ("on one", "latents_dir")):
        for error, clips in found[name]:
            assert error.startswith(flag) and "on rank 1 is not the folder of rank 0; expected a folder" in error
            assert "because every rank writes its share of the latents there\nhint: " in error
            assert clips == []
    assert not missing.exists()
