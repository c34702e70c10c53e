"""The pages of recipes' flags, generated from their configs. Those of other recipes list differences from ``sft``.

``python -m tests.contract.sft_flags_page > docs/reference/sft-flags.md`` rewrites one, and
``python -m tests.contract.sft_flags_page grpo > docs/reference/grpo-flags.md`` another, and so with ``video``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from pathlib import Path

import docstring_parser

from ebbtide.base.checks import in_words
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.video.config import VideoConfig

CONFIGS: dict[str, typing.Any] = {"sft": SftConfig, "grpo": GrpoConfig, "video": VideoConfig}
FOLDER = Path(__file__).parents[2] / "docs" / "reference"

_HEAD = """# Flags of `ebbtide VERB`

Generated from the config, like `ebbtide VERB --help`. `-` and `_` are interchangeable. A YAML file names flags without
leading hyphens (`ebbtide VERB run.yaml --max_steps 10`); flags override the file.

| flag | takes | default | |
| --- | --- | --- | --- |
"""

_SAME = "Only the flags that differ from [`ebbtide sft`](sft-flags.md) are listed. There is no {}.\n\n"

_SHORT = {
    "a tuple of a number": "list", "a tuple of text": "list", "true or false": "bool", "one of ": "",
    "an integer": "int", "a number": "float", "text": "str",
}  # fmt: skip

_OMIT = re.compile(r"leave it out(: |; |$)|[:;] leave it out")
"""What every hint without a flag says; the page says it once."""

_SECTIONS = (
    ("Names of other trainers", "Accepted in YAML files and in commands; a dot separates a section from its key.",
     ("name", "flag")),
    ("Keys of verl", "Each sets one or more flags. Numbers that contradict one another are refused.", ("key", "sets")),
    ("Refused", "Flags of other trainers: use what is named, else leave them out.", ("flag", "why, or instead")),
)  # fmt: skip


def page(verb: str = "sft") -> str:
    """Return the page of a recipe."""
    flags, tables = rows_of(verb), _names(verb)
    if verb != "sft":
        flags = [row for row in flags if row not in rows_of("sft")]
        tables = [[row for row in rows if row not in same] for rows, same in zip(tables, _names("sft"), strict=True)]
    parts = [_head(verb) + "\n".join(flags)]
    for (title, about, head), rows in zip(_SECTIONS, tables, strict=True):
        if not rows:
            continue
        lines = [f"| {' | '.join(head)} |", "| --- | --- |", *_merged(rows)]
        parts.append(f"## {title}\n\n{about}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def rows_of(verb: str) -> list[str]:
    """Return a row for every flag of a recipe."""
    config = CONFIGS[verb]
    hints = typing.get_type_hints(config)
    docs = [docstring_parser.parse(kind.__doc__ or "") for kind in reversed(config.__mro__)]
    about = {p.arg_name: p.description or "" for doc in docs for p in doc.params}
    rows: list[str] = []
    for field in dataclasses.fields(config):
        takes = in_words(hints[field.name])
        for words, short in _SHORT.items():
            takes = takes.replace(words, short)
        does = " ".join(about[field.name].split()).removesuffix(" Several may be given.")
        rows.append(f"| `--{field.name}` | {takes} | {_shown(field.default)} | {does} |")
    return rows


def _names(verb: str) -> list[list[tuple[str, str]]]:
    """Return the names in the tables of a recipe's sections, each with the cell next to it."""
    config = CONFIGS[verb]
    return [
        [(f"`{other}`", f"`--{name}`") for other, name in config.aliases.items()],
        [(f"`{key}`", sets) for key, sets in getattr(config, "translated", {}).items()],
        [(_flag(name), _OMIT.sub("", hint) or "–") for name, hint in config.unsupported.items()],
    ]


def _flag(name: str) -> str:
    """Return a name as a flag; one that ends in a dot means all keys of a section."""
    return f"`--{name}*`" if name.endswith(".") else f"`--{name}`"


def _merged(rows: list[tuple[str, str]]) -> list[str]:
    """Return the lines of a table: names that have the same cell next to them share a line."""
    names: dict[str, list[str]] = {}
    for name, cell in rows:
        names.setdefault(cell, []).append(name)
    return [f"| {', '.join(together)} | {cell} |" for cell, together in names.items()]


def _head(verb: str) -> str:
    """Return the top of a page, down to the head of the table of flags."""
    head = _HEAD.replace("VERB", verb)
    absent = sorted(
        {f.name for f in dataclasses.fields(SftConfig)} - {f.name for f in dataclasses.fields(CONFIGS[verb])}
    )
    if not absent:
        return head
    same = _SAME.format(", ".join(f"`--{name}`" for name in absent))
    return head.replace("| flag | takes", same + "| flag | takes")


def _shown(default: object) -> str:
    if default is None:
        return "–"
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in typing.cast("tuple[str, ...]", default))
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(page(*sys.argv[1:]), end="")
