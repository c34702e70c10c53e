"""The page of ``ebbtide sft``'s flags, written from its config.

``python -m tests.contract.sft_flags_page > docs/reference/sft-flags.md`` writes it anew.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import docstring_parser

from ebbtide.base.checks import in_words
from ebbtide_recipes.sft.config import ALIASES, UNSUPPORTED, SftConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sft-flags.md"

_HEAD = """# Flags of `ebbtide sft`

Written from the config; `ebbtide sft --help` shows the same. A flag may be written with hyphens or underscores, and
stand in a YAML file without its hyphens: `ebbtide sft run.yaml --max_steps 10`. A flag overrides the file. An unknown
name is an error that names the nearest one.

| flag | takes | default | |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Return the page."""
    hints = typing.get_type_hints(SftConfig)
    docs = [docstring_parser.parse(kind.__doc__ or "") for kind in reversed(SftConfig.__mro__)]
    told = {p.arg_name: p.description or "" for doc in docs for p in doc.params}
    rows: list[str] = []
    for field in dataclasses.fields(SftConfig):
        takes = in_words(hints[field.name]).replace("a tuple of text", "one or more names")
        does = " ".join(told[field.name].split())
        rows.append(f"| `--{field.name}` | {takes} | {_shown(field.default)} | {does} |")
    known = [f"| `{other}` | `{name}` |" for other, name in ALIASES.items()]
    refused = [f"| `--{name}` | {hint} |" for name, hint in UNSUPPORTED.items()]
    sections = [
        _HEAD + "\n".join(rows),
        "## Names of other trainers\n\nTaken for the flag beside them, in YAML files and on the command line; a dotted "
        "name is a key inside a section of a file.\n\n| name | flag |\n| --- | --- |\n" + "\n".join(known),
        "## Refused\n\nKnown to users of other trainers, and not to be had here.\n\n"
        "| flag | in its place |\n| --- | --- |\n" + "\n".join(refused),
    ]
    return "\n\n".join(sections) + "\n"


def _shown(default: object) -> str:
    if default is None:
        return "–"
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in typing.cast("tuple[str, ...]", default))
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(page(), end="")
