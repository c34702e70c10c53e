"""Loading a sharded model: host memory, bytes read and time, beside the other ways of doing it.

A decoder with random weights is written in several safetensors files, loaded by every way on gloo ranks in fresh
processes, in turn, and deleted. Memory is the peak that the system keeps of each process (reset before loading), above
what the process had before and its shard; bytes are those that the system fetched from the disk for all ranks, with the
files dropped from the page cache before (``cold``); time ends when every byte of every shard was touched, so that a
mapping that has not been read yet counts too. Every rank's shards are compared with those of plain loading by digest:
a way whose shards differ fails the suite.

    python -m benchmarks.suites.loading [--path DIR] [--rounds 5] [--worlds 2 4] [--dtypes bfloat16 float32] [--small]
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_folder import hardware, result_folder, summary, write_result

MIB = 1 << 20
WAIT_SECONDS = 600
WIDE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "vocab_size": 64000}
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 32000}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False}


def write_checkpoint(folder: Path, sizes: dict[str, int], file_size: str) -> None:
    """Write a decoder with random weights in bf16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**sizes, **HEADS, head_dim=sizes["hidden_size"] // 16)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=file_size)


# One rank's side


def _on_meta(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)


def _whole(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours(path: str, dtype: torch.dtype) -> Any:
    """``load_sharded``, each rank its slices."""
    import ebbtide

    return ebbtide.load_sharded(_on_meta(path, torch.bfloat16), path, shard=_shard, dtype=dtype)


def ours_broadcast(path: str, dtype: torch.dtype) -> Any:
    """``load_sharded``, one rank reads."""
    import ebbtide

    return ebbtide.load_sharded(_on_meta(path, torch.bfloat16), path, shard=_shard, dtype=dtype, source="broadcast")


def plain(path: str, dtype: torch.dtype) -> Any:
    """``from_pretrained`` on every rank, then ``fully_shard``."""
    return _shard(_whole(path, dtype))


def transformers_native(path: str, dtype: torch.dtype) -> Any:
    """``from_pretrained`` with a ``DistributedConfig``; wraps by the library's own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    world = torch.distributed.get_world_size()
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, distributed_config=DistributedConfig(fsdp_size=world)
    )


def accelerate_efficient(path: str, dtype: torch.dtype) -> Any:
    """Accelerate's loading from a full state dict on the first rank."""
    from types import SimpleNamespace

    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    first = torch.distributed.get_rank() == 0
    whole = _whole(path, dtype) if first else None
    values = whole.state_dict() if whole is not None else {}
    model = _shard(_on_meta(path, dtype))
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=first), model, values)
    return model


def dcp_broadcast(path: str, dtype: torch.dtype) -> Any:
    """``set_model_state_dict`` with ``broadcast_from_rank0``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = _whole(path, dtype).state_dict() if torch.distributed.get_rank() == 0 else {}
    model = _shard(_on_meta(path, dtype))
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def dcp_load(path: str, dtype: torch.dtype) -> Any:
    """``dcp.load`` with the reader of Hugging Face checkpoints, into the dtype of the file; then converted."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model = _shard(_on_meta(path, torch.bfloat16)).to_empty(device="cpu")
    values = model.state_dict()
    dcp.load(values, storage_reader=HuggingFaceStorageReader(path))
    return model.to(dtype)


WAYS: dict[str, Callable[[str, torch.dtype], Any]] = {
    "ebbtide, slices": ours,
    "ebbtide, broadcast": ours_broadcast,
    "from_pretrained on each rank": plain,
    "transformers DistributedConfig": transformers_native,
    "accelerate, from rank 0": accelerate_efficient,
    "DCP, from rank 0": dcp_broadcast,
    "DCP, load": dcp_load,
}


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _disk_bytes() -> int:
    line = next(x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_bytes:"))
    return int(line.split()[1])


def rank_main(way: str, path: str, dtype: str) -> None:
    """Load by one way in this rank, and print what it took as one line of JSON."""
    import importlib

    for name in ("transformers", "accelerate.utils.fsdp_utils", "ebbtide.loading", "torch.distributed.checkpoint"):
        importlib.import_module(name)  # what a program has imported anyway is no part of loading
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    private_peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            private_peak[0] = max(private_peak[0], _status("RssAnon"))

    base, base_private, disk = _status("VmRSS"), _status("RssAnon"), _disk_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    model = WAYS[way](path, getattr(torch, dtype))
    locals_ = {n: getattr(p, "_local_tensor", p).detach() for n, p in model.named_parameters()}
    for tensor in locals_.values():
        tensor.view(torch.uint8).view(-1)[::4096].sum()  # a page that nobody has touched has not been read
    torch.distributed.barrier()
    seconds = time.perf_counter() - started
    stop.set()
    watcher.join()
    peak = _status("VmHWM")
    found = {
        "seconds": seconds,
        "base_bytes": base,
        "peak_bytes": peak - base,
        "private_peak_bytes": private_peak[0] - base_private,
        "shard_bytes": sum(t.numel() * t.element_size() for t in locals_.values()),
        "disk_bytes": _disk_bytes() - disk,
        "digests": {n: _digest(t) for n, t in locals_.items()},
        "buffers": {n: _digest(b.detach()) for n, b in model.named_buffers()},
    }
    print("RESULT " + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "on meta"  # some ways leave buffers there
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


# The suite's side


def run_way(way: str, path: Path, dtype: str, world: int, *, cold: bool) -> dict[str, Any]:
    """Run one way in fresh processes; returns what its ranks told, or ``error``."""
    for file in path.glob("*.safetensors"):
        with file.open("rb") as one:
            if cold:
                os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while one.read(8 * MIB):
                    pass
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "benchmarks.suites.loading", "--rank-of", way, str(path), dtype]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told: list[dict[str, Any]] = []
    try:
        for one in ranks:
            out, err = one.communicate(timeout=WAIT_SECONDS)
            line = next((x for x in out.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                return {"error": (err.strip().splitlines() or ["no result"])[-1][:300]}
            told.append(json.loads(line.removeprefix("RESULT ")))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {WAIT_SECONDS} s"}
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
            one.wait()
    return {"ranks": told}


def measure(path: Path, dtype: str, world: int, rounds: int) -> dict[str, Any]:
    """Run every way ``rounds`` times cold, in turn, beginning with another each time."""
    total = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    errors: dict[str, str] = {}
    names = list(WAYS)
    reference: list[Any] = []
    for number in range(rounds):
        for way in names[number % len(names) :] + names[: number % len(names)]:
            if way in errors:
                continue
            result = run_way(way, path, dtype, world, cold=True)
            if "error" in result:
                errors[way] = result["error"]
                continue
            found[way].append(result)
    if not found["from_pretrained on each rank"]:
        raise SystemExit(f"plain loading failed: {errors}")
    plainly = found["from_pretrained on each rank"][0]["ranks"]
    reference = [r["digests"] for r in plainly]
    rows: dict[str, Any] = {}
    for way, runs in found.items():
        if not runs:
            rows[way] = {"error": errors[way]}
            continue
        equal = all([r["digests"] for r in run["ranks"]] == reference for run in runs)
        above = [max(r["peak_bytes"] - r["shard_bytes"] for r in run["ranks"]) for run in runs]
        private = [max(r["private_peak_bytes"] - r["shard_bytes"] for r in run["ranks"]) for run in runs]
        rows[way] = {
            "equal": equal,
            "buffers_equal": all(run["ranks"][0]["buffers"] == plainly[0]["buffers"] for run in runs),
            "above_shard_bytes": summary([float(x) for x in above]),
            "private_above_shard_bytes": summary([float(x) for x in private]),
            "read_share": summary([sum(r["disk_bytes"] for r in run["ranks"]) / total for run in runs]),
            "seconds": summary([max(r["seconds"] for r in run["ranks"]) for run in runs]),
            "shard_bytes": max(r["shard_bytes"] for r in runs[0]["ranks"]),
            "base_bytes": max(r["base_bytes"] for r in runs[0]["ranks"]),
            "runs": [[{k: v for k, v in r.items() if k not in ("digests", "buffers")} for r in run["ranks"]]
                     for run in runs],
        }  # fmt: skip
    return rows


def report(result: dict[str, Any]) -> str:
    """Return the README of a results folder."""
    lines = [
        f"# Loading sharded models: {result['hardware']}",
        "",
        f"{result['date']}, {result['filesystem']}, a checkpoint of {result['checkpoint_bytes'] / MIB:.0f} MiB in "
        f"{result['files']} files that the page cache lacks, fresh processes, {result['rounds']} rounds in turn.",
        "Cells are medians (quartiles). Memory is that of the worst rank above what it had before loading and its",
        "shard, in MiB; *private* leaves out pages of mapped files. *Read* is what all ranks fetched from disk over",
        "the checkpoint's size. Made by `python -m benchmarks.suites.loading`; every run is in `run.json`.",
    ]
    for case, rows in result["cases"].items():
        lines += ["", f"## {case}", "", "| way | memory | private | read | seconds | shards |", "| --- " * 6 + "|"]
        for way, row in rows.items():
            if "error" in row:
                lines.append(f"| {way} | | | | | does not run: {row['error'].replace('|', '/')} |")
                continue
            cells = [_spread(row[k], MIB, 0) for k in ("above_shard_bytes", "private_above_shard_bytes")]
            cells += [_spread(row["read_share"], 1, 2), _spread(row["seconds"], 1, 1)]
            lines.append(
                f"| {way} | {' | '.join(cells)} | {'equal' if row['equal'] else 'wrapped or read otherwise'} |"
            )
    return "\n".join(lines) + "\n"


def _verdict(row: dict[str, Any]) -> str:
    if not row["equal"]:
        return "cut or read otherwise"
    return "equal" if row["buffers_equal"] else "equal; buffers not"


def _spread(values: dict[str, float], unit: float, digits: int) -> str:
    low, middle, high = (values[k] / unit for k in ("q1", "median", "q3"))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Write a checkpoint, measure, and write ``run.json`` and ``README.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="directory on the disk to read from")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--small", action="store_true", help="a checkpoint of some 80 MiB, to try the suite")
    parser.add_argument("--out", type=Path, help="results folder; default: a new one in benchmarks/results")
    parser.add_argument("--rank-of", nargs=3, metavar=("WAY", "PATH", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(*options.rank_of)
        return
    from ebbtide.store.location import check_directory, default_directory, filesystem_of

    directory = check_directory(options.path) if options.path else default_directory()
    scratch = Path(tempfile.mkdtemp(prefix="ebbtide-loading-", dir=directory))
    try:
        sizes, file_size = (SMALL, "20MB") if options.small else (WIDE, "450MB")
        code = (
            f"from benchmarks.suites.loading import *; write_checkpoint(Path({str(scratch)!r}), {sizes}, {file_size!r})"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        os.sync()  # pages that are not written yet cannot be dropped
        files = list(scratch.glob("*.safetensors"))
        cases = {
            f"{world} ranks, bfloat16 to {dtype}": measure(scratch, dtype, world, options.rounds)
            for world in options.worlds
            for dtype in options.dtypes
        }
        result: dict[str, Any] = {
            "suite": "loading",
            "hardware": hardware(directory),
            "date": datetime.date.today().isoformat(),
            "filesystem": filesystem_of(directory),
            "checkpoint_bytes": sum(f.stat().st_size for f in files),
            "files": len(files),
            "rounds": options.rounds,
            "cases": cases,
        }
    finally:
        shutil.rmtree(scratch)
    text = report(result)
    write_result(options.out or result_folder("loading", directory), result, text)
    print(text)
    wrong = [
        f"{c}: {w}" for c, rows in cases.items() for w, r in rows.items() if w.startswith("ebb") and not r.get("equal")
    ]
    if wrong:
        raise SystemExit(f"shards differ from plain loading's: {wrong}")


if __name__ == "__main__":
    main()
