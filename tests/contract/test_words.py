"""One language: the glossary's words are used, retired words are not, and a public class name has one meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/concepts/glossary.md"
MODULES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

RETIRED = {
    "remake": r"\bremak|\bremade\b",
    "made again": r"\b(made|makes?|making) again\b",
    "on paper": r"\bon paper\b",
    "bit by bit": r"\bbit by bit\b",
    "turn-around": r"\bturn-?around\b",
    "stubborn": r"\bstubborn",
    "dear": r"\bdear(er|est)?\b",
    "bring in": r"\b(bring|brings|brought|brings) in\b",
    "bury": r"\b(bury|buries|buried)\b",
    "withdraw": r"\bwithdr(aw|ew)",
    "put back": r"\bputs? back\b",
    "re-run": r"\bre-?runs?\b|\bruns? again\b",
    "park": r"\bpark(s|ed|ing)?\b",
    "told": r"\btold\b",
    "stands": r"\bstands? where\b",
    "is said": r"\b(is|are) (told|said)\b",
    "beside": r"\bbeside\b",
    "anyway": r"\banyway\b",
    "anew": r"\banew\b",
    "mend": r"\bmend(s|ed|ing)?\b",
    "lies": r"\blies? (in|on|beside|where)\b",
    "scarce": r"\bscarce",
    "became of": r"\bbecame of\b",
    "plain training": r"\bplain training\b",
    "goes on": r"\bgoes on\b",
}
"""Word → pattern, for pages and for the texts that the code shows to users."""

ALLOWED: dict[str, set[str]] = {}
"""Word → pages and modules that still have it. Only ever shortened; a test fails when an entry is not needed."""

NAMES = ("told", "tell", "said", "say", "given", "whole", "asked", "beside", "anyway", "stubborn", "rerun", "living")
NAMES += ("moment", "bury", "bring", "withdraw", "withdraws", "remake", "remade", "turn", "serve", "there", "gone")
NAMES += ("park", "parked", "parking")
"""Words that no identifier of src has as a part, beyond the rooms of ``ROOMS``."""

ROOMS: dict[str, set[str]] = {
    "tell": {"cli"},
    "turn": {"recipes"},
}
"""Word → rooms whose identifiers still have it. Only ever shortened; a test fails when an entry is not needed."""

TWICE: dict[str, str] = {"OffloadCallback": "integrations, one for each host"}
"""Public class names defined more than once in src today, and the rooms. Only ever shortened."""


def words() -> list[str]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY.read_text(), re.MULTILINE)
    return [row for row in rows if row not in ("word", "---")]


def texts(source: str) -> Iterator[str]:
    """Yield the string constants of a module except docstrings: errors, help, output."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def shown(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return "\n".join(texts(text)) if path.suffix == ".py" else re.sub(r"`[^`\n]*`", "", text)


def retired(text: str) -> set[str]:
    return {word for word, pattern in RETIRED.items() if re.search(pattern, text, re.IGNORECASE)}


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").parts
    return "recipes" if parts[0] != "ebbtide" else parts[1] if len(parts) > 2 else "top"


def identifiers(source: str) -> set[str]:
    """Return the parts of a module's names: of functions, classes, parameters, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, field, None) for field in ("id", "name", "arg", "attr")]
        found |= {part for word in names if isinstance(word, str) for part in word.lower().split("_")}
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return public class name → modules that define it at top level."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return found


def test_every_word_of_the_glossary_is_used() -> None:
    pages = " ".join(page.read_text() for page in PAGES if page != GLOSSARY)
    known = re.sub(r"[-_\s]+", " ", pages + " ".join(path.read_text() for path in MODULES)).lower()
    assert len(words()) > 20
    assert [word for word in words() if word.replace("-", " ") not in known] == []


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=name)
def test_no_retired_word_is_shown(path: Path) -> None:
    allowed = {word for word, places in ALLOWED.items() if name(path) in places}
    assert retired(shown(path)) == allowed  # a word that does not occur leaves the list as well


def test_allowed_places_exist() -> None:
    places = set().union(*ALLOWED.values())
    assert {*ALLOWED} <= {*RETIRED} and places <= {name(path) for path in [*PAGES, *MODULES]}


def test_a_retired_word_is_found() -> None:
    source = '"""Told in a docstring."""\nraise ValueError("it was told, bit by bit")\nx = "told"\n'
    assert retired("\n".join(texts(source))) == {"told", "bit by bit"}


def test_no_identifier_has_a_retired_word_beyond_the_listed_rooms() -> None:
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for word in identifiers(path.read_text()) & {*NAMES}:
            found.setdefault(word, set()).add(room(path))
    assert found == ROOMS


def test_a_retired_word_in_a_name_is_found() -> None:
    assert {"told", "bury", "moment"} <= identifiers("class Moment: ...\ndef f(_bury): x.is_told = 1\n")


def test_a_public_class_name_has_one_meaning() -> None:
    found = classes({name(path): path.read_text() for path in MODULES})
    assert {word for word, places in found.items() if len(places) > 1} == {*TWICE}


def test_a_class_name_in_two_modules_is_found() -> None:
    assert classes({"a": "class Plan: ...\nclass _P: ...", "b": "class Plan: ..."}) == {"Plan": ["a", "b"]}
