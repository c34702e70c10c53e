"""Setup of every test: a printed seed, fixed threads, no network; and a count of the tests of each tier."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext

os.environ.update(
    OMP_NUM_THREADS="1",  # children inherit it; sums must not depend on how many cores there are
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import hypothesis
import pytest
import torch

from tests.helpers.gloo import use_one_worker
from tests.helpers.recipes_only import minimal_by_heuristic
from tests.helpers.tiers import HIDING, TierTally, sees_accelerator, tier_of

SEED = int(os.environ.get("EBBTIDE_TEST_SEED", "20"))

torch.set_num_threads(1)
use_one_worker()
hypothesis.settings.register_profile(
    "dev", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("dev"), derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed Python, torch and numpy from the run's seed and the test's own name; shown when the test fails."""
    value = zlib.crc32(f"{SEED}/{request.node.nodeid}".encode())
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)
    request.node.add_report_section("setup", "seed", f"EBBTIDE_TEST_SEED={SEED} (this test: {value})")
    return value


@pytest.fixture(scope="module", autouse=True)
def light_collections() -> None:
    """Hide the objects that earlier modules left alive from the garbage collector.

    A process that has imported torch, transformers and thousands of tests holds a million objects, and each of the
    collections that tests request would walk over all of them: seconds on a busy machine.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def recipes_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restrict ``Minimal`` to its recipes, except in the tests of its measurements."""
    measured = request.module.__name__.endswith(("test_minimal", "test_trials", "test_promise"))
    with nullcontext() if measured else minimal_by_heuristic():
        yield


def pytest_report_header() -> list[str]:
    profile = "ci (derandomized)" if os.environ.get("CI") else "dev"
    return [
        f"seed: EBBTIDE_TEST_SEED={SEED}, hypothesis profile: {profile}",
        f"torch: {torch.__version__}, {torch.get_num_threads()} thread, accelerator: {_accelerator() or 'none'}",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose device is missing: an accelerator, CUDA, or the simulated device."""
    absent = pytest.mark.skip(reason="torch sees no accelerator; pytest hides it unless all paths are in tests/gpu")
    no_cuda = pytest.mark.skip(reason="needs CUDA itself")
    not_simulated = pytest.mark.skip(reason="runs on the simulated device only: pytest --simdev")
    for item in items:
        if tier_of(item.path) == "simdev" and _accelerator() != "simdev":
            item.add_marker(not_simulated)
        elif (tier_of(item.path) == "gpu" or item.get_closest_marker("gpu")) and _accelerator() is None:
            item.add_marker(absent)
        elif item.get_closest_marker("needs_cuda") and _accelerator() != "cuda":
            item.add_marker(no_cuda)


def _accelerator() -> str | None:
    """The accelerator that torch sees, if any, by capability: a CPU build of torch has none."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--simdev", action="store_true", help="run tests/gpu and tests/simdev on the simulated device")


def pytest_configure(config: pytest.Config) -> None:
    # Background processes of a script ignore Ctrl-C, and tests that send it would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # under xdist the controller counts, and decides, for all workers
        if not sees_accelerator(config):
            os.environ.update(HIDING)  # before torch looks for one; importing torch does not
        config.pluginmanager.register(TierTally(), "ebbtide-tiers")
    if config.getoption("--simdev"):
        from tests.simdev.plugin import SimulatedDevice

        config.pluginmanager.register(SimulatedDevice(), "ebbtide-simdev")
