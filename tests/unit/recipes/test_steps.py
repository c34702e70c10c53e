"""The stalls in a step's line, and the order of clips in an epoch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.base.errors import ConfigError
from ebbtide.base.events import BUS
from ebbtide_recipes.skeleton.steps import StepRecorder
from ebbtide_recipes.skeleton.trainer import RecordedTrainer
from ebbtide_recipes.video.buckets import BucketSampler
from ebbtide_recipes.video.clips import Size
from ebbtide_recipes.video.config import VideoConfig
from ebbtide_recipes.video.families import Family
from ebbtide_recipes.video.recipe import _sampling
from ebbtide_recipes.video.trainer import VideoTrainer


def test_stalls_are_those_since_the_previous_log() -> None:
    total, shown = 0.0, []
    handle = SimpleNamespace(stats=lambda: ebbtide.Stats(total_stall_seconds=total))
    bar: Any = SimpleNamespace(update=lambda *given, **figures: None)
    recorder = StepRecorder(SimpleNamespace(handle=handle), bar, mean=lambda value: value)  # type: ignore[arg-type]
    state: Any = SimpleNamespace(global_step=0, max_steps=6, epoch=0.1)
    for step in range(1, 7):
        state.global_step, total = step, total + step
        recorder.micro_loss(torch.tensor(1.0))
        recorder.on_step_end(None, state, None)  # type: ignore[arg-type]
        shown.append(recorder.shown["stall(s)"])
        if step % 3 == 0:
            recorder.on_log(None, state, None, {"loss": 1.0})  # type: ignore[arg-type]
    assert shown == [1.0, 3.0, 6.0, 4.0, 9.0, 15.0]


def test_an_epoch_of_a_resumed_run_has_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedTrainer, "_run_epoch", lambda self, *args, **kwargs: None, raising=False)
    trainer = VideoTrainer.__new__(VideoTrainer)
    trainer._sampler = BucketSampler([Size(1, 16, 16)] * 8, batch=2, seed=3)
    first = list(trainer._sampler)
    trainer._run_epoch(epoch=2)
    assert list(trainer._sampler) != first
    fresh = BucketSampler([Size(1, 16, 16)] * 8, batch=2, seed=3)
    fresh.set_epoch(2)
    assert list(trainer._sampler) == list(fresh)


@pytest.mark.parametrize(("prompts", "samples", "count"), [(3, 2, 3), (1, 2, 1), (3, 0, 0), (None, 2, 2), (None, 9, 4)])
def test_every_prompt_is_sampled(prompts: int | None, samples: int, count: int) -> None:
    class Four:
        items = [{"caption": f"c{i}"} for i in range(4)]
        rate = None

        def __len__(self) -> int:
            return 4

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"latents": torch.zeros(2, 1, 2, 2), "text": {}}

        def text(self, caption: str) -> dict[str, Any]:
            return {}

    named = None if prompts is None else tuple(f"p{i}" for i in range(prompts))
    config = VideoConfig(sample_prompts=named, samples=samples)
    assert len(_sampling(config, SimpleNamespace(family=Family), Four()).prompts) == count  # type: ignore[arg-type]


def test_a_warmup_that_the_schedule_lacks_is_reported() -> None:
    assert "warmup_ratio" in VideoConfig(lr_scheduler_type="constant", warmup_ratio=0.1).without_effect()
    assert "warmup_ratio" not in VideoConfig(lr_scheduler_type="cosine", warmup_ratio=0.1).without_effect()


def test_processes_wait_for_one_another_as_long_as_the_flag_says() -> None:
    from ebbtide_recipes.sft.config import SftConfig
    from ebbtide_recipes.sft.trainer import arguments

    assert arguments(SftConfig(ddp_timeout=7200)).ddp_timeout_delta.total_seconds() == 7200
    with pytest.raises(ConfigError, match="ddp_timeout is 0; expected 1 or more"):
        SftConfig(ddp_timeout=0)


def test_parts_count_the_memory_of_the_device_and_a_shared_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8)
    trainer, heard = RecordedTrainer.__new__(RecordedTrainer), list[dict[str, Any]]()
    trainer.model = torch.nn.ParameterList([weight, weight.view(2, 4)])  # type: ignore[assignment]
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.state = SimpleNamespace(global_step=1)  # type: ignore[assignment]
    stop = BUS.subscribe(lambda kind, fields: heard.append(fields))
    trainer._emit_parts()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    trainer._emit_parts()  # FSDP's cpu_offload holds all of it in host memory
    stop()
    assert [(one["weights"], one["gradient_bytes"]) for one in heard] == [({"model": 32}, 32), ({}, 0)]
