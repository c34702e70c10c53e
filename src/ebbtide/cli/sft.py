"""``ebbtide sft``: read flags into the recipe's config, then hand over to the recipe."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ebbtide.cli.arguments import read_arguments

RECIPE = "ebbtide_recipes.sft"


def run(argv: Sequence[str]) -> int:
    """Fine-tune a model as the arguments say; start torchrun where they mean several processes.

    Args:
        argv: The arguments after ``sft``.

    Returns:
        The exit code.

    Raises:
        EbbtideError: Anything in the arguments, the model or the data that cannot be used; anything that failed.
    """
    config = read(argv)
    if config is None:
        return 0
    recipe = importlib.import_module(f"{RECIPE}.main")
    launch = importlib.import_module(f"{RECIPE}.launch")
    if not launch.is_rank():
        config = recipe.check(config)
        count = launch.processes(config)
        if count is not None:
            return launch.start(list(argv), count)
    recipe.main(config)
    return 0


def read(argv: Sequence[str], *, others: Sequence[str] = ()) -> Any:
    """Return the recipe's config as the arguments say; ``None`` when help was asked for and printed.

    Args:
        argv: The arguments after ``sft``.
        others: As ``read_arguments`` takes them.

    Raises:
        EbbtideError: Something in the arguments cannot be used.
    """
    kind = importlib.import_module(f"{RECIPE}.config").SftConfig
    return read_arguments(kind, argv, prog="ebbtide sft", others=others)


def check(config: Any) -> None:
    """Refuse what training would refuse before it loads, fetches or writes anything.

    Args:
        config: As ``read`` returns it.

    Raises:
        EbbtideError: Something in the config cannot be used here.
    """
    importlib.import_module(f"{RECIPE}.main").check(config)
