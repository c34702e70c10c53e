"""Counts the tests of each tier.

[Note: tiers]
A tier is a folder of ``tests/``. The closing summary says how many tests of each ran. A tier whose tests were all
skipped proves nothing while looking green, so it fails the run. Two may be skipped entirely: ``gpu`` needs an
accelerator, ``simdev`` the simulated one, which ``pytest --simdev`` loads and not every machine can build.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TIERS = ("unit", "property", "dist", "zoo", "integrations", "contract", "gpu", "simdev")
MAY_SKIP = ("gpu", "simdev")

HIDING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
"""Environment in which torch sees no accelerator of CUDA, ROCm or XPU; child processes inherit it."""


def tier_of(path: Path | str) -> str | None:
    """The tier a test file belongs to, or None for a file outside the tiers."""
    parts = Path(path).parts
    below = parts[len(TESTS.parts) :] if Path(path).is_absolute() else parts[1:]
    return below[0] if below and below[0] in TIERS else None


def sees_accelerator(config: pytest.Config) -> bool:
    """Whether a run sees the machine's accelerator: one of ``tests/gpu`` alone, and not on the simulated device."""
    paths = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return {tier_of(os.path.abspath(path)) for path in paths} == {"gpu"} and not config.getoption("--simdev")


class TierTally:
    """Counts what each tier did; see [Note: tiers]."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {tier: Counter() for tier in TIERS}

    def add(self, path: str, outcome: str) -> None:
        """Count one test, or one module that skipped itself."""
        if (tier := tier_of(path)) is not None:
            self.counts[tier][outcome] += 1

    def all_skipped(self) -> list[str]:
        """Tiers that have tests of which none ran, though some should."""
        return [
            t for t, n in self.counts.items() if t not in MAY_SKIP and n["skipped"] and not n.total() - n["skipped"]
        ]

    def lines(self) -> list[str]:
        """One line for each tier: how many tests ran, and how many did not."""
        return [
            f"{tier:<12} {n.total() - n['skipped']:>5} ran {n['failed']:>5} failed {n['skipped']:>5} skipped"
            for tier, n in self.counts.items()
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test is counted once: by its call, or by a setup that failed before it.
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.add(report.location[0], "xfailed" if hasattr(report, "wasxfail") else report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.add(report.nodeid.split("::")[0], "skipped")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.enforced(session.config) and self.all_skipped() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        terminalreporter.section("tiers")
        for line in self.lines():
            terminalreporter.line(line)
        if self.enforced(config):
            for tier in self.all_skipped():
                terminalreporter.line(f"FAILED: every test of tests/{tier} was skipped", red=True)

    @staticmethod
    def enforced(config: pytest.Config) -> bool:
        """Whether entire tiers were selected: a run of one file may well see it skipped."""
        return not config.option.keyword and all(Path(arg).is_dir() for arg in config.args)
