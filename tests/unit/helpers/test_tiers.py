"""The tally of tiers: a tier whose tests were all skipped fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.helpers.tiers import TESTS, TIERS, TierTally, tier_of

RUNS = "def test_a(): pass\n"
SKIPS = "import pytest\n@pytest.mark.skip(reason='absent')\ndef test_a(): pass\n"
SKIPS_WHOLE = "import pytest\npytest.importorskip('no_such_package')\ndef test_a(): pass\n"
XFAILS = "import pytest\n@pytest.mark.xfail\ndef test_a(): raise ValueError\n"


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("tests/unit/base/test_units.py", "unit"),
        (TESTS / "gpu/test_streams.py", "gpu"),
        ("tests/conftest.py", None),
        ("tests/helpers/test_x.py", None),
    ],
)
def test_tier_is_the_folder_below_tests(path: str | Path, tier: str | None) -> None:
    assert tier_of(path) == tier


@pytest.mark.parametrize("tier", TIERS)
def test_pytest_looks_into_every_tier(pytestconfig: pytest.Config, tier: str) -> None:
    # By default pytest silently skips folders named dist or build, which it takes for build output.
    assert not any(fnmatch(tier, pattern) for pattern in pytestconfig.getini("norecursedirs"))


def test_only_gpu_may_be_skipped_whole() -> None:
    tally = TierTally()
    for path in ("tests/gpu/test_a.py", "tests/zoo/test_a.py", "tests/unit/test_a.py"):
        tally.add(path, "skipped")
    tally.add("tests/unit/test_a.py", "failed")
    assert tally.all_skipped() == ["zoo"]
    assert [line.split()[:2] for line in tally.lines() if "unit" in line or "zoo" in line] == [
        ["unit", "1"],
        ["zoo", "0"],
    ]


@pytest.mark.parametrize(
    ("files", "arguments", "code", "workers"),
    [
        ({"unit": RUNS, "zoo": RUNS}, ["tests"], 0, "0"),
        ({"unit": RUNS, "zoo": SKIPS}, ["tests"], 1, "0"),
        ({"unit": RUNS, "zoo": SKIPS_WHOLE}, ["tests"], 1, "2"),
        ({"unit": RUNS, "gpu": SKIPS}, ["tests"], 0, "0"),
        ({"unit": RUNS, "zoo": XFAILS}, ["tests"], 0, "0"),
        ({"unit": RUNS, "zoo": SKIPS}, ["tests/zoo/test_zoo.py"], 0, "0"),
    ],
    ids=["all run", "one tier skipped", "one tier skipped at import", "gpu skipped", "xfail ran", "one file selected"],
)
def test_a_tier_skipped_whole_fails_the_run(
    tmp_path: Path, files: dict[str, str], arguments: list[str], code: int, workers: str
) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.helpers.tiers import TierTally\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'): config.pluginmanager.register(TierTally())\n"
    )
    for tier, text in files.items():
        (tmp_path / "tests" / tier).mkdir(parents=True)
        (tmp_path / "tests" / tier / f"test_{tier}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:hypothesispytest",
        "-n",
        workers,
        "--rootdir",
        str(tmp_path),
        "-c",
        os.devnull,
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    assert ("FAILED: every test of tests/zoo was skipped" in result.stdout) == (code == 1)
