"""The verbs that train: read flags into a recipe's config and call the recipe.

A recipe is a package ``ebbtide_recipes.NAME`` with a config class in ``config.py`` and ``RECIPE`` in ``recipe.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ebbtide.cli.arguments import read_arguments, set_names

RECIPES: Mapping[str, str] = {"sft": "SftConfig", "grpo": "GrpoConfig", "video": "VideoConfig"}
"""Each recipe's name and the name of its config class."""

_SKELETON = "ebbtide_recipes.skeleton"


def run(name: str, argv: Sequence[str]) -> int:
    """Train, and return the exit code; start torchrun if the arguments request several processes.

    Raises:
        EbbtideError: Arguments, model or data cannot be used, or training failed.
    """
    config = read(name, argv)
    if config is None:
        return 0
    skeleton = importlib.import_module(f"{_SKELETON}.run")
    launch = importlib.import_module(f"{_SKELETON}.launch")
    recipe = _recipe(name)
    if not launch.is_rank():
        config = skeleton.check(recipe, config)
        count = launch.processes(config)
        if count is not None:
            return launch.start(name, list(argv), count)
    skeleton.main(recipe, config)
    return 0


def read(name: str, argv: Sequence[str], *, others: Sequence[str] = ()) -> Any:
    """Parse the arguments into the recipe's config; ``None`` if help was printed. ``others``: as ``read_arguments``.

    Raises:
        EbbtideError: Something in the arguments cannot be used.
    """
    return read_arguments(_config_class(name), argv, prog=f"ebbtide {name}", others=others)


def names(name: str, argv: Sequence[str]) -> set[str]:
    """Return the fields of the recipe's config that flags set, by any of their names, and the translated keys."""
    return set_names(_config_class(name), argv)


def check(name: str, config: Any) -> None:
    """Check everything that training checks before it loads, fetches or writes anything.

    Raises:
        EbbtideError: Something in the config cannot be used here.
    """
    importlib.import_module(f"{_SKELETON}.run").check(_recipe(name), config)


def _config_class(name: str) -> type[Any]:
    return getattr(importlib.import_module(f"ebbtide_recipes.{name}.config"), RECIPES[name])


def _recipe(name: str) -> Any:
    return importlib.import_module(f"ebbtide_recipes.{name}.recipe").RECIPE
