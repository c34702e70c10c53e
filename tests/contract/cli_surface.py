"""The option names of the command line, as its help lists them.

``make cli-surface`` writes them to ``cli_surface.txt``; a reviewer reads the diff of that file.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

FILE = Path(__file__).with_name("cli_surface.txt")
_OPTION = re.compile(r"^\W*(?:-\w,\s+)?--([a-z][\w-]*)")


def surface() -> dict[str, list[str]]:
    """Return verb → option names, each in alphabetical order, as ``ebbtide VERB --help`` lists them."""
    from ebbtide.cli import VERBS

    return {verb: options(verb) for verb in sorted(VERBS)}


def options(verb: str) -> list[str]:
    """Return the option names of one verb; hyphens are written as underscores, as the command line reads them."""
    from ebbtide.cli import main

    # A wide terminal without colour: no name is split.
    os.environ.update(COLUMNS="200", NO_COLOR="1", TERM="dumb")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    found = {m.group(1).replace("-", "_") for line in printed.getvalue().splitlines() if (m := _OPTION.match(line))}
    return sorted(found - {"help"})


def frozen() -> dict[str, list[str]]:
    """Return the contents of ``cli_surface.txt``."""
    known: dict[str, list[str]] = {}
    for line in FILE.read_text().splitlines():
        verb, _, name = line.partition(" --")
        known.setdefault(verb, [])
        if name:
            known[verb].append(name)
    return known


def main() -> None:
    """Print the surface: a line for each verb, then one for each of its options."""
    for verb, names in surface().items():
        print(verb)
        for name in names:
            print(f"{verb} --{name}")


if __name__ == "__main__":
    main()
