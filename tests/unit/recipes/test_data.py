"""Every accepted file and column set becomes rows; everything else is an error that names what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.grpo import recipe as grpo_recipe
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.language import tables
from ebbtide_recipes.language.tables import as_dataset
from ebbtide_recipes.sft import data, media
from ebbtide_recipes.sft import pydoc as sft_pydoc
from ebbtide_recipes.sft import recipe as sft_recipe
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton import rows as rows_module
from ebbtide_recipes.skeleton import run
from ebbtide_recipes.skeleton.rows import FIRST_ROWS, SUFFIXES, Named, parsed

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def table(
    *names: str, chat: bool = True, takes: tuple[str, ...] = (), evaluation: tuple[str, ...] = (), **flags: Any
) -> Any:
    config = SftConfig(dataset=names, eval_dataset=evaluation or None, **flags)
    return data.load_both(config, chat=chat, takes=takes)[0]


def load(*names: str, **how: Any) -> list[dict]:
    return table(*names, **how).to_list()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_file_kind_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": f"row {number}"} for number in range(5)]
    name = write(tmp_path / f"rows{suffix}", rows)
    assert load(name) == rows
    assert load(f"{name}#2") == rows[:2]
    assert load(f"{name}#99") == rows


def test_one_object_a_line_is_read_from_a_json_file_too(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(3)]
    (tmp_path / "rows.json").write_text(Path(write(tmp_path / "rows.jsonl", rows)).read_text())
    assert load(str(tmp_path / "rows.json")) == rows
    (tmp_path / "rows.json").write_text('{"text": "t"}\n{"text": \n')
    with pytest.raises(DataError, match="line 2 of .*rows.json is not JSON"):
        load(str(tmp_path / "rows.json"))


@pytest.mark.parametrize(
    ("row", "shaped"),
    [
        ({"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"messages": [USER, ASSISTANT]},
        ),
        ({"prompt": "q", "completion": "a", "id": 1}, {"prompt": "q", "completion": "a"}),
        ({"prompt": "", "completion": "a"}, {"prompt": "", "completion": "a"}),
        ({"question": "q", "answer": "a"}, {"prompt": [USER], "completion": [ASSISTANT]}),
        ({"instruction": "q", "output": "a"}, {"prompt": [USER], "completion": [ASSISTANT]}),
        (
            {"instruction": "do", "input": "this", "output": "a"},
            {"prompt": [{"role": "user", "content": "do\n\nthis"}], "completion": [ASSISTANT]},
        ),
        ({"instruction": "q", "input": "", "output": "a"}, {"prompt": [USER], "completion": [ASSISTANT]}),
        ({"text": "q a", "id": 1}, {"text": "q a"}),
        ({"query": "q", "response": "a"}, {"prompt": [USER], "completion": [ASSISTANT]}),
        ({"query": "q", "response": "a", "history": []}, {"prompt": [USER], "completion": [ASSISTANT]}),
        (
            {"query": "r", "response": "a", "history": [["q", "a"]], "system": "s"},
            {"prompt": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "r"}], "completion": [ASSISTANT]},
        ),
        ({"messages": [USER, ASSISTANT], "system": "s"}, {"messages": [SYSTEM, USER, ASSISTANT]}),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "s"}, {"messages": [SYSTEM, USER, ASSISTANT]}),
        ({"messages": [USER, ASSISTANT], "system": ""}, {"messages": [USER, ASSISTANT]}),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": None},
            {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
        ),
    ],
)
def test_columns_are_put_into_shape(tmp_path: Path, row: dict, shaped: dict) -> None:
    assert load(write(tmp_path / "rows.jsonl", [row])) == [shaped]


def test_without_a_chat_template_a_question_is_plain_text(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    assert load(name, chat=False) == [{"prompt": "q\n", "completion": "a"}]


def test_without_a_chat_template_earlier_turns_stand_before_the_question(tmp_path: Path) -> None:
    row = {"query": "r", "response": "b", "history": [["q", "a"]]}
    assert load(write(tmp_path / "rows.jsonl", [row]), chat=False) == [{"prompt": "q\na\nr\n", "completion": "b"}]


def test_the_system_message_of_a_row_comes_before_that_of_the_flag(tmp_path: Path) -> None:
    rows = [{"query": "q", "response": "a", "system": "s"}, {"query": "q", "response": "a"}]
    read = load(write(tmp_path / "rows.jsonl", rows), system="flag")
    assert [row["prompt"][0]["content"] for row in read] == ["s", "flag"]


def test_a_system_message_may_be_all_that_is_before_an_answer(tmp_path: Path) -> None:
    for number, (row, flag) in enumerate((({"system": "s"}, None), ({}, "s"))):
        name = write(tmp_path / f"{number}.jsonl", [{"prompt": [], "completion": [ASSISTANT], **row}])
        (made,) = load(name, system=flag)
        assert made == {"prompt": [SYSTEM], "completion": [ASSISTANT]}


def test_a_system_message_for_plain_text_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, row in enumerate(({"prompt": "q", "completion": "a"}, {"messages": [USER, ASSISTANT]})):
        load(write(tmp_path / f"{number}.jsonl", [row]), system="flag")
    assert caplog.messages == [f"data set {str(tmp_path / '0.jsonl')!r} is plain text: --system has no effect on it"]


@pytest.mark.parametrize(
    ("row", "chat", "said"),
    [
        ({"query": "q", "response": "a", "system": "s"}, False, "has the system message 's' with plain text"),
        ({"text": "t", "system": "s"}, True, "has the system message 's' with plain text"),
        ({"messages": [USER], "system": 5}, True, "has the system message 5;"),
        ({"messages": [SYSTEM, USER], "system": "t"}, True, "has two system messages: 's' and 't'"),
        ({"query": "q", "response": "a", "history": ["q"]}, True, "does not fit: history .* is no list of"),
        ({"query": "q", "response": "a", "history": [["q", 1]]}, True, "does not fit: 1 is not text"),
    ],
)
def test_a_system_message_or_history_without_a_place_is_refused(
    tmp_path: Path, row: dict, chat: bool, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        load(write(tmp_path / "rows.jsonl", [row]), chat=chat)


def test_columns_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": "t"}, {"text": "t", "id": 3}]
    load(write(tmp_path / "rows.jsonl", rows))
    assert "nothing is learned from the columns id" in caplog.text
    caplog.clear()
    load(write(tmp_path / "rows.jsonl", [{"instruction": "q", "input": "", "output": "a", "history": []}]))
    assert not caplog.records


@pytest.mark.parametrize(("kind", "column"), [("image", "images"), ("video", "video"), ("audio", "audios")])
def test_files_that_the_model_does_not_take_are_refused_by_kind(tmp_path: Path, kind: str, column: str) -> None:
    rows = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT], column: ["file"]}]
    with pytest.raises(DataError, match=rf"rows.jsonl' has {kind}s, and the model takes text alone;.*\nhint: "):
        load(write(tmp_path / "rows.jsonl", rows))
    part = {"role": "user", "content": [{"type": kind, kind: "file"}, {"type": "text", "text": "q"}]}
    for name in ("messages", "conversations"):
        with pytest.raises(DataError, match=rf"parts.jsonl' has {kind}s, and the model takes text alone"):
            load(write(tmp_path / "parts.jsonl", [{name: [part, ASSISTANT]}]))


def test_files_in_the_parts_of_a_chat_are_found_under_both_its_names(tmp_path: Path) -> None:
    (tmp_path / "cat.png").touch()
    part = {"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "q"}]}
    tables: list[list[dict]] = []
    for name in ("messages", "conversations"):
        tables.append(load(write(tmp_path / "rows.jsonl", [{name: [part, ASSISTANT]}]), takes=("image",)))
    assert tables[0] == tables[1] and tables[0][0]["images"] == [str(tmp_path / "cat.png")]


@pytest.mark.parametrize("name", [f"data:image/png;base64,{'iVBOR' * 9000}", "a" * 9000], ids=["address", "data"])
def test_data_in_place_of_a_files_name_is_refused_in_short(tmp_path: Path, name: str) -> None:
    part = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": name}}]}
    for row in ({"messages": [part, ASSISTANT]}, {"messages": [USER, ASSISTANT], "images": [name]}):
        rows = write(tmp_path / "rows.jsonl", [row])
        with pytest.raises(DataError, match=rf"row 1 of data set .* names the image '{name[:50]}.*\nhint: ") as caught:
            load(rows, takes=("image",))
        assert len(str(caught.value)) < 1000


CALLS = [
    {"type": "function", "function": {"name": "light", "arguments": {"room": "x", "on": True}}},
    {"type": "function", "function": {"name": "play", "arguments": {"song": 3}}},
]
TOOLS = [{"type": "function", "function": {"name": "light", "parameters": {}}}]


def test_calls_of_tools_are_what_the_file_has(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": tools}
        for call, tools in zip(CALLS, (TOOLS, json.dumps(TOOLS)), strict=True)
    ]
    made = load(write(tmp_path / "rows.jsonl", [*rows, {"messages": [USER, ASSISTANT]}]))
    assert [row["messages"] for row in made] == [*(row["messages"] for row in rows), [USER, ASSISTANT]]
    assert [json.loads(row["tools"]) for row in made] == [TOOLS, TOOLS, None]
    with pytest.raises(DataError, match="row 1 .* has the tools 'light'.*\nhint: "):
        load(write(tmp_path / "wrong.jsonl", [{"messages": [USER, ASSISTANT], "tools": "light"}]))


@pytest.mark.parametrize("apart", [False, True])
def test_numbers_of_calls_and_texts_that_are_json_are_what_the_file_has(tmp_path: Path, apart: bool) -> None:
    numbers = [{"t": 0.3, "lr": 3e-11}, {"t": 2.294512345678901}, {"t": 1}, {"t": 2**70}]
    calls = [{"type": "function", "function": {"name": "set", "arguments": values}} for values in numbers]
    rows = [{"messages": [USER, {**ASSISTANT, "tool_calls": [call]}]} for call in calls]
    thought = {**ASSISTANT, "content": [{"type": "thinking", "thinking": "hm"}]}
    parts = [{"messages": [{**USER, "content": text}, thought]} for text in ('{"city": "Paris"}', "1.10", "null")]
    for number, group in enumerate((rows, rows[1:3], parts)):
        read = table(write(tmp_path / f"{number}.jsonl", group), completion_only_loss=apart)
        made = read.map(lambda row: {"length": 1})
        found = [[*row["prompt"], *row["completion"]] if apart else row["messages"] for row in made]
        assert json.dumps(found) == json.dumps([row["messages"] for row in group])


@pytest.mark.parametrize(
    "answers", [({"a": 1}, {"b": 2.5}), (1, "x"), ([{"a": 1}], [{"b": 2}]), ([{"a": 1}], "b")], ids=str
)
def test_columns_besides_chats_are_what_the_file_has(answers: tuple[object, object]) -> None:
    call = {"type": "function", "function": {"name": "set", "arguments": {"t": 0.3}}}
    chats = ([USER, {**ASSISTANT, "tool_calls": [call]}], [USER])
    rows = [{"prompt": chat, "answer": answer} for chat, answer in zip(chats, answers, strict=True)]
    assert as_dataset(rows, ["x"]).to_list() == rows


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_tag_that_no_user_wrote_is_text(tmp_path: Path, role: str) -> None:
    (tmp_path / "0.png").touch()
    row = {"messages": [USER, {"role": role, "content": "an <image> tag"}], "images": ["0.png"]}
    shaped = media.attach(row, row, ("image",), tmp_path, "row 1")["messages"]
    parts = {message["role"]: [part["text"] or part["type"] for part in message["content"]] for message in shaped}
    assert parts["user"] == ["image", "q"] and parts[role] == ["an <image> tag"]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_text_is_read_like_text(tmp_path: Path, role: str) -> None:
    (tmp_path / "0.png").touch()
    text, shaped = "look at <image> here", []
    for content in (text, [{"type": "text", "text": text}], [{"text": text}], [text]):
        row = {"messages": [USER, {"role": role, "content": content}], "images": ["0.png"]}
        shaped.append(media.attach(row, row, ("image",), tmp_path, "row 1"))
    assert shaped[1:] == shaped[:1] * 3
    kinds = [[part["type"] for part in message["content"]] for message in shaped[0]["messages"]]
    assert kinds == ([["text"], ["text", "image", "text"]] if role == "user" else [["image", "text"], ["text"]])


def test_plain_text_is_refused_by_the_files_that_it_has_or_that_others_have(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    pictures = write(tmp_path / "pictures.jsonl", [{"messages": [USER, ASSISTANT], "images": ["a.png"]}])
    notes = write(tmp_path / "notes.jsonl", [{"text": "t"}])
    seen = write(tmp_path / "seen.jsonl", [{"text": "t", "video": "a.mp4"}])
    for names, evaluation, said in (
        ([pictures, notes], (), "notes.jsonl' is plain text, and other rows have images"),
        ([pictures], (notes,), "notes.jsonl' is plain text, and other rows have images"),
        ([pictures, seen], (), "seen.jsonl' has videos with plain text"),
    ):
        with pytest.raises(DataError, match=rf"row 1 of data set .*{said}; expected .*\nhint: "):
            load(*names, evaluation=evaluation, takes=("image", "video"))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_files_in_some_rows_are_refused_where_ranks_share_weights(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    rows = [{"messages": [USER, ASSISTANT], **files} for files in ({kind: "file"}, {}, {})]
    read = table(write(tmp_path / "rows.jsonl", rows), takes=(kind,))
    with pytest.raises(DataError, match=f"row 2 of data set .* has no {kind}s, and other rows have"):
        media.check_even(read)
    for alike in ([0], [1, 2]):
        media.check_even(read.select(alike))


def test_arguments_that_are_json_in_a_text_are_learned_as_objects(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "light", "arguments": '{"on": true}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    made = load(write(tmp_path / "rows.jsonl", [{"messages": messages}]))
    assert made[0]["messages"][1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "light", "arguments": {"on": True}}}
    ]


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "light", "arguments": "on"}},
        {"type": "function", "function": {"name": "light", "arguments": "[1]"}},
        {"type": "custom", "custom": {"name": "light", "input": "on"}},
        {"name": "light", "parameters": {"on": True}},
        {"index": 0, "function": {"arguments": {"on": True}, "name": "light", "strict": True}, "id": "", "type": "f"},
    ],
)
def test_a_call_in_another_form_stays_as_the_file_has_it(tmp_path: Path, call: dict) -> None:
    text = {"index": 1, "function": {"arguments": '{"b": 1, "a": 2}', "name": "light"}, "type": "function"}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call, text]}]
    (row,) = load(write(tmp_path / "rows.jsonl", [{"messages": messages}]))
    text["function"]["arguments"] = {"b": 1, "a": 2}
    assert json.dumps(row["messages"][1]["tool_calls"]) == json.dumps([call, text])


def test_the_fields_that_a_table_adds_to_calls_and_tools_are_not_learned(tmp_path: Path) -> None:
    tools = [{"name": call["function"]["name"], "parameters": call["function"]["arguments"]} for call in CALLS]
    rows = [{"messages": [USER, {**ASSISTANT, "tool_calls": [call]}], "tools": tools} for call in CALLS]
    made = load(write(tmp_path / "rows.parquet", rows))
    assert [row["messages"] for row in made] == [row["messages"] for row in rows]
    assert [json.loads(row["tools"]) for row in made] == [tools, tools]


def test_parts_of_text_are_one_text_and_others_are_left_to_the_template(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]
    rows = [{"messages": [{**USER, "content": parts}, ASSISTANT]}, {"messages": [USER, ASSISTANT]}]
    assert load(write(tmp_path / "rows.jsonl", rows))[0]["messages"] == [{**USER, "content": "q?"}, ASSISTANT]
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True}
    for part in (thinking, {"type": "refusal", "refusal": "no"}):
        answer = {**ASSISTANT, "content": [part, parts[0]]}
        (row,) = load(write(tmp_path / "rows.jsonl", [{"messages": [{**USER, "content": parts}, answer]}]))
        assert row["messages"] == [{**USER, "content": "q?"}, answer]


CALL = {"role": "tool_call", "content": json.dumps({"name": "light", "arguments": {}})}


def test_turns_of_tools_have_the_roles_that_templates_know(tmp_path: Path) -> None:
    first, second = ({"name": name, "arguments": {"on": True}} for name in ("light", "sound"))
    shared = [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(first)}]
    shared += [{"from": "observation", "value": "ok"}, {"from": "gpt", "value": "a"}]
    swift = [USER, {"role": "assistant", "content": "Both."}]
    swift += [{"role": "tool_call", "content": json.dumps(call)} for call in (first, second)]
    swift += [{"role": "tool_response", "content": "ok"}] * 2 + [{"role": "model", "content": "a"}]
    read = load(write(tmp_path / "rows.jsonl", [{"messages": shared}, {"messages": swift}]))
    calls = [{"type": "function", "function": call} for call in (first, second)]
    answer = {"role": "tool", "content": "ok"}
    assert read[0]["messages"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        answer,
        ASSISTANT,
    ]
    assert read[1]["messages"] == [
        USER, {"role": "assistant", "content": "Both.", "tool_calls": calls}, answer, answer, ASSISTANT
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool_call", "content": "light"}, "has the call of a tool 'light'"),
        ({"role": "assistant", "content": "a", "loss": False}, "has a message with 'loss': False"),
        ({"role": "assistant", "content": "a", "weight": 0}, "has a message with 'weight': 0"),
        ({"from": "gpt", "value": "a", "weight": 0}, "has a message with 'weight': 0"),
        ({"from": "function_call", "value": CALL["content"], "weight": 0}, "has a message with 'weight': 0"),
    ],
)
def test_messages_that_would_be_dropped_or_learned_in_spite_of_the_file_are_refused(
    tmp_path: Path, message: dict, said: str
) -> None:
    name = write(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT]}, {"messages": [USER, message, ASSISTANT]}])
    with pytest.raises(DataError, match=f"(?s)row 2 of .* {said}"):
        load(name)


def test_roles_that_few_templates_know_are_kept_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [{**USER, "role": "User", "loss": False}, {"role": "documents", "content": "d"}, ASSISTANT]}]
    made = load(write(tmp_path / "rows.jsonl", rows))
    assert [message["role"] for message in made[0]["messages"]] == ["user", "documents", "assistant"]
    assert "has messages of the roles documents" in caplog.text


@pytest.mark.parametrize(
    "call",
    [
        {"name": "light", "arguments": {"on": True}},
        {"name": "light", "arguments": '{"on": true}'},
        {"type": "function", "function": {"name": "light", "arguments": '{"on": true}'}},
    ],
)
def test_arguments_of_calls_are_objects_whatever_the_file_has(tmp_path: Path, call: dict) -> None:
    messages = [USER, {"role": "tool_call", "content": json.dumps(call)}, ASSISTANT]
    made = load(write(tmp_path / "rows.jsonl", [{"messages": messages}]))
    (found,) = made[0]["messages"][1]["tool_calls"]
    assert found["function"] == {"name": "light", "arguments": {"on": True}}


def test_a_message_that_is_not_learned_may_be_marked(tmp_path: Path) -> None:
    marked = [{"messages": [{**USER, "loss": False}, {**ASSISTANT, "loss": True}]}]
    assert len(load(write(tmp_path / "rows.jsonl", marked), completion_only_loss=True)) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{**CALL, "loss": False}],
        [CALL, {**CALL, "loss": False}],
        [ASSISTANT, {**CALL, "weight": 0}],
        [{**ASSISTANT, "loss": False}, {**CALL, "loss": True}],
    ],
)
def test_a_call_of_a_tool_may_not_be_marked_where_it_is_learned(tmp_path: Path, messages: list[dict]) -> None:
    with pytest.raises(DataError, match="has a message with '(loss|weight)': (False|0)"):
        load(write(tmp_path / "rows.jsonl", [{"messages": [USER, *messages]}]))
    (row,) = load(write(tmp_path / "prompt.jsonl", [{"prompt": [USER, *messages], "completion": [ASSISTANT]}]))
    assert {message["role"] for message in row["prompt"]} == {"user", "assistant"}
    (row,) = load(write(tmp_path / "learned.jsonl", [{"messages": [USER, {**CALL, "loss": True}]}]))
    assert row["messages"][1].keys() == {"role", "content", "tool_calls"}


@pytest.mark.parametrize(
    ("flags", "learned"),
    [
        ({}, False),
        ({"completion_only_loss": True}, False),
        ({"completion_only_loss": False}, True),
        ({"assistant_only_loss": True}, True),
        ({"assistant_only_loss": True, "completion_only_loss": True}, False),
        ({"assistant_only_loss": True, "completion_only_loss": False}, True),
    ],
)
def test_an_answer_in_a_prompt_may_be_marked_where_prompts_are_not_learned(
    tmp_path: Path, flags: dict, learned: bool
) -> None:
    row = {"prompt": [USER, {**ASSISTANT, "loss": False}, USER], "completion": [ASSISTANT]}
    name = write(tmp_path / "rows.jsonl", [row])
    if learned:
        with pytest.raises(DataError, match="row 1 .* has a message with 'loss': False"):
            load(name, **flags)
    else:
        assert len(load(name, **flags)) == 1


def test_text_that_is_cut_inside_of_a_character_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "\\ud83d"}\n')
    with pytest.raises(DataError, match="surrogates not allowed.*\nhint: .*cut inside a character"):
        load(str(tmp_path / "rows.jsonl"))


def test_data_sets_follow_one_another(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{n}.jsonl", [{"text": f"{n}{i}"} for i in range(3)]) for n in "ab"]
    assert [row["text"] for row in load(names[0], f"{names[1]}#1")] == ["a0", "a1", "a2", "b0"]


def test_data_sets_of_two_shapes_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"text": "t"}])
    two = write(tmp_path / "two.jsonl", [{"prompt": "q", "completion": "a"}])
    with pytest.raises(ConfigError, match=r"differ in shape \(.*one.jsonl: text, .*two.jsonl: prompt\+completion\)"):
        load(one, two)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n\n", "is empty"),
        ("a.json", "[]", "is empty"),
        (
            "a.json",
            '{"text": "t"}',
            "holds a JSON dict; expected a list of objects\nhint: one object per line is .jsonl",
        ),
        ("a.jsonl", '{"text": "t"}\n{"text": \n', "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", "[1]\n", r"row 1 of .*a.jsonl is \[1\]; expected an object"),
        ("a.jsonl", '{"q": "x", "a": "y"}\n', "has the columns a, q; expected `messages`.*`text`"),
        ("a.jsonl", '{"prompt": "x"}\n', "has the columns prompt; expected"),
        ("a.jsonl", '{"text": "t"}\n{"other": "t"}\n', "row 2 of data set .* has no 'text'; its columns are other; "),
        ("a.jsonl", '{"text": ""}\n', "row 1 of data set .* has '' as text; expected text"),
        ("a.jsonl", '{"text": 5}\n', "row 1 of data set .* has 5 as text; expected text"),
        ("a.jsonl", '{"text": ["a", "b"]}\n', r"row 1 of data set .* has \['a', 'b'\] as text; expected text\n"),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}\n',
            "row 1 of data set .* has a list as prompt and a str as completion; expected two texts, or two lists",
        ),
        ("a.jsonl", '{"prompt": "q", "completion": null}\n', "row 1 of data set .* has None as completion"),
        ("a.jsonl", '{"question": "q", "answer": 5}\n', "row 1 of data set .* does not fit: 5 is not text"),
        ("a.jsonl", '{"messages": []}\n', r"row 1 of data set .* has \[\] as messages"),
        (
            "a.jsonl",
            '{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]}\n'
            '{"prompt": [], "completion": [{"role": "assistant", "content": "y"}]}\n',
            r"row 2 of data set .* has \[\] as prompt; expected a message before the answer\nhint: ",
        ),
        ("a.jsonl", '{"messages": "hi"}\n', "row 1 of data set .* does not fit: 'hi' is no list of messages"),
        ("a.jsonl", '{"messages": ["hi"]}\n', r"row 1 of data set .* does not fit: \['hi'\] is no list of messages"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "row 1 .* has the message {'role': 'user'} in messages"),
        ("a.jsonl", '{"messages": [{"content": "x"}]}\n', "row 1 .* has the message {'content': 'x'} in messages"),
        ("a.jsonl", '{"messages": [{"role": 1, "content": "x"}]}\n', "expected messages with `role` and `content`"),
        ("a.jsonl", '{"conversations": [{"from": "human"}]}\n', "row 1 of data set .* has no 'value'"),
        ("a.jsonl", '{"prompt": ["x"], "completion": "y"}\n', "row 1 of data set .* has the message 'x' in prompt"),
        (
            "a.jsonl",
            '{"promt": "x", "completion": "y"}\n',
            "has the columns completion, promt; .*\nhint: did you mean 'prompt'",
        ),
        (
            "a.jsonl",
            '{"prompt": "x", "completion": "y"}\n{"prompt": [{"role": "user", "content": "x"}], '
            '"completion": [{"role": "assistant", "content": "y"}]}\n',
            "row 2 of data set .* has a list as prompt, the first row a str; expected text in every row",
        ),
        ("a.jsonl", "\ufeff{broken\n", "line 1 of .*a.jsonl is not JSON: Expecting property name"),
        ("a.json", '"words"', "holds a JSON str; expected a list of objects"),
        ("a.jsonl", "null\n", "row 1 of .*a.jsonl is None; expected an object with named columns\nhint: such as {"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
        ("a.csv", "a,b\n", "ends in '.csv'; expected one of .jsonl, .json, .parquet"),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "\n\n", "is empty"),
        ("a.jsonl", '{"text": "t"}\n{"text": \n', "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", "[1]\n", r"row 1 of .*a.jsonl is \[1\]; expected an object"),
        (
            "a.jsonl",
            '{"promt": "x", "completion": "y"}\n',
            "has the columns completion, promt; .*\nhint: did you mean .*'prompt'",
        ),
        ("a.json", '"words"', "holds a JSON str; expected a list of objects"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
    ],
)
@pytest.mark.parametrize("verb", ["sft", "grpo"])
def test_the_first_rows_of_a_file_are_read_before_anything_heavy_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(run, "check_installed", lambda *args, **kwargs: None)
    for module in ("torch", "transformers", "trl", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    recipe, kind = {"sft": (sft_recipe.RECIPE, SftConfig), "grpo": (grpo_recipe.RECIPE, GrpoConfig)}[verb]
    good = write(tmp_path / "good.jsonl", [{"prompt": "1 + 1 =", "completion": "2", "answer": "2"}])
    for names in ({"dataset": (str(tmp_path / name),)}, {"dataset": (good,), "eval_dataset": (str(tmp_path / name),)}):
        with pytest.raises(DataError, match=said):
            run.check(recipe, kind(**names))


def test_a_column_that_a_flag_names_is_looked_for_in_the_first_row(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", [{"asked": "q", "said": "a"}])
    data.check(SftConfig(dataset=(name,), prompt_key="asked", response_key="said"))
    with pytest.raises(DataError, match="has no 'sayd'"):
        data.check(SftConfig(dataset=(name,), prompt_key="asked", response_key="sayd"))


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": "t"}])
    with pytest.raises(DataError, match=r"does not exist; expected a .* file\nhint: did you mean 'train.jsonl'"):
        load(str(tmp_path / "trian.jsonl"))
    (tmp_path / "machine.json").write_text("{}")
    with pytest.raises(DataError, match=r"does not exist; .*\nhint: /.* has machine.json, train.jsonl"):
        load(str(tmp_path / "nofile.jsonl"))
    with pytest.raises(DataError, match=r"does not exist; .*\nhint: /.*/none does not exist either"):
        load(str(tmp_path / "none" / "train.jsonl"))


def test_a_suffix_spelt_wrong_is_a_file_and_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d.jsonl", [{"text": "t"}])
    with pytest.raises(DataError, match="'d.jsnl' does not exist; expected a .jsonl.*\nhint: did you mean 'd.jsonl'"):
        data.READER.check(["d.jsnl"])
    with pytest.raises(DataError, match="'d.csv' does not exist; .*\nhint: did you mean 'd.jsonl'"):
        data.READER.check(["d.csv"])
    for name in ("owner/name", "owner/name-1.5", "name.en", "owner/name#5", "d.jsonl"):
        data.READER.check([name])


def test_a_file_with_other_letters_than_utf8_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(b'[{"text": "\xff\xfe"}]')
        with pytest.raises(DataError, match=f"{name} is not UTF-8: .* at byte 11; expected text in UTF-8\nhint: "):
            load(str(tmp_path / name))


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "t"}\n', encoding="utf-8")
    assert load(str(tmp_path / "a.jsonl")) == [{"text": "t"}]


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(tmp_path / "a.jsonl", [{"text": "t"}])

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a.jsonl cannot be read \(Permission denied\); expected a file you may read"):
        load(name)


def test_rows_that_make_no_table_are_an_error() -> None:
    with pytest.raises(DataError, match="the rows of a.jsonl do not make one table: .*\nhint: "):
        as_dataset([{"text": "t"}, {"text": 5}], ["a.jsonl"])


def test_rows_that_are_trained_in_order_keep_it_when_others_are_held_out() -> None:
    numbers = as_dataset([{"number": number} for number in range(20)], ["a"])
    shuffled, held = tables.split(numbers, 0.2, seed=3)
    rest, same = tables.split(numbers, 0.2, seed=3, in_order=True)
    assert list(rest["number"]) == sorted(shuffled["number"]) != list(shuffled["number"])
    assert list(same["number"]) == list(held["number"])


def test_fewer_rows_than_requested_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = write(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(3)])
    load(f"{name}#3")
    assert caplog.messages == []
    assert len(load(f"{name}#999")) == 3
    assert caplog.messages == [f"data set {name!r} has 3 rows, fewer than 999: all are used"]


@pytest.mark.parametrize("name", ["#5", " #5"])
def test_a_count_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="ends in #5; expected a name"):
        data.READER.check([name])


def test_of_what_is_checked_first_only_the_first_rows_of_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module.Reader, "_read_hub", lambda *args: pytest.fail("was fetched"))
    monkeypatch.setattr(sft_pydoc, "rows", lambda *args: pytest.fail("was made"))
    name = write(tmp_path / "a.jsonl", [{"text": "t"}] * (FIRST_ROWS + 1))
    first = data.READER.check([name, f"{name}#2", "builtin:pydoc#5", "owner/name"])
    assert first == {name: [{"text": "t"}] * FIRST_ROWS, f"{name}#2": [{"text": "t"}] * 2}
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n' * FIRST_ROWS + "{")
    data.check(SftConfig(dataset=(name,)))
    with pytest.raises(DataError, match="line 101 of .*a.jsonl is not JSON"):
        load(name)
    monkeypatch.setattr(rows_module, "LARGEST_DOCUMENT_BYTES", 8)
    (tmp_path / "a.json").write_text("no document")
    assert data.READER.check([str(tmp_path / "a.json")]) == {}
    for name in ("builtin:pydocs", str(tmp_path), str(tmp_path / "b.jsonl"), "./nothing", "~/no/such/file"):
        with pytest.raises(DataError, match="\nhint: "):
            data.READER.check([name])


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").touch()
    with pytest.raises(DataError, match="is a folder; .*\nhint: /.* has mine.jsonl"):
        load(str(tmp_path))


@pytest.mark.parametrize("count", ["0", "-5", "x", "1.5", ""])
def test_the_row_count_is_a_number_above_zero(count: str) -> None:
    with pytest.raises(ConfigError, match="and a number of rows above zero\nhint: NAME#1000"):
        load(f"builtin:pydoc#{count}")


def test_an_unknown_builtin_names_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'builtin:pydoc'"):
        load("builtin:pydocs")


@pytest.mark.parametrize("row", [{"messages": [USER, ASSISTANT]}, {"prompt": [USER], "completion": [ASSISTANT]}])
def test_chats_need_a_chat_template(tmp_path: Path, row: dict) -> None:
    name = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match="no chat template"):
        load(name, chat=False)


def test_other_names_are_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list([{"text": str(number)} for number in range(9)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("owner/name#3") == [{"text": "0"}, {"text": "1"}, {"text": "2"}]
    assert asked == [("owner/name", "train")]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("owner/name", Named(place="owner/name")),
        ("owner/name:main#9", Named(place="owner/name", subset="main", limit=9)),
        ("owner/name:main:test", Named(place="owner/name", subset="main", split="test")),
        ("owner/name::train[:10%]#2", Named(place="owner/name", split="train[:10%]", limit=2)),
        ("builtin:pydoc#3", Named(place="builtin:pydoc", limit=3)),
        ("a:b.jsonl", Named(place="a:b.jsonl")),
        ("rows.jsonl#5", Named(place="rows.jsonl", limit=5)),
    ],
)
def test_a_name_has_a_subset_a_split_and_a_number_of_rows(name: str, named: Named) -> None:
    assert parsed(name) == named


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/name:", "has an empty part.*hint: such as openai/gsm8k:main:test"),
        ("owner/name:main:", "has an empty part"),
        (":main", "has an empty part"),
        ("rows.jsonl:main", "names a part 'main' of a file.*hint: rows.jsonl#1000"),
        ("MS::owner/name", "begins with a hub.*hint: --use_hf false --dataset owner/name"),
    ],
)
def test_names_with_a_part_that_nothing_has_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        data.READER.check([name])


def test_subsets_and_splits_of_a_hub_are_read_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    parts = [("main", "train"), ("main", "test"), ("other", "train")]
    lines = ["---", "configs:"]
    for subset in ("main", "other"):
        lines += [f"- config_name: {subset}", "  data_files:"]
        for split in [split for name, split in parts if name == subset]:
            write(tmp_path / f"{subset}-{split}.jsonl", [{"text": f"{subset} {split}"}])
            lines += [f"  - split: {split}", f"    path: {subset}-{split}.jsonl"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    real = datasets.load_dataset

    def load_dataset(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        return real(str(tmp_path), subset, split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for subset, split in parts:
        assert load(f"owner/name:{subset}:{split}") == [{"text": f"{subset} {split}"}]
    for name, hint in {
        "owner/name": "owner/name:main",
        "owner/name:mian": "owner/name:main",
        "owner/name:main:validation": "owner/name:main:train, owner/name:main:test",
    }.items():
        with pytest.raises(DataError, match=f"\nhint: .*{hint}"):
            load(name)


def test_a_data_set_that_is_named_twice_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = write(tmp_path / "a.jsonl", [{"text": "t"}])
    assert len(load(name, name)) == 1
    assert caplog.messages == [f"data set {name!r} is named 2 times: its rows are used once"]


def test_a_hub_name_that_cannot_be_loaded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError, match="'owner/name' is no local file and could not be loaded by that name: no network"
    ):
        load("owner/name")
    with pytest.raises(
        DataError, match=r"\nhint: .*--use_hf false looks names up on ModelScope \(pip install 'ebbtide"
    ):
        load("owner/name")
    with pytest.raises(DataError, match="\nhint: did you mean 'builtin:pydoc'"):
        load("pydoc")


@pytest.mark.parametrize(
    ("known", "proxy", "offline"), [(False, "", True), (True, "", False), (False, "http://x:1", False)]
)
def test_without_a_network_only_the_cache_is_asked(
    monkeypatch: pytest.MonkeyPatch, known: bool, proxy: str, offline: bool
) -> None:
    """The packages would repeat requests for half a minute; behind a proxy names are not resolved locally."""
    import datasets
    import huggingface_hub.constants as constants

    def look_up(host: str, port: None) -> list[object]:
        if not known:
            raise OSError(-2, "Name or service not known")
        return []

    found: list[tuple[bool, bool]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        found.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("no network")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": proxy} if proxy else {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="no network"):
        load("owner/name")
    assert found == [(offline, offline)]
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_names_on_modelscope_are_fetched_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str) -> str:
        if name != "swift/self-cognition":
            raise RuntimeError(f"The request model: {name} does not exist!")
        (tmp_path / "train.jsonl").write_text(json.dumps({"query": "q", "response": "a", "tag": "zh"}) + "\n")
        return str(tmp_path)

    package = ModuleType("modelscope")
    package.dataset_snapshot_download = fetch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", package)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert load("swift/self-cognition#1", use_hf=False) == [{"prompt": [USER], "completion": [ASSISTANT]}]
    with pytest.raises(DataError, match=r"'swift/other' cannot be fetched from ModelScope.*\nhint: .*--use_hf true"):
        load("swift/other", use_hf=False)
