"""YAML and flags become a config, or an error that names the flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.cli.arguments import read_arguments, set_names


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a test.

    Attributes:
        model: Which model.
        dataset: Which data.
        max_steps: How many steps.
        rate: How fast.
        kind: What kind.
        verify: Whether to verify.
        path: Where.
    """

    unsupported: ClassVar[dict[str, str]] = {
        "deepspeed": "leave it out", "fsdp_strategy": "one process", "critic.path": "no critic"
    }  # fmt: skip
    aliases: ClassVar[dict[str, str]] = {
        "actor.model.path": "path", "data.files": "dataset", "optim.lr": "rate", "tuner_type": "kind"
    }  # fmt: skip
    groups: ClassVar[dict[str, str]] = {"actor": "theirs", "trainer": "theirs"}
    page: ClassVar[str] = "docs/flags.md"
    mappings: ClassVar[tuple[str, ...]] = ("path",)

    model: str
    dataset: tuple[str, ...] = ("default",)
    max_steps: int = -1
    rate: float | None = None
    kind: Literal["full", "lora"] = "full"
    verify: bool = False
    path: str | None = None

    def __post_init__(self) -> None:
        if self.max_steps == 0:
            raise ConfigError("max_steps is 0", expected="something else")


def read(*argv: str) -> Settings | None:
    return read_arguments(Settings, argv, prog="ebbtide test")


def test_hyphen_equals_underscore_and_equals_sign_equals_space() -> None:
    wanted = Settings(model="m", max_steps=5)
    for argv in (("--max-steps", "5"), ("--max_steps", "5"), ("--max-steps=5",), ("--max_steps=5",)):
        assert read("--model", "m", *argv) == wanted


def test_overrides_of_hydra_are_flags_by_their_keys() -> None:
    read_settings = read(
        "--model", "m", "actor.model.path=a b", "data.files=['x','y']", "+optim.lr=1e-3", "optim.lr=1e-3"
    )
    assert read_settings == Settings(model="m", path="a b", dataset=("x", "y"), rate=1e-3)
    assert read("actor.model.path=null", "--model", "m", "critic.path=none") == Settings(model="m")


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (("--model", "rate=1"), {"model"}),
        (("--model", "optim.lr=1"), {"model"}),
        (("--dataset", "a", "optim.lr=1", "--verify", "--path=b"), {"dataset", "verify", "path"}),
        (
            ("--verify", "--max-steps", "2", "optim.lr=1", "critic.path=c"),
            {"verify", "max_steps", "rate", "critic.path"},
        ),
        (("rate=1", "deepspeed=none", "--nothing", "optim.lr=1"), {"deepspeed"}),
    ],
)
def test_a_flags_value_sets_no_other_name(argv: tuple[str, ...], found: set[str]) -> None:
    assert set_names(Settings, argv) == found


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("critic.path=there", "critic.path there is not supported in this release; expected .*\nhint: no critic"),
        (
            "actr.model.path=x",
            r"unknown key 'actr.model.path' \(of the form key=value\); .*\nhint: did you mean 'actor.",
        ),
        ("optim.momentum=1", "unknown key 'optim.momentum' .*\nhint: docs/flags.md lists all names"),
        ("optim.lr=fast", "optim.lr is 'fast'; expected a number"),
        ("actor.model.path=", "actor.model.path is ''; expected a value"),
    ],
)
def test_overrides_that_cannot_be_are_named_by_their_keys(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read("--model", "m", word)
    with pytest.raises(ConfigError, match="optim.lr is set twice: 1, 2"):
        read("--model", "m", "--rate", "1", "optim.lr=2")


@pytest.mark.parametrize(
    ("argv", "found", "hint"),
    [
        (
            ["actor.optim.rates=1"],
            "unknown key 'actor.optim.rates' (of the form key=value)",
            "actor is a section of theirs's keys, and this one is not translated: did you mean --rate? "
            "docs/flags.md lists those that are",
        ),
        (
            ["--actor.depth.paths", "1"],
            "unknown flag 'actor.depth.paths'",
            "actor is a section of theirs's keys, and this one is not translated: did you mean 'actor.model.path', "
            "'critic.path', --path? docs/flags.md lists those that are",
        ),
        (
            ["trainer.zzz=null"],
            "unknown key 'trainer.zzz' (of the form key=value)",
            "trainer is a section of theirs's keys, and this one is not translated; docs/flags.md lists those that are",
        ),
    ],
)
def test_a_key_of_another_program_in_no_table_is_named_with_its_section(argv: list[str], found: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("--model", "m", *argv)
    assert (caught.value.found, caught.value.hint) == (found, hint)


def test_all_keys_of_another_program_in_no_table_are_named_in_one_error(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nactor:\n  model: {path: x, deep: {depth: 3, none: null}}\ntrainer: {max_steps: [1]}\n")
    with pytest.raises(ConfigError) as caught:
        read(str(file), "critic.path=there", "--actor.zzz", "--verify")
    assert str(caught.value).splitlines() == [
        "5 flags are unknown or not supported in this release; expected flags that `ebbtide test --help` shows",
        "hint: for each",
        "  critic.path there: no critic",
        "  --actor.zzz true: theirs's, and not translated",
        f"  actor.model.deep.depth in {file} 3: theirs's, and not translated",
        f"  actor.model.deep.none in {file} None: theirs's, and not translated",
        f"  trainer.max_steps in {file} [1]: theirs's, and not translated: did you mean --max_steps?",
        "  docs/flags.md lists the keys that are translated",
    ]


def test_all_that_is_refused_is_named_in_one_error(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("fsdp_strategy: hybrid\nmodel: m\n")
    with pytest.raises(ConfigError) as caught:
        read(str(tmp_path / "run.yaml"), "--deepspeed", "zero2", "critic.path=there")
    assert str(caught.value).splitlines() == [
        "3 flags are not supported in this release; expected flags that `ebbtide test --help` shows",
        "hint: for each",
        "  --deepspeed zero2: leave it out",
        "  critic.path there: no critic",
        f"  fsdp_strategy in {tmp_path / 'run.yaml'} hybrid: one process",
    ]


def test_a_mapping_in_the_file_is_kept_as_json(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\npath: {a: true, b: [1, x]}\n")
    assert read(str(tmp_path / "run.yaml")) == Settings(model="m", path='{"a": true, "b": [1, "x"]}')
    (tmp_path / "run.yaml").write_text("model: {a: 1}\n")
    with pytest.raises(ConfigError, match="model in .* is {'a': 1}; expected a value"):
        read(str(tmp_path / "run.yaml"))


def test_defaults_stay() -> None:
    assert read("--model", "m") == Settings(model="m")


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (("--verify",), True),
        (("--verify", "true"), True),
        (("--verify", "False"), False),
        (("--verify=false",), False),
        (("--verify", "1"), True),
        (("--verify", "--max_steps", "5"), True),
    ],
)
def test_booleans_take_a_word_or_stand_alone(argv: tuple[str, ...], value: bool) -> None:
    read_settings = read("--model", "m", *argv)
    assert read_settings is not None
    assert read_settings.verify is value


def test_repeated_flags_gather_and_replace_the_default() -> None:
    settings = read("--model", "m", "--dataset", "a", "b", "--dataset", "c#10")
    assert settings is not None
    assert settings.dataset == ("a", "b", "c#10")


def test_negative_numbers_are_values() -> None:
    assert read("--model", "m", "--max_steps", "-1", "--rate", "-0.5") == Settings(model="m", rate=-0.5)


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nmax-steps: 3\nrate: 1e-5\nverify: true\ndataset: [a, b]\npath: null\nkind: lora\n")
    assert read(str(file)) == Settings(model="m", max_steps=3, rate=1e-5, verify=True, dataset=("a", "b"), kind="lora")
    assert read(str(file), "--max-steps", "7", "--dataset", "c", "--verify", "false") == Settings(
        model="m", max_steps=7, rate=1e-5, dataset=("c",), kind="lora"
    )


@pytest.mark.parametrize("text", ["no", "yes", "on", "Off", "true", "1.10", "007", "1_000", "12:30:45", "2024-05-01"])
def test_a_text_in_a_file_is_taken_as_it_was_written(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {text}\ndataset: [{text}, b]\npath: {text}\n")
    assert read(str(file)) == Settings(model=text, dataset=(text, "b"), path=text)
    file.write_text("model: m\nmax_steps: 0x10\nrate: 1_0.5\nverify: on\n")
    assert read(str(file)) == Settings(model="m", max_steps=16, rate=10.5, verify=True)
    file.write_text(f"model: m\nkind: {text}\n")
    with pytest.raises(ConfigError, match=f"kind in .*run.yaml is '{text}'; expected one of full, lora"):
        read(str(file))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read(str(tmp_path / "empty.yaml"), "--model", "m") == Settings(model="m")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--modle", "m"), r"unknown flag 'modle'; expected a flag of `ebbtide test`\nhint: did you mean 'model'"),
        (("--xyzzy", "1"), "unknown flag 'xyzzy'; .*\nhint: docs/flags.md lists all names"),
        (("--tuner-typ", "lora"), r"unknown flag 'tuner-typ'; .*\nhint: did you mean 'tuner_type' \(here 'kind'\)"),
        (("-m", "m"), r"unknown flag '-m'; .*\nhint: flags begin with two hyphens; see"),
        (("-model", "m"), r"unknown flag '-model'; .*\nhint: flags begin with two hyphens: --model"),
        (("\u2014model", "m"), r"unknown flag '.model'; .*\nhint: flags begin with two hyphens"),
        ((), "--model is missing"),
        (("--model",), "--model has no value"),
        (("--model", "m", "--max_steps", "abc"), "--max_steps is 'abc'; expected an integer"),
        (("--model", "m", "--max_steps", "1.5"), "--max_steps is '1.5'; expected an integer"),
        (("--model", "m", "--rate", "fast"), "--rate is 'fast'; expected a number"),
        (("--model", "m", "--kind", "half"), "--kind is 'half'; expected one of full, lora"),
        (("--model", "m", "--verify=maybe"), "--verify is 'maybe'; expected true or false"),
        (("--model", "m", "--verify", "maybe"), "--verify is 'maybe'; expected true or false\nhint: yes and no"),
        (("--model", "m", "--verify", "ture"), "--verify is 'ture'; .*\nhint: did you mean 'true'"),
        (("--model", "m", "--kind", "lroa"), "--kind is 'lroa'; expected one of full, lora\nhint: did you mean 'lora'"),
        (("--model", "m", "--fsdp", "x"), "unknown flag 'fsdp'; .*\nhint: did you mean 'fsdp_strategy'"),
        (("--model", "m", "--path", ""), "--path is ''; expected a value\nhint: leave path out"),
        (("--model", "m", "--dataset", "a", ""), "--dataset is 'a '; expected a value"),
        (("--model", "m", "--rate", "1", "--rate", "2"), "--rate is set twice: 1, 2"),
        (("--model", "m", "--verify", "--verify=no"), "--verify is set twice: True, False"),
        (("--model", "m", "stray"), "'stray'.*\nhint: .*file"),
        (("--model", "m", "kind=lora"), "'kind=lora'.*\nhint: .*--kind=lora"),
        (
            ("--model", "m", "--deepspeed", "zero2"),
            "--deepspeed zero2 is not supported in this release; expected .*\nhint: leave it",
        ),
        (("--model", "m", "--deepspeed"), "--deepspeed true is not supported"),
        (("--model", "m", "--fsdp-strategy", "full_shard"), "--fsdp-strategy full_shard is not supported"),
        (("--model", "m", "--max_steps", "0"), "max_steps is 0; expected something else"),
    ],
)
def test_errors_name_the_flag(argv: tuple[str, ...], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        read(*argv)


def test_a_refused_flag_that_asks_for_nothing_passes() -> None:
    assert read("--model", "m", "--fsdp_strategy", "none", "--deepspeed", "false") == Settings(model="m")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("modle: m\n", ConfigError, "unknown key 'modle' in .*run.yaml; expected .*\nhint: did you mean 'model'"),
        ("model: {a: 1}\n", ConfigError, "model in .*run.yaml is {'a': 1}; expected a value"),
        ("max_steps: [1, 2]\n", ConfigError, "max_steps in .*run.yaml has 2 values"),
        ("deepspeed: zero3\n", ConfigError, "deepspeed in .*run.yaml zero3 is not supported"),
        ("deepspeed: {stage: 3}\n", ConfigError, "deepspeed in .*run.yaml {'stage': 3} is not supported"),
        ("verify: perhaps\n", ConfigError, "verify in .*run.yaml is 'perhaps'; expected true or false"),
        ("- a\n- b\n", ConfigError, "holds a list; expected `key: value` lines"),
        ("model: [unclosed\n", DataError, "cannot be read: line 2: .*; expected a YAML file.*\nhint: "),
        ("model: m\n\tverify: true\n", DataError, r"cannot be read: line 2: found character '\\t'.*\nhint: .*tabs"),
        ("run_name: 2026-02-30\n", DataError, "cannot be read: day is out of range for month; .*\nhint: .*dates"),
        ("model: m\nmodel: n\n", DataError, "line 2: the key 'model' is set a second time"),
        ("model: m\nmax-steps: 1\nmax_steps: 2\n", ConfigError, "max_steps in .*run.yaml.*twice"),
        ("model:\n", ConfigError, "model in .*run.yaml has no value"),
        ("model: ''\n", ConfigError, "model in .*run.yaml is ''; expected a value"),
        ("model: m\nmax_steps: 1.5\n", ConfigError, "max_steps in .*run.yaml is '1.5'; expected an integer"),
        ("model: m\nkind: lroa\n", ConfigError, "kind in .*run.yaml is 'lroa'; .*\nhint: did you mean 'lora'"),
        ("model: m\ndataset: [a, null]\n", ConfigError, r"dataset in .*run.yaml is .*; expected a value, or a list"),
        ("model: m\ndataset: []\n", ConfigError, r"dataset in .*run.yaml is \[\]; expected a value, or a list"),
        ("just words\n", ConfigError, "holds a str; expected `key: value` lines\nhint: such as `model: value`"),
        ("model: m\n---\nmodel: n\n", DataError, "cannot be read: line 2"),
        ("!!python/object:os.system x\n", DataError, "cannot be read: line 1: could not determine a constructor"),
    ],
)
def test_errors_in_the_file_name_the_key_and_the_file(
    tmp_path: Path, text: str, error: type[Exception], said: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(error, match=said):
        read(str(file))


@pytest.mark.parametrize("content", [b"model: \xff\xfe\n", None])
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "run.yaml"
    file.mkdir() if content is None else file.write_bytes(content)
    words = ".utf-8. codec.*tabs" if content else "Is a directory.*a model goes after --model"
    with pytest.raises(DataError, match=f"(?s)run.yaml cannot be read: {words}"):
        read(str(file))


def test_the_same_value_twice_is_no_contradiction() -> None:
    assert read("--model", "m", "--max_steps", "5", "--max-steps=5") == Settings(model="m", max_steps=5)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model: m\n")
    with pytest.raises(DataError, match="did you mean 'train.yaml'"):
        read(str(tmp_path / "trian.yaml"))


def test_help_lists_every_flag_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("--help") is None
    out = capsys.readouterr().out
    assert "usage: ebbtide test" in out
    assert all(f"--{name}" in out for name in ("model", "dataset", "max_steps", "verify"))
    assert "How many steps." in out
    assert "--rate FLOAT" in out and "None" not in out  # the text describes a default of None
    assert "(default: -1)" in " ".join(out.split())
