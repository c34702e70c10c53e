"""The engine on a real device: bitwise, in order, within its memory, without growth.

Skipped, with the reason, where there is no accelerator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.base.actions import Action
from tests.helpers.accelerator import delay, needs_sleep, on_device
from tests.helpers.engines import REMAKE
from tests.helpers.models import build
from tests.helpers.oracle import differences

pytestmark = pytest.mark.gpu

POLICIES = ["keep", "offload", "inputs", "minimal", "auto"]


class Block(nn.Module):
    """A residual gated block whose sizes give saved tensors of some MiB."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.before: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _model(width: int = 512, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth))).to(torch.accelerator.current_accelerator())


def _batch(width: int = 512, tokens: int = 512) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(tokens, width).to(torch.accelerator.current_accelerator())


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_gradients_are_those_of_plain_training(name: str, dtype: torch.dtype, policy: str) -> None:
    tiny = on_device(build(name, dtype=dtype, seed=0))
    plain = tiny.step()
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window="1B") as handle:
        for _ in range(3):
            before = handle.stats().total_copy_in_bytes
            assert differences(plain, tiny.step()) == []
        assert handle.stats().live_tickets == 0
        assert policy == "keep" or handle.stats().total_copy_in_bytes > before  # steps after the first move bytes too


@needs_sleep
@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_nothing_is_read_before_its_copy_when_compute_is_late(policy: str) -> None:
    model, x = _model(), _batch()
    plain = _step(model, x)
    for block in model:
        block.before = delay
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1MiB"):
        for _ in range(3):
            assert _same(plain, _step(model, x))
            torch.full((64 * 2**20,), float("nan"), device=x.device)  # freed blocks are reused, poisoned


def test_memory_after_forward_is_what_is_kept_and_the_window() -> None:
    model, x = _model(), _batch()
    _step(model, x)
    with ebbtide.enable_activation_offloading(model, policy="offload", window="16MiB") as handle:
        _step(model, x)
        model.zero_grad()
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        loss = model(x).square().mean()
        torch.accelerator.synchronize()
        after = torch.accelerator.memory_allocated()
        stats = handle.stats()
        output = x.numel() * x.element_size()
        block = stats.unique_bytes // len(model)
        assert after - before <= stats.kept_bytes + 16 * 2**20 + block + 3 * output
        loss.backward()


@pytest.mark.parametrize("policy", ["auto", "offload"])
def test_a_hundred_steps_do_not_grow(policy: str) -> None:
    model, x = _model(width=128, depth=4), _batch(width=128, tokens=512)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle:
        sizes, moved = [], []
        for step in range(100):
            _step(model, x)
            model.zero_grad()
            moved.append(handle.stats().total_copy_in_bytes)
            if step in (9, 99):
                torch.accelerator.synchronize()
                handle._engine.trust.await_comparisons()  # those of one block in fifty steps
                assert handle.stats().store_bytes == 0  # any call of the store lets it drop its sources
                sizes.append(torch.accelerator.memory_allocated())
        assert sizes[1] <= sizes[0]
        assert moved[-1] > moved[-2] or policy == "auto", "a plan may move nothing, depending on measured times"
        assert handle.stats().live_tickets == 0
        assert handle.stats().store_bytes == 0


DEVICE_NODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "FusedRmsNormBackward0": nn.RMSNorm(6),
    "NativeDropoutBackward0": lambda x: nn.functional.dropout(x, 0.3),
    # A scale that is divided in float64 is another one.
    "NativeDropoutBackward0 of 0.15": lambda x: nn.functional.dropout(x, 0.15),
    "NativeDropoutBackward0 of 0.45": lambda x: nn.functional.dropout(x, 0.45),
    "AvgPool3DBackward0": lambda x: nn.functional.avg_pool3d(x.view(1, 1, 4, 2, 3), (3, 1, 3), 1, (1, 0, 1)).view(4, 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "node", [pytest.param(n, marks=pytest.mark.needs_cuda if "Fused" in n else ()) for n in DEVICE_NODES]
)
def test_what_only_devices_compute_is_recomputed(node: str, dtype: torch.dtype) -> None:
    device, make = torch.accelerator.current_accelerator(), DEVICE_NODES[node]
    module = make.to(device, dtype) if isinstance(make, nn.Module) else None

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module if module is not None else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.tanh()  # saved: the recipe begins from it
            y = self.inner(x) if module is not None else make(x)
            return y.sigmoid() * y  # the y that a Mul saves is behind the node

    x = torch.randn(4, 6, device=device, dtype=dtype)

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.sum().backward()
        return [y.detach(), leaf.grad]  # type: ignore[list-item]

    model = nn.Sequential(nn.Sequential(Once()), nn.Sequential(nn.Identity(), Once()))
    try:
        expected = step(model)
    except NotImplementedError as error:  # no such kernel for this dtype
        pytest.skip(f"plain training: {str(error).splitlines()[0]}")
    in_any_order = x.device.type == "cuda" and node.startswith("AvgPool3D")  # documented; it may repeat by chance
    if in_any_order or not all(_same(expected, step(model)) for _ in range(3)):
        pytest.skip("plain training does not repeat its bits")
    with ebbtide.enable_activation_offloading(model, policy=REMAKE, blocks=["0", "1"], min_bytes=0) as handle:
        for _ in range(3):
            assert _same(expected, step(model))
            handle._engine.trust.await_comparisons()
        sites = handle._engine.last_pass.sites
        assert handle.stats().demoted_sites == ()
        assert node.split()[0] in {site.node for site, action in sites if action is Action.RECOMPUTE}


def test_the_plan_of_a_model_and_a_batch_on_the_device_is_that_of_the_host() -> None:
    plans: list[str] = []
    for device in (torch.device("cpu"), torch.accelerator.current_accelerator()):
        model = nn.Sequential(nn.Embedding(50, 64), *(Block(64) for _ in range(3))).to(device)
        ids = torch.randint(0, 50, (2, 64)).to(device)
        plans.append(ebbtide.make_plan(model, ids, machine="h200", min_bytes=0).explain())
    assert plans[0] == plans[1]
