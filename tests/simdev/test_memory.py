"""Device memory by the device's own count: bytes in use after a forward, exactly, and the peak of a step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.engine.fingerprint import Fingerprint
from ebbtide.engine.layout import checksum
from ebbtide.track import summarise
from tests.gpu.test_first_light import _batch, _model, _same, _step
from tests.helpers.accelerator import on_device
from tests.helpers.models import Tiny, build
from tests.helpers.oracle import differences
from tests.helpers.sizes import Size
from tests.helpers.twice import hard
from tests.simdev.device import configured

SIZE = Size(batch=4, tokens=256, pixels=32, layers=6)
MODELS = ("mlp", "attention", "conv", "llama", "gpt2")
MIB = 1 << 20
ROUNDED = 512
"""What the allocator makes of each request."""


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDED) * ROUNDED


def allocated() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def peak_of(step: Callable[[], object], *, warm: int = 3) -> int:
    """Return the most bytes that a settled step takes beyond those in use before it."""
    for _ in range(warm):
        step()
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    step()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def big(name: str) -> Tiny:
    return on_device(build(name, size=SIZE))


@pytest.mark.parametrize("policy", ["offload", "minimal"])
@pytest.mark.parametrize("name", ["mlp", "attention", "conv", "dropout", "block"])
def test_after_a_forward_nothing_is_there_but_its_output_and_what_is_kept(name: str, policy: str) -> None:
    tiny = big(name)
    with ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1) as handle:
        handle._engine.trust.fingerprints = False
        for _ in range(3):  # in the third step a block runs without hooks, to be timed
            tiny.step()
        tiny.model.zero_grad(set_to_none=True)
        before = allocated()
        loss, outputs = tiny.loss()
        taken, stats = allocated() - before, handle.stats()
        outside = sum(rounded(v.untyped_storage().nbytes()) for v in {id(v): v for v in outputs.values()}.values())
        assert stats.kept_bytes == 0 and stats.unique_bytes > 4 * outside
        assert taken == outside + rounded(loss.untyped_storage().nbytes())
        loss.backward()


class Hard(torch.nn.Module):
    """Saves tensors that no rule recomputes, so it is checkpointed; its one input is offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hard(self.up(x))


def test_a_checkpointed_block_holds_nothing_on_the_device() -> None:
    device = torch.accelerator.current_accelerator()
    model = torch.nn.Sequential(*(Hard() for _ in range(6))).to(device)
    x = torch.randn(512, 256, device=device)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, window=1) as handle:
        for _ in range(4):
            model(x).sum().backward()
        assert handle.stats().checkpointed_blocks == 6
        before = allocated()
        loss = model(x).sum()
        assert allocated() - before == ROUNDED  # only the loss
        loss.backward()


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_minimal_is_at_most_that_of_checkpoints(name: str) -> None:
    checkpointed = big(name)
    for block in checkpointed.block_list():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    theirs = peak_of(checkpointed.step)
    plain, tiny = big(name), big(name)
    kept = peak_of(plain.step)
    with ebbtide.enable_activation_offloading(tiny.model, policy="minimal", min_bytes=0, window=1):
        ours = peak_of(tiny.step)
        assert differences(plain.step(), tiny.step()) == []
    print(f"{name}: plain {kept}, checkpointed {theirs}, minimal {ours} bytes")
    assert ours <= theirs < kept


PLANS: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "inputs": {"policy": "inputs"},
    "offload": {"policy": "offload"},
    "minimal": {"policy": "minimal"},
    "mixed": {"policy": "offload", "tensor_filter": lambda tensor: tensor.shape[-1] == SIZE.width},
}
"""Everything kept; nothing; some."""


def peak_and_kept(name: str, layers: int, plan: dict[str, Any]) -> tuple[int, int]:
    """Return the most bytes that a step takes, without weights, gradients and inputs, and those the plan keeps."""
    tiny = on_device(build(name, size=replace(SIZE, batch=2, tokens=64, pixels=16, layers=layers)))
    with ebbtide.enable_activation_offloading(tiny.model, min_bytes=0, window=1, **plan) as handle:
        handle._engine.trust.fingerprints = False  # of one block in fifty steps
        peak = peak_of(lambda: tiny.loss()[0].backward(), warm=6)
        return peak, handle.stats().kept_bytes


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "bert", "phi"])
def test_the_peak_is_what_the_plan_keeps_and_what_one_block_needs(name: str, plan: str) -> None:
    """A deeper model needs exactly the extra kept bytes: the rest is the work of one block and of the head."""
    (peak, kept), (deeper, more) = (peak_and_kept(name, layers, PLANS[plan]) for layers in (2, 4))
    print(f"{name}, {plan}: kept {kept} and {more}, peak {peak} and {deeper}, the rest {peak - kept} bytes")
    assert (more > kept) is (plan in ("keep", "inputs", "mixed"))
    assert peak - kept == deeper - more > 0


def test_a_checksum_takes_little_memory() -> None:
    data = torch.ones(8 * MIB, dtype=torch.uint8, device="simdev")
    assert peak_of(lambda: checksum(data)) <= 48 * MIB  # all at once would take about 200


SHARES = (0.9, 0.5, 0.0)
"""Of what plain training takes."""
SEGMENT = 4 * MIB
"""The allocator takes 20 MiB at once: for a device this small that is like 5 GiB for a real one."""


def reserved() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved()


@pytest.fixture
def small_segments() -> Iterator[None]:
    reserved()
    with configured(middle_segment=SEGMENT):
        yield
        reserved()


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
@pytest.mark.usefixtures("small_segments")
def test_a_device_that_is_full_from_the_first_step_on(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each step equals ordinary training, or raises torch's own error; with room, training works again."""
    caplog.set_level("DEBUG")  # a kept log record holds nothing of the step
    model, x = _model(width=128, depth=4), _batch(width=128, tokens=2048)
    plain = _step(model, x)
    before = reserved()
    torch.accelerator.reset_peak_memory_stats()
    _step(model, x)
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_reserved()
    fits: dict[str, list[float]] = {"keep": [], policy: []}
    for share, (name, shares) in product(SHARES, fits.items()):
        model.zero_grad()
        reserved()
        with ebbtide.enable_activation_offloading(model, policy=name, min_bytes=0, window="1MiB") as handle:
            try:
                with configured(capacity=before + int(share * (peak - before))):
                    for _ in range(4):
                        assert _same(plain, _step(model, x)), (name, share)
                shares.append(share)
            except torch.OutOfMemoryError as error:
                assert "out of memory" in str(error)
            assert _same(plain, _step(model, x)), (name, share)  # there is room again
            stats = handle.stats()
            assert stats.live_tickets == stats.store_bytes == 0 and stats.demoted_sites == ()
    assert fits["keep"] == [] and 0.9 in fits[policy] and 0.0 not in fits[policy], fits


class _WorkOfBackward(torch.autograd.Function):
    """Allocates memory in backward and frees it before it could be sampled, like the gradient of logits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.empty(200 * MIB, dtype=torch.uint8, device=grad.device)
        return grad


@pytest.mark.parametrize("policy", [None, "offload"])
def test_the_peak_of_a_run_is_that_of_the_allocator(policy: str | None, tmp_path: Path) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = None if policy is None else ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0)
    with handle or nullcontext(), ebbtide.track_memory(tmp_path, model=model):
        for _ in range(4):
            _WorkOfBackward.apply(model(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = summarise(tmp_path)
    inside, phases = found["inside"], found["phases"]
    assert 200 * MIB < inside["peak_bytes"] == phases["backward"]["peak_bytes"]
    levels = inside["floor_bytes"], inside["activation_bytes"], phases["optimizer"]["peak_bytes"]
    assert max(levels) < 64 * MIB < found["peak_device_bytes"]


@pytest.mark.parametrize("shape", [(8, 4, 1 << 20), (1 << 20, 8, 4)])
def test_a_comparison_of_all_bytes_takes_little_memory(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="simdev").transpose(0, 1)
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    first = Fingerprint(x, full=True)
    assert first.same(x)
    assert torch.accelerator.max_memory_allocated() - before < x.nbytes * 5 // 8
    other = x.contiguous()
    assert first.same(other) and Fingerprint(other, full=True).same(x)
    other[-1, -1, -1] += 1
    assert not first.same(other)


def test_the_peak_hardly_depends_on_the_host_budget_if_there_is_a_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stage on the way to disk has 0.5 to 4 MiB, and storages have up to 5 MiB."""
    tiny = on_device(build("mlp", size=replace(SIZE, batch=16, tokens=1024, layers=4)))
    expected, peaks = tiny.step(), list[int]()
    for budget in (4, 8, 16, 32):
        with ebbtide.enable_activation_offloading(
            tiny.model, policy="offload", target="host", min_bytes=0, window=1, host_budget=budget * MIB,
            disk_path=tmp_path,
        ) as handle:  # fmt: skip
            peaks.append(peak_of(tiny.step, warm=2))
            assert differences(expected, tiny.step()) == []
            found = handle.stats()
        assert found.kept_bytes == found.total_refused_bytes == 0 < found.store["disk_written_bytes"]
    assert max(peaks) - min(peaks) <= 5 * MIB, peaks  # of a storage in one piece, the next may be there ahead
    assert not [record for record in caplog.records if "stays on the device" in record.message]


@pytest.mark.parametrize("policy", ["offload", "minimal"])
def test_a_context_around_a_whole_step_takes_no_more_than_one_around_its_forward(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its backward has read is released at once, as in ordinary training."""
    monkeypatch.setattr("ebbtide.api._idle_engines", {})
    device = torch.accelerator.current_accelerator()
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU()] * 10
    model, x = torch.nn.Sequential(*layers).to(device), torch.randn(1024, 256, device=device)
    context = ebbtide.offload_saved_tensors(policy=policy, min_bytes=0, window="1B")

    def step() -> None:
        model(x).square().mean().backward()

    def around_its_forward() -> None:
        with context:
            loss = model(x).square().mean()
        loss.backward()

    plain, forward, whole = peak_of(step), peak_of(around_its_forward), peak_of(context(step))
    print(f"{policy}: plain {plain}, around the forward {forward}, around the step {whole} bytes")
    assert whole <= forward + rounded(x.nbytes) < plain
