"""``pytest --simdev``: builds and loads the simulated device, and fails a test during which a race was seen.

Only ``tests/gpu`` and ``tests/simdev`` are collected then: a process that has the device is not one of a machine
without an accelerator. Where the device cannot be built these tests are skipped, and the run's summary says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.tiers import TESTS, tier_of
from tests.simdev import device
from tests.simdev.build import CannotBuildError, build

TIERS = ("gpu", "simdev")
_MOST_LINES = 10


class SimulatedDevice:
    """The plugin; loads the device when it is made.

    Attributes:
        reason: Why there is no device, or None.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        try:
            device.load(build())
            device.configure(poison=1, races=1)
        except CannotBuildError as error:
            self.reason = str(error)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the other tiers."""
        below = collection_path.is_relative_to(TESTS) and collection_path != TESTS
        return True if below and collection_path.is_dir() and tier_of(collection_path / "x") not in TIERS else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip everything where there is no device."""
        if self.reason is not None:
            for item in items:
                item.add_marker(pytest.mark.skip(reason=f"the simulated device cannot be built: {self.reason}"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print why nothing ran."""
        if self.reason is not None:
            terminalreporter.line(f"SKIPPED: the simulated device cannot be built: {self.reason}", yellow=True)

    @pytest.fixture(autouse=True)
    def ordered(self) -> Iterator[None]:
        """Fail the test if an access of memory was not ordered."""
        if self.reason is not None:
            yield
            return
        device.violations()
        yield
        torch.accelerator.synchronize()
        found = device.violations()
        assert not found, "\n".join(found[:_MOST_LINES])
