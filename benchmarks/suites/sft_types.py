"""``ebbtide sft`` on a real model, each type of training: do losses fall, and do they equal those without ebbtide?

SmolLM2-135M-Instruct on the standard library's docstrings, float32 on the CPU: all weights, adapters, adapters on 4-bit
weights, and all weights on two ranks of FSDP2. Every command runs twice in fresh processes, without and with
``--activation_cpu_offload``. A loss that differs in one bit, or that does not fall, fails the suite. Nothing is timed.

On CPUs the command refuses FSDP2, because accelerate would run DDP there; its two ranks are started through the
tests' shim, which lets accelerate's own FSDP2 code run.

    python -m benchmarks.suites.sft_types [--only full lora ...] [--out DIR]
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_folder import parser_of, result_folder, write_result
from ebbtide.base.runs import EVENTS_FILE, SUMMARY_FILE, read_events

ROOT = Path(__file__).parents[2]
COMMON = (
    "--model builtin:smollm2 --dataset builtin:pydoc#6 --packing true --max_length 128 "
    "--num_train_epochs 2 --lr_scheduler_type constant --logging_steps 1 --save false"
)
TYPES = {
    "full": "--train_type full --learning_rate 5e-5",
    "lora": "--train_type lora --learning_rate 1e-3",
    "qlora": "--train_type qlora --learning_rate 1e-3",
    "full, two FSDP2 ranks": "--train_type full --learning_rate 5e-5 --fsdp_strategy full_shard",
}
OURS = "--activation_cpu_offload true"


def command(flags: str) -> list[str]:
    """Return the command: ebbtide itself, or torchrun with the shim for sharded training."""
    if "--fsdp_strategy" not in flags:
        return [sys.executable, "-m", "ebbtide", "sft", *shlex.split(flags)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.helpers.cpu_fsdp"]
    return [sys.executable, *torchrun, "sft", *shlex.split(flags)]


def train(flags: str, folder: Path) -> dict[str, Any]:
    """Run one command in fresh processes; return its losses, its summary and what wrapped the model.

    Raises:
        SystemExit: It failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command(f"{flags} --output_dir {shlex.quote(str(folder))}"),
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{flags} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    steps = [event for event in read_events(folder / EVENTS_FILE) if event["event"] == "step"]
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    strategies = ("FSDP2", "DDP", "single-device")
    log = (folder / "training.log").read_text()
    return {
        "flags": flags,
        "losses": [event["loss"] for event in steps],
        "tokens": sum(event["tokens"] for event in steps),
        "world_size": summary["world_size"],
        "strategy": next((name for name in strategies if f"for {name} strategy" in log), None),
        "activation_bytes": summary["activation_bytes"],
        "memory_saved_bytes": summary["memory_saved_bytes"],
    }


def both(flags: str, scratch: Path) -> dict[str, Any]:
    """Train without and with ebbtide; return both runs and the mean losses of the first and the last epoch.

    Raises:
        SystemExit: The losses differ, do not fall, or nothing was saved.
    """
    plain = train(flags, scratch / "plain")
    ours = train(f"{flags} {OURS}", scratch / "ours")
    losses: list[float] = ours["losses"]
    epoch = len(losses) // 2
    first, last = statistics.mean(losses[:epoch]), statistics.mean(losses[-epoch:])
    if losses != plain["losses"]:
        raise SystemExit(f"{flags}: the losses differ\n{plain['losses']}\n{losses}")
    if not last < first or not ours["memory_saved_bytes"]:
        raise SystemExit(f"{flags}: from {first} to {last}, {ours['memory_saved_bytes']} bytes saved")
    return {"first_epoch": first, "last_epoch": last, "plain": plain, "ours": ours}


def rows(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table's rows."""
    lines = [
        "| | steps | loss, first epoch | loss, last epoch | against the run without | saved tensors | stayed |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for name, one in found.items():
        count, counted = len(one["ours"]["losses"]), one["ours"]["activation_bytes"]
        unique, kept = (f"{counted[key] / 2**20:.1f} MiB" for key in ("unique", "kept"))
        lines.append(
            f"| {name} | {count} | {one['first_epoch']:.4f} | {one['last_epoch']:.4f} | "
            f"{count} of {count} losses bitwise equal | {unique} | {kept} |"
        )
    return lines


def page(found: dict[str, dict[str, Any]]) -> str:
    """Return the text of ``README.md``."""
    text = [
        "# `ebbtide sft` on SmolLM2-135M-Instruct: each type of training",
        "",
        "float32 on the CPU, one thread a process, 2 epochs over the same rows. Every command ran twice in fresh "
        f"processes, without and with `{OURS}`; the figures on saved tensors are of one rank and one micro-batch, "
        "counted by the engine. Made by `python -m benchmarks.suites.sft_types`; every loss is in `run.json`.",
        "",
        *rows(found),
        "",
        "```",
        f"ebbtide sft {COMMON}",
        "```",
        "",
        "and for each:",
        "",
        *(f"- {name}: `{TYPES[name]}`" for name in found),
        "",
    ]
    return "\n".join(text)


def main() -> None:
    """Run everything, and write ``run.json`` and ``README.md``."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(TYPES), default=list(TYPES))
    given = parser.parse_args()
    folder = given.out or result_folder("sft-types")
    found: dict[str, dict[str, Any]] = {}
    for name in given.only:
        with tempfile.TemporaryDirectory(prefix="ebbtide-types-") as scratch:
            found[name] = both(f"{COMMON} {TYPES[name]}", Path(scratch))
        print(f"{name}: {found[name]['first_epoch']:.4f} to {found[name]['last_epoch']:.4f}, equal", flush=True)
        write_result(folder, {"suite": "sft_types", "types": found}, page(found))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
