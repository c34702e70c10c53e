"""``ebbtide sft``: read flags into the recipe's config, then hand over to the recipe."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ebbtide.cli.arguments import read_arguments

RECIPE = "ebbtide_recipes.sft"


def run(argv: Sequence[str]) -> int:
    """Fine-tune a model as the arguments say.

    Args:
        argv: The arguments after ``sft``.

    Returns:
        The exit code.

    Raises:
        EbbtideError: Anything in the arguments, the model or the data that cannot be used; anything that failed.
    """
    config = read_arguments(importlib.import_module(f"{RECIPE}.config").SftConfig, argv, prog="ebbtide sft")
    if config is None:
        return 0
    importlib.import_module(f"{RECIPE}.main").main(config)
    return 0
