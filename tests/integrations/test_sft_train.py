"""The recipe trains a tiny model, the same way in every mode."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide.base.events import BUS
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.recipe import RECIPE, main
from ebbtide_recipes.skeleton.steps import _duration
from ebbtide_recipes.skeleton.trainer import RecordedTrainer
from tests.integrations.conftest import write_jsonl
from tests.integrations.ranks import sft_config


def train(model: Path, folder: Path, /, **changes: object) -> dict:
    main(sft_config(model, folder, **changes))
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return {"events": events, "summary": json.loads((folder / "summary.json").read_text())}


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return train(tiny_model, tmp_path_factory.mktemp("plain"))


def losses(run: dict) -> list[float]:
    return [event["loss"] for event in run["events"] if event["event"] == "step"]


def test_plain_training_is_reproducible_bit_by_bit(plain: dict, tiny_model: Path, tmp_path: Path) -> None:
    again = train(tiny_model, tmp_path)
    assert len(losses(plain)) == 3
    assert len(set(losses(plain))) == 3
    assert losses(again) == losses(plain)


def test_checkpointing_computes_the_same_losses(plain: dict, tiny_model: Path, tmp_path: Path) -> None:
    checkpointed = train(tiny_model, tmp_path, gradient_checkpointing=True)
    assert losses(checkpointed) == losses(plain)
    assert checkpointed["summary"]["mode"] == "checkpointing"


def test_rows_without_a_token_to_learn_from_are_counted(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "word " * (200 if long else 2), "completion": "yes"} for long in (True, False, False, True)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    train(tiny_model, tmp_path / "run", dataset=(data,), packing=False, max_length=64, max_steps=1)
    log = (tmp_path / "run" / "training.log").read_text()
    assert "2 of 4 rows of" in log and "are left out: no token to learn from is within their first 64 tokens" in log


def test_answers_to_evaluate_on_that_are_all_cut_off_are_an_error(tiny_model: Path, tmp_path: Path) -> None:
    short, long = (
        write_jsonl(tmp_path / name, [{"prompt": "word " * count, "completion": "yes"}])
        for name, count in (("short.jsonl", 2), ("long.jsonl", 200))
    )
    changes = {"dataset": (short,), "eval_dataset": (long,), "packing": False}
    with pytest.raises(DataError, match=r"1 rows of .*long.jsonl to evaluate on leave no token to learn from"):
        train(tiny_model, tmp_path / "run", **changes, max_steps=1)


def test_packed_sequences_without_a_token_to_learn_from_are_left_out(tiny_model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "word " * 200, "completion": "yes"}] * 3)
    run = train(tiny_model, tmp_path / "run", dataset=(data,), max_length=32, max_steps=1)
    assert losses(run)[0] > 0
    assert "packed sequences of" in (tmp_path / "run" / "training.log").read_text()


def with_template(model: Path, folder: Path, template: str) -> Path:
    """Copy a model with another chat template, before its own."""
    shutil.copytree(model, folder)
    file = folder / "chat_template.jinja"
    file.write_text(template + file.read_text())
    return folder


def test_a_chat_that_the_template_refuses_is_an_error_that_names_it(tiny_model: Path, tmp_path: Path) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system message') }}{% endif %}"
    model = with_template(tiny_model, tmp_path / "model", refusing)
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    rows = [{"messages": chat}, {"messages": [{"role": "system", "content": "Be brief."}, *chat]}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="chat template refuses row 2: No system message.*\nhint: "):
        train(model, tmp_path / "run", dataset=(data,), packing=False, max_steps=1)


def test_tools_and_their_calls_reach_the_template(tiny_model: Path, tmp_path: Path) -> None:
    """Rendering is in the trainer's own code, so the template itself checks the values and raises if they differ."""
    call = {"type": "function", "function": {"name": "light", "arguments": {"on": True}}}
    seen = (
        "{% if tools and tools[0]['function']['name'] == 'light' and not messages[0].tool_calls is defined "
        "and messages[1].tool_calls[0]['function']['arguments'] == {'on': True} %}"
        "{{ raise_exception('as they were') }}{% endif %}"
    )
    model = with_template(tiny_model, tmp_path / "model", seen)
    row = {
        "messages": [
            {"role": "user", "content": "Light!"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "light", "parameters": {}}}],
    }
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match="as they were"):
        train(model, tmp_path / "run", dataset=(data,), packing=False, max_steps=1)


@pytest.mark.parametrize("apart", [False, True])
def test_a_chat_without_tools_has_none_where_others_have(tiny_model: Path, tmp_path: Path, apart: bool) -> None:
    described = "{% if tools is not none and not tools %}{{ raise_exception('an empty list') }}{% endif %}"
    model = with_template(tiny_model, tmp_path / "model", described)
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    tool = {"type": "function", "function": {"name": "light", "parameters": {}}}
    rows = [{"messages": chat, "tools": [tool]}, {"messages": chat}, {"messages": chat, "tools": []}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    values = {"packing": False, "max_steps": 1, "completion_only_loss": apart or None}
    assert losses(train(model, tmp_path / "run", dataset=(data,), **values))[0] > 0


@pytest.mark.parametrize("knows", [False, True])
def test_thoughts_that_a_template_leaves_out_are_a_warning(tiny_model: Path, tmp_path: Path, knows: bool) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}" if knows else ""
    model = with_template(tiny_model, tmp_path / "model", template)
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "42", "reasoning_content": "Hm."}]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": chat}])
    for apart in (False, True):
        values = {"dataset": (data,), "packing": False, "max_steps": 1, "completion_only_loss": apart or None}
        train(model, tmp_path / str(apart), **values)
        log = (tmp_path / str(apart) / "training.log").read_text()
        assert ("the chat template leaves reasoning_content of messages out" in log) is not knows


def learned(model: Path, folder: Path, /, **changes: object) -> str:
    """Return the text that is learned of the first row."""
    trainer = RECIPE.prepare(SftConfig(model=str(model), max_length=64, output_dir=str(folder), **changes))
    row = trainer.train_dataset[0]
    tokens = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    return trainer.processing_class.decode(tokens)


MARKED = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}
    {%- generation -%}{{ m.content }}<|end|>{%- endgeneration -%}
{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"""


@pytest.mark.parametrize("packing", [False, True])
def test_of_chats_only_what_the_assistant_answers_is_learned(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(MARKED)
    chat = [{"role": role, "content": f"{role} {n}"} for n in (1, 2) for role in ("user", "assistant")]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": chat}] * 8)
    text = learned(model, tmp_path / "run", dataset=(data,), assistant_only_loss=True, packing=packing)
    assert text.startswith("assistant 1<|end|>assistant 2<|end|>") and "user" not in text


def test_answers_in_the_prompt_of_a_chat_are_learned_too(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(MARKED)
    data = write_jsonl(tmp_path / "rows.jsonl", [{"query": "b?", "response": "b!", "history": [["a?", "a!"]]}] * 2)
    text = learned(model, tmp_path / "run", dataset=(data,), assistant_only_loss=True)
    assert text == "a!<|end|>b!<|end|>"


@pytest.mark.parametrize(
    ("row", "error", "said"),
    [
        ({"messages": [{"role": "assistant", "content": "4"}]}, DataError, "messages are not found: .*hat template"),
        ({"text": "four"}, ConfigError, "rows.jsonl has plain text; expected chats"),
    ],
)
def test_answers_that_cannot_be_found_are_an_error(
    tiny_model: Path, tmp_path: Path, row: dict, error: type[Exception], said: str
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(error, match=f"(?s)assistant_only_loss is true, and .*{said}.*\nhint: "):
        train(tiny_model, tmp_path / "run", dataset=(data,), packing=False, assistant_only_loss=True)


def test_a_template_that_joins_arguments_to_text_gets_them_as_json_in_a_text(tiny_model: Path, tmp_path: Path) -> None:
    joined = (
        "{% if messages[1].tool_calls is defined and "
        "'f(' + messages[1].tool_calls[0]['function']['arguments'] + ')' != 'f({\"on\": true})' %}"
        "{{ raise_exception('as it was not') }}{% endif %}"
    )
    model = with_template(tiny_model, tmp_path / "model", joined)
    question = {"role": "user", "content": "Light!"}
    for arguments in ('{"on": true}', {"on": True}, 5):
        call = {"type": "function", "function": {"name": "light", "arguments": arguments}}
        answers = [{"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        data = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [question, answer]} for answer in answers])
        values = {"dataset": (data,), "packing": False, "max_length": 128, "max_steps": 1}
        if arguments == 5:
            with pytest.raises(DataError, match="chat template refuses row 2: .*concatenate"):
                train(model, tmp_path / "refused", **values)
        else:
            assert losses(train(model, tmp_path / str(type(arguments)), **values))[0] > 0


@pytest.mark.parametrize("evaluated", [False, True])
def test_rows_that_may_not_be_cut_are_counted_and_refused(tiny_model: Path, tmp_path: Path, evaluated: bool) -> None:
    rows = [{"prompt": "ab", "completion": "c" * length} for length in (2, 4, 60, 70)]
    short = write_jsonl(tmp_path / "short.jsonl", rows[:1])
    long = write_jsonl(tmp_path / "long.jsonl", [*rows[1:], {"prompt": "a" * 80, "completion": "c"}])
    values = {"packing": False, "truncation": "error", "dataset": (short,), "max_steps": 1}
    changes = {"eval_dataset": (long,)} if evaluated else {"dataset": (long,)}
    with pytest.raises(
        DataError, match=f"3 of 4 rows of {long} have more than 32 tokens, the longest 82, and"
    ) as caught:
        train(tiny_model, tmp_path / "out", **{**values, **changes, "max_length": 32})
    assert "--max_length 82" in caught.value.hint
    assert len(losses(train(tiny_model, tmp_path / "whole", **{**values, **changes, "max_length": 82}))) == 1
    train(tiny_model, tmp_path / "cut", **{**values, **changes, "max_length": 32, "truncation": "right"})
    # The prompt of the fourth fills the length: nothing of it is learned.
    assert f"2 of 3 rows of {long} fill max_length, 32 tokens: " in (tmp_path / "cut" / "training.log").read_text()
    assert "fill max_length" not in (tmp_path / "whole" / "training.log").read_text()


def test_checkpointed_lora_computes_the_same_losses(tiny_model: Path, tmp_path: Path) -> None:
    runs = [
        train(tiny_model, tmp_path / str(on), train_type="lora", lora_rank=2, gradient_checkpointing=on)
        for on in (False, True)
    ]
    assert losses(runs[0]) == losses(runs[1])


def test_a_run_that_fails_says_so(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.base.errors import DiskFullError
    from ebbtide_recipes.sft.trainer import SftTrainer

    real = SftTrainer.training_step

    def second_fails(self: SftTrainer, *args: object, **kwargs: object) -> object:
        if self.state.global_step == 1:
            raise DiskFullError("the disk is full")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(SftTrainer, "training_step", second_fails)
    with pytest.raises(DiskFullError):
        train(tiny_model, tmp_path, save=True)
    end = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["status"], end["error"]) == ("run_end", "error", "DiskFullError: the disk is full")
    assert not (tmp_path / "model.safetensors").exists()


def test_checkpointing_really_checkpoints(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.checkpoint
    from transformers import modeling_layers

    calls: list[bool] = []
    real = torch.utils.checkpoint.checkpoint

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(bool(kwargs.get("use_reentrant")))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counted)
    for module in (modeling_layers, __import__("transformers").modeling_utils):
        if hasattr(module, "checkpoint"):
            monkeypatch.setattr(module, "checkpoint", counted)
    train(tiny_model, tmp_path / "plain", max_steps=1)
    assert calls == []
    train(tiny_model, tmp_path / "on", max_steps=1, gradient_checkpointing=True)
    assert calls == [False, False]  # two layers, non-reentrant


def test_a_run_folder_is_complete(plain: dict) -> None:
    summary, events = plain["summary"], plain["events"]
    assert (summary["mode"], summary["status"], summary["steps"]) == ("plain", "ok", 3)
    assert summary["loss"] == losses(plain)
    steps = [event for event in events if event["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["tokens"] == 64 for step in steps)  # packed: every sequence is full
    assert all(step["seconds"] > 0 and 0 <= step["token_accuracy"] <= 1 for step in steps)
    assert steps[0]["learning_rate"] == 1e-2
    assert steps[1]["learning_rate"] < 1e-2
    phases = [(event["name"], event["edge"], event["step"]) for event in events if event["event"] == "phase"]
    one = [(name, edge) for name in ("forward", "backward", "optimizer") for edge in ("begin", "end")]
    loading = [("load", "begin", 0), ("load", "end", 0)]
    assert phases == [*loading, *((*phase, step) for step in (1, 2, 3) for phase in one)]


def test_the_log_file_carries_the_documented_figures(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tiny_model, tmp_path, max_steps=2)
    lines = [line for line in (tmp_path / "training.log").read_text().splitlines() if " step " in line]
    assert len(lines) == 2
    figures = json.loads(lines[-1][lines[-1].index("{") :])
    assert set(figures) == {
        "loss",
        "token_acc",
        "memory(GiB)",
        "train_speed(s/it)",
        "memory_saved(GiB)",
        "stall(s)",
        "learning_rate",
        "grad_norm",
        "epoch",
        "percentage",
        "elapsed_time",
        "remaining_time",
    }
    assert figures["grad_norm"] > 0 and 0 < figures["epoch"] <= 1
    assert (figures["percentage"], figures["remaining_time"]) == ("100.00%", "0s")
    first = json.loads(lines[0][lines[0].index("{") :])
    assert first["percentage"] == "50.00%" and first["epoch"] < figures["epoch"]
    assert figures["loss"] == pytest.approx(losses(run)[-1], rel=1e-5)
    assert figures["memory_saved(GiB)"] is None  # no saving was requested, so nothing is known


def test_the_load_of_the_weights_is_in_the_record_and_drawn(tiny_model: Path, tmp_path: Path) -> None:
    from ebbtide.report import load_run, page

    run = train(tiny_model, tmp_path, max_steps=1, memory_efficient_init=True, activation_cpu_offload=True)
    edges = [event["edge"] for event in run["events"] if event["event"] == "load"]
    assert edges[0] == "begin" and edges[-1] == "end"
    loaded = load_run(tmp_path)
    (span,) = loaded.loads()
    assert any(span.begin <= e["t"] <= span.end for e in loaded.all("memory"))
    assert "Memory while weights are loaded" in page([loaded])


def test_a_time_is_written_as_people_say_it() -> None:
    assert [_duration(s) for s in (0, 59.6, 61, 3600, 7384)] == ["0s", "1m 0s", "1m 1s", "1h 0m 0s", "2h 3m 4s"]


def test_accumulated_micro_batches_are_one_step(tiny_model: Path, tmp_path: Path) -> None:
    two = train(tiny_model, tmp_path / "two", max_steps=1, gradient_accumulation_steps=2)
    one = train(tiny_model, tmp_path / "one", max_steps=1, per_device_train_batch_size=2)
    assert losses(two)[0] == pytest.approx(losses(one)[0], rel=1e-5)
    steps = [[event for event in run["events"] if event["event"] == "step"] for run in (one, two)]
    assert [step[0]["tokens"] for step in steps] == [128, 128]


def test_lora_trains_and_saves_adapters_alone(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    run = train(tiny_model, tmp_path, train_type="lora", lora_rank=2, target_modules=("q_proj", "v_proj"), save=True)
    assert losses(run)[0] != losses(run)[2]
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
        assert all("lora_" in name for name in names)
        assert len(names) == 2 * 2 * 2  # two layers, two modules, A and B
        assert any(file.get_tensor(name).abs().sum() > 0 for name in names if "lora_B" in name)
    assert not (tmp_path / "model.safetensors").exists()


def test_the_saved_model_is_the_trained_one(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(tiny_model, tmp_path, save=True)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_model, tmp_path))
    changed = [not a.equal(b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)
    # Some versions of transformers adopt the tokenizer's.
    known, saved = (model.config.to_diff_dict() | {"bos_token_id": None} for model in (before, after))
    assert before.config.use_cache and saved == known
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


@pytest.mark.parametrize("published", [{"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.0}], ids=["vicuna", "0"])
def test_settings_of_generation_are_saved_as_they_were_published(
    published: dict[str, float], tiny_model: Path, tmp_path: Path
) -> None:
    """Transformers reads them with a warning and refuses to save them, because trainers add the tokenizer's."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text(json.dumps({**published, "eos_token_id": 2}))
    train(model, tmp_path / "run", save=True, max_steps=1)
    saved = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert {name: saved[name] for name in published} == published and not saved.get("do_sample")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_loss_is_on_the_completion_alone(tiny_model: Path, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "x" * 30, "completion": " It returns"}])
    assert learned(tiny_model, tmp_path / "out", dataset=(rows,)) == " It returns<|end|>"


def test_only_completions_are_evaluated_if_chats_are_trained_on(tiny_model: Path, tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "What does it?"}, {"role": "assistant", "content": "It returns."}
    rows = {"chats": {"messages": [question, answer]}, "pairs": {"query": "What does it?", "response": "It returns."}}
    for name, row in rows.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [row])
    counts: dict[str, list[int]] = {}
    for trained, evaluated in (("chats", "pairs"), ("pairs", "chats")):
        names = {"dataset": (f"{tmp_path}/{trained}.jsonl",), "eval_dataset": (f"{tmp_path}/{evaluated}.jsonl",)}
        made = RECIPE.prepare(
            SftConfig(model=str(tiny_model), **names, max_length=64, output_dir=str(tmp_path / "out"))
        )
        for name, part in ((trained, made.train_dataset), (evaluated, made.eval_dataset)):
            counts.setdefault(name, []).append(sum(label != -100 for label in part[0]["labels"]))
    assert counts["chats"][0] == counts["chats"][1] > counts["pairs"][0] == counts["pairs"][1]


def test_nothing_is_left_behind(tiny_model: Path, tmp_path: Path) -> None:
    logger = logging.getLogger("ebbtide")
    before = (list(logger.handlers), logger.level)
    train(tiny_model, tmp_path, max_steps=1)
    assert (list(logger.handlers), logger.level) == before
    assert not BUS.active


def test_an_earlier_run_is_not_overwritten_unasked(tiny_model: Path, tmp_path: Path) -> None:
    train(tiny_model, tmp_path, max_steps=1)
    record = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(DataError, match="holds an earlier run"):
        train(tiny_model, tmp_path, max_steps=2)
    assert (tmp_path / "run.jsonl").read_bytes() == record
    assert train(tiny_model, tmp_path, max_steps=2, overwrite_output_dir=True)["summary"]["steps"] == 2


KINDS: dict[str, dict] = {"full": {}, "lora": {"train_type": "lora", "lora_rank": 2}}


@pytest.mark.parametrize(("first", "second"), [("lora", "full"), ("full", "lora")])
def test_the_model_of_an_overwritten_run_is_no_part_of_the_new_one(
    tiny_model: Path, tmp_path: Path, first: str, second: str
) -> None:
    from transformers import AutoModelForCausalLM

    once: dict = {"max_steps": 1, "save": True}
    train(tiny_model, tmp_path / "alone", **once, **KINDS[second])
    train(tiny_model, tmp_path / "both", **once, **KINDS[first], save_steps=1)
    train(tiny_model, tmp_path / "both", **once, **KINDS[second], save_steps=1, overwrite_output_dir=True)
    alone, both = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("alone", "both"))
    assert alone.keys() == both.keys() and all(alone[name].equal(both[name]) for name in alone)
    weights = [sorted(path.name for path in (tmp_path / name).glob("*model*")) for name in ("alone", "both")]
    assert weights[0] == weights[1]
    assert (tmp_path / "both" / "checkpoint-1" / "ebbtide.json").is_file()


def test_the_model_of_an_overwritten_run_stays_until_the_new_one_is_saved(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("in a step")

    train(tiny_model, tmp_path, max_steps=1, save=True, **KINDS["lora"])
    before = {path: path.read_bytes() for path in tmp_path.glob("adapter_*")}
    overwrites: dict = {"save": True, "save_steps": 1, "overwrite_output_dir": True}
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="in a step"):
        patched.setattr(RecordedTrainer, "training_step", fails)
        train(tiny_model, tmp_path, **overwrites)
    train(tiny_model, tmp_path, max_steps=1, **{**overwrites, "save": False})
    assert len(before) == 2 and {path: path.read_bytes() for path in before} == before
    resumes: dict = {"max_steps": 2, "resume_from_checkpoint": "latest"}
    with pytest.raises(DataError, match=r"holds adapter_model.safetensors, and this run saves all weights"):
        train(tiny_model, tmp_path, **resumes, save=True)
    train(tiny_model, tmp_path, **resumes, **overwrites)
    assert not any(path.exists() for path in before) and (tmp_path / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"max_length": 129}, ConfigError, "at most 128"),
        ({"train_type": "lora", "target_modules": ("q_porj",)}, ConfigError, "q_proj"),
        ({"train_type": "lora", "target_modules": ("q_proj", "lm_head")}, ConfigError, "embeddings, lm_head, would"),
        ({"report_to": ("wandbb",)}, ConfigError, "did you mean 'wandb'"),
        ({"report_to": ("wandb",)}, ConfigError, "a tracker that is installed"),
        ({"model": "builtin:smollm"}, DataError, "builtin:smollm2"),
        ({"model": "./nowhere"}, DataError, "no model folder"),
    ],
)
def test_bad_input_is_refused_before_training(
    tiny_model: Path, tmp_path: Path, changes: dict, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        train(tiny_model, tmp_path, **changes)
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "packing", "said"),
    [
        ({"text": "too short"}, True, "fill no sequence of 64 tokens; expected more text"),
        ({"prompt": "x" * 99, "completion": "never seen"}, False, "leave no token to learn from"),
    ],
)
def test_data_that_cannot_teach_is_refused(
    tiny_model: Path, tmp_path: Path, row: dict, packing: bool, said: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=said):
        train(tiny_model, tmp_path / "out", dataset=(str(tmp_path / "rows.jsonl"),), packing=packing)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"cannot be loaded[\s\S]*config.json"):
        train(tmp_path / "empty", tmp_path / "out")
