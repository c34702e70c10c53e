"""Hints name pages that their reader has."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from ebbtide.base import pages
from ebbtide.base.errors import ConfigError

TEXT = "unknown flag; expected a flag\nhint: docs/reference/sft-flags.md lists all names"


def test_a_checkout_has_the_pages() -> None:
    assert str(ConfigError("unknown flag", expected="a flag", hint=TEXT.partition("hint: ")[2])) == TEXT


def test_a_wheel_has_their_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    lines = "".join(f"Project-URL: {name}, {url}\n" for name, url in project["urls"].items())
    found = importlib.metadata.PathDistribution(tmp_path)
    (tmp_path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ebbtide\n{lines}")
    monkeypatch.setattr(pages, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(pages.importlib.metadata, "metadata", lambda name: found.metadata)
    error = ConfigError("unknown flag", expected="a flag", hint=TEXT.partition("hint: ")[2])
    root = project["urls"]["Documentation"].removesuffix("docs/README.md")
    assert str(error) == TEXT.replace("docs/", f"{root}docs/") and root.startswith("https://")
    assert pages.with_addresses("my/docs/x.md and https://a/docs/b.md") == "my/docs/x.md and https://a/docs/b.md"


def test_a_package_without_metadata_keeps_the_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pages, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(pages.importlib.metadata, "metadata", absent)
    assert pages.with_addresses(TEXT) == TEXT
