"""Ranks that train the same part of a model need equal settings; a rank that differs or is absent is named."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ebbtide
from ebbtide.base.errors import ConfigError, StrategyError
from ebbtide.config import STRATEGIES
from ebbtide.wrap import check_strategy
from ebbtide.wrap.agreement import check_agreement, groups_of
from ebbtide.wrap.meeting import Meeting
from tests.helpers.models import WIDTH, Block, Stack
from tests.helpers.spawn import Case, CaseResult, run_cases

WRAPPERS = ("fsdp2", "fsdp", "flat fsdp", "ddp")
LATER = ("fsdp2", "fsdp2 as one unit", "fsdp of blocks", "ddp")


def wrapped(wrapper: str, model: nn.Module | None = None) -> nn.Module:
    model = model or Stack(*(Block() for _ in range(2)))
    mesh = init_device_mesh("cpu", (2,))
    if wrapper.startswith("fsdp2"):
        for layer in () if wrapper == "fsdp2 as one unit" else model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if wrapper == "fsdp of blocks":
        for i, layer in enumerate(model.layers):
            model.layers[i] = FullyShardedDataParallel(layer, mesh.get_group(), device_id=torch.device("cpu"))
    if wrapper != "ddp":
        # One wrapper around everything: all of a block's numbers may be on the other rank.
        return FullyShardedDataParallel(
            model, mesh.get_group(), device_id=torch.device("cpu"), use_orig_params=wrapper == "fsdp"
        )
    return DistributedDataParallel(model, process_group=mesh.get_group())


def told(wrapper: str, *options: dict[str, Any]) -> str:
    """Enable on this rank with its own options (the last for all further ranks); return the message."""
    rank = dist.get_rank()
    model = wrapped(wrapper)
    try:
        handle = ebbtide.enable_activation_offloading(model, **options[min(rank, len(options) - 1)])
    except ConfigError as error:
        return str(error)
    handle.close()
    return "agreed"


def wrapped_later(wrapper: str, *options: dict[str, Any], late: bool = False, after: str = "") -> list[str]:
    """Enable on this rank, wrap, train; return the message of each of three steps.

    Args:
        wrapper: How it is wrapped.
        options: As ``told`` takes them.
        late: Rank 1 wraps first.
        after: State after earlier steps: ``"measured"`` or ``"at rest"``.
    """
    rank = dist.get_rank()
    model: nn.Module = Stack(*(Block() for _ in range(2)))
    first = late and rank == 1
    module = wrapped(wrapper, model) if first else model
    handle = ebbtide.enable_activation_offloading(module, min_bytes=0, **options[min(rank, len(options) - 1)])
    if not first:
        module = wrapped(wrapper, model)
    said: list[str] = []
    plan: Any = handle.plan
    if after == "measured":
        plan._why["Block"] = f"checkpointed: a block took {rank} s"
    for scope in handle._attachment._scopes if after == "at rest" else ():
        scope.leave()
    with (
        handle,
        mock.patch("ebbtide.wrap.rest.Rest.prepare", lambda *args: True) if after == "at rest" else nullcontext(),
    ):
        for _ in range(3):
            with counted() as meetings:
                try:
                    module(torch.randn(2, 4, WIDTH)).sum().backward()
                    said.append(f"trains, {len(meetings)} compared")
                except ConfigError as error:
                    said.append(str(error))
    return said


@contextmanager
def counted() -> Iterator[list[object]]:
    """Count the comparisons of ranks."""
    compared: list[object] = []

    def check(*args: Any) -> None:
        compared.append(args)
        check_agreement(*args)

    with mock.patch("ebbtide.wrap.agreement.check_agreement", check):
        yield compared


def never_enabled() -> str:
    """Rank 1 does not offload: the other says so in its first forward, in bounded time."""
    store = dist.distributed_c10d._get_default_store()
    before, model = store.timeout, Stack(*(Block() for _ in range(2)))
    handle = None if dist.get_rank() else ebbtide.enable_activation_offloading(model)
    said, module = "", wrapped("ddp", model)
    if handle is not None:
        store.set_timeout(timedelta(seconds=1))
        try:
            module(torch.randn(2, 4, WIDTH))
        except ConfigError as error:
            said = str(error)
        store.set_timeout(before)
        handle.close()
    dist.barrier()
    return said


def without_batches() -> float:
    """Train under DDP and torch's ``Join``; rank 1 has no batch. Return the norm of the gradients."""
    module = wrapped("ddp")
    with ebbtide.enable_activation_offloading(module, policy="minimal", min_bytes=0), Join([module]):
        for _ in range(0 if dist.get_rank() else 2):
            module(torch.randn(2, 4, WIDTH)).sum().backward()
    return sum(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)


def asked(wrapper: str) -> dict[str, str]:
    """Request every strategy; return the one in use, or the message."""
    model, said = wrapped(wrapper), {}
    for strategy in STRATEGIES:
        try:
            said[strategy] = check_strategy(model, strategy)
        except StrategyError as error:
            said[strategy] = str(error)
    return said


def interrupted() -> str:
    """Ctrl-C while a rank waits for an absent one; then both meet, and the other one is interrupted."""
    model = wrapped("fsdp2")
    said = ""
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        try:
            ebbtide.enable_activation_offloading(model)
        except KeyboardInterrupt:
            said = "interrupted"
        signal.signal(signal.SIGINT, before)
    dist.barrier()
    ebbtide.enable_activation_offloading(model).close()
    return said + "; then agreed"


def met() -> list[str]:
    """A rank is interrupted after the other has read its settings: both count that meeting."""
    said: list[str] = []
    with suppress(KeyboardInterrupt), Meeting([0, 1], "meet", "one") as meeting:
        said += meeting.attend().values()
        dist.barrier()
        if dist.get_rank():
            raise KeyboardInterrupt
    with Meeting([0, 1], "meet", "two") as meeting:
        said += meeting.attend().values()
    return said


def absent(late: bool) -> str:
    """Rank 1 is absent, or comes after the others have given up; then all meet."""
    store = dist.distributed_c10d._get_default_store()
    before = store.timeout
    model = wrapped("fsdp2")
    said = ""
    if dist.get_rank() == 0:
        store.set_timeout(timedelta(seconds=1))
        try:
            ebbtide.enable_activation_offloading(model)
        except ConfigError as error:
            said = str(error)
        store.set_timeout(before)
    dist.barrier()
    if late:
        ebbtide.enable_activation_offloading(model).close()
        said += "; then agreed"
    return said


def apart() -> tuple[str, list[tuple[int, ...]]]:
    """Two parts of a model, two ranks each: parts may differ, ranks of a part may not."""
    rank = dist.get_rank()
    part = [0, 1] if rank < 2 else [2, 3]
    meshes = [dist.DeviceMesh("cpu", p) for p in ([0, 1], [2, 3])]
    model = Stack(*(Block() for _ in range(2 if rank < 2 else 3)))
    for layer in model.layers:
        fully_shard(layer, mesh=meshes[rank // 2])
    fully_shard(model, mesh=meshes[rank // 2])
    policy = "offload" if rank < 2 else "minimal"
    ebbtide.enable_activation_offloading(model, policy=policy).close()
    try:
        ebbtide.enable_activation_offloading(model, policy="keep" if rank == 3 else policy).close()
    except ConfigError as error:
        return str(error), groups_of(model)
    assert groups_of(model) == [tuple(part)]
    return "agreed", groups_of(model)


def replicated() -> tuple[list[tuple[int, ...]], str]:
    """Two shards, two replicas: all four ranks hold the part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Stack(*(Block() for _ in range(2))), mesh=mesh)
    try:
        ebbtide.enable_activation_offloading(model, policy="keep" if dist.get_rank() in (1, 2) else "inputs").close()
    except ConfigError as error:
        return groups_of(model), str(error)
    return groups_of(model), "agreed"


def crossing() -> tuple[list[tuple[int, ...]], str]:
    """FSDP1 knows its replicas by another group: each rank meets two groups, and no two ranks meet the same two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        Stack(*(Block() for _ in range(2))),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    try:
        ebbtide.enable_activation_offloading(model, policy="keep" if dist.get_rank() == 3 else "inputs").close()
    except ConfigError as error:
        return groups_of(model), str(error)
    return groups_of(model), "agreed"


def one_may(n: int) -> bool:
    return n > 1


def another_may(n: int) -> bool:
    return n > 2


BUDGET: dict[str, Any] = {"host_budget": "1GiB"}
DIFFERING: dict[str, tuple[tuple[dict[str, Any], ...], str]] = {
    "policy": (({"policy": "offload"}, {"policy": "inputs"}), "policy is 'offload (every storage"),
    "enable_ckpt": (({"enable_ckpt": True}, {}), "policy is 'minimal ("),
    "slowdown": (
        ({"policy": ebbtide.Auto(max_slowdown=0.1)}, {"policy": ebbtide.Auto(max_slowdown=0.2)}),
        "policy is 'auto (",
    ),
    "min_bytes": (({"min_bytes": 0}, {"min_bytes": "1MiB"}), "min_bytes is '0' on rank 0, but '1048576' on rank 1"),
    "window": (({"window": "1MiB"}, {}), "window is '1048576 bytes' on rank 0, but 'as the model needs' on rank 1"),
    "verify": (({"verify": True}, {}), "verify is 'True' on rank 0, but 'False' on rank 1"),
    "budget": ((BUDGET, {}), "host_budget is '1073741824 bytes' on rank 0, but 'a fair share' on rank 1"),
    "filter": (
        ({"tensor_filter": one_may}, {"tensor_filter": another_may}),
        "tensor_filter is 'one_may' on rank 0, but 'another_may' on rank 1",
    ),
    "blocks": (
        ({"blocks": ["layers.0"]}, {"blocks": ["layers.1"]}),
        "block layers.0 is 'Block' on rank 0, but 'absent' on rank 1; block layers.1 is 'absent' on rank",
    ),
}


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {f"same {w}": (told, (w, {"policy": "minimal"})) for w in WRAPPERS}
    found |= {f"policy {w}": (told, (w, {"policy": "offload"}, {"policy": "inputs"})) for w in WRAPPERS}
    found |= {name: (told, ("ddp", *options)) for name, (options, _) in DIFFERING.items()}
    found |= {f"strategy {w}": (asked, (w,)) for w in WRAPPERS}
    found |= {f"later same {w}": (wrapped_later, (w, {"policy": "minimal"})) for w in LATER}
    found |= {f"later policy {w}": (wrapped_later, (w, {"policy": "offload"}, {"policy": "inputs"})) for w in LATER}
    found["one later"] = (partial(wrapped_later, late=True), ("fsdp2", {"policy": "minimal"}))
    found["never"] = (never_enabled, ())
    found["paths"] = (told, ("ddp", {"disk_path": "/var/tmp"}, {}))
    found["measured later"] = (partial(wrapped_later, after="measured"), ("ddp", {"policy": "minimal"}))
    found["rests later"] = (partial(wrapped_later, after="at rest"), ("ddp", {"policy": "auto"}))
    found["interrupted"] = (interrupted, ())
    found["met"] = (met, ())
    found["no batches"] = (without_batches, ())
    found["absent"] = (absent, (False,))
    found["late"] = (absent, (True,))
    return found


@pytest.fixture(scope="module")
def two() -> dict[str, CaseResult]:
    return run_cases(cases(), 2, timeout_seconds=90.0)


@pytest.fixture(scope="module")
def four() -> dict[str, CaseResult]:
    cases: dict[str, Case] = {f.__name__: (f, ()) for f in (apart, replicated, crossing)}
    return run_cases(cases, 4, timeout_seconds=90.0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_with_equal_settings_agree(two: dict[str, CaseResult], wrapper: str) -> None:
    assert two[f"same {wrapper}"].values() == ["agreed"] * 2
    for said in two[f"policy {wrapper}"].values():
        assert "policy is 'offload" in said and "on rank 0, but 'inputs" in said


@pytest.mark.parametrize("wrapper", LATER)
def test_ranks_of_a_model_wrapped_later_compare_once_in_the_first_forward(
    two: dict[str, CaseResult], wrapper: str
) -> None:
    agreed = ["trains, 1 compared", "trains, 0 compared", "trains, 0 compared"]
    assert two[f"later same {wrapper}"].values() == [agreed] * 2
    for said in two[f"later policy {wrapper}"].values():
        for one in said:  # not only the first: no rank trains on
            assert "policy is 'offload" in one and "on rank 0, but 'inputs" in one
            assert "expected the same on ranks 0, 1, which train the same part of the model" in one


@pytest.mark.parametrize("after", ["measured", "rests"])
def test_steps_before_the_wrapping_are_no_difference_and_no_excuse(two: dict[str, CaseResult], after: str) -> None:
    """Ranks' measurements differ by nature; and a rank whose hooks are removed must still be met."""
    agreed = ["trains, 1 compared", "trains, 0 compared", "trains, 0 compared"]
    assert two[f"{after} later"].values() == [agreed] * 2


def test_a_rank_that_waits_can_be_interrupted(two: dict[str, CaseResult]) -> None:
    assert two["interrupted"].values() == ["interrupted; then agreed", "; then agreed"]


def test_a_rank_that_is_interrupted_after_it_was_met_has_met(two: dict[str, CaseResult]) -> None:
    assert two["met"].values() == [["one", "two"]] * 2


def test_a_rank_that_wraps_first_agrees_with_one_that_wraps_later(two: dict[str, CaseResult]) -> None:
    later, first = two["one later"].values()
    assert later == ["trains, 1 compared", "trains, 0 compared", "trains, 0 compared"]
    assert first == ["trains, 0 compared"] * 3


def test_a_rank_without_batches_keeps_nobody_waiting(two: dict[str, CaseResult]) -> None:
    """Enabled after wrapping. Enabled before, the others would wait for its first forward: the guide says so."""
    trained, shadow = two["no batches"].values()
    assert trained > 0 == shadow


def test_a_rank_that_never_offloads_is_named_in_the_first_forward_of_the_others(two: dict[str, CaseResult]) -> None:
    said, nothing = two["never"].values()
    assert said.startswith(
        "rank 1 did not enable offloading (and run a forward, if that was before wrapping) within 1 s; expected the "
    )
    assert nothing == ""


@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_that_differ_say_so_on_every_rank(two: dict[str, CaseResult], what: str) -> None:
    one, other = two[what].values()
    assert one == other
    assert DIFFERING[what][1] in one
    assert "expected the same on ranks 0, 1, which train the same part of the model\nhint: pass the same" in one


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_strategy_is_checked_against_the_model(two: dict[str, CaseResult], wrapper: str) -> None:
    real = wrapper.removeprefix("flat ")
    for said in two[f"strategy {wrapper}"].values():
        assert (said.pop("auto"), said.pop(real)) == (real, real)
        assert len(said) == 3
        for asked_for, answer in said.items():
            assert answer.startswith(
                f"strategy is {asked_for!r} and the model is wrapped as {real!r}; expected a model"
            )


def test_a_directory_is_a_ranks_own_affair(two: dict[str, CaseResult]) -> None:
    assert two["paths"].values() == ["agreed"] * 2


def test_a_rank_that_does_not_come_is_named_in_bounded_time(two: dict[str, CaseResult]) -> None:
    said, nothing = two["absent"].values()
    assert said == (
        "rank 1 did not enable offloading (and run a forward, if that was before wrapping) within 1 s; expected the "
        "same calls on ranks 0, 1, which train the same part of the model\nhint: check the log of that rank; the "
        "time limit is that of init_process_group"
    )
    assert nothing == ""


def test_ranks_meet_again_after_one_had_not_come(two: dict[str, CaseResult]) -> None:
    waited, came = two["late"].values()
    assert "rank 1 did not enable offloading" in waited and waited.endswith("; then agreed")
    assert came == "; then agreed"


def test_parts_of_a_model_may_differ_and_ranks_of_a_part_may_not(four: dict[str, CaseResult]) -> None:
    said, ranks = zip(*four["apart"].values(), strict=True)
    assert ranks == ([(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)])
    assert said[:2] == ("agreed", "agreed") and said[2] == said[3]
    assert "on rank 2, but 'keep (" in said[2] and "expected the same on ranks 2, 3," in said[2]


def test_replicas_hold_the_same_part(four: dict[str, CaseResult]) -> None:
    for ranks, said in four["replicated"].values():
        assert ranks == [(0, 1, 2, 3)]
        assert "on ranks 0, 3, but 'keep (" in said and "on ranks 1, 2; expected" in said


def test_groups_that_cross_are_all_met(four: dict[str, CaseResult]) -> None:
    groups, said = zip(*four["crossing"].values(), strict=True)
    assert groups == ([(0, 1), (0, 2)], [(0, 1), (1, 3)], [(0, 2), (2, 3)], [(1, 3), (2, 3)])
    assert said[0] == "agreed"  # no collective of this rank includes rank 3
    assert "on rank 1, but 'keep (" in said[1] and "on rank 2, but 'keep (" in said[2]
    assert "on rank 1, but 'keep (" in said[3]


def test_alone_there_is_nobody_to_meet() -> None:
    assert groups_of(Stack(Block())) == []
