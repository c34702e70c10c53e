"""The roles of a chat's messages under the names that chat templates know.

[Note: roles]
Most templates silently drop a message whose role they do not know, and with it what should be learned. Other programs'
names are mapped: ShareGPT's, and ms-swift's ``tool_call`` and ``tool_response``; other roles, which a few templates
know, stay and are named in a warning. A call of a tool becomes part of an assistant's message, as OpenAI writes it, and
calls in a row become one message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ebbtide.base.errors import DataError
from ebbtide_recipes.skeleton.rows import Row

KNOWN = ("system", "developer", "user", "assistant", "tool")
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
    "function_response": "tool",
}
CALLS = ("tool_call", "function_call")
"""Roles of messages that are calls of tools, as JSON."""
NOT_LEARNED = ("loss", "weight")
"""Fields by which other programs leave a message out of the loss."""


def with_known_roles(messages: list[Row], where: str) -> list[Row]:
    """Return messages with the roles that templates know. See [Note: roles].

    Args:
        messages: Each with a ``role``.
        where: The row and its data set, for errors.

    Raises:
        DataError: A call of a tool cannot be read.
    """
    made: list[Row] = []
    for message in messages:
        role = str(message["role"])
        if role in CALLS:
            calls = _calls(message.get("content"), where)
            last = made[-1] if made and made[-1]["role"] == "assistant" else None
            if last is None:
                made.append({"role": "assistant", "content": "", "tool_calls": calls})
            else:
                made[-1] = {**last, "tool_calls": [*(last.get("tool_calls") or ()), *calls]}
            continue
        if message.get("tool_calls"):
            message = {**message, "tool_calls": _calls(message["tool_calls"], where)}
        lower = role.lower()
        known = ALIASES.get(lower, lower if lower in KNOWN else role)
        made.append(message if known == role else {**message, "role": known})
    return made


def unknown_in(rows: Iterable[Row]) -> list[str]:
    """Return the roles in normalized rows that few chat templates know, sorted."""
    columns = (row.get(column) for row in rows for column in ("messages", "prompt", "completion"))
    return sorted({str(m["role"]) for messages in columns if isinstance(messages, list) for m in messages} - {*KNOWN})


def check_learned(row: Row, where: str) -> None:
    """Refuse messages that are marked not to be learned, where all messages are.

    Args:
        row: A normalized row; the messages of its ``prompt`` are not learned.
        where: The row and its data set, for errors.

    Raises:
        DataError: There is one.
    """
    for column in ("messages", "completion"):
        messages = row.get(column)
        for message in messages if isinstance(messages, list) else []:
            if message.get("role") != "assistant":
                continue
            name = next((n for n in NOT_LEARNED if message.get(n) not in (None, 1)), None)
            if name is not None:
                raise DataError(
                    f"{where} has a message with {name!r}: {message[name]!r}",
                    expected="messages that are all learned: this field has no effect here",
                    hint="--completion_only_loss true learns only a chat's last answer; or take the field out",
                )


def _calls(content: Any, where: str) -> list[Row]:
    """Return the calls of a message in OpenAI's form: of one JSON object with name and arguments, or a list of such."""
    try:
        found = json.loads(content) if isinstance(content, str) else content
    except ValueError:
        found = None
    listed = found if isinstance(found, list) else [found]
    return [_call(call, content, where) for call in listed]


def _call(found: Any, content: Any, where: str) -> Row:
    """Return one call in OpenAI's form; it may have that form, and its arguments may be JSON in a text."""
    call = found.get("function", found) if isinstance(found, dict) else {}
    arguments = call.get("arguments") or {} if isinstance(call, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise DataError(
            f"{where} has the call of a tool {content!r:.80}",
            expected="JSON with its name and arguments",
            hint='such as {"name": "light", "arguments": {"on": true}}',
        )
    named = {"id": found["id"]} if found.get("id") else {}
    return {**named, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
