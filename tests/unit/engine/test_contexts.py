"""``offload_saved_tensors`` around whole steps: backwards run while it is open."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from benchmarks.nodevice import NoDevice
from ebbtide.store.host import HostTier
from ebbtide.store.meter import HostMeter
from tests.helpers.engines import POLICIES, assert_nothing_left, hooks_are_closed, in_thread, leaf
from tests.helpers.oracle import same_bits
from tests.unit.wrap.test_replay import batch, stack

STEPS = 4
POLICY = pytest.mark.parametrize("policy", POLICIES)

Step = Callable[[int], None]


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores in host memory, without a device, and no engines of earlier tests."""
    monkeypatch.setattr("ebbtide.api.open_tier", lambda *given, **options: HostTier(NoDevice()))
    monkeypatch.setattr("ebbtide.store.meter.DeviceMeter", lambda device: HostMeter())
    monkeypatch.setattr("ebbtide.api._idle_engines", {})
    yield


def loss_of(model: nn.Module, number: int) -> Tensor:
    wide = model(batch(5, number)).bfloat16().float()
    return (wide * wide).mean()


def trained(around: Callable[[Step], Step] = lambda step: step) -> list[Tensor]:
    """Return the weights after some steps.

    Args:
        around: What is done with the function of a step.
    """
    model = copy.deepcopy(stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = around(step)
    for number in range(STEPS):
        step(number)
    return [p.detach() for p in model.parameters()]


@POLICY
def test_a_step_that_is_decorated(policy: str) -> None:
    offloaded = ebbtide.offload_saved_tensors(policy=policy, min_bytes=0)
    assert all(map(same_bits, trained(), trained(offloaded)))
    assert offloaded.stats().packs > 0 and offloaded.stats().store_bytes == 0 and hooks_are_closed()
    assert offloaded._latest is not None
    assert_nothing_left(offloaded._latest)


@POLICY
def test_a_loop_inside_the_context(policy: str) -> None:
    """Each step is a pass of its own: replayed, and the figures are those of one step."""
    expected, packs = trained(), set[int]()
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as offloaded:

        def counted(step: Step) -> Step:
            def run(number: int) -> None:
                step(number)
                engine = offloaded._latest
                assert engine is not None
                packs.add(engine.last_tally.packs)
                assert not engine.guard._by_storage(), "no weight is copied before an optimizer steps"
                assert_nothing_left(engine)

            return run

        assert all(map(same_bits, expected, trained(counted)))
        assert len(packs) == 1 and packs != {0}
        stats = offloaded.stats()
        assert policy in ("auto", "minimal") or stats.replayed > 0.8 * stats.packs
    assert offloaded.stats().packs in packs and hooks_are_closed()


@pytest.mark.parametrize("policy", ["keep", "offload", "minimal"])
def test_what_a_backward_inside_the_context_has_read_is_released_at_once(policy: str) -> None:
    x, alive = leaf(64, 64), list[int]()

    def chain(offloaded: ebbtide.offload_saved_tensors | None) -> Tensor:
        y = x
        for place in range(20):
            y = y.sin().exp()
            if offloaded is not None and place == 3:
                y.register_hook(lambda gradient: alive.append(offloaded.stats().live_tickets))
        return y.sum()

    expected = torch.autograd.grad(chain(None), x)
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as offloaded:
        loss = chain(offloaded)
        saved = len(offloaded._latest.live_tickets)
        assert same_bits(torch.autograd.grad(loss, x)[0], expected[0])
        assert saved > 36 and alive == [alive[0]] and alive[0] < saved / 2, (saved, alive)


@POLICY
def test_a_gradient_that_is_recorded_is_a_part_of_the_forward(policy: str) -> None:
    """As in forces that are trained on."""
    x, w = leaf(6, 8), leaf(8, 8, parameter=True)

    def loss() -> Tensor:
        energy = (torch.tanh(x @ w) * x.sin()).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return (energy + force.square().sum()).sin()

    expected = torch.autograd.grad(loss(), [x, w])
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as around:
        wanted = loss()
        assert around._latest is not None and not around._latest.last_tally.packs, "no pass has ended"
    packs = around.stats().packs
    assert all(map(same_bits, expected, torch.autograd.grad(wanted, [x, w])))
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as inside:
        for _ in range(STEPS):
            assert all(map(same_bits, expected, torch.autograd.grad(loss(), [x, w])))
            assert inside.stats().packs == packs > 0
            assert_nothing_left(inside._latest)


@POLICY
def test_graphs_that_overlap_inside_the_context(policy: str) -> None:
    """One forward more before each backward, a graph that is read twice, and one that is dropped."""
    x = leaf(16, 16)

    def forward(number: int) -> Tensor:
        y = (x * (number + 1)).sin()
        return (y.exp() * y).sum()

    expected = [torch.autograd.grad(forward(number), x)[0] for number in range(5)]
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as offloaded:
        former = forward(0)
        for number in range(1, 5):
            latter, dropped = forward(number), forward(number)
            for again in (True, False):
                (gradient,) = torch.autograd.grad(former, x, retain_graph=again)
                assert same_bits(gradient, expected[number - 1])
            former = latter
            del latter, dropped
        assert same_bits(torch.autograd.grad(former, x)[0], expected[4])
        del former
        assert_nothing_left(offloaded._latest)


def test_a_backward_that_raises_inside_the_context() -> None:
    x = leaf(16, 16)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)

    def stop(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError

    with ebbtide.offload_saved_tensors(policy="minimal", min_bytes=0) as offloaded:
        y = x.sin()
        y.register_hook(stop)
        z = y.exp().sum()
        with pytest.raises(ZeroDivisionError):
            z.backward()
        del y, z
        assert same_bits(torch.autograd.grad(x.sin().exp().sum(), x)[0], expected)
        assert_nothing_left(offloaded._latest)
    assert hooks_are_closed()


@POLICY
def test_a_backward_in_another_thread_inside_the_context(policy: str) -> None:
    """As on a device. A later pass, of whichever thread, takes no operator of this one for its own."""
    x = leaf(16, 16)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    with ebbtide.offload_saved_tensors(policy=policy, min_bytes=0) as offloaded:
        for _ in range(STEPS):
            loss = x.sin().exp().sum()
            (found,) = in_thread(lambda: torch.autograd.grad(loss, x))  # noqa: B023
            assert same_bits(found, expected)
    number = loss.grad_fn._sequence_nr()
    in_thread(offloaded._latest.begin_pass)
    assert offloaded._latest.weights.since > number
    assert_nothing_left(offloaded._latest)
