"""Wheel and source archive: built and inspected, and the wheel installed into an empty environment."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDERS = ("hatchling", "hatch_fancy_pypi_readme")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in BUILDERS), reason=f"needs {' and '.join(BUILDERS)}"
    ),
]


def build(source: Path, out: Path, *targets: str) -> None:
    flags = [word for target in targets for word in ("-t", target)]
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", out, *flags], cwd=source, check=True, timeout=120)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel and the source archive."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "sdist", "wheel")
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        return sorted(opened.namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        return message_from_bytes(opened.read(next(n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))))


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment with only the wheel, without torch."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", str(built[0])]
    subprocess.run([folder / "bin/python", *install], check=True, timeout=120)
    return folder / "bin"


def call(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=program.parent,
        env={"PATH": os.environ["PATH"], **environment},
    )  # fmt: skip


def test_the_wheel_holds_the_packages_and_what_they_read(built: tuple[Path, Path]) -> None:
    names = files(built[0])
    assert {name.split("/")[0] for name in names} == {"ebbtide", "ebbtide_recipes", "ebbtide-0.1.0.dist-info"}
    assert "ebbtide/py.typed" in names and any(name.endswith(".j2") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def test_the_archive_builds_the_same_wheel_and_has_the_tests(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        opened.extractall(tmp_path, filter="data")
    assert {"tests/conftest.py", "docs/README.md", "Makefile", "constraints.txt"} <= names
    assert not [name for name in names if name.startswith((".ci", ".venv", "runs", "dist")) or "__pycache__" in name]
    build(next(tmp_path.iterdir()), tmp_path / "out", "wheel")
    assert files(next((tmp_path / "out").glob("*.whl"))) == files(built[0])


def test_the_page_of_the_package_index_has_links_that_lead_somewhere(built: tuple[Path, Path]) -> None:
    message = metadata(built[0])
    links = re.findall(r"\]\(([^)\s]+)", str(message.get_payload()))
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    pictures = [link for link in links if link.endswith(".svg")]
    assert pictures and all("raw.githubusercontent.com" in link for link in pictures)
    targets = [link.partition("/main/")[2].partition("#")[0] for link in links if "/main/" in link]
    assert targets and [target for target in targets if not (ROOT / target).exists()] == []
    labels = {value.partition(",")[0] for value in message.get_all("Project-URL", [])}
    assert labels == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


def test_the_command_line_starts_without_any_other_package(clean: Path) -> None:
    assert "usage: ebbtide VERB" in call(clean / "ebbtide", "--help").stdout
    assert call(clean / "ebbtide", "--version").stdout == "0.1.0\n"
    assert call(clean / "python", "-m", "ebbtide", "--version").stdout == "0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("sft", "--model", "m", "--dataset", "d", "--output_dir", "o"), "pip install 'ebbtide[recipes]'"),
        (("plan", "--model", "m"), "pip install 'ebbtide[recipes]'"),
        (("compare", "sft"), "pip install 'ebbtide[recipes]'"),
        (("report", "nowhere"), ""),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(clean: Path, arguments: tuple[str, ...], hint: str) -> None:
    """The extras' packages; torch and safetensors come with the wheel."""
    done = call(clean / "ebbtide", *arguments)
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert hint in done.stderr and "\nhint: " in done.stderr


def test_the_installed_library_trains(clean: Path) -> None:
    site = next(clean.parent.glob("lib/python*/site-packages"))
    code = (
        "import ebbtide, torch; print(ebbtide.__file__)\n"
        "model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in '123'])\n"
        "handle = ebbtide.enable_activation_offloading(model, policy='offload', min_bytes=0)\n"
        "model(torch.randn(2, 8, 16)).sum().backward()\n"
        "print(handle.stats().total_copy_out_bytes > 0)\n"
    )
    done = call(
        Path(sys.executable), "-W", "ignore", "-c", code, PYTHONPATH=str(site), HOME=os.environ.get("HOME", "/")
    )
    path, moved = done.stdout.split()
    assert (Path(path).is_relative_to(site), moved) == (True, "True"), done.stderr
