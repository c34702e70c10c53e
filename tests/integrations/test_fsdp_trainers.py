"""OffloadCallback inside the trainers of transformers and TRL, and accelerate's own loop: real FSDP2 on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.spawn import CaseResult, run_cases
from tests.integrations.conftest import make_tiny_model
from tests.integrations.ranks import accelerate_case, trainer_case

pytestmark = pytest.mark.timeout(1200)  # many cases in one group of ranks, each with its own limit

KINDS = ("trainer", "sft", "dpo", "reward")
CHECKPOINTED = {"activation_checkpointing": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256))


def run(model: str, folder: Path, kinds: tuple[str, ...], *, checkpointed: bool = False) -> dict[str, CaseResult]:
    cases = {
        f"{kind} {offload}": (trainer_case, (kind, model, str(folder / f"{kind}{offload}"), offload, {}))
        for kind in kinds
        for offload in (False, True)
    }
    if checkpointed:
        cases["checkpointed"] = (trainer_case, ("sft", model, str(folder / "checkpointed"), True, CHECKPOINTED))
        cases["callback"] = (trainer_case, ("sft", model, str(folder / "callback"), False, {}, True))
    return run_cases(cases, 2, timeout_seconds=120)


def check(results: dict[str, CaseResult], kind: str) -> None:
    plain, ours = (results[f"{kind} {offload}"].values() for offload in (False, True))
    for rank in (0, 1):
        assert plain[rank]["wrapped"] == ours[rank]["wrapped"] == "fsdp2"
        assert plain[rank]["sharded"] == ours[rank]["sharded"] > 2  # each block, and the model around them
        assert ours[rank]["losses"] == plain[rank]["losses"]
        assert (plain[rank]["callbacks"], ours[rank]["callbacks"]) == (0, 1)
        assert ours[rank]["saved"] > 0
        assert ours[rank]["open"] == [False]
    assert len(set(ours[0]["losses"])) == 2


def test_the_switch_in_the_fsdp_config_offloads_and_changes_no_loss(model: str, tmp_path: Path) -> None:
    check(run(model, tmp_path, ("sft",)), "sft")


@pytest.fixture(scope="module")
def results(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    return run(model, tmp_path_factory.mktemp("trainers"), KINDS, checkpointed=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_every_trainer_the_switch_offloads_and_changes_no_loss(results: dict[str, CaseResult], kind: str) -> None:
    check(results, kind)


@pytest.mark.slow
def test_among_the_callbacks_of_a_hosts_own_trainer_it_does_the_same(results: dict[str, CaseResult]) -> None:
    check({"callback False": results["sft False"], "callback True": results["callback"]}, "callback")


@pytest.mark.slow
def test_under_fsdps_own_checkpointing_kept_tensors_are_offloaded(results: dict[str, CaseResult]) -> None:
    ours, plain = results["checkpointed"].values(), results["sft False"].values()
    assert [rank["wrapped"] for rank in ours] == ["fsdp2", "fsdp2"]
    assert ours[0]["losses"] == plain[0]["losses"]
    assert 0 < ours[0]["saved"] < results["sft True"].values()[0]["saved"]


@pytest.mark.slow
def test_in_a_loop_on_what_accelerate_prepared_no_loss_changes(model: str) -> None:
    cases = {str(offload): (accelerate_case, (model, offload)) for offload in (False, True)}
    plain, ours = (result.values() for result in run_cases(cases, 2, timeout_seconds=120).values())
    for rank in (0, 1):
        assert plain[rank]["sharded"] == ours[rank]["sharded"] > 2
        assert ours[rank]["losses"] == plain[rank]["losses"]
        assert ours[rank]["saved"] > 0
    assert len(set(ours[0]["losses"])) == 3 and ours[0]["losses"] != ours[1]["losses"]
