"""The simulated machine: costs of operators, live memory, and real tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

import pytest
import torch

from ebbtide.planner.machines import Machine
from ebbtide.profiling.attention import FusedAttention
from ebbtide.profiling.faketensors import REAL_BYTES, FakeMachine, FakeTensorTier, without_bytes

MACHINE = Machine(
    name="slow", memory_bytes=1 << 30, flop_per_second=1e9, flop32_per_second=1e8, attention_flop_per_second=1e7,
    memory_bytes_per_second=1e6, out_bytes_per_second=1e5, in_bytes_per_second=1e5, host_memory_bytes=1 << 30,
    host_bytes_per_second=1e5, launch_seconds=1e-9,
)  # fmt: skip


@pytest.fixture
def machine() -> Generator[FakeMachine]:
    machine = FakeMachine(MACHINE, 1000)
    with without_bytes(), machine:
        yield machine


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def took(machine: FakeMachine, before: float) -> float:
    return machine.seconds(before, machine.timestamp(None))


def test_a_product_costs_its_flop_and_an_addition_its_bytes(machine: FakeMachine) -> None:
    one = fake(1000, 1000)
    before = machine.timestamp(None)
    _ = one @ one
    assert took(machine, before) == pytest.approx(2e9 / 1e8)
    before = machine.timestamp(None)
    _ = one + one
    assert took(machine, before) == pytest.approx(3 * 4e6 / 1e6)
    half = one.bfloat16()
    before = machine.timestamp(None)
    _ = half @ half
    assert took(machine, before) == pytest.approx(max(2e9 / 1e9, 3 * 2e6 / 1e6))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_costs_its_flop(machine: FakeMachine, transposed: bool) -> None:
    rows, ends = fake(512, 64, dtype=torch.bfloat16), torch.tensor([128, 256, 384, 512], dtype=torch.int32)
    others = fake(512, 256, dtype=torch.bfloat16) if transposed else fake(4, 64, 256, dtype=torch.bfloat16)
    machine._machine = dataclasses.replace(MACHINE, memory_bytes_per_second=1e12)
    before = machine.timestamp(None)
    made = torch.ops.aten._grouped_mm(rows.t() if transposed else rows, others, ends)
    assert made.shape == ((4, 64, 256) if transposed else (512, 256))
    assert took(machine, before) == pytest.approx(2 * 512 * 64 * 256 / 1e9)
    if not transposed:
        pytest.importorskip("transformers.integrations.moe")
        before = machine.timestamp(None)
        torch.ops.transformers.grouped_mm_fallback(rows, others, ends)
        torch.ops.transformers.grouped_mm_fallback_backward(rows, others, ends, made)
        assert took(machine, before) == pytest.approx(3 * 2 * 512 * 64 * 256 / 1e9)


def test_views_and_empty_memory_cost_nothing(machine: FakeMachine) -> None:
    one = fake(100, 100)
    before = machine.timestamp(None)
    _ = one.view(-1)[10:].reshape(-1, 90).t(), torch.empty(10, 10), one.detach()
    assert took(machine, before) == 0
    one.add_(1)
    assert took(machine, before) == pytest.approx(2 * 40_000 / 1e6, rel=0.5)


def test_causal_attention_needs_half_of_the_pairs(machine: FakeMachine) -> None:
    query = fake(1, 2, 512, 64, dtype=torch.bfloat16)
    seconds: list[float] = []
    for causal in (False, True):
        before = machine.timestamp(None)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
        seconds.append(took(machine, before))
    assert seconds[0] == pytest.approx(4 * 2 * 512 * 512 * 64 / 1e7)
    assert seconds[1] == pytest.approx(seconds[0] / 2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_values_of_another_width_costs_the_flop_of_fused_attention(
    machine: FakeMachine, causal: bool
) -> None:
    query, value = (fake(1, 2, 512, width, dtype=torch.bfloat16).requires_grad_() for width in (192, 128))
    pairs = 2 * 512 * 512 / (2 if causal else 1)
    with FusedAttention():
        before = machine.timestamp(None)
        result = torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=causal)
        assert took(machine, before) == pytest.approx(2 * pairs * (192 + 128) / 1e7)
        gradient = torch.empty_like(result)
        before = machine.timestamp(None)
        result.backward(gradient)
    assert took(machine, before) == pytest.approx(2 * pairs * (3 * 192 + 2 * 128) / 1e7, rel=0.1)


def test_what_lives_counts_until_it_dies(machine: FakeMachine) -> None:
    assert machine.take_peak_bytes() == 1000
    one = fake(100)
    two = one + 1
    view = two.view(10, 10)
    assert machine.take_peak_bytes() == 1000 + 800
    del one, two
    assert machine.take_peak_bytes() == 1000 + 800  # the peak since the last call, which was before they died
    assert machine.take_peak_bytes() == 1000 + 400  # a view holds its storage
    del view
    machine.take_peak_bytes()
    assert machine.take_peak_bytes() == 1000


def test_base_memory_is_not_counted_twice() -> None:
    with without_bytes():
        weight, other = fake(100), fake(100)
        machine = FakeMachine(MACHINE, 1000)
        machine.ignore([weight])
        with machine:
            _ = weight.view(-1)
            assert machine.take_peak_bytes() == 1000
            _ = other.view(-1)
            assert machine.take_peak_bytes() == 1400


def test_what_is_made_of_no_weights_is_real_and_may_be_asked(machine: FakeMachine) -> None:
    positions = torch.arange(5)
    assert (positions + 1).sum().item() == 15 and bool((positions >= 0).all())
    mask = positions > 2
    rows = fake(5, 7)
    assert rows[mask].shape == (2, 7)
    rows[mask] = 0.0
    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        rows.sum().item()


def test_large_values_are_fake_tensors_even_so(machine: FakeMachine) -> None:
    many = torch.zeros(REAL_BYTES // 4 + 1)
    assert isinstance(many, torch._subclasses.fake_tensor.FakeTensor)
    assert not isinstance(torch.zeros(10), torch._subclasses.fake_tensor.FakeTensor)


def test_real_bytes_come_back_from_the_tier_as_they_were(machine: FakeMachine) -> None:
    tier = FakeTensorTier()
    real = torch.arange(10).view(torch.uint8)
    (slot,) = tier.copy_out_all([real])
    assert tier.are_copied_out([slot]) and not slot.cancel()
    back = slot.take()
    assert back.untyped_storage() is not real.untyped_storage() and back.tolist() == real.tolist()
    slot.free()
    (paper_slot,) = tier.copy_out_all([fake(10, dtype=torch.uint8)])
    assert paper_slot.take().shape == (10,)
