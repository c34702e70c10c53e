"""The commands of examples/: every flag is known, every value is valid, and they mean what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ebbtide.cli.arguments import read_arguments
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton.config import RecipeConfig
from ebbtide_recipes.skeleton.sharding import resolved
from ebbtide_recipes.video.config import VideoConfig

ROOT = Path(__file__).parents[3]
RECIPES: dict[str, type[RecipeConfig]] = {"grpo": GrpoConfig, "video": VideoConfig}
SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
VARIABLES = {"$offload": "true", "$checkpointing": "false", "${MODE:-ebbtide}": "ebbtide", "${ROWS:-rows.jsonl}": "r"}


def config_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> SftConfig:
    text = script.read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if re.search(r"\bebbtide sft ", line))
    for name, value in VARIABLES.items():
        command = command.replace(name, value)
    monkeypatch.chdir(ROOT)
    config = read_arguments(SftConfig, shlex.split(command.split("ebbtide sft ", 1)[1]), prog="ebbtide sft")
    assert config is not None
    return resolved(config)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_asks_for_fsdp2_and_ebbtide(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(script, monkeypatch)
    assert config.mode == "ebbtide"
    assert (config.fsdp_strategy != "none", config.fsdp_version) == (True, 2)
    assert config.without_effect() == []


@pytest.mark.parametrize("preset", sorted((ROOT / "examples" / "presets").glob("*.yaml")), ids=lambda path: path.name)
def test_a_preset_makes_a_run_with_ebbtide(preset: Path) -> None:
    config = read_arguments(SftConfig, [str(preset), "--model", "m"], prog="ebbtide sft")
    assert config is not None and config.mode == "ebbtide" and config.without_effect() == []


@pytest.mark.parametrize(
    ("preset", "kind"),
    [(path, kind) for recipe, kind in RECIPES.items() for path in sorted((ROOT / "examples" / recipe).glob("*.yaml"))],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_a_preset_of_another_recipe_makes_a_run_with_ebbtide(preset: Path, kind: type[RecipeConfig]) -> None:
    config = read_arguments(kind, [str(preset)], prog="ebbtide")
    assert config is not None and config.mode == "ebbtide" and config.without_effect() == []


def test_every_script_is_on_the_page() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    assert SCRIPTS
    assert {str(path.relative_to(ROOT / "examples")) for path in SCRIPTS} == set(
        re.findall(r"\]\(([\w/.-]+\.sh)\)", page)
    )
