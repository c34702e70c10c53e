"""Loading ranks stop together with one message; saved models load on any number of ranks; first values agree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.loading import (
    Setup,
    compare,
    count,
    draw_twice,
    fail,
    fail_receiving,
    first_values,
    interrupt,
    interrupt_messages,
    load_uneven,
    refuse,
    save,
    save_after_evaluation,
    source_of,
    tie,
    write_checkpoint,
)
from tests.helpers.spawn import CaseResult, run_cases

FAULTS = {
    "shard": "rank 1: RuntimeError: this rank cannot shard\nin the function passed as shard=",
    "memory": "rank 1: RuntimeError: ",
    "read": "rank 1: OSError: [Errno 5] Input/output error",
    "server": "rank 0: OSError: [Errno 5] Input/output error; rank 1: rank 0 stopped sending weights",
    "cut": "rank 1: ",
    "another": "ranks see 2 different checkpoints",
    "values": "ranks see 2 different checkpoints",
    "nobody": "no rank sees a checkpoint in '",
    "dtype": "bfloat16 on rank 0 and ",
    "sources": "source differs: rank 0: 'auto'; rank 1: 'broadcast'",
    "slices": "source='slices' and ranks 1 do not see the checkpoint",
}
REFUSED = {
    "weights": (False, "rank 1: weights is a int"),
    "device": (False, "rank 1: device is 'gpu'"),
    "shard": (False, "rank 1: shard is 'fully_shard'"),
    "source": (False, "rank 1: source is 'slice'"),
    "missing": (False, "rank 1: missing is 'ignore'"),
    "folder": (True, "rank 1: folder is None"),
    "name": (True, "rank 1: name is ''"),
    "max_file_bytes": (True, "'max_file_bytes' is 100 on rank 0 and 200 on rank 1"),
}
"""By argument: whether it is of saving, and the error if only the last of two ranks passes such a one."""
SAVED = {
    "sharded": Setup(),
    "tied": Setup(tied=True),
    "flat": Setup(wrapper="fsdp", flat=True),
    "experts": Setup(family="qwen3_moe"),
    "columns": Setup(four="bfloat16", nested=True, column=True),
}
INITIALISED = {"decoder": Setup(), "experts": Setup(family="qwen3_moe"), "convolutions": Setup(family="gpt2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, a truncated copy, and another checkpoint."""
    home = tmp_path_factory.mktemp("together")
    write_checkpoint(home / "model", Setup())
    shutil.copytree(home / "model", home / "model-cut")
    victim = sorted((home / "model-cut").glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-100])
    write_checkpoint(home / "model-another", Setup(tied=True))
    shutil.copytree(home / "model", home / "model-values")
    for file in (home / "model-values").glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    return home / "model"


@pytest.fixture(scope="module")
def failures(folder: Path) -> dict[str, CaseResult]:
    return run_cases({fault: (fail, (fault, str(folder))) for fault in FAULTS}, 2, timeout_seconds=60.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_stops_all_with_one_message(failures: dict[str, CaseResult], fault: str) -> None:
    messages, on_meta = zip(*failures[fault].values(), strict=True)
    assert FAULTS[fault] in messages[0]
    assert "expected" in messages[0] and "hint:" in messages[0]
    assert len(set(messages)) == 1
    assert all(on_meta)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    folder = str(tmp_path_factory.mktemp("refused"))
    cases = {option: (refuse, (save, option, f"{folder}/{option}")) for option, (save, _) in REFUSED.items()}
    return run_cases(cases, 2, timeout_seconds=20.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("option", REFUSED)
def test_an_argument_that_one_rank_cannot_use_stops_all_at_once(refusals: dict[str, CaseResult], option: str) -> None:
    one, other = refusals[option].values()
    assert one.startswith(REFUSED[option][1]) and one == other
    assert "expected" in one and "hint:" in one


@pytest.mark.timeout(300)
def test_a_rank_that_fails_while_it_receives_hangs_nobody() -> None:
    one, other = run_cases({"progress": (fail_receiving, ())}, 2, timeout_seconds=60.0)["progress"].values()
    assert "rank 1: RuntimeError: progress" in one and one == other


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [interrupt, interrupt_messages], ids=["at once", "between two messages"])
@pytest.mark.parametrize("rank", [0, 1], ids=["the sender", "the receiver"])
def test_an_interrupt_of_one_rank_hangs_nobody(rank: int, case: Callable[[int], str]) -> None:
    raised = run_cases({"interrupt": (case, (rank,))}, 2, timeout_seconds=20.0)["interrupt"].values()
    assert raised[rank].startswith("KeyboardInterrupt")
    assert f"rank {rank}: KeyboardInterrupt" in raised[1 - rank] and "hint:" in raised[1 - rank]


@pytest.mark.timeout(300)
def test_tied_weights_that_fsdp2_shards_apart_are_refused(tmp_path: Path) -> None:
    values = {"embed.weight": torch.ones(8, 4), "head.bias": torch.ones(8)}
    save_file(values | {"norm.weight": torch.ones(4), "norm.bias": torch.ones(4)}, tmp_path / "model.safetensors")
    kinds = [f"{units}{end}" for units in ("together", "root", "apart") for end in ("", " initialized")]
    found = run_cases({kind: (tie, (kind, str(tmp_path))) for kind in kinds}, 2, timeout_seconds=30.0)
    for kind in kinds:
        (tied, message), other = found[kind].values()
        assert (tied, message) == other and tied != kind.startswith("apart"), kind
        if not tied:
            assert "embed.weight and head.weight were tied and are separate" in message
            assert "fully_shard([model.embed, model.head])" in message.split("hint:")[1]


@pytest.mark.timeout(300)
def test_counters_of_batch_norms_are_saved_and_loaded(tmp_path: Path) -> None:
    for found in run_cases({"count": (count, (str(tmp_path),))}, 2, timeout_seconds=60.0)["count"].values():
        assert found == [(3, 0, 8), (3, 0, 8), (0, 0, 8), (1,)]


@pytest.mark.timeout(300)
def test_of_padded_shards_one_at_a_time_is_in_memory_twice() -> None:
    full, padded = run_cases({"uneven": (load_uneven, ())}, 2, timeout_seconds=60.0)["uneven"].values()
    assert padded == [0, 0, 0, 0] and -1 not in full


@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp"])
def test_what_is_saved_after_an_evaluation_is_the_shards(tmp_path: Path, wrapper: str) -> None:
    run_cases({wrapper: (save_after_evaluation, (wrapper, str(tmp_path)))}, 2, timeout_seconds=60.0)
    wanted, found = _tensors(tmp_path / "before"), _tensors(tmp_path / "after")
    assert wanted.keys() == found.keys() and {t.dtype for t in found.values()} == {torch.float32}
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world", "others"), [(2, (4, 1)), pytest.param(4, (2,), marks=pytest.mark.slow)], ids=["2 to 4 and 1", "4 to 2"]
)
def test_what_is_saved_is_loaded_on_another_number_of_ranks(
    tmp_path: Path, world: int, others: tuple[int, ...]
) -> None:
    cases, loads = {}, {}
    for name, setup in SAVED.items():
        write_checkpoint(tmp_path / name, setup)
        out = tmp_path / f"{name}-saved"
        cases[name] = (save, (setup, str(tmp_path / name), str(out)))
        loads[name] = (compare, (setup, str(out)))
    saved = run_cases(cases, world, timeout_seconds=90.0)
    for name, setup in SAVED.items():
        assert sum(saved[name].values()) > 0
        source, out = (Path(source_of(setup, str(tmp_path / name) + end)) for end in ("", "-saved"))
        before, after = _tensors(source), _tensors(out)
        if name != "experts":  # those stay as they were stacked while loading
            assert before.keys() == after.keys()
            assert all(torch.equal(_bits(before[key]), _bits(after[key])) for key in before)
        assert len(list(out.glob("*.safetensors"))) > 1
        assert not list(out.glob("*.part"))
        shutil.copy(source / "config.json", out)
    for other in others:
        for name, result in run_cases(loads, other, timeout_seconds=90.0).items():
            for found in result.values():
                assert found["loaded"] == [], name
                assert found["trained"] == [], name


@pytest.mark.timeout(300)
def test_a_second_model_has_other_first_values_though_the_first_rank_drew_none() -> None:
    assert [*run_cases({"draw": (draw_twice, ())}, 2, timeout_seconds=60.0)["draw"].values()] == [True, False]


@pytest.mark.timeout(600)
def test_first_values_are_the_same_for_any_number_of_ranks() -> None:
    cases = {name: (first_values, (setup,)) for name, setup in INITIALISED.items()}
    two, four = (run_cases(cases, world, timeout_seconds=60.0) for world in (2, 4))
    for name in INITIALISED:
        reference, *others = [*two[name].values(), *four[name].values()]
        assert all(value.isfinite().all() for value in reference.values())
        assert any(value.std() > 0 for value in reference.values() if value.numel() > 1)
        for other in others:
            assert other.keys() == reference.keys()
            assert [k for k in reference if not torch.equal(reference[k], other[k])] == []


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
