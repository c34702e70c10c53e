"""When torchrun is started, and with what."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from ebbtide.base.errors import ConfigError
from ebbtide.cli.signals import Terminated, terminate_as_interrupt
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import launch
from tests.helpers.interrupts import signalled_before_waiting

RANK = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize(
    ("changes", "environment", "count"),
    [
        ({}, {}, None),
        ({"nproc_per_node": 1}, {}, None),
        ({"nproc_per_node": 2}, {}, 2),
        ({}, {"NPROC_PER_NODE": "3"}, 3),
        ({"nproc_per_node": 2}, {"NPROC_PER_NODE": "3"}, 2),
        ({}, {"NPROC_PER_NODE": " "}, None),
        ({}, {"NNODES": "2"}, 1),
        ({"fsdp_strategy": "full_shard"}, {}, 1),
        ({"nproc_per_node": 2}, RANK, None),
    ],
)
def test_processes_are_started_where_flags_or_the_environment_mean_several(
    changes: dict, environment: dict, count: int | None
) -> None:
    assert launch.processes(SftConfig(**changes), environment) == count


def test_one_process_a_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert launch.processes(SftConfig(), {}) == 4
    assert launch.processes(SftConfig(nproc_per_node=2), {}) == 2
    with pytest.raises(ConfigError, match="5 processes .*; expected at most 4, one per visible device\nhint: "):
        launch.processes(SftConfig(nproc_per_node=5), {})


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"NPROC_PER_NODE is '{text}' in the environment; expected 1 or more\nhint: "):
        launch.processes(SftConfig(), {"NPROC_PER_NODE": text})


@pytest.mark.usefixtures("no_devices")
def test_fsdp_on_cpus_is_refused_where_ddp_would_run_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    launch.check_device(SftConfig())
    with pytest.raises(
        ConfigError, match="fsdp_strategy is 'full_shard' on a machine without an accelerator.*\nhint: "
    ):
        launch.check_device(SftConfig(fsdp_strategy="full_shard"))


def test_who_is_the_main_process() -> None:
    assert launch.is_main({}) and launch.is_main({**RANK, "RANK": "0"})
    assert not launch.is_main(RANK)
    assert (launch.world_size({}), launch.world_size(RANK)) == (1, 2)


def test_torchrun_gets_the_other_nodes() -> None:
    alone = launch.torchrun("sft", ["--max_steps", "3"], 2, {})
    assert alone[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert alone[3:] == ["--nproc_per_node", "2", "--standalone", "-m", "ebbtide", "sft", "--max_steps", "3"]
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "29501"}
    many = " ".join(launch.torchrun("sft", [], 8, nodes))
    assert "--nnodes 2 --node_rank 1 --master_addr first --master_port 29501" in many
    assert "--standalone" not in many


def test_an_interrupt_ends_the_ranks_before_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    children, came = list[Any](), list[str]()

    class Interrupted(subprocess.Popen):
        """A child; waiting for it is interrupted once."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
            children.append(self)

        def wait(self, timeout: float | None = None) -> int:
            if not came and self.poll() is None:
                came.append("interrupt")
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.start("sft", [], 2)
    assert children[0].poll() is not None
    children[0].stdin.close()


def test_a_signal_just_before_the_system_call_that_waits_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    class Known(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Known)
    monkeypatch.setattr(launch, "torchrun", lambda *given: ["sleep", "10"])
    came = signalled_before_waiting(signal.SIGTERM, monkeypatch)
    with terminate_as_interrupt(), pytest.raises(Terminated):
        launch.start("sft", [], 2)
    assert len(came) == 1
    assert children[0].returncode == -signal.SIGINT  # it had not ended by itself
