"""Stand-in for a recipe: writes a run folder by mode, with memory that really rises and falls; no model, no torch.

The losses are the same in every mode unless --uneven names the mode that differs; --fail names one that fails, --late
one that does so after its last step, --killed one that is killed then; --wait makes it wait to be interrupted. The
first four steps are slow and hold nothing; with ebbtide a plan is made after three, or after --plan_after steps.
"""

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

MIB = 1024**2
SECONDS = {"plain": 0.03, "checkpointing": 0.06, "ebbtide": 0.045, "ebbtide-minimal": 0.06}
HEIGHT = {"plain": 96, "checkpointing": 16, "ebbtide": 32, "ebbtide-minimal": 16}


def flag(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


FOLDER = Path(flag("--output_dir"))


def emit(kind, /, **fields):
    with (FOLDER / "run.jsonl").open("a") as file:
        file.write(json.dumps({"t": time.monotonic(), "event": kind, **fields}) + "\n")


def mode():
    truth = flag("--activation_cpu_offload"), flag("--gradient_checkpointing")
    names = {("false", "false"): "plain", ("false", "true"): "checkpointing", ("true", "false"): "ebbtide"}
    return names.get(truth, "ebbtide-minimal")


def be_seen():
    """Wait until the watcher has taken two more samples."""
    watched = FOLDER / "outside.jsonl"
    until = watched.read_bytes().count(b"\n") + 2
    while watched.read_bytes().count(b"\n") < until:
        pass


def pages(size):
    """Return resident memory that goes back to the system when it is dropped: no allocator keeps it."""
    memory = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def train(name):
    steps, planned = int(flag("--max_steps", 3)), int(flag("--plan_after", 3))
    for step in range(1, steps + 1):
        warm = step <= min(4, steps - 1)
        be_seen()
        emit("phase", name="forward", edge="begin", step=step)
        activations = pages(1 if warm else HEIGHT[name] * MIB)
        be_seen()
        emit("phase", name="forward", edge="end", step=step)
        emit("phase", name="backward", edge="begin", step=step)
        be_seen()
        del activations
        emit("phase", name="backward", edge="end", step=step)
        loss = 1 / 3 / step + (1e-16 if flag("--uneven") == name else 0)
        emit("step", step=step, loss=loss, seconds=SECONDS[name] * (10 if warm else 1), tokens=100)
        if step == 1:
            emit("parts", step=1, weights={"model": 8 * MIB}, gradient_bytes=8 * MIB, optimizer_bytes=16 * MIB)
        if step == planned and name.startswith("ebbtide"):
            emit("plan", name="auto", text="the plan")
    if name != "plain":
        emit("message", level="warning", text="the cache is on")


def main():
    name = mode()
    print("fake child:", name, flush=True)
    if flag("--fail") == name:
        raise SystemExit("the fake child was told to fail")
    emit("run_begin", schema=1, mode=name, model="fake", device="cpu", pid=os.getpid(), unix_time=time.time())
    try:
        if flag("--wait"):
            emit("message", level="info", code="waiting", text="")
            signal.pause()
        train(name)
        if flag("--killed") == name:
            os.kill(os.getpid(), signal.SIGKILL)
    except KeyboardInterrupt:
        emit("run_end", status="interrupted", error=None)
        raise
    emit("run_end", status="ok", error=None)
    if flag("--late") == name:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
