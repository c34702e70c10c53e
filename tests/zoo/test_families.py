"""Model families from configurations: every policy, both precisions, equal in every bit, and something really moved."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.engine import Stats
from tests.helpers.models import Attention, Mlp, Tiny, build
from tests.helpers.oracle import Outcome, differences

POLICIES = ("keep", "offload", "inputs", "minimal", "auto")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stage(nn.Module):
    """A stage of a U-Net: two convolutions with group norms, a residual."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(2, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.second, self.skip = nn.Conv2d(outer, outer, 3, padding=1), nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.second(F.silu(self.first(F.silu(self.norm(x)))))


class Unet(nn.Module):
    """Down, middle, up, with skip connections that live through the whole forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList([Stage(width, width), Stage(width, 2 * width)])
        self.up = nn.ModuleList([Stage(4 * width, width), Stage(2 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for stage in self.down:
            skips.append(stage(x))
            x = F.avg_pool2d(skips[-1], 2) if stage is not self.down[-1] else skips[-1]
        for stage in self.up:
            skip = skips.pop()
            x = stage(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1))
        return self.head(x)


class Modulated(nn.Module):
    """A block of a diffusion transformer: norms without weights, scaled and shifted by the time."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention, self.mlp, self.modulation = Attention(width), Mlp(width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, gate_mlp = self.modulation(F.silu(time))[:, None].chunk(4, -1)
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        return x + gate_mlp * self.mlp(x)


class Dit(nn.Module):
    """Patches and a time through modulated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Modulated() for _ in range(3)])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, time)
        return x


class Cell(nn.Module):
    """A norm, an LSTM and a residual: a block whose middle no rule covers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cell() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    return Unet(), {"x": torch.randn(2, 3, 8, 8)}


def _dit() -> tuple[nn.Module, dict[str, Any]]:
    return Dit(), {"x": torch.randn(2, 12, 48), "time": torch.randn(2, 48)}


def _cells() -> tuple[nn.Module, dict[str, Any]]:
    return Cells(), {"x": torch.randn(2, 6, 16)}


PLAIN = {"unet": _unet, "dit": _dit, "lstm": _cells}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "t5", "mixtral", "qwen3_moe", "vit", "mamba", *PLAIN)
NOTHING_CHEAP = {"auto": {"lstm"}}
"""Where a policy finds nothing to remake."""


def make(name: str, dtype: torch.dtype) -> Tiny:
    if name not in PLAIN:
        return build(name, dtype=dtype)
    torch.manual_seed(0)
    model, inputs = PLAIN[name]()
    inputs = {k: v.to(dtype).requires_grad_() for k, v in inputs.items()}
    return Tiny(name=name, model=model.to(dtype).train(), inputs=inputs, blocks="")


_plain: dict[tuple[str, str], Outcome] = {}


def plain(name: str, dtype: str) -> Outcome:
    if (name, dtype) not in _plain:
        _plain[name, dtype] = make(name, DTYPES[dtype]).step()
    return _plain[name, dtype]


def check_moved(name: str, policy: str, stats: Stats) -> None:
    """Assert that the policy did what it is for."""
    assert stats.unique_bytes > 0 and stats.packs > 0
    if stats.checkpointed_blocks:
        assert policy == "minimal"
    else:
        assert stats.saved_bytes >= stats.unique_bytes
    if policy == "keep":
        assert stats.offloaded_bytes == stats.total_copy_out_bytes == 0 and stats.kept_bytes == stats.unique_bytes
        return
    assert stats.offloaded_bytes > 0 and stats.total_copy_in_bytes > 0
    if policy == "inputs":
        assert stats.kept_bytes > 0
    else:
        assert stats.kept_bytes == 0
    if policy in ("auto", "minimal") and name not in NOTHING_CHEAP.get(policy, ()):
        assert stats.recomputed_bytes > 0
        assert stats.total_recomputes > 0 or stats.checkpointed_blocks > 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_under_a_policy(name: str, dtype: str, policy: str) -> None:
    expected = plain(name, dtype)
    tiny = make(name, DTYPES[dtype])
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1, verify=True) as handle:
        for step in range(3):  # the first compares recipes, the second knows the blocks, the third trusts both
            assert differences(expected, tiny.step()) == [], step
            assert handle.stats().live_tickets == 0, step
        check_moved(name, policy, handle.stats())
    assert differences(expected, tiny.step()) == [], "after close"
    gc.collect()
