"""Example commands of ms-swift, verl and FastVideo, as in ``example_commands.md``.

Only the program's name is changed. The table of refused arguments in docs/guides/from-ms-swift-and-verl.md matches the
command line's answers.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError
from ebbtide.cli.recipe import read
from tests.integrations.commands import LIMIT_SECONDS, ROOT, Forks, replaced, surroundings
from tests.integrations.conftest import make_tiny_model

PAGE = (ROOT / "docs/guides/from-ms-swift-and-verl.md").read_text()
SECTION = PAGE.split("## Their example commands")[1].split("\n## ")[0]
COMMANDS = Path(__file__).with_name("example_commands.md").read_text()
PROGRAMS = {
    "swift sft": "sft",
    "python3 -m verl.trainer.main_ppo": "grpo",
    "fastvideo/training/wan_training_pipeline.py": "video",
}
TABLE: list[tuple[int, str, str]] = [
    (int(number), flag, hint) for number, flag, hint in re.findall(r"^\| (\d+) \| `(.*?)` \| (.*) \|$", SECTION, re.M)
]


def example(number: int) -> tuple[str, list[str]]:
    """Return an example's verb, and the words after its program."""
    line = re.findall(r"```\n(.*?)\n```", COMMANDS, re.DOTALL)[number - 1]
    program = next(name for name in PROGRAMS if line.startswith(name))
    return PROGRAMS[program], shlex.split(line.removeprefix(program))


def refused(number: int) -> list[str]:
    """Return the words of an example that are refused according to the page."""
    return [flag for its, flag, _ in TABLE if its == number]


def kept(number: int) -> list[str]:
    """Return an example's words without the refused ones."""
    _, words = example(number)
    for flag in refused(number):
        name, value = flag.rsplit(maxsplit=1)
        at = next(i for i, word in enumerate(words) if word == name or word.partition("=")[0] == name)
        both = at + 1 < len(words) and words[at] == name and words[at + 1] == value
        del words[at : at + 1 + both]
    return words


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_example_is_read_or_refused_by_name(number: int) -> None:
    verb, words = example(number)
    told: list[tuple[int, str, str]] = []
    try:
        read(verb, words)
    except ConfigError as error:
        one = f"{error.found.removesuffix(' is not supported in this release')}: {error.hint}"
        lines = error.hint.splitlines()[1:] or [one]
        told = [(number, *line.strip().split(": ", 1)) for line in lines]  # type: ignore[misc]
    assert told == [row for row in TABLE if row[0] == number]
    assert {1: len(told) == 0, 2: len(told) == 1, 3: len(told) > 5}[number]
    config = read(verb, kept(number))
    assert config is not None and (number == 1 or config.mode == "ebbtide")  # of 1 the FSDP file says so


SMALL = {
    1: {"--dataset": "builtin:pydoc#60", "--max_length": "256", "--gradient_accumulation_steps": "2"},
    2: {
        "max_prompt_length": "64", "max_response_length": "16", "n_gpus_per_node": "1", "name": "hf",
        "logger": "console", "tensor_model_parallel_size": "1",
        "train_batch_size": "4", "ppo_mini_batch_size": "2", "save_freq": "1",
        "log_prob_micro_batch_size_per_gpu": "5",
    },
    3: {
        "--num_gpus": "1", "--hsdp_shard_dim": "1", "--num_height": "32", "--num_width": "32", "--num_frames": "5",
        "--max_train_steps": "2", "--gradient_accumulation_steps": "1", "--data_path": "builtin:moving-shapes#2",
        "--validation_sampling_steps": "2",
    },
}  # fmt: skip

ROLLOUT = ("generation", "begin")


def questions(folder: Path) -> dict[str, str]:
    """Write prompts in verl's form; return the values that name them."""
    from datasets import Dataset

    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + 1 ="}], "reward_model": {"ground_truth": f"{n + 1}"}}
        for n in range(16)
    ]
    values = {"train_files": folder / "train.parquet", "val_files": folder / "test.parquet"}
    for place in values.values():
        Dataset.from_list(rows).to_parquet(place)
    return {key: str(place) for key, place in values.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_example_trains(number: int, tmp_path: Path) -> None:
    verb, _ = example(number)
    out = tmp_path / "out"
    model = "builtin:tiny-wan" if number == 3 else str(make_tiny_model(tmp_path, positions=256))
    values = {**SMALL[number], "--output_dir": str(out)}
    values |= {"--model": model, "--model_path": model, "--pretrained_model_name_or_path": model}
    if number == 2:
        values |= {"path": model, "ppo_micro_batch_size_per_gpu": "5", **questions(tmp_path)}
    words = replaced(kept(number), values)
    words = [_override(word, values) for word in words]
    words += {1: ["--max_steps", "2", "--packing", "true"], 2: ["--max_steps", "2", "--output_dir", str(out)]}.get(
        number, ["--samples", "0", "--min_bytes", "0"]
    )
    if number == 1:
        with Forks() as forks:
            forks.sft(words, 2)
    else:
        result = subprocess.run(
            [sys.executable, "-m", "ebbtide", verb, *words],
            cwd=ROOT, env=surroundings(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["mode"], summary["status"], summary["steps"]) == ("ebbtide", "ok", 2)
    assert summary["activation_bytes"]["offloaded"] > 0
    if number == 2:
        # One rollout of 4 prompts x 5 is used in two updates of 2 prompts, followed by one checkpoint.
        events = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
        rollouts = [e["step"] for e in events if e["event"] == "phase" and (e["name"], e["edge"]) == ROLLOUT]
        assert rollouts == [1]
        assert [folder.name for folder in out.glob("checkpoint-*")] == ["checkpoint-2"]


def _override(word: str, values: dict[str, str]) -> str:
    """Return one ``key=value`` with a small value."""
    key, equals, _ = word.partition("=")
    name = key.rpartition(".")[2]
    return f"{key}={values[name]}" if equals and "." in key and name in values else word


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_verls_example_for_fine_tuning_trains(tmp_path: Path) -> None:
    """``examples/sft/gsm8k/run_qwen_05_peft.sh``: columns inside a column, batches of all processes, adapters."""
    from datasets import Dataset

    rows = [{"data_source": "gsm8k", "extra_info": {"question": f"{n} + 1 =", "answer": f"{n + 1}"}} for n in range(16)]
    for name in ("train", "test"):
        Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    words = shlex.split(
        f"data.train_files={tmp_path}/train.parquet data.val_files={tmp_path}/test.parquet data.prompt_key=extra_info "
        "data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=[question] +data.response_dict_keys=[answer] "
        "data.micro_batch_size_per_gpu=2 data.train_batch_size=8 data.max_length=256 "
        f"model.partial_pretrain={make_tiny_model(tmp_path, positions=256)} model.enable_activation_offload=True "
        f"trainer.default_local_dir={tmp_path}/out trainer.project_name=gsm8k-sft trainer.experiment_name=qwen "
        "trainer.logger=[console] trainer.total_epochs=1 trainer.default_hdfs_dir=null trainer.n_gpus_per_node=1 "
        "trainer.save_freq=-1 model.lora_rank=4 model.lora_alpha=16 model.target_modules=all-linear"
    )
    result = subprocess.run(
        [sys.executable, "-m", "ebbtide", "sft", *words],
        cwd=ROOT, env=surroundings(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["mode"], summary["status"], summary["steps"]) == ("ebbtide", "ok", 2)  # 16 rows, 8 a step
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert (tmp_path / "out" / "adapter_config.json").is_file()
