"""Normalizing rows to the forms the trainer takes.

[Note: row shapes]
A row becomes one of three: ``messages`` (a chat), ``prompt`` + ``completion`` (loss on the completion only), or
``text``. Questions and instructions become a chat turn if the tokenizer has a chat template, as chat models expect;
columns called ``prompt`` and ``completion`` are used unchanged. ``history`` has earlier turns of a question, which are
not learned. ``system`` is the system message of its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ebbtide.base.errors import DataError, nearest
from ebbtide_recipes.language.tables import check_kinds
from ebbtide_recipes.sft.roles import NOT_LEARNED, with_known_roles
from ebbtide_recipes.skeleton.rows import Row

PAIRS = (("question", "answer"), ("query", "response"), ("instruction", "output"))
"""Columns of a question and its answer; ``input`` is the rest of an instruction, ``history`` the turns before."""

ACCEPTED = (
    "`messages`, `conversations`, `prompt`+`completion`, `question`+`answer`, `query`+`response`, "
    "`instruction`+`output` or `text`"
)
KNOWN = ("messages", "conversations", "prompt", "completion", *(name for pair in PAIRS for name in pair), "text")
EXAMPLE = '{"prompt": "What is ebb?", "completion": "The tide going out."}'

Shape = Callable[[Row], Row]


def shape_of(row: Row, name: str, *, chat: bool) -> tuple[Shape, frozenset[str]]:
    """Choose how rows with these columns are normalized.

    Args:
        row: The first row.
        name: The data set, for errors.
        chat: Whether the tokenizer has a chat template.

    Returns:
        The function that does it, and the columns it reads.

    Raises:
        DataError: The columns are not known, or the rows are chats and there is no chat template.
    """
    columns = set(row)
    chats = "messages" in columns or "conversations" in columns
    pair = {"prompt", "completion"} <= columns
    if not chat and (chats or (pair and isinstance(row["prompt"], list))):
        raise DataError(
            f"data set {name!r} holds chats, but the model's tokenizer has no chat template",
            expected="a tokenizer with a chat template, or text in `prompt`+`completion` or `text` columns",
            hint="use the model's instruct variant",
        )
    if chats:
        return _chat, frozenset({"messages" if "messages" in columns else "conversations"})
    if pair:
        return lambda row: {"prompt": row["prompt"], "completion": row["completion"]}, frozenset(
            {"prompt", "completion"}
        )
    for question, answer in PAIRS:
        if {question, answer} <= columns:
            rest = {"input"} if question == "instruction" else set[str]()
            return partial(_pair, question=question, answer=answer, chat=chat), frozenset(
                {question, answer, "history", *rest}
            )
    if "text" in columns:
        return lambda row: {"text": row["text"]}, frozenset({"text"})
    listed = ", ".join(sorted(map(str, columns))) or "(none)"
    close = next((near for c in sorted(map(str, columns - {*KNOWN})) if (near := nearest(c, KNOWN, count=1))), "")
    raise DataError(
        f"data set {name!r} has the columns {listed}",
        expected=ACCEPTED,
        hint=close or f"rename them; such as {EXAMPLE}",
    )


def pair_of(pair: tuple[str, str], row: Row, name: str, *, chat: bool) -> tuple[Shape, frozenset[str]]:
    """Return how rows are normalized whose question and answer the user named.

    Args:
        pair: Where they are: ``COLUMN``, or ``COLUMN.KEY`` for a value inside a column of mappings.
        row: The first row.
        name: The data set, for errors.
        chat: Whether the tokenizer has a chat template.

    Returns:
        The function that does it, and the columns it reads.

    Raises:
        DataError: The first row has no such value.
    """

    def shape(row: Row) -> Row:
        question, answer = (_value_at(path, row) for path in pair)
        return _pair({"question": question, "answer": answer}, question="question", answer="answer", chat=chat)

    for path in pair:
        try:
            _value_at(path, row)
        except KeyError as error:
            raise DataError(
                f"data set {name!r} has no {path!r}; its columns are {', '.join(sorted(map(str, row))) or '(none)'}",
                expected="the column of --prompt_key and that of --response_key",
                hint=nearest(path.partition(".")[0], [str(column) for column in row], count=1)
                or "COLUMN.KEY is a value inside a column",
            ) from error
    return shape, frozenset(path if path in row else path.partition(".")[0] for path in pair)


def _value_at(path: str, row: Row) -> object:
    """Return a column's value, or the one inside it; raise ``KeyError`` with the path if there is none."""
    if path in row:
        return row[path]
    value: object = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(path)
        value = value[key]
    return value


def shaped_row(shape: Shape, row: Row, where: str) -> Row:
    """Normalize one row.

    Args:
        shape: As ``shape_of`` chose it from the first row.
        row: The row.
        where: The row and its data set, for errors.

    Raises:
        DataError: The row does not fit.
    """
    try:
        result = shape(row)
    except KeyError as error:
        columns = ", ".join(sorted(map(str, row))) or "(none)"
        raise DataError(
            f"{where} has no {error.args[0]!r}; its columns are {columns}",
            expected="the columns of the first row in every row",
            hint=f"columns may be {ACCEPTED}",
        ) from error
    except TypeError as error:
        raise DataError(f"{where} does not fit: {error}", expected=ACCEPTED, hint=f"such as {EXAMPLE}") from error
    for column, value in result.items():
        # An empty prompt is allowed: a text is learned without context, and a system message may begin a chat.
        fits = isinstance(value, str if column == "text" else str | list)
        if not fits or not (value or column == "prompt"):
            raise DataError(
                f"{where} has {value!r:.60} as {column}",
                expected="text" if column == "text" else "text, or a list of messages",
                hint="fix the row, or remove it from the file",
            )
        if isinstance(value, list):
            for message in value:
                _check_message(message, where, column)
            result[column] = with_known_roles(value, where)
    if len({type(value) for value in result.values()}) > 1:
        raise DataError(
            f"{where} has a {type(result['prompt']).__name__} as prompt and a "
            f"{type(result['completion']).__name__} as completion",
            expected="two texts, or two lists of messages",
            hint='a message is {"role": "assistant", "content": "Hello"}',
        )
    return result


def with_system(row: Row, text: str) -> Row:
    """Prepend a system message to a chat that has none; plain text is unchanged."""
    column, messages = _chat_of(row)
    if messages is None or (messages and messages[0].get("role") == "system"):
        return row
    return {**row, column: [_message("system", text), *messages]}


def with_own_system(row: Row, text: object, where: str) -> Row:
    """Prepend the system message of a row's ``system`` column to its chat.

    Raises:
        DataError: It is not text, the row is plain text, or its chat begins with another system message.
    """
    if text is None or text == "":
        return row
    messages = _chat_of(row)[1]
    if not isinstance(text, str) or messages is None:
        raise DataError(
            f"{where} has the system message {text!r:.60}" + (" with plain text" if messages is None else ""),
            expected="text, and a chat that it stands before",
            hint="use a model with a chat template, or write the message into the prompt and remove the column",
        )
    if messages and messages[0].get("role") == "system" and messages[0].get("content") != text:
        raise DataError(
            f"{where} has two system messages: {messages[0].get('content')!r:.40} and {text!r:.40}",
            expected="one",
            hint="remove the column `system`, or the first message",
        )
    return with_system(row, text)


def is_chat(row: Row) -> bool:
    """Whether a row is messages, and not plain text."""
    return _chat_of(row)[1] is not None


def with_tools(row: Row, tools: object, where: str) -> Row:
    """Add the tools that a chat's template describes to the model, as the JSON that TRL reads.

    Raises:
        DataError: They are no list, nor JSON of one.
    """
    try:
        found: object = json.loads(tools) if isinstance(tools, str) and tools else tools or []
    except json.JSONDecodeError:
        found = tools
    if not isinstance(found, list):
        raise DataError(
            f"{where} has the tools {tools!r:.60}",
            expected="a list of tools, or JSON of one",
            hint="a tool is a JSON schema: {'type': 'function', 'function': {'name': ...}}",
        )
    # An empty list is not none: templates such as Llama's would describe a call of no tool.
    return {**row, "tools": json.dumps(found or None)}


def in_text(row: Row) -> Row:
    """Return a row without files whose messages are text: parts in OpenAI's form are joined, if all of them are text.

    Other parts are left to the chat template, such as ``thinking``.
    """
    return {
        column: [{**m, "content": _joined(m["content"])} if isinstance(m.get("content"), list) else m for m in v]
        if isinstance(v, list)
        else v
        for column, v in row.items()
    }


def _joined(parts: Sequence[object]) -> str | Sequence[object]:
    """Return the text of a message's parts; the parts, if one of them is no text."""
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part for part in parts
    ]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else parts


def _chat_of(row: Row) -> tuple[str, list[Row] | None]:
    """Return the column that a chat begins in, and its messages; ``None``: the row is plain text."""
    column = "messages" if "messages" in row else "prompt"
    messages = row.get(column)
    return column, messages if isinstance(messages, list) else None


def answer_apart(row: Row, where: str) -> Row:
    """Split a chat into its last answer, which is learned, and everything before.

    Raises:
        DataError: The chat does not end in an answer, or the row is plain text.
    """
    if "completion" in row:
        return row
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise DataError(
            f"{where} has no answer to learn from",
            expected="a chat that ends with the assistant, or `prompt`+`completion`",
            hint="leave --completion_only_loss out to learn from all text",
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def one_kind(rows: Sequence[Row], name: str) -> str:
    """Return what rows hold, in words, such as ``prompt+completion``.

    Raises:
        DataError: A column holds text in one row and messages in another.
    """
    check_kinds(rows, name, rows[0])
    return "+".join(
        f"{column} (messages)" if isinstance(value, list) and column != "messages" else column
        for column, value in rows[0].items()
    )


def _check_message(message: object, where: str, column: str) -> None:
    """Reject a message that a chat template cannot render."""
    spoken = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not spoken or not (isinstance(message.get("content"), str | list) or message.get("tool_calls")):
        raise DataError(
            f"{where} has the message {message!r:.80} in {column}",
            expected="messages with `role` and `content`, both text",
            hint='such as {"role": "user", "content": "Hello"}',
        )


def _pair(row: Row, *, question: str, answer: str, chat: bool) -> Row:
    """Return a question with the turns before it, and its answer: as a chat, or as plain text."""
    prompt = (
        "\n\n".join(filter(None, (row[question], row.get("input")))) if question == "instruction" else row[question]
    )
    turns = [*_turns(row.get("history")), (prompt, row[answer])]
    for text in (text for turn in turns for text in turn):
        if not isinstance(text, str):
            raise TypeError(f"{text!r:.60} is not text")
    if not chat:
        before = "".join(f"{earlier}\n{reply}\n" for earlier, reply in turns[:-1])
        return {"prompt": f"{before}{prompt}\n", "completion": row[answer]}
    messages = [
        message for earlier, reply in turns for message in (_message("user", earlier), _message("assistant", reply))
    ]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def _turns(history: object) -> list[tuple[object, object]]:
    """Return the questions and answers of a row's ``history``."""
    if history is None:
        return []
    if not isinstance(history, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history):
        raise TypeError(f"history {history!r:.60} is no list of [question, answer]")
    return [(question, answer) for question, answer in history]


def _chat(row: Row) -> Row:
    """A chat, with the keys of either convention."""
    messages = row["messages"] if "messages" in row else row["conversations"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise TypeError(f"{messages!r:.60} is no list of messages")
    # A table gives a message the empty fields of all others.
    return {
        "messages": [
            _message(m["from"], m["value"]) | {name: m[name] for name in NOT_LEARNED if name in m}
            if "from" in m and "role" not in m
            else {name: value for name, value in m.items() if value is not None or name == "content"}
            for m in messages
        ]
    }


def _message(role: str, content: str) -> dict[str, str]:
    if not isinstance(content, str):
        raise TypeError(f"{content!r:.60} is not text")
    return {"role": role, "content": content}
