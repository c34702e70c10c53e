"""How often saved tensors are replayed in real training: changing lengths, several live passes, routing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.api import Handle
from ebbtide.base.actions import Candidate
from tests.helpers.engines import REMAKE, ByTable
from tests.helpers.oracle import same_bits

WIDTH = 16


class Layer(nn.Module):
    """Attention and a gated MLP, or experts chosen for each token."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, max(experts, 1))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(experts))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        if not self.experts:
            return x + self.down(F.silu(self.up(x)) * x)
        choice, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                out = out.masked_scatter(chosen[..., None], expert(x[chosen]))
        return x + out


def stack(experts: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(experts) for _ in range(3)))


@contextmanager
def pair(policy: str, experts: int = 0) -> Generator[tuple[nn.Module, nn.Module, Handle]]:
    """Return a model under a policy, its twin without, and the handle."""
    model, chosen = stack(experts), REMAKE if policy == "recompute" else policy
    twin = copy.deepcopy(model)
    with ebbtide.enable_activation_offloading(model, policy=chosen, min_bytes=0, target="disk") as handle:
        yield model, twin, handle


def check(model: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or (other.grad is not None and same_bits(one.grad, other.grad)), name
        one.grad = other.grad = None


def batch(tokens: int, seed: int) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_step(model: nn.Module, twin: nn.Module, x: Tensor, *, autocast: bool = False) -> None:
    for m in (model, twin):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = m(x).float().square().mean()
        loss.backward()
    check(model, twin)


def share(handle: Handle) -> float:
    """Return the replayed share of the saved tensors of the latest pass."""
    stats = handle.stats()
    return stats.replayed / stats.packs


POLICIES = ["keep", "offload", "recompute"]


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_one_length(policy: str) -> None:
    with pair(policy) as (model, twin, handle):
        found: list[float] = []
        for seed in range(3):
            one_step(model, twin, batch(8, seed))
            found.append(share(handle))
    assert found[0] == 0 and found[1] == found[2] == 1, found


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_that_recur(policy: str) -> None:
    with pair(policy) as (model, twin, handle):
        for seed, tokens in enumerate([8, 12, 4, 8, 4, 12, 6, 8]):
            one_step(model, twin, batch(tokens, seed))
            assert (share(handle) == 1) is (seed in (3, 4, 5, 7)), (seed, tokens, share(handle))


@pytest.mark.parametrize("policy", POLICIES)
def test_more_lengths_than_are_remembered(policy: str) -> None:
    with pair(policy) as (model, twin, handle):
        for tokens in range(1, 20):
            one_step(model, twin, batch(tokens, tokens))
        known = handle._engine.known_sites
        sizes = [len(memos) for each in known.values() for module in each.memos.values() for memos in module]
        assert 0 < max(sizes) <= 16


def accumulate(model: nn.Module) -> None:
    for seed in range(2):
        model(batch(8, seed)).square().mean().backward()


def several_live(model: nn.Module) -> None:
    losses = [model(batch(8, seed)).square().mean() for seed in range(3)]
    for loss in losses:
        loss.backward()


def retain(model: nn.Module) -> None:
    loss = model(batch(8, 1)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def interleaved(model: nn.Module) -> None:
    """Alternate forwards and backwards, like the stages of a pipeline."""
    first = model(batch(8, 0)).square().mean()
    for seed in (1, 2):
        second = model(batch(8, seed)).square().mean()
        first.backward()
        first = second
    first.backward()


def frozen(model: nn.Module) -> None:
    for parameter in model[1].parameters():  # type: ignore[index]
        parameter.requires_grad_(not parameter.requires_grad)
    model(batch(8, 0)).square().mean().backward()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", [accumulate, several_live, retain, interleaved])
def test_graphs_in_any_order(way: Callable[[nn.Module], None], policy: str) -> None:
    with pair(policy) as (model, twin, handle):
        for step in range(3):
            for m in (model, twin):
                way(m)
            check(model, twin)
            assert step == 0 or share(handle) == 1


@pytest.mark.parametrize("replays", [False, True])
def test_an_input_of_two_live_passes_is_counted_once(replays: bool) -> None:
    with pair("keep") as (model, _, handle):
        handle._engine.replays = replays
        for _ in range(3):
            x = batch(8, 0).requires_grad_()
            losses: list[Tensor] = []
            kept: list[int] = []
            for _ in range(2):
                losses.append(model(x).sum())
                kept.append(handle.stats().kept_bytes)
            assert kept[0] - kept[1] == x.nbytes and handle._engine.kept.total == sum(kept)
            torch.autograd.backward(losses)
            losses.clear()
            assert handle._engine.kept.total == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_are_frozen_and_thawed(policy: str) -> None:
    with pair(policy) as (model, twin, handle):
        for _ in range(4):
            for m in (model, twin):
                frozen(m)
            check(model, twin)
        assert handle.stats().replayed > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_routing(policy: str) -> None:
    """The saved tensors of experts depend on the data; the rest of their block is replayed."""
    with pair(policy, experts=4) as (model, twin, handle):
        found: list[float] = []
        for seed in range(4):
            one_step(model, twin, batch(8, seed))
            found.append(share(handle))
    assert found[0] == 0 and all(0.2 < one < 1 for one in found[1:]), found


def test_verify_analyses_every_tensor() -> None:
    model = stack()
    with ebbtide.enable_activation_offloading(model, policy="keep", min_bytes=0, target="disk", verify=True) as handle:
        for seed in range(2):
            model(batch(8, seed)).sum().backward()
        assert handle.stats().packs > 0 and handle.stats().replayed == 0


class _Scaled(nn.Module):
    """Multiplies by an activation or, from some step on, by a buffer of the same description."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor
        self.register_buffer("table", torch.full((2, 8, WIDTH), 0.5))
        self.by_table = False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (self.table if self.by_table else x.detach() + 1)


def test_a_weight_where_an_activation_was_saved_is_not_moved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Scaled() for _ in range(3)))
    twin = copy.deepcopy(model)
    with ebbtide.enable_activation_offloading(model, policy="offload", min_bytes=0, target="disk") as handle:
        for step in range(6):
            for module in (*model, *twin):
                module.by_table = step > 3
            one_step(model, twin, batch(8, step))
            if step == 3:
                before = handle.stats().offloaded_bytes
                assert share(handle) == 1
        assert handle.stats().offloaded_bytes == before - 3 * model[0].table.nbytes


class _Norm(nn.Module):
    """A norm that computes in float32, like those of Llama, Qwen and Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class _Cast(nn.Module):
    """Casts its input, a computed tensor, or a weight: tensors of one description.

    The operand of the cast is chosen for each step; the second norm's operand is also read in its own type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.inner = _Norm(), _Norm(), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((2, 8, WIDTH), 0.5))
        self.cast = "input"

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        chosen = {"input": x, "made": made, "weight": self.scale}[self.cast].float()
        hidden = made + self.first(x) * (chosen.sin() * chosen).to(x.dtype)
        normed = self.second(made if self.cast == "made" else hidden)
        return self.down(F.silu(self.up(normed)) * hidden) + hidden


def _counts(handle: Handle) -> tuple[dict[str, int], object]:
    done = handle._engine.last_pass
    counts = {name: getattr(done.tally, name) for name in done.tally.__slots__ if name != "replayed"}
    return counts, {key: value for key, value in done.sites.items() if value[0]}


class _Heard(ByTable):
    """Recomputes if possible, and remembers the candidates of each site."""

    def heard(self) -> set[Candidate]:
        heard, self.asked = {replace(c, kept_bytes=0) for c in self.asked}, []
        return heard


@contextmanager
def analysed_too(model: nn.Module, twin: nn.Module, policy: str) -> Generator[tuple[Handle, Callable[[object], None]]]:
    """Put a model under a policy, and its twin without memos; yields the first handle, and a comparison of both."""
    plans = [_Heard(REMAKE.choose) for _ in range(2)]
    chosen = plans if policy == "recompute" else [policy, policy]
    with (
        ebbtide.enable_activation_offloading(model, policy=chosen[0], min_bytes=0, target="disk") as handle,
        ebbtide.enable_activation_offloading(twin, policy=chosen[1], min_bytes=0, target="disk") as analysed,
    ):
        analysed._engine.replays = False

        def compare(step: object) -> None:
            assert _counts(handle) == _counts(analysed), step
            assert plans[0].heard() == plans[1].heard()

        yield handle, compare


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("then", ["input", "made", "weight"])
@pytest.mark.parametrize("first", ["input", "made", "weight"])
def test_what_was_cast(first: str, then: str, policy: str) -> None:
    """Replayed from the second step on; the bytes, sites and gradients are those of an engine without memos."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Cast() for _ in range(3))).to(torch.bfloat16)
    twin = copy.deepcopy(model)
    with analysed_too(model, twin, policy) as (handle, compare):
        for step, cast in enumerate([first, first, first, then, then, then]):
            for block in (*model, *twin):
                block.cast = cast
            one_step(model, twin, batch(8, step).to(torch.bfloat16))
            compare(step)
            assert step in (0, 3) or share(handle) == 1, (step, share(handle))
    reference = copy.deepcopy(twin)
    chosen = REMAKE if policy == "recompute" else policy
    with ebbtide.enable_activation_offloading(model, policy=chosen, min_bytes=0, target="disk"):
        for step in range(3):
            one_step(model, reference, batch(8, step).to(torch.bfloat16))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_copies_that_autocast_makes_of_weights(frozen: bool, policy: str) -> None:
    """Replayed from the second step on; the bytes, sites and gradients are those of an engine without memos."""
    torch.manual_seed(0)
    model = stack()
    for layer in model if frozen else ():
        layer.up.weight.requires_grad_(False)
        layer.mix.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    with analysed_too(model, twin, policy) as (handle, compare):
        for step in range(4):
            one_step(model, twin, batch(8, step), autocast=True)
            compare(step)
            assert step == 0 or share(handle) == 1, (step, share(handle))
            with torch.no_grad():  # as an optimizer does: the copy of the next step has other values
                for m in (model, twin):
                    for parameter in m.parameters():
                        parameter.mul_(0.9)
    reference = copy.deepcopy(twin)
    chosen = REMAKE if policy == "recompute" else policy
    with ebbtide.enable_activation_offloading(model, policy=chosen, min_bytes=0, target="disk"):
        for step in range(3):
            one_step(model, reference, batch(8, step), autocast=True)
