"""The page of trainers: its versions match the other pages, its code compiles and has the claimed number of lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/trainers.md").read_text(encoding="utf-8")
VERSIONS = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
HOSTS = {"Lightning `Trainer`": "lightning", "Lightning Fabric": "lightning", "DeepSpeed": "deepspeed"}
"""Rows that do not begin with the name of their package."""
PINNED = {"a loop of your own": "torch", "transformers `Trainer`": "transformers", "TRL: SFT": "trl"}
PINNED |= {"TRL: packing, LoRA; DPO, KTO, Reward, GRPO, RLOO": "trl", "PEFT": "peft"}
PINNED |= {"diffusers: the loop of its examples": "diffusers", "DDP, FSDP2, FSDP1": "torch"}


def rows(page: str) -> dict[str, tuple[str, str, int]]:
    """Return host → (version, how it was tested, lines)."""
    found = re.findall(r"^\| \[([^]]+)\]\([^)]+\) \| ([\d.]+)[^|]* \| ([^|]+) \| (\d+) \|$", page, re.MULTILINE)
    return {host: (version, how, int(lines)) for host, version, how, lines in found}


def sections(page: str) -> dict[str, list[str]]:
    """Return heading → its blocks of Python."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return {
        heading: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def lines_of(code: str) -> int:
    """Count the lines of some code without its imports."""
    return len([line for line in code.splitlines() if line.strip() and not re.match(r"(from \S+ )?import ", line)])


def test_versions_are_those_of_the_other_pages() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    hosts = dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([\d.]+) \| \d+ \|$", VERSIONS, re.MULTILINE))
    for host, (version, how, _) in rows(PAGE).items():
        if how.startswith("by hand"):
            assert hosts[HOSTS.get(host, host)] == version, host
        elif how.startswith("five steps"):
            assert f"{host} {version} trained" in VERSIONS, host
        elif not how.startswith("not run"):
            assert pins[PINNED.get(host, host)] == version, host


@pytest.mark.parametrize("host", ["ms-swift", "axolotl", "verl", "torchtitan", "FastVideo", "twinkle"])
def test_the_code_of_a_plugin_compiles_and_has_the_lines_it_claims(host: str) -> None:
    (code,) = sections(PAGE)[host]
    compile(code, host, "exec")
    assert lines_of(code) == rows(PAGE)[host][2]


def test_the_page_has_its_hosts() -> None:
    assert len(rows(PAGE)) == PAGE.count("\n| [") >= 19
    assert lines_of("import a\nfrom b import c\n\nx = 1\n") == 1
