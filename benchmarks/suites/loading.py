"""Loading a sharded model: host memory, bytes read and time, compared with other loaders.

A decoder with random weights is written in several safetensors files and loaded with every loader on gloo ranks in
processes of their own, in turn. Memory is the peak that the system keeps of each process (reset before loading), above
what the process had before and its shard; bytes are those that the system read from the disk for all ranks, after the
files were dropped from the page cache; time ends when every page of every shard was read, so that a mapping that has
not been read yet counts too; a second time ends when every page was also written, as the first optimizer step does,
because a private mapping copies its pages then. Processor seconds are those of all ranks; on a shared machine they vary
less than time. Every rank's shards are compared with those of plain loading by digest: a loader of ours whose shards
differ fails the suite.

    python -m benchmarks.suites.loading [--work DIR] [--worlds 2 4] [--rounds 5 3] [--dtypes bfloat16 float32]
        [--often WAY ...] [--small]

``--rounds`` has a number for each of ``--worlds``: more ranks than cores show memory and bytes, not time. ``--often``
names the loaders that are run in every round; the others are then run in the first round only. With ``--work`` the
checkpoint and every finished load are kept there, and the same command resumes where it stopped; finished rounds count.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks.loaders import IMPORTED, LOADERS, MIB, PLAIN, RAW, SMALL, TINY, WIDE, rank_main
from benchmarks.results_folder import hardware, parser_of, result_folder, spread, summary, write_result
from ebbtide.store.share import fields_of

WAIT_SECONDS = 300
SPARE_BYTES = 2 << 30
OURS = ("ebbtide, slices", "ebbtide, broadcast")
SHOWN = ("ebbtide, slices", PLAIN, "accelerate, from rank 0")
"""The loaders whose memory over time is drawn."""


class Bench:
    """The runs of the suite; each is done once.

    Args:
        work: Holds the checkpoints ``big`` and ``tiny``, and ``runs.jsonl``, with one line for each finished run.
    """

    def __init__(self, work: Path) -> None:
        self.work = work
        self._log = work / "runs.jsonl"
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._runs: dict[str, Any] = {run["key"]: run for run in map(json.loads, lines)}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(IMPORTED))
        self.total_bytes = sum(f.stat().st_size for f in self.files)

    @property
    def files(self) -> list[Path]:
        """The files of the checkpoint."""
        return sorted((self.work / "big").glob("*.safetensors"))

    def run(self, loader: str, dtype: str, world: int, number: int) -> dict[str, Any]:
        """Return the result of one load: its ranks' values, or ``error``; a finished run is not repeated."""
        key = f"{world} {dtype} {loader} {number}"
        if key not in self._runs:
            started = time.monotonic()
            self._runs[key] = {"key": key, **self._load(loader, dtype, world, number)}
            with self._log.open("a") as log:
                log.write(json.dumps(self._runs[key]) + "\n")
            print(f"{key}: {time.monotonic() - started:.1f} s {self._runs[key].get('error', '')}", file=sys.stderr)
        return self._runs[key]

    def rounds_done(self, dtype: str, world: int, loaders: Collection[str]) -> int:
        """Return how many rounds of a case are complete for some loaders."""
        number = 0
        while all(f"{world} {dtype} {loader} {number}" in self._runs for loader in loaders):
            number += 1
        return number

    def record(self, loader: str, dtype: str, world: int, folder: Path) -> None:
        """Load once more with memory recorded on the first rank, and keep the run folder."""
        if not (folder / "summary.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            found = self._load(loader, dtype, world, 0, record=folder)
            if "error" in found:
                raise SystemExit(f"{loader} could not be recorded: {found['error']}")

    def _load(self, loader: str, dtype: str, world: int, number: int, *, record: Path | None = None) -> dict[str, Any]:
        wide = 2 if dtype == "float32" else 1
        # Plain loading holds a whole model on every rank, plus mapped files.
        needed = int(self.total_bytes * ((world * wide if loader == PLAIN else 2 * wide) + 1.5)) + SPARE_BYTES
        if not _wait_for_memory(needed):
            return {"error": f"the machine has no {needed / (1 << 30):.0f} GiB of memory to spare"}
        self._drop_cache()
        with tempfile.TemporaryDirectory(prefix="meet-", dir=self.work) as folder, _threads_of_one():
            arguments = [(rank, world, folder, loader, dtype, record is not None) for rank in range(world)]
            ranks = [self._context.Process(target=rank_main, args=a, daemon=True) for a in arguments]
            for one in ranks:
                one.start()
            error = _ended(ranks, time.monotonic() + WAIT_SECONDS)
            if error:
                return {"error": error}
            if record is not None:
                shutil.move(f"{folder}/run", record)
            return {"ranks": [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(world)]}

    def _drop_cache(self) -> None:
        for file in self.files:
            with file.open("rb") as one:
                os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait_for_memory(needed_bytes: int) -> bool:
    """Wait until the machine has memory to spare; ``False`` if it has none for minutes."""
    for _ in range(60):
        if fields_of(Path("/proc/meminfo"), unit=1024)["MemAvailable:"] >= needed_bytes:
            return True
        time.sleep(5)
    return False


@contextlib.contextmanager
def _threads_of_one() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


def _ended(ranks: list[Any], deadline: float) -> str:
    """Wait for all ranks; return the error, if any. A rank that fails ends the others, which would wait for it."""
    try:
        while any(one.is_alive() for one in ranks):
            multiprocessing.connection.wait([one.sentinel for one in ranks if one.is_alive()], timeout=1.0)
            failed = [one.exitcode for one in ranks if one.exitcode]
            if failed:
                return f"a rank ended with {failed[0]}"
            if time.monotonic() > deadline:
                return f"no end within {WAIT_SECONDS} s"
    finally:
        for one in ranks:
            if one.is_alive():
                one.kill()
            one.join()
    failed = [one.exitcode for one in ranks if one.exitcode]
    return f"a rank ended with {failed[0]}" if failed else ""


def measure(
    bench: Bench, dtype: str, world: int, rounds: int, often: Collection[str] = tuple(LOADERS)
) -> dict[str, Any]:
    """Run the loaders ``rounds`` times, in turn, beginning with a different one each time; return the rows of a table.

    Args:
        bench: Stores the runs.
        dtype: The dtype to load into.
        world: Number of ranks.
        rounds: Number of rounds.
        often: The loaders of every round; the others are run in the first.
    """
    rounds = max(rounds, bench.rounds_done(dtype, world, often))
    found: dict[str, list[dict[str, Any]]] = {loader: [] for loader in LOADERS}
    for number in range(rounds):
        names = [loader for loader in LOADERS if loader in often or number == 0]
        first = number % len(names)  # the loaders of this round: none follows the same one each time
        for loader in names[first:] + names[:first]:
            found[loader].append(bench.run(loader, dtype, world, number))
    plainly = next((run["ranks"] for run in found[PLAIN] if "ranks" in run), None)
    if plainly is None:
        raise SystemExit(f"plain loading failed: {found[PLAIN][0]['error']}")
    rows: dict[str, Any] = {}
    for loader, runs in found.items():
        good = [run["ranks"] for run in runs if "ranks" in run]
        errors = [run["error"] for run in runs if "error" in run]
        rows[loader] = _row(good, plainly, bench.total_bytes) if good else {}
        if errors:
            rows[loader]["error"] = f"{len(errors)} of {len(runs)} did not run: {errors[0]}"
    return rows


def _row(runs: list[list[dict[str, Any]]], plainly: list[dict[str, Any]], total_bytes: int) -> dict[str, Any]:
    digests, buffers = [r["digests"] for r in plainly], [r["buffers"] for r in plainly]
    above = [max(r["peak_bytes"] - r["shard_bytes"] for r in ranks) for ranks in runs]
    private = [max(r["private_peak_bytes"] - r["shard_bytes"] for r in ranks) for ranks in runs]
    return {
        "equal": all([r["digests"] for r in ranks] == digests for ranks in runs),
        "buffers_equal": all([r["buffers"] for r in ranks] == buffers for ranks in runs),
        "above_shard_bytes": summary([float(x) for x in above]),
        "private_above_shard_bytes": summary([float(x) for x in private]),
        "read_share": summary([sum(r["disk_bytes"] for r in ranks) / total_bytes for ranks in runs]),
        "seconds": summary([max(r["seconds"] for r in ranks) for ranks in runs]),
        "written_seconds": summary([max(r["written_seconds"] for r in ranks) for ranks in runs]),
        "processor_seconds": summary([sum(r["processor_seconds"] for r in ranks) for ranks in runs]),
        "shard_bytes": max(r["shard_bytes"] for r in runs[0]),
        "base_bytes": max(r["base_bytes"] for r in runs[0]),
        "runs": [
            [{k: v for k, v in r.items() if k not in ("digests", "buffers")} for r in ranks] for ranks in runs
        ],
    }  # fmt: skip


def report(result: dict[str, Any]) -> str:
    """Return the README of a results folder."""
    lines = [
        f"# Loading sharded models: {result['hardware']}",
        "",
        f"{result['date']}, {result['filesystem']}, a checkpoint of {result['checkpoint_bytes'] / MIB:.0f} MiB in "
        f"{result['files']} files that the page cache lacks, a process for each rank and load, in turn.",
        "Cells are medians (quartiles), or the value of a method that was run once. *Memory*: of the worst rank, above",
        "what it had before loading and its shard, in MiB; *private*: without pages of mapped files. *Of the fastest*:",
        "time over that of the fastest method that is not ours. *Of raw*: the checkpoint's bytes a second over those",
        "of raw reads: direct I/O, four threads a rank, 16 MiB each, nothing kept. *Written*: time until every page of",
        "the shards was also written. *Processor*: time of all ranks' processors. All ranks together read from disk",
        f"{_reads(result['cases'])} Made by `python -m benchmarks.suites.loading`; every load is in `run.json`.",
    ]
    for case, rows in result["cases"].items():
        rounds = max(len(row.get("runs", [])) for row in rows.values())
        medians = {loader: row["seconds"]["median"] for loader, row in rows.items() if "runs" in row}
        raw = medians.get(RAW)
        fastest = min((seconds for loader, seconds in medians.items() if loader not in (*OURS, RAW)), default=None)
        lines += [
            "",
            f"## {case}: {rounds} {'round' if rounds == 1 else 'rounds'}",
            "",
            "| method | memory | private | seconds | of the fastest | of raw | written | processor | shards |",
            "| --- " * 9 + "|",
        ]
        for loader, row in rows.items():
            error = row.get("error", "").replace("|", "/")
            if "runs" not in row:
                lines.append(f"| {loader} | | | | | | | | {error} |")
                continue
            shown = spread if len(row["runs"]) > 1 else _only
            cells = [shown(row[k], 0, unit=MIB) for k in ("above_shard_bytes", "private_above_shard_bytes")]
            cells.append(shown(row["seconds"], 1))
            cells.append(f"{medians[loader] / fastest:.2f}" if fastest and loader != RAW else "")
            cells.append(f"{raw / medians[loader]:.2f}" if raw else "")
            cells += [shown(row[k], 1) for k in ("written_seconds", "processor_seconds")]
            cells.append("; ".join(words for words in (_verdict(row) if loader != RAW else "none", error) if words))
            lines.append(f"| {loader} | {' | '.join(cells)} |")
    if result["drawn"]:
        lines += ["", f"Memory of the first rank over time, {result['drawn']}:", "", "![Loading](loading.svg)"]
    return "\n".join(lines) + "\n"


def _reads(cases: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the share of the checkpoint that was read from disk: by every method, and by those that read more."""
    shares = [
        (f"{loader} with {case}", row["read_share"]["q3"])
        for case, rows in cases.items() for loader, row in rows.items() if "runs" in row
    ]  # fmt: skip
    more = [f"{what}: {share:.2f} times" for what, share in shares if share > 1.05]
    most = max((share for _, share in shares if share <= 1.05), default=1.0)
    return "; ".join([f"at most {most:.2f} times the checkpoint's size", *more]) + "."


def _verdict(row: dict[str, Any]) -> str:
    if not row["equal"]:
        return "cut otherwise"
    return "equal" if row["buffers_equal"] else "equal, buffers not"


def _only(values: dict[str, float], digits: int, *, unit: float = 1.0) -> str:
    return f"{values['median'] / unit:.{digits}f}"


def _prepare(work: Path, *, small: bool) -> None:
    """Write the missing checkpoints, in a process that ends afterwards."""
    for name, sizes, file_size in (
        ("big", SMALL if small else WIDE, "20MB" if small else "450MB"),
        ("tiny", TINY, "1MB"),
    ):
        if not (work / name / "config.json").exists():
            code = (
                "from benchmarks.loaders import *; "
                f"write_checkpoint(Path({str(work / 'draft')!r}), {sizes}, {file_size!r})"
            )
            subprocess.run([sys.executable, "-c", code], check=True)
            (work / "draft").rename(work / name)
    os.sync()  # unwritten pages cannot be dropped


def _draw(bench: Bench, dtype: str, world: int) -> str:
    """Record the loaders in the picture, and return it."""
    from ebbtide.report import load_run, loading_svg

    folders = [bench.work / f"run-{number}" for number in range(len(SHOWN))]
    for loader, folder in zip(SHOWN, folders, strict=True):
        bench.record(loader, dtype, world, folder)
    return loading_svg([load_run(folder) for folder in folders])


def main() -> None:
    """Write a checkpoint, measure, and write ``run.json``, ``README.md`` and ``loading.svg``."""
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, help="directory on the disk to read from, kept; default: a temporary one")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, nargs="+", default=[5, 3], help="for each of --worlds")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--often", nargs="+", default=list(LOADERS), choices=list(LOADERS), help="run in every round")
    parser.add_argument("--small", action="store_true", help="a checkpoint of about 80 MiB, to try the suite")
    options = parser.parse_args()
    if len(options.rounds) != len(options.worlds):
        parser.error("--rounds needs a number for each of --worlds")
    from ebbtide.store.location import check_directory, default_directory, filesystem_of

    with contextlib.ExitStack() as stack:
        if options.work:
            options.work.mkdir(parents=True, exist_ok=True)
            work = check_directory(options.work)
        else:
            scratch = tempfile.TemporaryDirectory(prefix="ebbtide-loading-", dir=default_directory())
            work = Path(stack.enter_context(scratch))
        _prepare(work, small=options.small)
        bench = Bench(work)
        cases = {
            f"{world} ranks, bfloat16 to {dtype}": measure(bench, dtype, world, rounds, options.often)
            for world, rounds in zip(options.worlds, options.rounds, strict=True)
            for dtype in options.dtypes
        }
        drawn = (options.dtypes[-1], options.worlds[0])
        picture = _draw(bench, *drawn)
        result: dict[str, Any] = {
            "suite": "loading",
            "hardware": hardware(work),
            "date": datetime.date.today().isoformat(),
            "filesystem": filesystem_of(work),
            "checkpoint_bytes": bench.total_bytes,
            "files": len(bench.files),
            "cases": cases,
            "drawn": f"{drawn[1]} ranks, bfloat16 to {drawn[0]}",
        }
        folder = options.out or result_folder("loading", work)
    text = report(result)
    write_result(folder, result, text)
    (folder / "loading.svg").write_text(picture)
    print(text)
    wrong = [
        f"{c}: {w}" for c, rows in cases.items() for w, r in rows.items() if w.startswith("ebb") and not r.get("equal")
    ]
    if wrong:
        raise SystemExit(f"shards differ from plain loading's: {wrong}")


if __name__ == "__main__":
    main()
