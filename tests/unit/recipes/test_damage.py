"""Checkpoints that are complete, and hold other bytes than were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import checkpoints, damage


def make(output: Path, step: int) -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"weight": torch.zeros(8)}, folder / "model.safetensors")
    torch.save({"state": {0: torch.zeros(8)}}, folder / "optimizer.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / damage.STATE).write_text(json.dumps({"global_step": step}))
    checkpoints.seal(folder, SftConfig(), step=step, world_size=1)
    return folder


def flipped(at: int) -> Callable[[bytes], bytes]:
    """Return a function that flips a bit of a file."""

    def flip(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", flipped(0)),
        ("model.safetensors", flipped(8)),
        ("optimizer.pt", flipped(0)),
        ("optimizer.pt", flipped(100)),
        ("optimizer.pt", flipped(-22)),
        ("rng_state.pth", lambda data: b"?" * len(data)),
        ("trainer_state.json", flipped(0)),
        ("trainer_state.json", lambda data: b"[]".ljust(len(data))),
        ("trainer_state.json", lambda data: data.replace(b"6", b"7")),
    ],
)
def test_a_file_of_other_bytes_is_named_with_the_checkpoint_before(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    four, six = make(tmp_path, 4), make(tmp_path, 6)
    make(tmp_path, 8)
    damage.check(six)
    (six / name).write_bytes(change((six / name).read_bytes()))
    assert checkpoints.read_seal(six)[0] is not None
    with pytest.raises(DataError, match=f"^{six / name} ") as caught:
        damage.check(six)
    assert caught.value.expected and str(four) in caught.value.hint
    (four / checkpoints.SEAL).unlink()
    with pytest.raises(DataError, match=f"^{six / name} (?s:.*)hint: no complete one is before it"):
        damage.check(six)


@pytest.mark.parametrize(
    "error", [KeyError("param_groups"), RuntimeError("Error(s) in loading state_dict for Llama:\n\tsize mismatch")]
)
def test_what_does_not_fit_is_an_error_about_the_checkpoint(tmp_path: Path, error: Exception) -> None:
    folder = make(tmp_path, 4)
    with pytest.raises(DataError, match=f"^{folder} ") as caught, damage.explained(folder):
        raise error
    assert caught.value.__cause__ is error and str(error.args[0]).split()[-1] in caught.value.found
    assert caught.value.expected and caught.value.hint


@pytest.mark.parametrize("error", [RuntimeError("device-side assert"), DataError("another"), MemoryError()])
def test_another_error_of_loading_stays_what_it_is(tmp_path: Path, error: Exception) -> None:
    folder = make(tmp_path, 4)
    with pytest.raises(type(error)) as caught, damage.explained(folder):
        raise error
    assert caught.value is error


def test_a_seal_with_other_values_is_none(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    seal = json.loads((folder / checkpoints.SEAL).read_text())
    for changes in ({"files": list(seal["files"])}, {"files": {"a": None}}, {"settings": "r"}, {"order": [1]}):
        (folder / checkpoints.SEAL).write_text(json.dumps(seal | changes))
        assert checkpoints.read_seal(folder) == (None, "has an ebbtide.json that cannot be read")
