"""Small steps on weights in bfloat16 are warned of, in every recipe."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton.precision import warn_of_lost_steps
from ebbtide_recipes.video.config import VideoConfig

SHARDED = {"fsdp_strategy": "full_shard"}


@pytest.mark.parametrize("kind", [SftConfig, GrpoConfig, VideoConfig])
@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, True),
        (SHARDED, True),
        ({"bf16": True}, True),
        ({**SHARDED, "bf16": True}, False),
        ({"learning_rate": 1e-3}, False),
        ({"train_type": "lora"}, False),
        ({"torch_dtype": "auto", "bf16": True}, False),
        ({"torch_dtype": "float32"}, False),
    ],
)
def test_steps_that_round_to_nothing_are_warned_of(
    caplog: pytest.LogCaptureFixture, kind: Any, changes: dict[str, Any], warns: bool
) -> None:
    config = kind(**{"torch_dtype": "bfloat16", "train_type": "full", **changes})
    warn_of_lost_steps(config)
    assert (f"at a learning rate of {config.peak_learning_rate:g} most steps round to nothing" in caplog.text) is warns
