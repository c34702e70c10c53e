"""The spawn helper itself: values, failures, deaths and hangs, and that nothing outlives a test."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers import spawn
from tests.helpers.spawn import SHOWN_CHARACTERS, CaseResult, SpawnError, run_cases

HANG_SECONDS = 3.0
LIMIT = timedelta(seconds=17)


def add_ranks(offset: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total, os.getpid()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 cannot")
    dist.barrier()  # never answered: ended by the parent


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.write(2, b"its last words")
        os.abort()
    dist.barrier()


def die_with_much_to_say() -> None:
    if dist.get_rank() == 0:
        os.write(2, b"its first words" + b"." * 2 * SHOWN_CHARACTERS + b"and its last ones")
        os._exit(3)
    dist.barrier()


def count_workers() -> list[int]:
    """Return how many workers each of some groups has."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("rows", "columns"))
    groups = [dist.group.WORLD, dist.new_group([0, 1]), *mesh.get_all_groups()]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


def hang_on_rank_1(inside: str) -> int:
    if dist.get_rank() == 1:
        Path(inside).touch()
        dist.recv(torch.zeros(1), src=0)  # no rank sends
    return dist.get_rank()


def random_number() -> float:
    return torch.rand(()).item()


def unpicklable() -> object:
    return lambda: None


def found_hanging(inside: Path) -> dict[str, CaseResult]:
    """Run a case whose limit strikes once rank 0 has answered and rank 1 hangs, however busy the machine is."""

    def patient(pipes: list[Any], timeout: float) -> list[Any]:
        if timeout > HANG_SECONDS or len(pipes) > 1:  # the start, or rank 0 has not answered
            return wait(pipes, timeout=spawn.STARTUP_SECONDS)
        while not inside.exists():
            time.sleep(0.001)
        return wait(pipes, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "wait", patient)
        return run_cases({"hangs": (hang_on_rank_1, (str(inside),))}, 2, timeout_seconds=HANG_SECONDS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    cases = {
        "sum": (add_ranks, (10,)),
        "again": (add_ranks, (20,)),
        "random": (random_number, ()),
        "raises": (fail_on_rank_1, ()),
        "after raising": (add_ranks, (0,)),
        "workers": (count_workers, ()),
        "dies": (die_on_rank_0, ()),
        "says much": (die_with_much_to_say, ()),
        "unpicklable": (unpicklable, ()),
    }
    hangs = found_hanging(tmp_path_factory.mktemp("hangs") / "inside")
    return {**run_cases(cases, 2, timeout_seconds=60.0), **hangs}


def test_values_come_back_by_value_in_rank_order(results: dict[str, CaseResult]) -> None:
    ranks, totals, _ = zip(*results["sum"].values(), strict=True)
    assert ranks == (0, 1)
    assert [t.item() for t in totals] == [21.0, 21.0]
    assert not any(t.is_shared() for t in totals)


def test_many_cases_share_one_group(results: dict[str, CaseResult]) -> None:
    pids = [[pid for *_, pid in results[name].values()] for name in ("sum", "again", "after raising")]
    assert pids[0] == pids[1]
    assert set(pids[0]).isdisjoint(pids[2])  # a failed case takes its group with it


def test_every_case_starts_from_the_same_seed_on_every_rank(results: dict[str, CaseResult]) -> None:
    torch.manual_seed(0)
    assert results["random"].values() == [torch.rand(()).item()] * 2


def test_an_exception_is_reported_with_its_rank_and_traceback(results: dict[str, CaseResult]) -> None:
    with pytest.raises(SpawnError, match=r"(?s)case 'raises': rank 1 raised.*fail_on_rank_1.*rank 1 cannot"):
        results["raises"].values()


def test_a_hang_is_a_failure_with_the_stack_of_who_hangs(results: dict[str, CaseResult]) -> None:
    with pytest.raises(SpawnError, match=r"(?s)no answer of ranks \[1\] within 3 s.*in hang_on_rank_1"):
        results["hangs"].values()


def test_a_death_is_reported_with_its_exit_code_output_and_stack(results: dict[str, CaseResult]) -> None:
    with pytest.raises(
        SpawnError, match=r"(?s)rank 0 died with exit code -6.*its last words.*in die_on_rank_0.*frame #0"
    ):
        results["dies"].values()


def test_the_first_and_the_last_output_of_a_dead_rank_is_reported(results: dict[str, CaseResult]) -> None:
    with pytest.raises(SpawnError, match=r"(?s)exit code 3\nits first words.*characters left out.*its last ones$"):
        results["says much"].values()


def test_each_group_has_one_worker(results: dict[str, CaseResult]) -> None:
    assert results["workers"].values() == [[1] * 4] * 2


def test_a_group_with_a_time_limit_or_options_of_its_own_has_one_worker_too() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    groups = [
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, *settings, **named)
        for settings, named in (((), {}), ((LIMIT,), {}), ((), {"timeout": LIMIT}), ((options,), {}))
    ]
    assert [group.options._threads for group in groups] == [1] * 4
    assert [group.options._timeout == LIMIT for group in groups] == [False, True, True, False]


def test_a_value_that_cannot_be_pickled_is_a_failure(results: dict[str, CaseResult]) -> None:
    with pytest.raises(SpawnError, match="[Pp]ickle"):
        results["unpicklable"].values()


def test_no_process_is_left(results: dict[str, CaseResult]) -> None:
    assert multiprocessing.active_children() == []
    for *_, pid in (*results["sum"].values(), *results["after raising"].values()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
