"""The text of the repository: commands that exist, links that lead somewhere, nothing of one machine or registry."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import SUITES as GPU_SUITES
from ebbtide.cli.recipe import RECIPES
from tests.contract.cli_surface import frozen

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_GOAL = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)

# Written in two parts, or the test would find this file.
MACHINE_PATHS = ["/wo" + "rk/", "/ro" + "ot/", "/opt/whe" + "els"]
REGISTRIES = [
    "py" + "pi.org",
    "pythonhos" + "ted.org",
    "download.py" + "torch.org",
    "registry.npm" + "js.org",
    "--index" + "-url",
    "--extra-index" + "-url",
    "--find" + "-links",
]


def tracked() -> list[Path]:
    """The files under version control, except binary ones."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip("no git checkout: there is no list of tracked files")
    paths = [ROOT / name for name in result.stdout.split("\0") if name]
    return [p for p in paths if p.is_file() and b"\0" not in p.read_bytes()[:4096]]


def documents() -> list[Path]:
    return [p for p in tracked() if p.suffix == ".md"]


def goals() -> set[str]:
    return set(_GOAL.findall((ROOT / "Makefile").read_text()))


def commands(text: str) -> Iterator[str]:
    """The command lines of a document: those in fenced blocks, and code that begins with make or ebbtide."""
    for block in _FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip().removeprefix("$ ")
    yield from re.findall(r"`((?:make|ebbtide) [^`\n]+)`", text)


def unknown_goals(text: str) -> list[str]:
    """Goals of make that a document names but the Makefile lacks."""
    named = {m.group(1) for c in commands(text) if (m := re.match(r"make ([a-z][a-z-]*)", c))}
    return sorted(named - goals())


def aliases(recipe: str) -> set[str]:
    """Return the other names of a recipe's flags."""
    config = importlib.import_module(f"ebbtide_recipes.{recipe}.config")
    return set(getattr(config, RECIPES[recipe]).aliases)


def unknown_words(text: str) -> list[str]:
    """Verbs and options of ebbtide that a document names but the command line lacks.

    ``compare`` passes on to the recipe what it does not take itself; anything after ``--`` is no flag of ebbtide.
    """
    known, found = frozen(), []
    for command in commands(text):
        if not (match := re.match(r"(?:\S*/|[A-Z_]+=\S+ )*ebbtide ([a-z]+)( .*)?$", command.split("#")[0].rstrip())):
            continue
        verb, rest = match.group(1), (match.group(2) or "").partition(" -- ")[0]  # a command of the user's own
        if verb not in known:
            found.append(f"ebbtide {verb}")
            continue
        names = {n.replace("-", "_") for n in re.findall(r"(?<=\s)--([a-z][\w-]*)", rest)} - {"help", "version"}
        recipes = [verb] if verb in RECIPES else list(RECIPES) if verb == "compare" else []
        taken = set(known[verb]).union(*(set(known[recipe]) | aliases(recipe) for recipe in recipes))
        found += [f"ebbtide {verb} --{name}" for name in sorted(names - taken)]
    return found


def test_the_front_door_is_there() -> None:
    names = {p.relative_to(ROOT).as_posix() for p in documents()}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= names


def test_commands_in_documents_exist() -> None:
    found = {p.name: unknown_goals(p.read_text()) + unknown_words(p.read_text()) for p in documents()}
    assert {name: words for name, words in found.items() if words} == {}


def test_commands_that_do_not_exist_are_found() -> None:
    text = "```\n$ make nothing\nebbtide sft --no-such x \\\n  --model y\n```\nand `make setup`, `ebbtide fly --high`\n"
    assert unknown_goals(text) == ["nothing"]
    assert unknown_words(text) == ["ebbtide sft --no_such", "ebbtide fly"]


def test_readme_says_how_to_begin() -> None:
    said = {c.partition("#")[0].strip() for c in commands((ROOT / "README.md").read_text())}
    assert {"make demo", "make test"} <= said


def test_every_goal_is_listed_by_help() -> None:
    text = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"^([a-z-]+):.*  ## ", text, re.MULTILINE)) == goals()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == goals()


def test_every_benchmark_suite_is_run_by_a_goal() -> None:
    named = re.findall(r"^CPU_SUITES :=(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE) + [" ".join(GPU_SUITES)]
    suites = {p.relative_to(ROOT / "benchmarks/suites") for p in tracked() if p.parent.name == "suites"}
    assert {n for names in named for n in names.split()} == {p.stem for p in suites if not p.stem.startswith("_")}


def test_links_lead_to_files() -> None:
    broken = [
        f"{p.relative_to(ROOT)}: {link}"
        for p in documents()
        for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", p.read_text())))
        if "://" not in link and not link.startswith("mailto:") and not (p.parent / link).exists()
    ]
    assert broken == []


def test_every_test_that_a_document_names_exists() -> None:
    sources = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    known = {name for text in sources.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    known |= {path.stem for path in sources}
    named = {
        (p.name, name)
        for p in documents()
        for code in re.findall(r"`([^`\n]*)`", _FENCE.sub("", p.read_text()))
        for name in re.findall(r"(?<!\.)\b(test_\w+)(?![\w*])", code)  # not verl's trainer.test_freq
        if not name.endswith("_")  # tests/unit/engine/test_cases_*.py
    }
    assert named and {(where, name) for where, name in named if name not in known} == set()


def test_text_names_no_path_of_one_machine_and_no_registry() -> None:
    found: list[str] = []
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="replace")
        words = MACHINE_PATHS + REGISTRIES + (["/tm" + "p/"] if path.suffix == ".md" else [])
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []


def test_every_requirement_is_pinned_exactly() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    pins = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)", line)
        assert match, f"{line!r} is no exact version (a local build name such as +cpu ties it to one machine)"
        pins[re.sub(r"[-_.]+", "-", match.group(1)).lower()] = match.group(2)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.match(r"[A-Za-z0-9._-]+", r).group().replace("_", "-").lower() for r in wanted} - {"ebbtide"}
    assert names <= pins.keys()
    assert len(pins) == len(lines)
