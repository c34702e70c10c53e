"""Values sent to trackers: TensorBoard's event file is read back, a stand-in for Weights & Biases records calls."""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ebbtide.base.errors import ConfigError
from tests.integrations.conftest import make_tiny_model
from tests.integrations.test_sft_resume import events, train

FIELDS = {"loss", "token_acc", "memory(GiB)", "train_speed(s/it)", "memory_saved(GiB)", "stall(s)", "learning_rate"}
OURS = {"max_steps": 2, "max_length": 256, "activation_cpu_offload": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 256 tokens, for storages that are worth moving (64 KiB and more)."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


def scalars(path: Path) -> dict[str, dict[int, float]]:
    """Read an event file, records of length, checksum, event, checksum; return tag → step → value."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                found.setdefault(value.tag, {})[event.step] = value.simple_value
        content = content[16 + length :]
    return found


def test_tensorboard_holds_every_step_field(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    losses = train(model, tmp_path, report_to=("tensorboard",), **OURS)
    (path,) = tmp_path.rglob("events.out*")
    found = scalars(path)
    # Its writer replaces brackets with _.
    tags = {"train/" + name.replace("(", "_").replace(")", "_") for name in FIELDS}
    assert tags <= set(found)
    for tag in tags:
        assert set(found[tag]) == {1, 2}, tag
    assert found["train/loss"] == pytest.approx(losses, rel=1e-6)
    stats = [event for event in events(tmp_path) if event["event"] == "stats"]
    saved = {event["step"]: event["memory_saved_bytes"] / 2**30 for event in stats}
    assert found["train/memory_saved_GiB_"] == pytest.approx(saved, rel=1e-6)
    assert all(value > 0 for value in saved.values())
    assert all(value > 0.05 for value in found["train/memory_GiB_"].values())  # a process with torch in it
    assert all(value >= 0 for value in found["train/stall_s_"].values())


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="report_to names 'wandb'.*\nhint: pip install wandb, or leave it out"):
        train(model, tmp_path / "out", report_to=("wandb",))
    assert not (tmp_path / "out" / "run.jsonl").exists()


class Noting(dict[str, Any]):
    """A run's config or summary: a mapping that records its updates."""

    def update(self, *args: Any, allow_val_change: bool = False, **kwargs: Any) -> None:
        super().update(*args, **kwargs)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with the functions of wandb that transformers calls; ``calls`` has the calls."""
    names = ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util")
    for name in names:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[names[-1]].ConfigError = type("ConfigError", (Exception,), {})  # type: ignore[attr-defined]
    made: Any = sys.modules["wandb"]
    made.calls, made.run, made.config = [], None, Noting()

    def init(**settings: Any) -> None:
        made.calls.append(("init", settings))
        made.run = SimpleNamespace(summary=Noting(), _label=lambda **kwargs: None, url="", id="1", name="r")

    made.init = init
    made.define_metric = lambda *args, **kwargs: None
    made.log = lambda values, **kwargs: made.calls.append(("log", values))
    return made


def test_wandb_gets_the_project(model: Path, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    train(model, tmp_path, report_to=("wandb",), project_name="gsm8k", **OURS)
    [(_, settings)] = [call for call in wandb.calls if call[0] == "init"]
    assert settings["project"] == "gsm8k"
    assert "WANDB_PROJECT" not in os.environ


def test_wandb_gets_every_step_field(model: Path, tmp_path: Path, wandb: Any) -> None:
    losses = train(model, tmp_path, report_to=("wandb",), run_name="mine", **OURS)
    assert [call for call in wandb.calls if call[0] == "init"] == [("init", {"project": "huggingface", "name": "mine"})]
    logged = [values for name, values in wandb.calls if name == "log" and "train/loss" in values]
    assert [values["train/global_step"] for values in logged] == [1, 2]
    for values in logged:
        assert {"train/" + name for name in FIELDS} <= set(values)
        assert values["train/loss"] == pytest.approx(losses[values["train/global_step"]], rel=1e-6)
        assert values["train/memory_saved(GiB)"] > 0
    assert wandb.config["max_steps"] == 2
