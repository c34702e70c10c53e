"""Children of a training process: none touches the parent's store, and the parent continues undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ebbtide
from tests.helpers.handles import training
from tests.helpers.oracle import same_bits

POLICIES = ["offload", "minimal", "auto"]
ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning"),
    pytest.mark.timeout(60),
]


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child; its exit code."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_child_forked_between_forward_and_backward(tier: str, policy: str) -> None:
    with training(policy, tier) as trainee:
        model: nn.Module = trainee.handle._attachment._model
        x = torch.randn(2, 12, 48)
        weights = list(model.parameters())
        expected = torch.autograd.grad(model(x).square().sum(), weights)
        graph = [model(x).square().sum()]

        def drop_everything() -> None:
            graph.clear()  # tickets die here: their slots belong to the parent
            trainee.handle.stats()
            trainee.handle.close()

        assert in_child(drop_everything) == 0
        assert in_child(lambda: sys.exit(0)) == 0
        got = torch.autograd.grad(graph.pop(), weights)
        assert all(map(same_bits, got, expected))
        trainee.assert_recovers()


def test_a_child_that_continues_training_gets_a_hint() -> None:
    with training("offload", "disk") as trainee:

        def train() -> None:
            with pytest.raises(ebbtide.EbbtideError, match=r"forked child[\s\S]*hint: in the child call handle.close"):
                trainee.step()

        assert in_child(train) == 0
        trainee.assert_recovers()


class Batches(Dataset[Tensor]):
    """Eight batches, made in the worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2, 12, 48), 0.01 * (index + 1))


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [True, False])
def test_data_loader_workers(context: str, persistent: bool) -> None:
    def loader() -> Any:
        return DataLoader(
            Batches(), batch_size=None, num_workers=1, multiprocessing_context=context, persistent_workers=persistent
        )

    with training("minimal", "disk") as trainee:
        model: nn.Module = trainee.handle._attachment._model
        weights = list(model.parameters())

        def grads(batch: Tensor) -> list[Tensor]:
            return list(torch.autograd.grad(model(batch).square().sum(), weights))

        trainee.handle.disable()
        expected = [grads(Batches()[i]) for i in range(8)]
        trainee.handle.enable()
        seen = 0
        for batch, right in zip(loader(), expected, strict=True):
            held = model(batch).square().sum()  # a graph is alive while the worker is forked, and when it ends
            assert all(map(same_bits, torch.autograd.grad(held, weights), right))
            seen += 1
        del held
        assert seen == 8
        trainee.assert_recovers()


SCRIPT = """
    import sys
    import torch
    from torch import nn
    import ebbtide

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x):
            return x + self.b(nn.functional.silu(self.a(x)))

    model = nn.Sequential(*(Block() for _ in range(3)))
    handle = ebbtide.enable_activation_offloading(model, policy=sys.argv[1], min_bytes=0, disk_path=sys.argv[2])
    loss = model(torch.randn(64, 256)).square().sum()
    if sys.argv[3] == "backward":
        loss.backward()
    elif sys.argv[3] == "error":
        raise ValueError("the user's own")
    elif sys.argv[3] == "exit":
        sys.exit(3)
    elif sys.argv[3] == "interrupt":
        import signal
        signal.raise_signal(signal.SIGINT)
    print("the end")
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the disk target serves tensors in RAM")
@pytest.mark.parametrize(
    ("how", "code", "last_line"),
    [
        ("graph", 0, ""),
        ("backward", 0, ""),
        ("error", 1, "ValueError: the user's own"),
        ("exit", 3, ""),
        ("interrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_the_interpreter_ends_with_an_open_handle(how: str, code: int, last_line: str, tmp_path: Path) -> None:
    policy = "minimal" if how == "backward" else "offload"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), policy, str(tmp_path), how],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert (lines[-1] if lines else "") == last_line
    assert done.stderr.count("Traceback") == bool(last_line) and "Exception ignored" not in done.stderr
    assert list(tmp_path.iterdir()) == []
