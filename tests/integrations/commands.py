"""Run commands of the documents on tiny models: in separate processes, or in forks of one with all imports.

[Note: forks]
Importing a recipe's packages takes longer than two steps on a tiny model. ``Forks`` starts one process that imports,
and forks it for each command, once per rank; a fork calls the command line's own ``main``, with the command's own
words. Ranks meet as under torchrun, and FSDP gets the shim of ``tests.helpers.cpu_fsdp``. Ranks that ``ebbtide`` or
torchrun starts are tested with ``start``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 550


def surroundings() -> dict[str, str]:
    """Return the environment of commands: one thread, no network, this checkout."""
    changes = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def start(
    words: Sequence[str], *, ranks: str | None = None, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``ebbtide sft`` in processes of its own.

    Args:
        words: The arguments of ``sft``.
        ranks: ``NPROC_PER_NODE``; ``None``: unset.
        torchrun: Start it under torchrun, on two ranks.
    """
    environment = surroundings() | ({} if ranks is None else {"NPROC_PER_NODE": ranks})
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if torchrun else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ebbtide", "sft", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip


def replaced(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a command's words with other values for some of its flags."""
    return [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]


class Forks:
    """A process that has imported a recipe's packages. See [Note: forks]."""

    def __enter__(self) -> Forks:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.commands"],
            cwd=ROOT, env=surroundings(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_SECONDS)
        self._process.stdout.close()

    def sft(self, words: Sequence[str], ranks: int) -> str:
        """Run ``ebbtide sft`` on several ranks; return their output.

        Raises:
            AssertionError: One of them failed, or took longer than ``LIMIT_SECONDS``.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"words": list(words), "ranks": ranks}) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        assert told["codes"] == [0] * ranks, f"ended with {told['codes']}\n{told['said'][-4000:]}"
        return told["said"]


def serve() -> None:
    """Answer commands, one per line."""
    import torch

    from ebbtide_recipes.language import adapters, meta, models  # noqa: F401
    from ebbtide_recipes.sft import data, pydoc, trainer  # noqa: F401

    torch.set_num_threads(1)
    pydoc.rows()  # kept for the life of the process, and so by all forks
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="ebbtide-forks-") as folder:
            files = [Path(folder, f"said-{rank}") for rank in range(command["ranks"])]
            children = []
            for rank, file in enumerate(files):
                child = os.fork()
                if child == 0:
                    _rank(command["words"], rank, command["ranks"], file)
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            said = "".join(f"[rank {rank}] {file.read_text()}" for rank, file in enumerate(files))
        print(json.dumps({"codes": codes, "said": said}), flush=True)


def _rank(words: Sequence[str], rank: int, ranks: int, file: Path) -> None:
    """Run as one rank, in a fork; never returns."""
    code = 1
    try:
        output = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        import torch

        from ebbtide.cli import main
        from tests.helpers.gloo import use_one_worker
        from tests.integrations.ranks import fresh_world

        world: Any = contextlib.nullcontext()
        if ranks > 1:
            use_one_worker()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            place = f"file://{file.with_name('meeting')}"
            torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
            world = fresh_world(sharded=any(word.startswith(("--fsdp", "--strategy")) for word in words))
        with world:
            code = main(["sft", *words])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
