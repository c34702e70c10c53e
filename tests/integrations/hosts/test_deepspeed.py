"""DeepSpeed's ZeRO on two ranks: losses and parameters bitwise those of DeepSpeed alone."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ebbtide
from tests.dist.trial import _Recompute, follow
from tests.helpers.hosts import Trained, differences, trained
from tests.helpers.models import WIDTH, Block
from tests.helpers.spawn import CaseResult, run_cases

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

LAYERS, STEPS = 3, 6
POLICIES = ("offload", "minimal", "recompute", "auto")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train.

    Attributes:
        stage: Stage of ZeRO.
        persistence: Parameters with fewer numbers stay unsharded under ZeRO-3.
        bf16: Train in bfloat16.
        offload: ZeRO-Offload: the optimizer's state is in host memory.
        place: ``"before"`` DeepSpeed wraps the model, the ``"engine"``, or its ``"module"``.
    """

    stage: int
    persistence: int = 0
    bf16: bool = False
    offload: bool = False
    place: str = "module"


SETUPS = {
    "ZeRO-2": Setup(stage=2, place="engine"),
    "ZeRO-2, bfloat16, before": Setup(stage=2, bf16=True, place="before"),
    "ZeRO-3": Setup(stage=3),
    "ZeRO-3, engine, small weights stay": Setup(stage=3, persistence=100, place="engine"),
    "ZeRO-3, bfloat16, ZeRO-Offload, before": Setup(stage=3, bf16=True, offload=True, place="before"),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def compare(setup: Setup) -> dict[str, tuple[list[str], str, ebbtide.Stats]]:
    """Train with DeepSpeed alone, then with each policy; return differences, the strategy found, and the figures."""
    plain, found = _train(setup, None)[0], {}
    assert len({loss.item() for loss in plain.losses}) > 1
    for policy in POLICIES:
        ours, strategy = _train(setup, policy)
        assert ours.stats is not None
        found[policy] = differences(plain, ours), strategy, ours.stats
    return found


def _train(setup: Setup, policy: str | None) -> tuple[Trained, str]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from ebbtide.wrap.strategy import found_strategy

    torch.manual_seed(0)
    model, handle = Model(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if setup.place == "before":
        handle = _enable(model, policy)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(setup), dist_init_required=False)
    if setup.place != "before":
        handle = _enable(engine if setup.place == "engine" else engine.module, policy)
    losses: list[Tensor] = []
    for step in range(STEPS):
        batch = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 6, WIDTH, generator=batch)
        loss = engine(x.bfloat16() if setup.bf16 else x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    result = trained(losses, nn.Module(), handle)
    strategy = found_strategy(engine if setup.place == "engine" else engine.module)
    for name, p in model.named_parameters():
        result.parameters[name] = safe_get_full_fp32_param(p).clone()
    if handle is not None:
        handle.close()
    return result, strategy


def _enable(model: nn.Module, policy: str | None) -> ebbtide.Handle | None:
    if policy is None:
        return None
    recompute = policy == "recompute"
    handle = ebbtide.enable_activation_offloading(model, policy="minimal" if recompute else policy, min_bytes=0)
    if recompute:
        follow(handle, _Recompute(handle.plan))
    return handle


def _config(setup: Setup) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setup.stage, "stage3_param_persistence_threshold": setup.persistence}
    if setup.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": setup.bf16},
    }


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected cases, in one group of processes."""
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    return run_cases({name: (compare, (SETUPS[name],)) for name in wanted}, 2, timeout_seconds=120.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETUPS)
def test_training_is_bitwise_that_of_deepspeed_alone(results: dict[str, CaseResult], name: str) -> None:
    setup = SETUPS[name]
    for by_policy in results[name].values():
        for policy, (different, strategy, stats) in by_policy.items():
            assert different == [], (policy, different)
            assert stats.packs > 0 and stats.live_tickets == 0, policy
            assert strategy == ("deepspeed" if setup.place == "engine" or setup.stage == 3 else "single")
        assert by_policy["offload"][2].total_copy_out_bytes > 0
        if setup.stage == 3:  # with sharded weights one rank may not checkpoint a block alone
            assert by_policy["auto"][2].checkpointed_blocks == 0
