"""Compiled blocks on two ranks: FSDP1 shards their weights, which are not whole on any."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import ebbtide
from tests.helpers.parts import WIDTH, Model, Part, gated, linear, training_step
from tests.helpers.spawn import run_cases

ROWS = 5


def _saved(projections: int, original: bool) -> set[int]:
    """Return the sizes that blocks around FSDP1 units saved: of two linear layers, or of one weight."""

    def unit() -> nn.Module:
        bare = Part(lambda s, x: x + s.a(x).sin(), a=nn.Linear(WIDTH, WIDTH, bias=False))
        part = Part(gated, a=linear(), b=linear()) if projections > 1 else bare
        wrapped = FullyShardedDataParallel(part, use_orig_params=original, device_id=torch.device("cpu"))
        return torch.compile(wrapped, backend="aot_eager")  # pyright: ignore[reportReturnType]

    torch._dynamo.reset()
    model = FullyShardedDataParallel(Model(unit), use_orig_params=original, device_id=torch.device("cpu"))
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, blocks="layers.*") as handle:
        for _ in range(2):
            training_step(model, torch.ones(ROWS, WIDTH))
        assert handle.stats().offloaded_bytes > 0
        return {nbytes // count for count, nbytes in handle._engine.last_pass.sites.values()}


@pytest.mark.timeout(300)
def test_weights_of_fsdp1_units_that_are_gathered_in_compiled_code_are_known() -> None:
    cases = {f"{n} {original}": (_saved, (n, original)) for n in (1, 2) for original in (True, False)}
    found = run_cases(cases, 2, timeout_seconds=60.0)
    assert {name: case.values() for name, case in found.items()} == dict.fromkeys(cases, [{ROWS * WIDTH * 4}] * 2)
