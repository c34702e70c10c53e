"""``import ebbtide`` costs what ``import torch`` costs, imports nothing else, and does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
LIMIT = 1.2
FORBIDDEN = {
    "accelerate",
    "datasets",
    "jinja2",
    "pandas",
    "peft",
    "psutil",
    "rich",
    "transformers",
    "trl",
    "tyro",
    "yaml",
}

SNAPSHOT = """
import atexit, json, logging, os, signal, sys, threading, warnings
import torch

def snapshot():
    loggers = [logging.getLogger(), *(x for x in logging.root.manager.loggerDict.values() if hasattr(x, "handlers"))]
    patched = [torch.nn.Module.__call__, torch.nn.Module.to, torch.Tensor.backward, torch.autograd.backward,
               torch.autograd.graph.saved_tensors_hooks.__enter__, torch.utils.checkpoint.checkpoint, print]
    return {
        "threads": sorted(t.name for t in threading.enumerate()),
        "kernel threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "environment": dict(os.environ),
        "handlers": sorted(f"{x.name}: {x.handlers}" for x in loggers if x.handlers),
        "levels": sorted(f"{x.name}: {x.level}" for x in loggers if x.level),
        "warning filters": [str(x) for x in warnings.filters],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "hooks": [id(sys.excepthook), id(threading.excepthook), id(sys.displayhook), len(sys.meta_path)],
        "patched": [id(x) for x in patched],
        "exit callbacks": atexit._ncallbacks(),
        "torch": [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
                  torch.random.initial_seed(), torch.are_deterministic_algorithms_enabled()],
        "random state": torch.get_rng_state().sum().item(),
        "directory": os.getcwd(),
    }

import torch.utils.checkpoint
before = snapshot()
IMPORT
after = snapshot()
print(json.dumps({k: [str(before[k])[:500], str(after[k])[:500]] for k in before if before[k] != after[k]}))
"""
EVERY_ROOM = """
import importlib, pkgutil, ebbtide
for room in ("base", "store", "engine", "planner", "wrap", "track", "report"):
    package = importlib.import_module(f"ebbtide.{room}")
    for module in pkgutil.iter_modules(package.__path__, f"ebbtide.{room}."):
        importlib.import_module(module.name)
importlib.import_module("ebbtide.api"); importlib.import_module("ebbtide.config")
"""


def python(code: str) -> tuple[str, float]:
    """Run code in a fresh process; return its output and CPU seconds (user and system)."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": ""}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stream:
        printed = stream.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, code
    return printed, usage.ru_utime + usage.ru_stime


def modules(code: str) -> set[str]:
    return set(json.loads(python(f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))")[0]))


def test_import_costs_at_most_a_fifth_more_than_torch() -> None:
    # The least of several is the cost of the work itself; other load on the machine only adds. More pairs are
    # taken while the contract looks broken, so that a busy machine does not break it, and a heavy import still does.
    python("import ebbtide")  # compiles what is not compiled
    torch_seconds: list[float] = []
    ebbtide_seconds: list[float] = []
    while len(torch_seconds) < 3 or (len(torch_seconds) < 12 and min(ebbtide_seconds) > LIMIT * min(torch_seconds)):
        torch_seconds.append(python("import torch")[1])
        ebbtide_seconds.append(python("import ebbtide")[1])
    ratio = min(ebbtide_seconds) / min(torch_seconds)
    assert ratio <= LIMIT, f"import ebbtide takes {ratio:.2f} times import torch ({ebbtide_seconds}, {torch_seconds})"


def test_import_brings_no_other_package_than_torch_and_safetensors() -> None:
    before, after = modules("import torch"), modules("import ebbtide")
    tops = {name.partition(".")[0] for name in after - before} - set(sys.stdlib_module_names)
    assert {name for name in tops if not name.startswith("_")} <= {"ebbtide", "safetensors"}
    assert not {name.partition(".")[0] for name in after} & FORBIDDEN
    assert {n for n in after if n.startswith("numpy")} <= {n for n in before if n.startswith("numpy")}


@pytest.mark.parametrize("code", ["import ebbtide", EVERY_ROOM], ids=["package", "every room"])
def test_nothing_happens_at_import(code: str) -> None:
    changed = json.loads(python(SNAPSHOT.replace("IMPORT", code))[0])
    assert changed == {}


def test_what_happens_at_import_would_be_found() -> None:
    code = (
        "os.environ['EBBTIDE_X'] = '1'; logging.getLogger('x').addHandler(logging.NullHandler()); "
        "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    changed = json.loads(python(SNAPSHOT.replace("IMPORT", code))[0])
    assert {"environment", "handlers", "threads", "kernel threads"} <= changed.keys()
