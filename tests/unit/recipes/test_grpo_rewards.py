"""Every reward function returns one number per completion; anything else is an error that names the function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.base.errors import ConfigError, DataError, TrainingError
from ebbtide_recipes.grpo import answers, rewards

TWO = ["The answer is 18.", ""]


def judge(function: Callable[..., Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
    reward = rewards.Reward(name="mine", function=function)
    return reward(prompts=["p"] * len(completions), completions=completions, **columns)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("She has 3 eggs, so 1,234.5 in all.", 1234.5),
        ("#### 18\nWas it 19?", 18),
        ("<think>7</think><answer>-4</answer> 9", -4),
        (r"so \boxed{5} of 6", 5),
        (r"so \boxed{\frac{1}{4}} of 6", 0.25),
        ("#### (1, 2)", None),
        ("<answer>1/0</answer>", None),
        ("#### Step 3\nThe sum is 42.\nso \\boxed{42}", 42),
        ("#### Step 3\n<answer>42</answer>", 42),
        ("so \\boxed{42}\n#### 18", 18),
        ("#### 18\ncut off \\boxed{42", 18),
        ("1" * 5000 + " 1/2", 0.5),
        ("7 - 4", 4),
        ("minus .5: -.5", -0.5),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer_is_found(text: str, number: float | None) -> None:
    assert answers.number_in(text) == number


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("It makes 18", "She sells 9 eggs.\n#### 18", True),
        ("It makes 18.0 dollars", "#### 18", True),
        ("It makes 180", "#### 18", False),
        ("", "#### 18", False),
        ("<answer>Paris.</answer>", "paris", True),
        ("<answer>Rome</answer>", "paris", False),
        (r"so \boxed{3/2}", "1/2", False),
        (r"so \boxed{\frac{1}{2}}", "1/2", True),
        (r"so \boxed{0.5}", r"\dfrac{1}{2}", True),
        ("the answer is 1/2", "0.5", True),
        (r"\boxed{\left(7, 2\right)}", "(1, 2)", False),
        (r"\boxed{\left(1, 2\right)}", "(1,2)", True),
        ("<answer>11:30</answer>", "10:30", False),
        ("<answer>10:30</answer>", "10:30", True),
        ("#### x = 2", "x=2", True),
        ("#### 3 + 15 = 18", "18", True),
        ("#### 18 19", "18", False),
        (r"\boxed{6}", "x=5, y=6", False),
        (r"\boxed{x = 5,\ y = 6}", "x=5, y=6", True),
        (r"\boxed{6}", "x = 5 and y = 6", False),
        ("#### 7", "x < 3 or x = 7", False),
        ("#### 7", "x_1 = 3; x_2 = 7", False),
        ("#### 5 apples and 3 pears = 8", "8", True),
        ("#### 48/2=24, 48+24=72", "72", True),
        (r"\boxed{a_1, a_2 = 7}", "7", True),
        (r"\boxed{2+3=5; total=5}", "5", True),
        ("#### 3x = 54, x = 18", "18", True),
        ("#### 2 + x = 20, x = 18", "18", True),
        ("#### So, x = 18", "18", True),
        ("#### f(1, 2) = 1,000 + 8 = 1,008", "1008", True),
        (r"\boxed{18\text{ dollars}}", "$18", True),
        (r"\boxed{2 \sqrt{3}}", r"2\sqrt{3}", True),
        (r"\boxed{2\sqrt{3}}", r"5\sqrt{3}", False),
        (r"cut off \boxed{18", "17", False),
        ("It makes 1,234,567", "1234567", True),
        (r"\boxed{3}", r"\sqrt{3}", False),
        (r"\boxed{2}", r"2\pi", False),
        (r"\boxed{2}", "x^2", False),
        (r"\boxed{5}", "5x", False),
        (r"\boxed{3}", "-x+3", False),
        (r"\boxed{\log 7}", "7", False),
        ("#### sqrt 7", "7", False),
        (r"\boxed{10^{3}}", "10", False),
        (r"\boxed{\frac{3\pi}{4}}", "0.75", False),
        (r"\boxed{\frac12}", "0.5", True),
        (r"so it is -\frac{3}{4}", "-0.75", True),
        (r"\boxed{2\frac{1}{2}}", "2.5", True),
        ("#### 2 1/2", r"2\frac12", True),
        ("#### 1.5e3", "1500", True),
        ("x is 5-7", "7", True),
        (r"\boxed{18\%}", "18", True),
        (r"\boxed{90^{\circ}}", "90", True),
        (r"\boxed{\$1{,}800}", "1800", True),
        ("#### **18** ", "18", True),
        ("#### 60 km/h", "60", True),
        ("#### about 5 square feet.", "5", True),
        (r"\boxed{5\text{ cm}^2}", "5", True),
        ("#### 5km", "5", True),
    ],
)
def test_answers_are_compared_as_numbers_and_else_as_words(text: str, expected: str, same: bool) -> None:
    assert answers.same_answer(text, expected) is same


FIVE = (
    r"<answer>\boxed{5}</answer>", r"#### \boxed{5}", r"<answer>\(5\)</answer>", "<answer>+5</answer>",
    r"\boxed{5 \mathrm{cm}}", r"\boxed{5\degree}", r"\boxed{\mathbf{5}}", "#### `5`", "#### (5)", "#### [5]",
    '#### "5"', "#### 5 (five)", "#### 5 apples!", "#### 5 apples, total", "#### 5 a day", "#### 5元", "#### ~5",
    "#### Janet's total is 5", "#### total: 5", r"\boxed{5\,m^2}", r"\boxed{5\%}", "#### 5.",
)  # fmt: skip
NOT_FIVE = (
    "#### negative 5", "#### minus 5", "#### less than 5", "#### not 5", "#### 5 million", "#### 5 dozen", "#### 5!",
    "#### 5 squared", "#### \u22125", "it is \u22125", "#### about -5", "#### x5", "#### 5a", "#### 5 or six",
    "#### 5 万", r"\boxed{\le 5}", "#### > 5", "#### 5x", "#### f(5)", "#### a/5",
)  # fmt: skip


@pytest.mark.parametrize("text", FIVE)
def test_words_units_and_layout_do_not_hide_a_number(text: str) -> None:
    assert answers.same_answer(text, "5") and answers.same_answer("#### 5", text)


@pytest.mark.parametrize("text", NOT_FIVE)
def test_words_and_variables_change_a_number(text: str) -> None:
    assert not answers.same_answer(text, "5") and not answers.same_answer("#### 5", text)


def test_what_is_no_number_is_compared_as_text() -> None:
    assert answers.same_answer("#### about -5", "-5") and answers.same_answer("#### 5 Million.", "5 million")


@pytest.mark.timeout(60)
def test_many_blanks_end() -> None:
    """A policy that begins to learn writes many; a pattern that retries at each of them would take minutes."""
    assert answers.number_in("1" + " " * 400_000 + "x") == 1
    assert answers.same_answer("#### 1" + " " * 400_000 + "2", "12") is False


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("18446744073709551615", "18446744073709551616", False),
        ("18,446,744,073,709,551,616", "18446744073709551616", True),
        ("9007199254740993/1", "9007199254740992", False),
        ("1e20", "100000000000000000000", True),
        ("0.3333333333333333", "1/3", True),
        ("1e999999999", "5", False),
        ("9" * 5000, "5", False),
        ("1/0", "5", False),
    ],
)
def test_integers_of_any_length_are_compared_exactly(text: str, expected: str, same: bool) -> None:
    assert answers.same_answer(f"#### {text}", expected) is same
    assert (answers.number_in(f"#### {text}") == answers.number_in(expected)) is same


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think>\n<answer>b</answer>", True),
        ("<think></think><answer></answer>", True),
        ("x<think>a</think><answer>b</answer>", False),
        ("<answer>b</answer>", False),
        ("<think>a<think>b</think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_the_format_is_two_tags_and_nothing_else(text: str, right: bool) -> None:
    assert answers.has_tags(text) is right


def test_the_built_in_functions_judge_texts_and_chats() -> None:
    loaded = {reward.name: reward for reward in rewards.load(("accuracy", "closeness", "format"))}
    chats = [[{"role": "assistant", "content": text}] for text in ("18", "20", "")]
    for completions in (["18", "20", ""], chats):
        given = {"prompts": ["p"] * 3, "completions": completions, "answer": ["#### 18"] * 3}
        assert loaded["accuracy"](**given) == [1.0, 0.0, 0.0]
        assert loaded["closeness"](**given) == [1.0, 1 / 3, 0.0]
        assert loaded["format"](**given) == [0.0, 0.0, 0.0]


def test_rows_without_an_answer_are_not_judged() -> None:
    loaded = {reward.name: reward for reward in rewards.load(("accuracy", "closeness"))}
    rows = {"prompts": ["p"] * 3, "completions": ["none", "18", "18"], "answer": [None, "18", "Paris"]}
    assert loaded["accuracy"](**rows) == [None, 1.0, 0.0]
    assert loaded["closeness"](**rows) == [None, 1.0, None]


def test_each_answer_of_a_list_is_right() -> None:
    loaded = {reward.name: reward for reward in rewards.load(("accuracy", "closeness"))}
    rows = {"prompts": ["p"] * 4, "completions": ["18", "paris", "5", "5"]}
    rows["answer"] = [["17", 18], ["Lyon", "Paris"], [None, "2", 4, "a"], []]  # type: ignore[list-item]
    assert loaded["accuracy"](**rows) == [1.0, 1.0, 0.0, None]
    assert loaded["closeness"](**rows) == [1.0, None, 0.5, None]
    assert loaded["accuracy"].judges([{"answer": None}, {"answer": ["a"]}], "a")
    assert not loaded["closeness"].judges([{"answer": ["a"]}], "a")


@pytest.mark.parametrize("answer", [{"target": 98}, ["1", {"target": 98}], [["1"]]])
def test_a_right_answer_that_is_no_text_is_refused_by_its_row(answer: Any) -> None:
    (accuracy,) = rewards.load(("accuracy",))
    for row in ({"answer": answer}, {"reward_model": {"ground_truth": answer}}):
        with pytest.raises(DataError, match=r"row 2 of data set 'a' has the right answer .*\nhint: "):
            accuracy.judges([{"answer": "1"}, row], "a")


@pytest.mark.parametrize(
    ("returned", "taken"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ((True, False), [1.0, 0.0]),
        ([None, 2], [None, 2.0]),
        (torch.tensor([1.0, 0.25], requires_grad=True), [1.0, 0.25]),
        ([torch.tensor(1.5), torch.tensor(2, dtype=torch.int64)], [1.5, 2.0]),
    ],
)
def test_what_may_be_returned(returned: Any, taken: list[float | None]) -> None:
    assert judge(lambda completions: returned, TWO) == taken


def test_a_function_gets_what_its_signature_names() -> None:
    assert judge(lambda answer: [float(a) for a in answer], TWO, answer=["1", "2"]) == [1.0, 2.0]
    assert judge(lambda **all_: [float(len(all_))] * 2, TWO, answer=["1", "2"]) == [3.0, 3.0]


def test_a_coroutine_is_awaited() -> None:
    async def later(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    assert judge(later, TWO) == [17.0, 0.0]


def test_a_function_of_verls_kind_is_called_once_a_completion() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": float(ground_truth in solution_str)}

    assert judge(compute_score, TWO, answer=["18", "18"]) == [1.0, 0.0]


def test_the_truth_of_verls_rows_comes_before_a_column_named_answer() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(ground_truth in solution_str)

    told = {"style": "rule", "ground_truth": "18"}
    assert judge(compute_score, TWO, answer=["a long way to 18"] * 2, reward_model=[told, told]) == [1.0, 0.0]
    accuracy = rewards.load(("accuracy",))[0]
    columns = {"answer": ["19", "20"], "reward_model": [told, None]}
    assert accuracy(prompts=["p"] * 2, completions=["18", "20"], **columns) == [1.0, 1.0]


REWARDS_FILE = """
from __future__ import annotations
import dataclasses
from concurrent.futures import ProcessPoolExecutor
from beside_the_rewards import BONUS
print("imported")

@dataclasses.dataclass
class Judged:
    score: float | None = None

def judged(text):
    from beside_the_rewards import later
    return Judged(float("18" in text) + BONUS + later())

def reward(completions):
    with ProcessPoolExecutor(1) as pool:
        return [found.score for found in pool.map(judged, completions)]
"""


def test_a_file_of_functions_is_imported_once_as_a_module_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS_FILE)
    (tmp_path / "beside_the_rewards.py").write_text("BONUS = 1\ndef later(): return 1\n")
    for _ in range(2):
        (reward,) = rewards.load((f"{tmp_path / 'rewards.py'}:reward",))
        assert reward(prompts=["p"] * 2, completions=["18", "20"]) == [3.0, 2.0]
    assert capsys.readouterr().out == "imported\n"


def raises(completions: list[str]) -> list[float]:
    return [float(completion.split()[0] == "The") for completion in completions]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            raises,
            "'mine' raised IndexError: .* \\(1 of the 2 completions are empty\\); expected ",
        ),
        (lambda completions: sys.exit(), "'mine' raised SystemExit: .*; expected one number per completion"),
        (lambda completions: sys.exit(3), "'mine' raised SystemExit: 3"),
        (lambda completions: [1.0], "'mine' returned 1 rewards; expected 2"),
        (lambda completions: None, "'mine' returned None; expected a list of 2 numbers"),
        (lambda completions: 1.0, "'mine' returned 1.0; expected a list of 2 numbers"),
        (lambda completions: torch.tensor(1.0), "'mine' returned 1.0; expected a list of 2 numbers"),
        (
            lambda completions: [1.0, float("nan")],
            "'mine' returned nan for the completion ''; expected a finite number",
        ),
        (lambda completions: [float("-inf"), 1.0], "'mine' returned -inf for the completion 'The answer is 18.'"),
        (lambda completions: ["1", "2"], "'mine' returned '1' for the completion"),
        (lambda completions: torch.ones(2, 1), r"'mine' returned \[1.0\] for the completion"),
        (lambda completions: torch.tensor([1.0, float("nan")]), "'mine' returned nan"),
    ],
)
def test_what_is_no_reward_is_refused(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(TrainingError, match=said) as caught:
        judge(function, TWO)
    assert caught.value.hint


def test_a_tensor_on_another_device_is_moved() -> None:
    class Elsewhere:
        """Stand-in for a tensor on an accelerator: it has ``tolist``, and cannot be iterated over."""

        def tolist(self) -> list[float]:
            return [1.0, 2.0]

    assert judge(lambda completions: Elsewhere(), TWO) == [1.0, 2.0]


def test_functions_are_loaded_from_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n")
    (loaded,) = rewards.load((f"{file}:reward",))
    assert loaded.name == loaded.__name__ == "mine:reward"
    assert loaded(prompts=["p"], completions=["abc"]) == [3.0]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("acuracy",), "there is no reward function 'acuracy'; .*\nhint: did you mean 'accuracy'"),
        (("accuracy", "accuracy"), "names 'accuracy' twice"),
        (("{0}/mine.py:reward", "{0}/../{0.name}/mine.py:reward"), "names 'mine:reward' twice"),
        (("{}/mind.py:reward",), "there is no file '.*mind.py'.*\nhint: did you mean 'mine.py'"),
        (("{}/mine.py:rewrd",), "has no function 'rewrd'; expected one of reward\nhint: did you mean 'reward'"),
        (("{}/mine.py:LIMIT",), "has no function 'LIMIT'"),
        (("{}/broken.py:reward",), "broken.py cannot be imported: ZeroDivisionError"),
        (("mine.py",), "there is no reward function 'mine.py'; .*path.py:function"),
    ],
)
def test_functions_that_are_not_there_are_refused(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    (tmp_path / "mine.py").write_text("LIMIT = 3\ndef reward(completions): return [0.0 for c in completions]\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=said) as caught:
        rewards.load(tuple(name.format(tmp_path) for name in names))
    assert caught.value.hint


def test_functions_of_one_name_in_two_folders_are_named_by_their_paths(tmp_path: Path) -> None:
    names = [str(tmp_path / folder / "mine.py:reward") for folder in ("a", "b")]
    for number, name in enumerate(names):
        Path(name).parent.mkdir()
        Path(name.partition(":")[0]).write_text(f"def reward(completions): return [{number}.0 for c in completions]\n")
    loaded = rewards.load([*names, "accuracy"])
    assert [one.name for one in loaded] == [*names, "accuracy"]
    assert [one(prompts=["p"], completions=["c"]) for one in loaded[:2]] == [[0.0], [1.0]]


def test_rows_without_what_a_function_needs_are_refused() -> None:
    (accuracy,) = rewards.load(("accuracy",))
    accuracy.check_columns(["prompt", "solution"])
    with pytest.raises(DataError, match="'accuracy' needs the right answer.* columns prompt; expected one of answer"):
        accuracy.check_columns(["prompt"])
    with pytest.raises(DataError, match="'accuracy' needs .*, and the rows have no column after the prompt; expected"):
        accuracy.check_columns([])
    mine = rewards.Reward(name="mine", function=lambda completions, awnser, weight=1.0: [])
    with pytest.raises(DataError, match="takes 'awnser'.*\nhint: did you mean 'answer'"):
        mine.check_columns(["prompt", "answer"])
