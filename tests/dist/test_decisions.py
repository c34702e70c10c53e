"""Ranks with different batches decide together which blocks are checkpointed: collectives inside blocks match."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide.base.actions import Action, Plan
from ebbtide.base.errors import RestoreError
from tests.dist.trial import Enable, Findings, Job, Record, check, compare, follow, note_step, randomise
from tests.helpers.handles import Unlimited
from tests.helpers.models import WIDTH
from tests.helpers.recipes_only import measured_minimal
from tests.helpers.spawn import Case, CaseResult, run_cases

LAYERS = 3
SCALE = 1e-6
"""Of losses: the blocks have no norms, and from larger gradients the second step would be no number."""


class Attention(nn.Module):
    """Materialises scores, with dropout: the tensors that no rule recomputes grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = nn.functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1)
        return x + self.out(weights @ v)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.one, self.two = Attention(), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.attention(x)))


class Exchange(torch.autograd.Function):
    """A hand-written sum over the ranks, as with experts or a split sequence: no module shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.mean().reshape(1)
        dist.all_reduce(total)
        return x + total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Exchanging(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Exchange.apply(x))


class Varying(Exchanging):
    """Sums in a different order each time, as ``index_put_`` does with several threads."""

    varies = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        rows = list(torch.sin(x).unbind(1))
        if self.varies:
            rows.sort(key=lambda row: time.perf_counter_ns() * 7919 % 101)
        return x + reduce(torch.add, rows).square().unsqueeze(1)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, layers: int = LAYERS) -> Tensor:
        for layer in self.layers[:layers]:
            x = layer(x)
        return self.head(x)


class OfTheLength:
    """A plan that decides by the rank's own batch, like ``Minimal``, but with a known threshold."""

    def __init__(self, plan: Plan, border_bytes: int) -> None:
        self._plan, self._border_bytes = plan, border_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        large = input_bytes > self._border_bytes or must_keep_bytes > 2**60  # asked whether it would ever
        return Action.CHECKPOINT if large else Action.KEEP


class Never(OfTheLength):
    """A plan that has measured that no block should be checkpointed."""

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.KEEP


def _job(wrapper: str, lengths: tuple[int, int], enable: Enable) -> Job:
    model: nn.Module = Model(Exchanging if wrapper == "exchanging" else Layer)
    whole = randomise(model)
    mesh = init_device_mesh("cpu", (2,))
    if wrapper in ("ddp", "exchanging"):
        model = DistributedDataParallel(model)
    elif wrapper == "fsdp1":
        units = ModuleWrapPolicy({nn.Linear, Layer})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=units, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        for layer in model.layers:
            for part in (layer.attention.out, layer.one.up, layer.one.down, layer.two.up):
                fully_shard(part, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    enable(model)
    return Job(model=model, step=partial(_step, model, lengths[dist.get_rank()]), whole=whole)


def _step(model: nn.Module, length: int, step: int, record: Record) -> None:
    torch.manual_seed(step)
    value = model(torch.randn(2, length, WIDTH, requires_grad=True)).square().mean() * SCALE
    value.backward()
    assert value.isfinite()
    note_step(record, str(step), model, value)


def uneven(wrapper: str, lengths: tuple[int, int], *, border_bytes: int = 0) -> dict[str, Findings]:
    """Train on a different sequence length on each rank; with a border, the length decides about checkpoints."""
    original = ebbtide.enable_activation_offloading

    def with_border(model: nn.Module, **options: Any) -> ebbtide.Handle:
        handle = original(model, **options)
        follow(handle, OfTheLength(handle.plan, border_bytes))
        return handle

    if border_bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ebbtide, "enable_activation_offloading", with_border)
            return compare(partial(_job, wrapper, lengths), ("minimal",))
    return compare(partial(_job, wrapper, lengths), ("minimal",))


def without_gradients(enough: bool) -> list[int]:
    """The first block's input needs no gradient, and in the first steps no other block runs."""
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer.one, mesh=mesh)
    checkpointed: list[int] = []
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        follow(handle, OfTheLength(handle.plan, 1))
        for step in range(13):
            later = step >= 9
            x = torch.randn(2, 4 + 4 * dist.get_rank(), WIDTH, requires_grad=enough and later)
            model(x, layers=LAYERS if later or not enough else 1).square().mean().backward()
            checkpointed.append(handle.stats().checkpointed_blocks)
    return checkpointed


def measured(wrapper: str) -> dict[str, Findings]:
    """Train until plans are made from measurements and judged, on ranks whose batches differ."""
    with measured_minimal():
        policies: Any = ("minimal", Unlimited(max_slowdown=3.0))
        found = compare(partial(_job, wrapper, (4, 24)), policies, steps=14)
    return {str(policy): one for policy, one in found.items()}


def varying(evaluated: bool) -> list[str]:
    """The first block of rank 0 varies: its backward is the last one, so the other rank needs nothing further.

    Args:
        evaluated: The model is in evaluation mode during the backward.
    """
    model = Model(Varying)
    model.layers[0].varies = dist.get_rank() == 0
    said: list[str] = []
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        follow(handle, OfTheLength(handle.plan, 1))
        for _ in range(3):
            loss = model.train()(torch.randn(2, 16, WIDTH, requires_grad=True)).square().mean()
            model.train(not evaluated)
            try:
                loss.backward()
                said.append("trains")
            except RestoreError as error:
                said.append(str(error))
            failed = torch.tensor([float(said[-1] != "trains")])
            dist.all_reduce(failed)  # a third forward on one rank would have needed the other rank's collectives
            if failed:
                break
    return said


def skipping() -> int:
    """A replica runs no block, and the units in the blocks belong to one rank each."""
    store = dist.distributed_c10d._get_default_store()
    rank, before, model = dist.get_rank(), store.timeout, Model()
    mesh = [dist.DeviceMesh("cpu", [r]) for r in range(2)][rank]
    for layer in model.layers:
        fully_shard(layer.one, mesh=mesh)
    own = [name for name, _ in model.named_parameters() if ".one." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    store.set_timeout(timedelta(seconds=5))
    with ebbtide.enable_activation_offloading(replica, policy="minimal", min_bytes=0) as handle:
        follow(handle, OfTheLength(handle.plan, 1))
        for _ in range(2):
            x = torch.randn(2, 4, WIDTH, requires_grad=True)
            replica(x, layers=0 if rank else LAYERS).square().mean().backward()
        store.set_timeout(before)
        return handle.stats().checkpointed_blocks


def without_tokens() -> list[int]:
    """Rank 1 has no tokens in the first step, before which the units in blocks are gathered: no forward shows them."""
    store = dist.distributed_c10d._get_default_store()
    before, model, mesh = store.timeout, Model(), init_device_mesh("cpu", (2,))
    for layer in model.layers:
        for part in (layer.one.up, layer.two.up, layer):
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(torch.randn(2, 4, WIDTH))
    store.set_timeout(timedelta(seconds=5))
    checkpointed: list[int] = []
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        follow(handle, OfTheLength(handle.plan, 1))
        for step in range(2):
            tokens = 0 if step == 0 and dist.get_rank() == 1 else 2
            (model(torch.randn(tokens, 4, WIDTH, requires_grad=True)).square().sum() * SCALE).backward()
            checkpointed.append(handle.stats().checkpointed_blocks)
        store.set_timeout(before)
    return checkpointed


def other_mode() -> list[int]:
    """Rank 1 alone has measured that checkpointing is slow; then blocks that communicate run in another mode."""
    store = dist.distributed_c10d._get_default_store()
    before, model = store.timeout, Model(Exchanging)
    store.set_timeout(timedelta(seconds=5))
    checkpointed: list[int] = []
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        checkpointable = handle._attachment._checkpointable
        follow(handle, OfTheLength(handle.plan, 1))
        checkpointable._voted = checkpointable._plan
        for step in range(4):
            if step == 2:
                model.eval()
                checkpointable._plan = Never(handle.plan, 1) if dist.get_rank() else checkpointable._plan
            (model(torch.randn(2, 4, WIDTH, requires_grad=True)).square().mean() * SCALE).backward()
            checkpointed.append(handle.stats().checkpointed_blocks)
        store.set_timeout(before)
    return checkpointed


def placeholders() -> list[int]:
    """An axis of a mesh that is not used has a group of torch's ``fake`` backend, as in torchtitan."""
    model, unused, checkpointed = Model(Exchanging), dist.new_group(backend="fake"), list[int]()
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0) as handle:
        follow(handle, OfTheLength(handle.plan, 1))
        for _ in range(2):
            (model(torch.randn(2, 4, WIDTH, requires_grad=True)).square().mean() * SCALE).backward()
            checkpointed.append(handle.stats().checkpointed_blocks)
    dist.destroy_process_group(unused)
    return checkpointed


LENGTHS = (4, 96)
BORDER_BYTES = 10_000


@pytest.fixture(scope="module")
def results() -> dict[str, CaseResult]:
    border = partial(uneven, border_bytes=BORDER_BYTES)
    cases: dict[str, Case] = {
        "units in blocks": (border, ("fsdp2", LENGTHS)),
        "units of FSDP1 in blocks": (border, ("fsdp1", LENGTHS)),
        "no collectives in blocks": (border, ("ddp", LENGTHS)),
        "exchanging": (border, ("exchanging", LENGTHS)),
        "short": (border, ("fsdp2", (4, 6))),
        "minimal": (uneven, ("fsdp2", LENGTHS)),
        "measured fsdp2": (measured, ("fsdp2",)),
        "measured ddp": (measured, ("ddp",)),
        "a first block without gradients": (without_gradients, (False,)),
        "gradients later": (without_gradients, (True,)),
        "varying": (varying, (False,)),
        "varying, evaluated": (varying, (True,)),
        "skipping": (skipping, ()),
        "without tokens": (without_tokens, ()),
        "another mode": (other_mode, ()),
        "placeholders": (placeholders, ()),
    }
    return run_cases(cases, 2, timeout_seconds=90.0)


def test_one_rank_that_wants_it_has_all_checkpoint_blocks_with_collectives(results: dict[str, CaseResult]) -> None:
    values = results["units in blocks"].values()
    check(values, blocks=LAYERS)
    assert [found["minimal"].checkpointed for found in values] == [LAYERS, LAYERS]


def test_blocks_with_units_of_fsdp1_are_not_checkpointed(results: dict[str, CaseResult]) -> None:
    values = results["units of FSDP1 in blocks"].values()
    check(values, blocks=LAYERS)
    assert [found["minimal"].checkpointed for found in values] == [0, 0]


def test_without_collectives_in_blocks_each_rank_decides_for_itself(results: dict[str, CaseResult]) -> None:
    values = results["no collectives in blocks"].values()
    check(values, blocks=LAYERS)
    assert [found["minimal"].checkpointed for found in values] == [0, LAYERS]


def test_collectives_that_no_module_tells_of_are_not_repeated_by_one_rank_alone(
    results: dict[str, CaseResult],
) -> None:
    values = results["exchanging"].values()
    check(values, blocks=LAYERS)
    one, other = (found["minimal"].checkpointed for found in values)
    assert one == other


def test_where_no_rank_wants_it_nothing_is_checkpointed(results: dict[str, CaseResult]) -> None:
    values = results["short"].values()
    check(values, blocks=LAYERS)
    assert [found["minimal"].checkpointed for found in values] == [0, 0]


def test_minimal_decides_alike_on_lengths_that_differ(results: dict[str, CaseResult]) -> None:
    values = results["minimal"].values()
    check(values, blocks=LAYERS)
    one, other = (found["minimal"].checkpointed for found in values)
    assert one == other


def test_a_first_block_whose_input_needs_no_gradient_decides_nothing(results: dict[str, CaseResult]) -> None:
    one, other = results["a first block without gradients"].values()
    assert one == other and one[-1] == LAYERS


def test_blocks_whose_inputs_need_gradients_later_are_decided_then(results: dict[str, CaseResult]) -> None:
    one, other = results["gradients later"].values()
    assert one == other and set(one[:9]) == {0} and one[-1] == LAYERS


def test_a_rank_without_tokens_votes_where_units_of_the_blocks_are_already_gathered(
    results: dict[str, CaseResult],
) -> None:
    assert results["without tokens"].values() == [[LAYERS - 1, LAYERS]] * 2


def test_in_another_mode_ranks_watch_blocks_whatever_each_has_measured(results: dict[str, CaseResult]) -> None:
    one, other = results["another mode"].values()
    assert one == other and one[-1] == LAYERS


@pytest.mark.parametrize("case", ["varying", "varying, evaluated"])
def test_no_third_forward_runs_where_other_ranks_are_needed(results: dict[str, CaseResult], case: str) -> None:
    one, other = results[case].values()
    assert one[0] == "trains" and "its second forward computed another" in one[1]
    assert "or does a sum's order vary?" in one[1]
    assert other == ["trains", "trains"]


def test_replicas_are_not_needed_for_a_vote_on_collectives_among_others(results: dict[str, CaseResult]) -> None:
    one, other = results["skipping"].values()
    assert (one > 0, other) == (True, 0)


def test_groups_that_carry_no_collectives_do_not_end_checkpoints(results: dict[str, CaseResult]) -> None:
    for _, then in results["placeholders"].values():
        assert then == LAYERS


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_plans_of_measurements_are_exact_on_every_rank(results: dict[str, CaseResult], wrapper: str) -> None:
    check(results[f"measured {wrapper}"].values(), blocks=LAYERS)
