"""Nodes of a job on this machine's loopback: each is a launcher with its ranks, as on separate machines."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.integrations.commands import ROOT, surroundings

PUBLISHED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Since torch shares its store (pytorch/pytorch#128096), the agent that was rank 0 before does not publish in the next
round where ranks meet; an agent that is new waits for it and fails. Checked with torch 2.13."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def agent(*words: str, port: int, first: bool, restarts: int = 0) -> list[str]:
    """Return the command of one of two torchrun agents, two ranks each, that meet by torch's own rendezvous.

    Args:
        words: The arguments of each rank's ``-m``.
        port: The rendezvous port.
        first: Whether this one hosts the rendezvous.
        restarts: ``--max_restarts``.
    """
    # In seconds; by default torch waits minutes for a dead node.
    settings = f"is_host={int(first)},join_timeout=90,last_call_timeout=1"
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2", "--rdzv_id", "test",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_conf", settings,
        "--local_addr", "127.0.0.1", "--monitor_interval", "0.5", "--max_restarts", str(restarts), "-m", *words,
    ]  # fmt: skip


class Nodes:
    """The nodes of a job, and their output. On exit, running processes are killed by pid."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.printed: list[str] = []
        self._news = threading.Condition()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        for node in range(len(self.processes)):
            self.kill(node)
        for reader in self._readers:
            reader.join()

    def start(self, command: Sequence[str], **variables: str) -> int:
        """Start a node; return its number."""
        process = subprocess.Popen(
            command, cwd=ROOT, env=surroundings() | PUBLISHED | variables, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(process,))
        reader.start()
        self.processes.append(process)
        self._readers.append(reader)
        return len(self.processes) - 1

    def await_line(self, text: str, seconds: float) -> None:
        """Wait until a node has printed a line with a text.

        Raises:
            AssertionError: The line did not come in time.
        """
        with self._news:
            found = self._news.wait_for(lambda: any(text in line for line in self.printed), seconds)
        assert found, f"{text!r} was not printed in {seconds} s\n{self.tail()}"

    def kill(self, node: int) -> None:
        """Kill a node like a power failure: launcher and ranks at once."""
        process = self.processes[node]
        if process.poll() is not None:
            return
        mine = psutil.Process(process.pid)
        for one in [mine, *mine.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()

    def wait(self, node: int, seconds: float) -> int:
        """Return a node's exit code.

        Raises:
            AssertionError: It still runs.
        """
        try:
            return self.processes[node].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"node {node} still runs after {seconds} s\n{self.tail()}") from None

    def tail(self) -> str:
        return "".join(self.printed[-80:])

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with self._news:
                    self.printed.append(line)
                    self._news.notify_all()


def load_case(folder: Path) -> None:
    """Load a checkpoint that the second node does not have, on the ranks of two nodes; write whether shards are equal.

    Args:
        folder: Holds ``weights`` from ``save_sharded``; the answers go there.
    """
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import ebbtide
    from ebbtide.store.share import ranks_of
    from tests.helpers.gloo import use_one_worker

    use_one_worker()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])

    def shard(model: nn.Module) -> None:
        for layer in [*model.children(), model]:
            fully_shard(layer)

    here = folder / "weights" if os.environ["GROUP_RANK"] == "0" else folder / "not-here"
    loaded = ebbtide.load_sharded(model, here, shard=shard)
    torch.manual_seed(5)
    whole = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    equal = [a.full_tensor().equal(b) for a, b in zip(loaded.parameters(), whole.parameters(), strict=True)]
    answer = f"{rank} {os.environ['GROUP_RANK']} {ranks_of(os.environ)} {len(equal)} {all(equal)}"
    (folder / f"answer-{rank}").write_text(answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    load_case(Path(sys.argv[1]))
