"""Trust: each block is compared, every recompute carries a fingerprint, verdicts do not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action, Site
from ebbtide.base.errors import RestoreError
from ebbtide.base.events import Bus
from ebbtide.engine.fingerprint import Compared, Fingerprint, can_be_taken, host_sample
from ebbtide.engine.layout import Layout
from ebbtide.engine.tickets import Entry, Expr
from ebbtide.engine.trust import STEPS_BETWEEN, Trust
from ebbtide.schedule import LiveCount
from tests.helpers.engines import REMAKE, ByTable, forward_pass, leaf, open_engine
from tests.helpers.twice import Stack, check, check_refused, sgd, step_of

# Fingerprints

TENSORS = {
    "matrix": lambda: torch.randn(300, 48),
    "bfloat16": lambda: torch.randn(4, 96, 64).bfloat16(),
    "transposed": lambda: torch.randn(64, 80).t(),
    "channels last": lambda: torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 500, 1).expand(3, 500, 7),
    "a part": lambda: torch.randn(100, 100)[3:77, 5:50],
    "complex": lambda: torch.randn(40, 40, dtype=torch.complex64),
    "bool": lambda: torch.randn(30, 30) > 0,
    "small": lambda: torch.randn(7),
    "scalar": lambda: torch.tensor(3.0),
    "no number": lambda: torch.full((20, 20), float("nan")),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_fingerprint_is_of_values_and_not_of_memory(kind: str, whole: bool) -> None:
    tensor = TENSORS[kind]()
    taken = Fingerprint(tensor, full=whole)
    assert taken.same(tensor) is True
    assert taken.same(tensor.clone()) is True
    assert taken.same(tensor.contiguous().clone()) is True
    other = tensor.clone() if tensor.dtype is torch.bool else tensor.clone() + 1
    assert taken.same(~other if tensor.dtype is torch.bool else torch.nan_to_num(other, 5.0)) is False


def test_one_changed_number_is_seen_by_a_whole_fingerprint() -> None:
    tensor = torch.randn(1000, 37)
    whole = Fingerprint(tensor, full=True)
    for place in torch.randint(tensor.numel(), (50,)):
        changed = tensor.clone()
        changed.view(-1)[place] += 1
        assert whole.same(changed) is False


def test_a_changed_row_column_or_stretch_is_seen_by_a_sample() -> None:
    tensor = torch.randn(512, 256)
    sample = Fingerprint(tensor)
    for part in (slice(3, 7), (slice(None), slice(8, 12)), slice(500, 512)):
        changed = tensor.clone()
        changed[part] += 1
        assert sample.same(changed) is False, part


def test_a_sample_of_host_memory_is_of_values_in_any_layout() -> None:
    square = torch.randn(40, 40)
    sample = host_sample(square.t())
    assert sample is not None
    assert sample.same(square.t())
    assert sample.same(square.t().contiguous())
    assert not sample.same(square), "the same memory, other values"
    assert not sample.same(square.t() + 1)
    assert not sample.same(square.t()[None])
    assert not sample.same(square.t().view(torch.int32)), "the same bytes, another type"
    longer = torch.randn(4000, 4000)
    assert not sample.same(longer), "more elements than memory of that layout has"
    assert host_sample(square[:, ::2]) is None and host_sample(square[0].expand(3, 40)) is None


def test_what_has_no_memory_of_its_own_has_no_fingerprint() -> None:
    assert not can_be_taken(torch.empty(0)) and not can_be_taken(torch.empty(3, device="meta"))
    assert not can_be_taken(torch.eye(3).to_sparse()) and not can_be_taken(torch.randn(3, dtype=torch.complex64).conj())


def test_the_first_run_of_a_block_and_then_one_in_some_are_compared_whole() -> None:
    trust, blocks = Trust(Bus()), 4
    assert [trust.begin_block(str(n), ("kind",), accelerator=True) for n in range(blocks)] == [Compared.FULL] * blocks
    steps = 200 * STEPS_BETWEEN
    found = [trust.begin_block(str(n % blocks), ("kind",), accelerator=True) for n in range(steps * blocks)]
    assert 100 < found.count(Compared.FULL) < 400 and Compared.SAMPLE not in found
    on_host = {trust.begin_block("0", ("kind",), accelerator=False) for _ in range(2000)}
    assert on_host == {Compared.SAMPLE, Compared.FULL}


def test_what_a_device_answers_later_is_raised_before_an_optimizer_steps() -> None:
    trust = Trust(Bus())
    trust.require(torch.tensor(True), lambda: RestoreError("never"))
    trust.await_comparisons()
    trust.require(torch.tensor(False), lambda: RestoreError("wrong"))
    with pytest.raises(RestoreError, match="wrong"):
        trust.await_comparisons()
    trust.await_comparisons()  # logged once


# In training


class Clamped(nn.Module):
    """Changes, under no_grad, an unsaved value."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.up, self.down, self.on = nn.Linear(16, 16), nn.Linear(16, 16), on

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.on:
            with torch.no_grad():
                h.clamp_(-0.1, 0.1)
        return x + self.down(h.view(-1, 16).exp())


squares = step_of(lambda model: model(torch.randn(8, 16, requires_grad=True)).square().mean())


def test_a_change_in_deeper_blocks_only_is_found_before_use() -> None:
    check(lambda: sgd(Stack(*(Clamped(on) for on in (False, True, True)))), squares)


def test_a_change_that_begins_late_is_an_error_and_the_site_is_offloaded_from_then_on() -> None:
    def step(model: Any, number: int) -> Tensor:
        for block in model.blocks:
            block.on = number >= 3
        return squares(model, number)

    def make() -> nn.Module:
        return sgd(Stack(*(Clamped(False) for _ in range(3))), 0.001)

    check_refused(make, step, RestoreError, policies=("minimal",))
    model: Any = make()
    with ebbtide.enable_activation_offloading(model, policy="minimal", target="disk", min_bytes=0) as handle:
        for number in range(3):
            step(model, number)
        with pytest.raises(RestoreError, match="differs from what was saved"):
            step(model, 3)
        assert handle.stats().demoted_sites
        step(model, 4)


class Doubled(torch.autograd.Function):
    """Its backward changes its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.saved_tensors[0].mul_(0.5)
        return grad * 2


def test_a_copy_in_the_same_type_is_recomputed_as_a_copy() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return torch.sin(h) + Doubled.apply(h.to(h.dtype, copy=True))

    check(lambda: sgd(Stack(Copies(), Copies())), squares)


def test_an_embedding_that_renormalises_in_two_forwards_before_one_backward() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(10, 16, max_norm=1.0), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(F.silu(x + self.table(torch.arange(8)).sin()))

    twice = step_of(lambda model: model(torch.randn(8, 16)).mean() + model(torch.randn(8, 16)).square().mean())
    check(lambda: sgd(Stack(Embeds(), Embeds())), twice)


def test_scheduled_numbers_and_new_lengths_make_no_new_verdicts() -> None:
    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.number = nn.Linear(16, 16), nn.Linear(16, 16), 1.0

        def forward(self, x: Tensor) -> Tensor:
            h = torch.add(self.up(x), x, alpha=self.number).clamp(max=self.number) ** (1 + self.number)
            return x + self.down(h.exp())

    model: Any = Stack(Scheduled(), Scheduled())
    with ebbtide.enable_activation_offloading(model, policy="auto", target="disk", min_bytes=0) as handle:
        known = set()
        for number in range(30):
            for block in model.blocks:
                block.number = 1 / (number + 1)
            model(torch.randn(4 + number % 11, 16).abs()).mean().backward()
            known.add(len(handle._engine.trust._verdicts))
    assert max(known) < 12 and len(known) < 4, known


def test_a_recipe_on_another_device_is_left_out() -> None:
    trust, base = Trust(Bus()), torch.ones(4)
    layout, site = Layout.of(base), Site("block", "", "node", 0)
    entry = Entry(torch.empty(0), site=site, region=(0, 16), base_layout=layout, at=0, live=LiveCount())
    recipe = Expr(torch.ones_like, (), key=("made elsewhere",))
    assert not trust.holds(("block",), entry, recipe, base, lambda: torch.ones(4, device="meta"))
    assert trust.demoted[site] == "made on meta, not on cpu"


def test_no_verdict_is_missing_once_all_recipes_were_compared() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.LayerNorm(64), nn.GELU()) for _ in range(3)])
    x, seen = torch.randn(64, 64), list[int]()
    with ebbtide.enable_activation_offloading(model, policy="minimal", blocks=["0", "1", "2"], min_bytes=0) as handle:
        for _ in range(4):
            model(x).sum().backward()
            seen.append(handle._engine.trust.unsure)
    assert seen[0] > 0 and seen[1] == seen[2] == seen[3]


def test_no_verdict_is_missing_of_recipes_with_a_kept_operand() -> None:
    """It has an entry in the first pass, and none once it is replayed."""
    plan = ByTable(lambda c: Action.KEEP if c.site.node == "SinBackward0" else REMAKE.choose(c))
    x, seen = leaf(64, 64), list[int]()
    with open_engine(plan) as engine:
        for _ in range(4):
            with forward_pass(engine, x):
                y = x.sin().cos().exp()
            y.sum().backward()
            seen.append(engine.trust.unsure)
        assert engine.stats().recomputed_bytes and engine.stats().kept_bytes and engine.stats().replayed
    assert seen[0] > 0 and len(set(seen)) == 1
