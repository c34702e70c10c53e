"""Read, measure, and derive findings."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ebbtide.base.errors import EbbtideError
from ebbtide.base.extras import oldest
from ebbtide.doctor.device import look_at_device
from ebbtide.doctor.facts import Facts, look_at_bus, look_at_disk, look_at_environment, look_at_host
from ebbtide.doctor.findings import Finding, findings
from ebbtide.profiling.hardware import machine_with, measured_speed
from ebbtide.store.share import ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The result of an examination.

    Attributes:
        facts: Facts about the machine and measured rates.
        findings: Problems and notes, by code.
    """

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; notes do not count."""
        return all(finding.severity != "problem" for finding in self.findings)


def examine(target: str = "auto", disk_path: str | None = None) -> Examination:
    """Read this machine's facts, measure it (seconds), and derive findings.

    Args:
        target: ``"host"``, ``"disk"``, or ``"auto"``: host memory with an accelerator, disk without.
        disk_path: Directory for the disk tier; ``None``: a usual one.

    Returns:
        Facts and findings; failures are findings, not errors.
    """
    with _quiet_store():  # its warnings are findings here
        facts = measure(look(target, disk_path))
    return Examination(facts=facts, findings=findings(facts))


def look(target: str, disk_path: str | None) -> Facts:
    """Read this machine's facts without measuring; arguments as for ``examine``."""
    device = look_at_device()
    if target == "auto":
        target = "host" if device.accelerated else "disk"
    ranks = ranks_of(os.environ)
    return Facts(
        torch=torch.__version__,
        torch_oldest=oldest("torch"),
        target=target,
        device=device,
        bus=look_at_bus(device.address) if device.accelerated else None,
        disk=look_at_disk(disk_path),
        host=look_at_host(ranks=ranks),
        ranks=ranks,
        environment=look_at_environment(os.environ),
    )


def measure(facts: Facts, *, root: Path = Path("/")) -> Facts:
    """Return the facts with measured rates, or with the reason that there are none.

    Args:
        facts: As ``look`` returns them.
        root: The folder of ``sys``.
    """
    # An unusable disk is a finding; the link to host memory is measured without it.
    disk_path = facts.disk.path if facts.disk.requested and facts.disk.refused is None else None
    if facts.target == "disk" and facts.disk.refused is not None:
        return replace(facts, unmeasured=facts.disk.refused)
    try:
        machine = machine_with(measured_speed(facts.target, disk_path))
    except EbbtideError as error:
        return replace(facts, unmeasured=error.found, advice=error.hint or None)
    # An idle device lowers the speed of its link; it has just been busy.
    bus = None if facts.bus is None else look_at_bus(facts.device.address, root=root)
    return replace(facts, machine=machine, bus=bus)


@contextmanager
def _quiet_store() -> Generator[None, None, None]:
    logger = logging.getLogger("ebbtide.store")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
