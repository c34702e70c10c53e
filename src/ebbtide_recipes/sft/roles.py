"""The roles of a chat's messages under the names that chat templates know.

[Note: roles]
Most templates silently drop a message whose role they do not know, and with it what should be learned. Other programs'
names are mapped: ShareGPT's, and ms-swift's ``tool_call`` and ``tool_response``; other roles, which a few templates
know, stay and are named in a warning. A call of a tool becomes part of an assistant's message, as OpenAI writes it, and
calls in a row become one message. A message's own ``tool_calls`` stay, except for arguments that are JSON in a text:
most templates write an object as JSON, and such a text as a text in JSON; a few take a text alone.
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
            begun = made.pop() if made and made[-1]["role"] == "assistant" else {"role": "assistant", "content": ""}
            made.append({**begun, "tool_calls": [*(begun.get("tool_calls") or ()), *calls], **_switched_off(message)})
            continue
        if isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        lower = role.lower()
        known = ALIASES.get(lower, lower if lower in KNOWN else role)
        made.append(message if known == role else {**message, "role": known})
    return made


def unknown_in(rows: Iterable[Row]) -> list[str]:
    """Return the roles in normalized rows that few chat templates know, sorted."""
    columns = (row.get(column) for row in rows for column in ("messages", "prompt", "completion"))
    return sorted({str(m["role"]) for messages in columns if isinstance(messages, list) for m in messages} - {*KNOWN})


def check_learned(row: Row, where: str, *, prompt: bool) -> None:
    """Refuse messages that are marked not to be learned, where all messages are.

    Args:
        row: A normalized row.
        where: The row and its data set, for errors.
        prompt: Whether the messages of its ``prompt`` are learned, too.

    Raises:
        DataError: There is one.
    """
    for column in ("messages", "completion", *(("prompt",) if prompt else ())):
        messages = row.get(column)
        for message in messages if isinstance(messages, list) else []:
            if message.get("role") != "assistant":
                continue
            for name, value in _switched_off(message).items():
                raise DataError(
                    f"{where} has a message with {name!r}: {value!r}",
                    expected="messages that are all learned: this field has no effect here",
                    hint="--completion_only_loss true learns only a chat's last answer; or take the field out",
                )


def with_texts(row: Row) -> Row:
    """Return a row whose calls have their arguments as JSON in a text, for a template that takes a text alone."""
    return {
        column: [
            {**m, "tool_calls": [_with_text(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m for m in v
        ]
        for column, v in row.items()
        if column in ("messages", "prompt", "completion") and isinstance(v, list)
    }


def _switched_off(message: Row) -> Row:
    """Return the fields of a message that leave it out of the loss."""
    return {name: message[name] for name in NOT_LEARNED if message.get(name) not in (None, 1)}


def _with_text(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    if not isinstance(arguments := function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_object(call: Any) -> Any:
    """Return a call with its arguments as an object, where they are JSON of one in a text."""
    if isinstance(call, dict) and "function" in call:
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


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
