"""Rows of every accepted shape get a prompt; everything else is an error that names what was found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.base.errors import DataError
from ebbtide_recipes.grpo import prompts
from ebbtide_recipes.grpo.answers import number_in
from ebbtide_recipes.grpo.config import GrpoConfig

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}
ASSISTANT = {"role": "assistant", "content": "a"}


def shaped(*rows: dict[str, Any], chat: bool = True, system: str | None = None) -> list[dict[str, Any]]:
    return prompts.shaped(rows, "rows", chat=chat, system=system)


def test_the_built_in_sums_are_right_and_belong_to_the_seed() -> None:
    rows = prompts.arithmetic(3)
    assert rows == prompts.arithmetic(3) != prompts.arithmetic(4)
    assert len(rows) == prompts.COUNT
    for row in rows:
        first, sign, second, _ = row["prompt"].split()
        right = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert number_in(row["answer"]) == right >= 0


@pytest.mark.parametrize(
    ("row", "made"),
    [
        ({"prompt": "q", "answer": "a"}, {"prompt": "q", "answer": "a"}),
        ({"prompt": [USER], "level": 3}, {"prompt": [USER], "level": 3}),
        ({"question": "q", "answer": "#### 1"}, {"prompt": [USER], "answer": "#### 1"}),
        (
            {"problem": "q", "messages": [USER, ASSISTANT], "solution": "a"},
            {"prompt": [USER], "problem": "q", "messages": [USER, ASSISTANT], "solution": "a"},
        ),
        ({"problem": "q", "messages": [SYSTEM, USER]}, {"prompt": [SYSTEM, USER], "problem": "q"}),
        ({"problem": 17, "question": "q"}, {"prompt": [USER], "problem": 17}),
        ({"problem": "q", "answer": "a"}, {"prompt": [USER], "problem": "q", "answer": "a"}),
        ({"messages": [SYSTEM, USER], "solution": "a"}, {"prompt": [SYSTEM, USER], "solution": "a"}),
        ({"prompt": "q", "completion": "gone"}, {"prompt": "q"}),
        (
            {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "72"}},
            {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "72"}, "answer": "72"},
        ),
    ],
)
def test_columns_are_put_into_shape(row: dict[str, Any], made: dict[str, Any]) -> None:
    assert shaped(row) == [made]


def test_without_a_chat_template_a_question_is_plain_text() -> None:
    assert shaped({"question": "q", "answer": "a"}, chat=False) == [{"prompt": "q\n", "answer": "a"}]


def test_a_system_message_is_put_before_chats_that_have_none() -> None:
    assert shaped({"prompt": [USER]}, {"prompt": [SYSTEM, USER]}, system="t") == [
        {"prompt": [{"role": "system", "content": "t"}, USER]},
        {"prompt": [SYSTEM, USER]},
    ]


def test_a_system_message_for_plain_text_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert shaped({"prompt": "q"}, system="t") == [{"prompt": "q"}]
    assert caplog.messages == ["data set 'rows' is plain text: --system has no effect on it"]
    caplog.clear()
    shaped({"prompt": "q"}), shaped({"prompt": [USER]}, system="t")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "t"}], "has the columns text; expected `prompt`"),
        ([{"promt": "t"}], "has the columns promt.*\nhint: did you mean 'prompt'"),
        ([{"prompt": ""}], "row 1 of data set 'rows' has '' as prompt"),
        ([{"prompt": 3}], "row 1 of data set 'rows' has 3 as prompt"),
        ([{"prompt": ["x"]}], "row 1 .* has the message 'x'"),
        ([{"prompt": [{"role": "user", "content": ["x"]}]}], "row 1 .* has the message"),
        ([{"prompt": [USER, ASSISTANT]}], "row 1 .* ends with the assistant"),
        ([{"prompt": "q", "images": []}], "has the column 'images'"),
        ([{"prompt": "q", "completions": 1}], "has the column 'completions'"),
        ([{"prompt": "q", "a": 1}, {"prompt": "q"}], "row 2 .* has the columns prompt; .*those of the first row: a, p"),
        ([{"prompt": "q"}, {"prompt": [USER]}], "row 2 .* has a list as prompt, the first row a str"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        shaped(*rows)
    assert caught.value.hint


def test_a_chat_needs_a_template() -> None:
    with pytest.raises(DataError, match="the model's tokenizer has no chat template"):
        shaped({"prompt": [USER]}, chat=False)


def test_truths_of_verls_rows_become_the_column_answer_of_every_row() -> None:
    judged = [None, {"ground_truth": "72"}, {"ground_truth": None}]
    rows = shaped(*({"prompt": "q", "reward_model": value} for value in judged))
    assert [row["answer"] for row in rows] == [None, "72", None]
    assert "answer" not in shaped({"prompt": "q", "reward_model": {"style": "model"}})[0]
    both = {"prompt": "q", "reward_model": {"ground_truth": "72"}, "answer": "a long way to 72"}
    assert shaped(both) == [both]


class Words:
    """A tokenizer of eight words."""

    def __len__(self) -> int:
        return 8

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text.split())}


def test_a_data_set_that_is_named_twice_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from ebbtide_recipes.grpo import data, rewards

    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "answer": "1"}\n')
    text: Any = SimpleNamespace(vocab_size=8)
    source: Any = SimpleNamespace(chats=False, tokenizer=Words(), config=SimpleNamespace(get_text_config=lambda: text))
    name = str(tmp_path / "a.jsonl")
    assert len(data.load((name, name), GrpoConfig(), source, rewards.load(("accuracy",)))) == 1
    assert caplog.messages == [f"data set {name!r} is named 2 times: its rows are used once"]


@pytest.mark.parametrize(
    ("refusing", "said"),
    [
        ("raise_exception('No system message')", "No system message"),
        ("messages[0].content + 1", "can only concatenate str"),
    ],
)
def test_a_chat_that_the_template_refuses_is_named_by_its_row(tmp_path: Path, refusing: str, said: str) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from ebbtide_recipes.grpo import data, rewards

    template = f"{{{{ ({refusing}) if messages[0].role == 'system' else 'q' }}}}"
    words = Tokenizer(models.WordLevel({"q": 0}, unk_token="q"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)
    text: Any = SimpleNamespace(vocab_size=8)
    source: Any = SimpleNamespace(chats=True, tokenizer=tokenizer, config=SimpleNamespace(get_text_config=lambda: text))
    rows = [{"prompt": [USER], "answer": "1"}, {"prompt": [SYSTEM, USER], "answer": "1"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name, functions = str(tmp_path / "a.jsonl"), rewards.load(("accuracy",))
    with pytest.raises(DataError, match=f"chat template refuses row 2 of data set '{name}': {said}.*\nhint: "):
        data.load([name], GrpoConfig(), source, functions)
    with pytest.raises(DataError, match="chat template refuses row 1 of data set"):
        data.load([f"{name}#1"], GrpoConfig(system="s"), source, functions)
    assert len(data.load([f"{name}#1"], GrpoConfig(), source, functions)) == 1


@pytest.mark.parametrize(("shuffled", "level"), [(True, "INFO"), (False, "WARNING")])
def test_prompts_that_fill_no_rollout_are_counted(caplog: pytest.LogCaptureFixture, shuffled: bool, level: str) -> None:
    from trl.trainer.utils import RepeatSampler

    from ebbtide_recipes.grpo.data import check_count

    dataset: Any = range(10)
    config = GrpoConfig(per_device_train_batch_size=8, num_generations=2, dataset_shuffle=shuffled)
    sampler = RepeatSampler(dataset, mini_repeat_count=2, batch_size=4, shuffle=shuffled, seed=0)
    assert len(set(sampler)) == 8
    with caplog.at_level("INFO", logger="ebbtide.grpo"):
        check_count(dataset, config, 1)
        check_count(dataset[:8], config, 1)
    (record,) = (record for record in caplog.records if record.name == "ebbtide.grpo")
    assert record.levelname == level
    assert "2 of the 10 prompts are left out of each epoch" in record.message
