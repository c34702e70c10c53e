"""The floors: imports go down only, and the check would find one that goes up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the import linter on the packages in ``folder/src`` with the contracts of ``folder/pyproject.toml``."""
    code = "import sys; sys.path.insert(0, 'src'); from importlinter import cli; cli.lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_imports_go_down_only() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("base/units.py", "from ebbtide.store import protocol", "Imports go down only"),
        ("store/protocol.py", "import ebbtide.planner", "Imports go down only"),
        ("base/units.py", "import torch", "Configuration, planner, schedule and base import no torch"),
        ("store/protocol.py", "import transformers", "The core needs torch and safetensors only"),
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src/ebbtide" / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert f"{contract} BROKEN" in result.stdout, result.stdout + result.stderr
