"""Reward functions: the built-in ones, those of a user's file, and the checks of what they return.

[Note: a reward function]
It is called with lists of one entry per completion, by name: ``prompts``, ``completions``, ``completion_ids`` and every
other column of the rows; only those in its signature, or all if it takes ``**kwargs``. It returns one number per
completion, or ``None`` to abstain. A function that takes ``solution_str`` is called once per completion with
``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info``, as in verl.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbtide.base.errors import ConfigError, DataError, TrainingError, nearest
from ebbtide_recipes.grpo.answers import has_tags, number_in, same_answer
from ebbtide_recipes.skeleton.functions import load_function

ANSWERS = ("answer", "solution", "ground_truth")
"""Columns that may hold the right answer; the first that exists counts."""

HANDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What the trainer hands to every reward function besides the columns of the rows."""

_HINT = "def reward(completions, answer, **kwargs): return [float(a in c) for c, a in zip(completions, answer)]"


def text_of(completion: Any) -> str:
    """Return a completion's text; of a chat, the contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def truth_in(reward_model: Any) -> Any:
    """Return the right answer in a value of verl's column ``reward_model``; ``None``: it has none."""
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def accuracy(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return 1 for a completion with the right answer, else 0; see [Note: where an answer stands] in ``answers.py``.

    Of a list of answers each is right. ``None``, for no judgement, where the row has no answer.
    """
    wanted = _wanted(columns, len(completions))
    return [
        float(any(same_answer(text_of(completion), one) for one in right)) if (right := _right(answer)) else None
        for completion, answer in zip(completions, wanted, strict=True)
    ]


def closeness(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return ``1 / (1 + |difference|)`` of a completion's number and the right one; 0 for a completion without one.

    Of a list of answers the closest counts. ``None``, for no judgement, where the row has no number as its answer.
    """
    rewards: list[float | None] = []
    for completion, answer in zip(completions, _wanted(columns, len(completions)), strict=True):
        answered = number_in(text_of(completion))
        numbers = [number for one in _right(answer) if (number := number_in(one)) is not None]
        close = [0.0 if answered is None else 1 / (1 + abs(answered - number)) for number in numbers]
        rewards.append(max(close, default=None))
    return rewards


def format_(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 for a completion that is ``<think>...</think><answer>...</answer>``, else 0."""
    return [float(has_tags(text_of(completion))) for completion in completions]


BUILTIN: Mapping[str, Callable[..., Sequence[float | None]]] = {
    "accuracy": accuracy,
    "closeness": closeness,
    "format": format_,
}


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function whose results are checked; called as the trainer calls reward functions.

    Attributes:
        name: Its name in the log.
        function: See [Note: a reward function].
    """

    name: str
    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """The name under which the trainer logs it."""
        return self.name

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise if the rows lack a column that the function needs.

        Args:
            columns: Columns of the rows.

        Raises:
            DataError: One is missing.
        """
        listed = f"the columns {', '.join(sorted(columns))}" if columns else "no column after the prompt"
        if self.function in (accuracy, closeness) and not set(ANSWERS) & set(columns):
            raise DataError(
                f"the reward {self.name!r} needs the right answer, and the rows have {listed}",
                expected=f"one of {', '.join(ANSWERS)}",
                hint="rename the column, or choose another of --reward_funcs",
            )
        if _one_by_one(self.function):
            return
        for name, parameter in inspect.signature(self.function).parameters.items():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.default is parameter.empty and name not in (*HANDED, *columns):
                raise DataError(
                    f"the reward function {self.name!r} takes {name!r}, and the rows have {listed}",
                    expected=f"parameters among {', '.join(HANDED[:3])} and the columns",
                    hint=nearest(name, (*HANDED, *columns)) or f"such as {_HINT}",
                )

    def judges(self, rows: Sequence[Mapping[str, Any]], name: str) -> bool:
        """Whether some row has what the function judges by; of functions in files this is not known, and assumed.

        Args:
            rows: The rows.
            name: Their data set, for errors.

        Raises:
            DataError: The right answer of a row cannot be compared with a text.
        """
        if self.function not in (accuracy, closeness):
            return True
        listed = [{column: [value] for column, value in row.items()} for row in rows]
        for number, columns in enumerate(listed, start=1):
            (answer,) = _wanted(columns, 1)
            if any(isinstance(one, Mapping | list) for one in _each_of(answer)):
                raise DataError(
                    f"row {number} of data set {name!r} has the right answer {answer!r:.60}",
                    expected="a text, a number, or a list of them, each of which is right",
                    hint="path.py:function in --reward_funcs judges by any value",
                )
        return any(self.function([""], **columns) != [None] for columns in listed)

    def __call__(self, *, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Judge completions.

        Args:
            prompts: One per completion.
            completions: Texts, or lists of messages.
            columns: Lists with one entry per completion, and further arguments of the trainer.

        Returns:
            One number per completion; ``None``: not judged.

        Raises:
            TrainingError: The function raised, or did not return one number per completion.
        """
        try:
            returned = self._call(prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:
            empty = sum(not text_of(completion).strip() for completion in completions)
            also = f" ({empty} of the {len(completions)} completions are empty)" if empty else ""
            chat = "" if isinstance(completions[0], str) else "a completion of a chat is a list of messages; "
            raise TrainingError(
                f"the reward function {self.name!r} raised {type(error).__name__}: {error}{also}",
                expected="one number per completion, for any text",
                hint=f"{chat}call it by hand with a completion and with an empty one; "
                "return None for a completion that it does not judge",
            ) from error
        values = self._listed(returned, len(completions))
        return [self._number(value, completion) for value, completion in zip(values, completions, strict=True)]

    def _call(self, **handed: Any) -> Any:
        """Call the function with those of ``handed`` that it takes."""
        if _one_by_one(self.function):
            return _each(self.function, handed)
        parameters = inspect.signature(self.function).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            handed = {parameter.name: handed[parameter.name] for parameter in parameters if parameter.name in handed}
        returned = self.function(**handed)
        return asyncio.run(returned) if inspect.iscoroutine(returned) else returned

    def _listed(self, returned: Any, count: int) -> list[Any]:
        """Convert the function's result to a list; tensors may be on any device."""
        if hasattr(returned, "tolist"):  # tensors and arrays
            returned = returned.tolist()
        if not isinstance(returned, list | tuple):
            raise TrainingError(
                f"the reward function {self.name!r} returned {returned!r:.60}",
                expected=f"a list of {count} numbers",
                hint=f"such as {_HINT}",
            )
        if len(returned) != count:
            raise TrainingError(
                f"the reward function {self.name!r} returned {len(returned)} rewards",
                expected=f"{count}, one per completion",
                hint="it is called with all completions of a batch at once; zip(completions, answer) pairs them",
            )
        return list(returned)

    def _number(self, value: Any, completion: Any) -> float | None:
        if hasattr(value, "item") and getattr(value, "size", None) is not None:  # a tensor or an array of one number
            value = value.item() if getattr(value, "ndim", 0) == 0 else value
        if value is None:
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TrainingError(
                f"the reward function {self.name!r} returned {value!r:.60} for the completion "
                f"{text_of(completion)!r:.60}",
                expected="a finite number",
                hint="return 0.0, or None for a completion that it does not judge",
            )
        return float(value)


def load(names: Sequence[str]) -> list[Reward]:
    """Return the named reward functions.

    Args:
        names: Keys of ``BUILTIN``, or ``path.py:function``.

    Raises:
        ConfigError: There is no such function, or one is named twice.
    """
    rewards = [_load(name) for name in names]
    for reward in rewards:
        if rewards.count(reward) > 1:
            hint = "--reward_weights makes one count more"
            raise ConfigError(f"reward_funcs names {reward.name!r} twice", expected="each once", hint=hint)
    called = [reward.name for reward in rewards]  # files of one name in two folders need their paths
    return [
        replace(one, name=name) if called.count(one.name) > 1 else one for one, name in zip(rewards, names, strict=True)
    ]


def _load(name: str) -> Reward:
    place, colon, function = name.rpartition(":")
    if not colon or not place.endswith(".py"):
        if name in BUILTIN:
            return Reward(name=name, function=BUILTIN[name])
        raise ConfigError(
            f"there is no reward function {name!r}",
            expected=f"some of {', '.join(BUILTIN)}, or path.py:function",
            hint=nearest(name, BUILTIN) or "for a function of your own: rewards.py:reward",
        )
    found = load_function(place, [function], what="a reward function", example=_HINT)
    return Reward(name=f"{Path(place).stem}:{function}", function=found)


def _wanted(columns: Mapping[str, Any], count: int) -> list[Any]:
    """Return the right answers: the truths in verl's rows, else the column; ``None`` where a row has none."""
    answers = next((columns[name] for name in ANSWERS if name in columns), [None] * count)
    truths = map(truth_in, columns.get("reward_model") or [None] * count)
    return [answer if truth is None else truth for truth, answer in zip(truths, answers, strict=True)]


def _each_of(answer: Any) -> Sequence[Any]:
    return answer if isinstance(answer, list | tuple) else [answer]


def _right(answer: Any) -> list[str]:
    """Return the texts of a row's right answer, or of each of a list; none where the row has none."""
    return [str(one) for one in _each_of(answer) if one is not None]


def _one_by_one(function: Callable[..., Any]) -> bool:
    """Whether a function judges one completion per call, as verl's do."""
    return "solution_str" in inspect.signature(function).parameters


def _each(function: Callable[..., Any], handed: Mapping[str, Any]) -> list[Any]:
    """Call a function of verl's kind for each completion."""
    count = len(handed["completions"])
    answers = _wanted(handed, count)
    sources, extras = handed.get("data_source", [""] * count), handed.get("extra_info", [None] * count)
    rows = zip(sources, map(text_of, handed["completions"]), answers, extras, strict=True)
    rewards = [
        function(data_source=source, solution_str=text, ground_truth=answer, extra_info=extra)
        for source, text, answer, extra in rows
    ]
    return [reward["score"] if isinstance(reward, dict) else reward for reward in rewards]
