"""Run a script like a process of ``ebbtide run`` or ``ebbtide compare``, without importing torch again.

The process is forked from one that has imported torch and the hosts, so the switch is armed by hand where normally
``sitecustomize`` does it; the command line's own tests start real commands.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.base.runs import Event, read_events
from ebbtide.script.request import VARIABLE, Request, read_notes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switched:
    """The results of a switched script."""

    code: int
    output: str
    notes: Sequence[Event]
    events: Sequence[Event]

    def all(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def checksum(self) -> str:
        return self.all("parameters")[-1]["checksum"]

    @property
    def losses(self) -> list[float | None]:
        return [event["loss"] for event in self.all("step")]


def run_switched(script: Path, *argv: str, folder: Path, seconds: float = 120.0, **request: Any) -> Switched:
    """Run a script with a request in a folder of its own.

    Raises:
        AssertionError: It took longer than ``seconds``.
    """
    folder.mkdir(parents=True)
    wanted = Request(folder=str(folder), **{"compared": True, **request})
    environment = {**os.environ, VARIABLE: json.dumps(dataclasses.asdict(wanted))}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.warm"])
    output = folder / "output.txt"
    process = context.Process(target=_main, args=([str(script), *argv], environment, output), daemon=True)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"{script.name} still runs after {seconds:g} s\n{output.read_text()}")
    file = folder / "run.jsonl"
    return Switched(
        code=process.exitcode or 0, output=output.read_text(), notes=read_notes(folder),
        events=read_events(file) if file.exists() else [],
    )  # fmt: skip


def _main(argv: list[str], environment: Mapping[str, str], output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    from ebbtide.script import switch

    switch.arm()
    runpy.run_path(argv[0], run_name="__main__")
