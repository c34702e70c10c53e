"""The suite on loading: finished loads are not repeated, and rows show the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.loaders import LOADERS, MIB, PLAIN, RAW
from benchmarks.suites.loading import Bench, measure, report

SHARD = 100 * MIB


def _rank(above: int, disk: int, digest: str, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds, "written_seconds": seconds + 1, "processor_seconds": 1.5,
        "base_bytes": 300 * MIB, "peak_bytes": SHARD + above, "private_peak_bytes": SHARD,
        "shard_bytes": SHARD, "disk_bytes": disk, "digests": {"weight": digest}, "buffers": {"inv_freq": "same"},
    }  # fmt: skip


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record real loads; ``DCP, load`` reads other bytes, and one loader fails."""
    done: list[str] = []

    def load(self: Bench, loader: str, dtype: str, world: int, number: int) -> dict[str, Any]:
        done.append(f"{loader} {number}")
        if loader == "DCP, from rank 0" or (loader == PLAIN and number == 1):
            return {"error": "no room | at all"}
        above = (12 if loader.startswith("ebb") else 500) * MIB
        if loader == RAW:
            return {"ranks": [_rank(16 * MIB, 100 * MIB, "none", 1.5) for _ in range(world)]}
        digest, seconds = (
            "other" if loader == "DCP, load" else "same",
            2.5 if loader.startswith("transformers") else 2.0,
        )
        seconds += loader in ("DCP, load", PLAIN, "accelerate, from rank 0")
        return {"ranks": [_rank(above, 100 * MIB, digest, seconds) for _ in range(world)]}

    monkeypatch.setattr(Bench, "_load", load)
    return done


def _bench(work: Path) -> Bench:
    bench = Bench(work)
    bench.total_bytes = 200 * MIB
    return bench


def test_a_load_that_is_done_is_not_done_again(tmp_path: Path, loads: list[str]) -> None:
    first = measure(_bench(tmp_path), "bfloat16", 2, 2)
    assert len(loads) == 2 * len(LOADERS)
    assert loads[0].endswith(" 0") and loads[0].rsplit(" ", 1)[0] != loads[len(LOADERS)].rsplit(" ", 1)[0]
    assert measure(_bench(tmp_path), "bfloat16", 2, 2) == first
    assert len(loads) == 2 * len(LOADERS)
    assert measure(_bench(tmp_path), "bfloat16", 2, 1) == first, "finished loads count"
    measure(_bench(tmp_path), "bfloat16", 2, 3)
    assert len(loads) == 3 * len(LOADERS)


def test_loaders_that_are_not_run_often_are_run_once(tmp_path: Path, loads: list[str]) -> None:
    rows = measure(_bench(tmp_path), "bfloat16", 2, 3, ["ebbtide, slices", "transformers DistributedConfig"])
    assert len(loads) == len(LOADERS) + 2 * 2
    turns = [loads[len(LOADERS) + 2 * number].rsplit(" ", 1)[0] for number in range(2)]
    assert turns == ["transformers DistributedConfig", "ebbtide, slices"], "each begins in turn"
    assert [len(rows[loader]["runs"]) for loader in ("ebbtide, slices", "DCP, load")] == [3, 1]
    told = {"hardware": "a", "date": "b", "filesystem": "c", "checkpoint_bytes": 200 * MIB, "files": 4, "drawn": ""}
    text = report({**told, "cases": {"2 ranks": rows}})
    assert "## 2 ranks: 3 rounds\n" in text
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    assert {loader for loader in LOADERS if " to " in lines[loader]} == {
        "ebbtide, slices",
        "transformers DistributedConfig",
    }


def test_rows_tell_memory_above_the_shard_and_what_was_read(tmp_path: Path, loads: list[str]) -> None:
    rows = measure(_bench(tmp_path), "bfloat16", 2, 1)
    ours, plain = rows["ebbtide, slices"], rows[PLAIN]
    assert (ours["above_shard_bytes"]["median"], plain["above_shard_bytes"]["median"]) == (12 * MIB, 500 * MIB)
    assert ours["read_share"]["median"] == 1.0
    assert ours["equal"] and ours["buffers_equal"] and not rows["DCP, load"]["equal"]
    told = {"hardware": "a", "date": "b", "filesystem": "c", "checkpoint_bytes": 200 * MIB, "files": 4, "drawn": ""}
    text = report({**told, "cases": {"2 ranks": rows}})
    row = "| ebbtide, slices | 12 | 0 | 2.0 | 0.80 | 0.75 | 3.0 | 3.0 | equal |"
    assert row in text and "| 2.5 | 1.00 | 0.60 | 3.5 |" in text
    assert f"| {RAW} | 16 | 0 | 1.5 |  | 1.00 | 2.5 | 3.0 | none |" in text
    assert "| DCP, from rank 0 | | | | | | | | 1 of 1 did not run: no room / at all |" in text
    assert "cut otherwise" in text
    assert "read from disk\nat most 1.00 times the checkpoint's size. Made" in text
    rows[PLAIN]["read_share"] = {"q1": 2.0, "median": 2.0, "q3": 2.0}
    text_of_more = report({**told, "cases": {"2 ranks": rows}})
    assert f"at most 1.00 times the checkpoint's size; {PLAIN} with 2 ranks: 2.00 times. Made" in text_of_more
    assert "## 2 ranks: 1 round\n" in text
    text = report({**told, "cases": {"2 ranks": measure(_bench(tmp_path), "bfloat16", 2, 2)}})
    assert "| ebbtide, slices | 12 (12 to 12) | 0 (0 to 0) | 2.0 (2.0 to 2.0) |" in text
    assert " | 3.0 | equal; 1 of 2 did not run: no room / at all |" in text
