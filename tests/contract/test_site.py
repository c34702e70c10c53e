"""The site: its menu has every page, links out of ``docs/`` lead somewhere, the Chinese page has the English code.

``make docs`` builds it, and fails at a link that leads nowhere.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ebbtide
from docs.site_hooks import on_page_content, outward

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for entry in nav:
            yield from pages(entry)
    else:
        for entry in nav.values():
            yield from pages(entry)


def code(page: str) -> list[str]:
    """Return the lines of a page's code, without comments."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [re.sub(r"\s*#.*", "", line) for block in blocks for line in block.splitlines() if line.strip()]


def test_the_menu_has_every_page_once() -> None:
    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_public_name_has_its_place_in_the_reference() -> None:
    page = (DOCS / "reference/python.md").read_text(encoding="utf-8")
    errors = {name for name in ebbtide.__all__ if name.endswith("Error")}
    assert {name for name in ebbtide.__all__ if f"::: ebbtide.{name}\n" not in page} == {"__version__"} | errors
    assert "::: ebbtide.base.errors" in page


def test_classes_describe_arguments_of_an_initialiser() -> None:
    """The site's builder looks for them there alone, and warns, which ends its build."""
    classes = [kind for kind in (getattr(ebbtide, name) for name in ebbtide.__all__) if isinstance(kind, type)]
    described = [kind for kind in classes if "\nArgs:\n" in (inspect.getdoc(kind) or "")]
    assert described and [kind for kind in described if kind.__init__ is kind.__base__.__init__] == []


def test_every_folder_of_results_is_in_the_evidence() -> None:
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    folders = [path.parent.name for path in (ROOT / "benchmarks/results").glob("*/README.md")]
    assert folders and [name for name in folders if f"results/{name}/README.md" not in page] == []


def test_the_evidence_calls_a_folder_by_its_title() -> None:
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^- \[(.+)\]\(\.\./(.+)\)$", page, re.MULTILINE)).items()
    titles = {name: (ROOT / path).read_text(encoding="utf-8").partition("\n")[0] for name, path in listed}
    assert titles and {name for name, title in titles.items() if not f"# {name}".startswith(title)} == set()


def test_the_evidence_calls_an_earlier_folder_by_its_name() -> None:
    page = (DOCS / "evidence.md").read_text(encoding="utf-8").partition("\n## Earlier")[2]
    listed = re.findall(r"\[`([^`]+)`\]\(\.\./benchmarks/results/([^/]+)/README\.md\)", page)
    assert listed and [folder for name, folder in listed if folder.rpartition("_")[0] != name] == []


def test_the_chinese_quick_start_has_the_code_of_the_english_one() -> None:
    assert code("zh/quick-start.md") == code("guides/quick-start.md")


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("guides/sft.md", "../../examples/README.md", "https://h/blob/main/examples/README.md"),
        ("evidence.md", "../benchmarks/results/a/", "https://h/blob/main/benchmarks/results/a"),
        ("guides/sft.md", "../reference/sft-flags.md", "../reference/sft-flags.md"),
        ("guides/sft.md", "grpo.md#x", "grpo.md#x"),
    ],
)
def test_only_links_that_leave_the_pages_lead_to_the_repository(path: str, link: str, expected: str) -> None:
    assert outward(f"[a]({link})", path, "https://h") == f"[a]({expected})"


def test_two_colons_before_an_example_are_shown_as_one() -> None:
    shown = on_page_content("<p>Example::</p><p>a::b</p>", page=None, config=None, files=None)
    assert shown == "<p>Example:</p><p>a::b</p>"
