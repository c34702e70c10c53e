"""Runs commands of the documents on tiny models: what they name is replaced, and what is sharded gets the CPU shim."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 550


def start(
    words: Sequence[str], *, ranks: str | None = None, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``ebbtide sft``.

    Args:
        words: What stands behind ``sft``.
        ranks: ``NPROC_PER_NODE``; ``None``: unset.
        torchrun: Start it under torchrun, on two ranks, with the shim where FSDP is asked for.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    program = ["-m", "ebbtide"]
    if torchrun:
        sharded = any(word.startswith("--fsdp") for word in words)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        program = [*launcher, "-m", "tests.helpers.cpu_fsdp" if sharded else "ebbtide"]
    elif ranks is not None:
        environment["NPROC_PER_NODE"] = ranks
    return subprocess.run(
        [sys.executable, *program, "sft", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a command's words with other values for some of its flags."""
    return [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]
