"""The pages of recipes' flags, written from their configs. The page of ``grpo`` has what differs from that of ``sft``.

``python -m tests.contract.sft_flags_page > docs/reference/sft-flags.md`` writes one anew, and
``python -m tests.contract.sft_flags_page grpo > docs/reference/grpo-flags.md`` another.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path

import docstring_parser

from ebbtide.base.checks import in_words
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.sft.config import SftConfig

CONFIGS: dict[str, typing.Any] = {"sft": SftConfig, "grpo": GrpoConfig}
FOLDER = Path(__file__).parents[2] / "docs" / "reference"

_HEAD = """# Flags of `ebbtide VERB`

Written from the config, as `ebbtide VERB --help` is. Hyphens equal underscores. In a YAML file flags have no leading
hyphens (`ebbtide VERB run.yaml --max_steps 10`); flags override the file. The error for an unknown name has the
nearest one.

| flag | takes | default | |
| --- | --- | --- | --- |
"""


_SAME = "Flags of [`ebbtide sft`](sft-flags.md) that are not listed here are the same, but it has no {}.\n\n"


def page(verb: str = "sft") -> str:
    """Return the page of a recipe."""
    parts = _parts(verb)
    if verb == "sft":
        return _text(verb, parts)
    common = _parts("sft")
    return _text(verb, [[row for row in rows if row not in same] for rows, same in zip(parts, common, strict=True)])


def rows_of(verb: str) -> list[str]:
    """Return a row for every flag of a recipe."""
    return _parts(verb)[0]


def _parts(verb: str) -> list[list[str]]:
    """Return the rows of a recipe's flags, of other trainers' names, of translated keys, and of refused flags."""
    config = CONFIGS[verb]
    hints = typing.get_type_hints(config)
    docs = [docstring_parser.parse(kind.__doc__ or "") for kind in reversed(config.__mro__)]
    told = {p.arg_name: p.description or "" for doc in docs for p in doc.params}
    rows: list[str] = []
    for field in dataclasses.fields(config):
        takes = in_words(hints[field.name]).replace("a tuple of text", "one or more names")
        does = " ".join(told[field.name].split())
        rows.append(f"| `--{field.name}` | {takes} | {_shown(field.default)} | {does} |")
    known = [f"| `{other}` | `{name}` |" for other, name in config.aliases.items()]
    refused = [f"| `--{name}` | {hint} |" for name, hint in config.unsupported.items()]
    translated = [f"| `{key}` | {sets} |" for key, sets in config.translated.items()]
    return [rows, known, translated, refused]


def _text(verb: str, parts: list[list[str]]) -> str:
    rows, known, translated, refused = parts
    head = _HEAD.replace("VERB", verb)
    absent = sorted(
        {f.name for f in dataclasses.fields(SftConfig)} - {f.name for f in dataclasses.fields(CONFIGS[verb])}
    )
    if absent:
        same = _SAME.format(", ".join(f"`--{name}`" for name in absent))
        head = head.replace("| flag | takes", same + "| flag | takes")
    sections = [
        head + "\n".join(rows),
        "## Names of other trainers\n\nAccepted for the flag next to them, in YAML files and in commands; a dotted "
        "name is a key inside a section of a file.\n\n| name | flag |\n| --- | --- |\n" + "\n".join(known),
        "## Keys of verl\n\nTheir values set one or more flags, or are read together. Numbers that do not fit one "
        "another are refused.\n\n| key | sets |\n| --- | --- |\n" + "\n".join(translated),
        "## Refused\n\nFlags of other trainers that ebbtide does not support.\n\n"
        "| flag | instead |\n| --- | --- |\n" + "\n".join(refused),
    ]
    return "\n\n".join(sections) + "\n"


def _shown(default: object) -> str:
    if default is None:
        return "–"
    if isinstance(default, tuple):
        return " ".join(f"`{item}`" for item in typing.cast("tuple[str, ...]", default))
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(page(*sys.argv[1:]), end="")
