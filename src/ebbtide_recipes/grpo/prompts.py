"""Prompts: the built-in sums, and rows of files and hubs in the form that the trainer takes.

[Note: prompt rows]
Each row gets a ``prompt``: text, or a chat that ends with the user. It comes from ``prompt``, ``messages``,
``question`` or ``problem``; from ``problem`` rather than from ``messages`` that end with its solution, as in NuminaMath
and OpenR1. ``problem`` and all other columns stay and are passed to the reward functions. Without a column ``answer``,
the truths in verl's ``reward_model`` become one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any, cast

from ebbtide.base.errors import DataError, nearest
from ebbtide_recipes.grpo.rewards import HANDED, truth_in
from ebbtide_recipes.language.tables import check_kinds
from ebbtide_recipes.skeleton.rows import Row

LOGGER = logging.getLogger("ebbtide.grpo")

ACCEPTED = "`prompt` (text or messages), `messages`, `question` or `problem`"
_SOURCES = ("prompt", "messages", "question", "problem")
COUNT = 4096
"""Rows of the built-in data set."""

_REFUSED = (*HANDED, "environments", "image", "images", "videos", "audios")


def arithmetic(seed: int) -> list[Row]:
    """Return sums and differences of two numbers from 1 to 20, each with its answer, drawn from a seed.

    The prompts are plain text, a handful of tokens: ``7 + 5 =``.
    """
    draw = random.Random(seed)
    rows: list[Row] = []
    for _ in range(COUNT):
        first, second = draw.randint(1, 20), draw.randint(1, 20)
        plus = first < second or draw.random() < 0.5  # no answer is below zero
        answer = first + second if plus else first - second
        rows.append({"prompt": f"{first} {'+' if plus else '-'} {second} =", "answer": str(answer)})
    return rows


def shaped(rows: Sequence[Row], name: str, *, chat: bool, system: str | None = None) -> list[Row]:
    """Normalize rows. See [Note: prompt rows].

    Args:
        rows: At least one.
        name: Their data set, for errors.
        chat: Whether the tokenizer has a chat template.
        system: System message for chats that have none.

    Raises:
        DataError: The columns are unknown, or a row is invalid.
    """
    columns = set(map(str, rows[0]))
    taken = sorted(columns & set(_REFUSED))
    if taken:
        raise DataError(
            f"data set {name!r} has the column {taken[0]!r}",
            expected="other names: images, videos and audios are not supported, and the trainer uses the others",
            hint=f"rename {taken[0]!r}, or take it out",
        )
    source = next((c for c in _SOURCES if c in columns), None)
    if source is None:
        listed = ", ".join(sorted(columns)) or "(none)"
        close = next((near for c in sorted(columns) if (near := nearest(c, _SOURCES))), "")
        raise DataError(
            f"data set {name!r} has the columns {listed}",
            expected=ACCEPTED,
            hint=close or 'such as {"question": "What is 9 + 9?", "answer": "#### 18"}',
        )
    if source == "messages" and isinstance(rows[0].get("problem"), str) and _is_solved(rows[0]["messages"]):
        source = "problem"
    made: list[Row] = []
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of data set {name!r}"
        if set(row) != columns:
            raise DataError(
                f"{where} has the columns {', '.join(sorted(map(str, row))) or '(none)'}",
                expected=f"those of the first row: {', '.join(sorted(columns))}",
                hint="every row needs every column; null is a value",
            )
        made.append(_shaped(row, source, where, chat=chat, system=system))
    check_kinds(made, name, ["prompt"])
    if system is not None and isinstance(made[0]["prompt"], str):
        LOGGER.warning("data set %r is plain text: --system has no effect on it", name)
    truths = [truth_in(row.get("reward_model")) for row in rows]
    if "answer" in columns or all(truth is None for truth in truths):
        return made
    return [{**row, "answer": truth} for row, truth in zip(made, truths, strict=True)]


def _shaped(row: Row, source: str, where: str, *, chat: bool, system: str | None) -> Row:
    value = row[source]
    if source in ("question", "problem") and isinstance(value, str):
        value = [{"role": "user", "content": value}] if chat else f"{value}\n"
    if not value or not isinstance(value, str | list):
        raise DataError(f"{where} has {value!r:.60} as {source}", expected=ACCEPTED, hint="fix or remove the row")
    if isinstance(value, list):
        value = _chat(cast("list[Any]", value), where, chat=chat, system=system)
    left_out = {source, "completion"} - {"problem"}
    return {"prompt": value, **{str(key): item for key, item in row.items() if key not in left_out}}


def _is_solved(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _chat(messages: list[Any], where: str, *, chat: bool, system: str | None) -> list[dict[str, Any]]:
    """Return a chat that ends with the user."""
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(
                f"{where} has the message {message!r:.80}",
                expected="messages with `role` and `content`, both text",
                hint='such as {"role": "user", "content": "What is 9 + 9?"}',
            )
    if not chat:
        raise DataError(
            f"{where} is a chat, and the model's tokenizer has no chat template",
            expected="a tokenizer with a chat template, or prompts that are text",
            hint="use the model's instruct variant",
        )
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where} ends with the assistant",
            expected="a chat that ends with the user: the model writes the answer",
            hint="remove the last message; a column `answer` may hold the reference answer",
        )
    if system is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages
