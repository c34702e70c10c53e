"""Every recipe warns of small steps on weights in bfloat16."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.language.adapter_kinds import config_of
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
    warn_of_lost_steps(config, nn.Linear(2, 2, dtype=torch.bfloat16))
    assert (f"at a learning rate of {config.peak_learning_rate:g} most steps round to nothing" in caplog.text) is warns


@pytest.mark.filterwarnings("ignore:Unsupported layer type .*Norm:UserWarning")  # of LN_TUNING, which copies it
@pytest.mark.parametrize(
    ("settings", "rate", "warns"),
    [
        ({"peft_type": "LN_TUNING", "target_modules": ["norm"]}, 1e-3, True),
        ({"peft_type": "LN_TUNING", "target_modules": ["norm"]}, 5e-3, False),
        ({"modules_to_save": ["norm"]}, 1e-5, True),
        ({"modules_to_save": ["norm"]}, 1e-3, False),
        ({}, 1e-5, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_on_copies_besides_adapters_are_warned_of_too(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, settings: dict[str, Any], rate: float, warns: bool
) -> None:
    model = nn.Sequential(OrderedDict(linear=nn.Linear(8, 8), norm=nn.LayerNorm(8))).to(dtype)
    made: Any = get_peft_model(model, config_of({"peft_type": "LORA", "target_modules": ["linear"], **settings}, "a"))
    warn_of_lost_steps(SftConfig(train_type="lora", learning_rate=rate), made)
    assert ("most steps round to nothing" in caplog.text) is (warns and dtype == torch.bfloat16)
