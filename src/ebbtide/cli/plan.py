"""``ebbtide plan``: read flags into the recipe's config and call the recipe."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ebbtide.cli.arguments import read_arguments
from ebbtide.cli.progress import WorkProgress

RECIPE = "ebbtide_recipes.plan"


def run(argv: Sequence[str]) -> int:
    """Predict whether training fits on a device, and with which plan. Progress is printed on standard error.

    Returns:
        The exit code: 0, even if nothing fits.

    Raises:
        EbbtideError: An argument or the model's config cannot be used or simulated, or no plan to save fits.
    """
    config = read_arguments(importlib.import_module(f"{RECIPE}.config").PlanConfig, argv, prog="ebbtide plan")
    if config is None:
        return 0
    with WorkProgress(sys.stderr) as progress:
        recipe = importlib.import_module(f"{RECIPE}.main")
        result = recipe.main(config, report=progress.report, begin=progress.begin)
    print(recipe.shown(result))
    files = ((config.out, recipe.save), (config.svg, recipe.draw))
    for path, write in files:
        if path is not None:
            print(write(result, path), file=sys.stderr if config.json else sys.stdout)
    return 0
