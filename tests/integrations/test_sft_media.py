"""The recipe on rows with videos and sounds: real files, random models, their own processors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.sft import decode
from ebbtide_recipes.sft.collator import MediaCollator
from ebbtide_recipes.sft.config import SftConfig
from tests.integrations.conftest import make_tiny_model
from tests.integrations.families import (
    Films,
    make_films,
    make_llava,
    make_pictures,
    make_qwen_audio,
    make_qwen_vl,
    make_sounds,
    write_rows,
)
from tests.integrations.test_sft_families import both, train

pytest.importorskip("av", reason="needs the extra media")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


@pytest.fixture(scope="module")
def hearing(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_audio(tmp_path_factory.mktemp("qwen-audio"), text_model)


@pytest.fixture
def seeing(text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Path]:
    """Make a Qwen2-VL with a part for videos, whose processor transformers can load."""
    import transformers

    def make(films: Any) -> Path:
        model, processor = make_qwen_vl(tmp_path / "qwen", text_model, films)
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *args, **kwargs: processor)
        return model

    return make


def test_videos_are_trained_on(seeing: Callable[[Any], Path], tmp_path: Path) -> None:
    rows = make_films(tmp_path / "films")
    changes = {"dataset": (str(rows),), "per_device_train_batch_size": 4, "max_steps": 2, "freeze_vit": False}
    ours = both(seeing(Films()), tmp_path, **changes)
    for number in range(4):  # other videos, other losses
        (rows.parent / f"{number}.mp4").unlink()
    make_films(rows.parent, frames=16)
    other = train(tmp_path / "qwen", tmp_path / "other", **changes)
    assert other["losses"][1] != ours["losses"][1]


def test_transformers_own_part_for_videos_is_used(seeing: Callable[[Any], Path], tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="transformers' video processors need torchvision")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    films = Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=56 * 56 * 8, max_frames=8, fps=2, min_frames=2)
    rows = make_films(tmp_path / "films")
    both(seeing(films), tmp_path, dataset=(str(rows),), per_device_train_batch_size=4, max_steps=2)


def test_sounds_are_trained_on(hearing: Path, tmp_path: Path) -> None:
    rows = make_sounds(tmp_path / "sounds")
    changes = {"dataset": (str(rows),), "per_device_train_batch_size": 4, "max_steps": 2, "freeze_vit": False}
    ours = both(hearing, tmp_path, **changes)
    make_sounds(rows.parent, seconds=0.25)
    assert train(hearing, tmp_path / "other", **changes)["losses"][1] != ours["losses"][1]


def test_a_frozen_audio_part_stays_and_adapters_keep_out_of_it(hearing: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    rows = str(make_sounds(tmp_path / "sounds", count=2))
    train(hearing, tmp_path / "full", dataset=(rows,), max_steps=1, save=True)
    before, after = (load_file(place / "model.safetensors") for place in (hearing, tmp_path / "full"))
    assert {name for name in before if before[name].equal(after[name])} == {n for n in before if "audio_tower" in n}
    train(hearing, tmp_path / "lora", dataset=(rows,), max_steps=1, save=True, train_type="lora")
    with safe_open(tmp_path / "lora" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert names and not any("audio_tower" in name for name in names)


@pytest.mark.parametrize(("kind", "other"), [("videos", "sounds"), ("audios", "films")])
def test_files_that_the_processor_does_not_take_are_refused_before_the_weights_are_loaded(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, other: str
) -> None:
    from ebbtide_recipes.language import models

    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the weights were loaded"))
    rows = make_films(tmp_path / "films", 1) if kind == "videos" else make_sounds(tmp_path / "sounds", 1)
    for model, takes in ((text_model, "text alone"), (make_llava(tmp_path / "llava", text_model), "images and text")):
        with pytest.raises(DataError, match=f"rows.jsonl' has {kind}, and the model takes {takes}"):
            train(model, tmp_path / "out", dataset=(str(rows),))


@pytest.mark.parametrize(
    ("frames", "rate", "changes", "said"),
    [
        (1, 24, {}, "does not take row 1 of .*: cannot sample 2 frames a second of 1 frames"),
        (
            80,
            8,
            {"max_length": 32},
            r'(?s)row 1 of .* has .* tokens with its files; expected at most 32, the max_length.*hint: .*"fps": 2 ',
        ),
        (80, 8, {"max_length": 32, "truncation": "error"}, "row 1 of .* has .* tokens, and truncation is 'error'"),
        (8, 8, {"packing": True}, "packing is true, and the rows have images, videos or sounds"),
    ],
)
def test_videos_that_no_batch_can_be_made_of_are_refused_before_the_weights_are_loaded(
    seeing: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    frames: int, rate: int, changes: dict, said: str,
) -> None:  # fmt: skip
    from ebbtide_recipes.language import models

    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the weights were loaded"))
    rows = make_films(tmp_path / "films", 1, frames=frames, rate=rate)
    with pytest.raises((DataError, ConfigError), match=said):
        train(seeing(Films()), tmp_path / "out", dataset=(str(rows),), **changes)


def test_rows_with_images_that_are_too_long_are_refused_before_the_weights_are_loaded(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoProcessor

    from ebbtide_recipes.language import models
    from ebbtide_recipes.sft import data

    model, rows = make_llava(tmp_path / "llava", text_model), make_pictures(tmp_path / "pictures")
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[4]["messages"][0]["content"] = "word " * 30 + "<image>"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with monkeypatch.context() as patched:
        patched.setattr(models, "load", lambda *args: pytest.fail("the weights were loaded"))
        for names in ({"dataset": (str(rows),)}, {"dataset": (f"{rows}#4",), "eval_dataset": (str(rows),)}):
            with pytest.raises(DataError, match="row 5 of .* has .* tokens with its files"):
                train(model, tmp_path / "out", max_length=64, packing=False, **names)
    processor = AutoProcessor.from_pretrained(model)
    table = data.load_both(SftConfig(dataset=(f"{rows}#4",)), chat=True, takes=("image",))[0]
    collator = MediaCollator(processor=processor, max_length=64, completion_only=False)
    asked: list[Any] = []
    monkeypatch.setattr(  # a processor that claims too much is not trusted
        type(processor), "_get_num_multimodal_tokens",
        lambda self, image_sizes: asked.append(image_sizes) or SimpleNamespace(num_image_tokens=[100]),
    )  # fmt: skip
    collator.check(table)
    assert asked == [[(30, 40)]] * 3


@pytest.mark.parametrize("row", [{"audios": ["0.wav"]}, {"audios": ["bad.wav"]}, {"audios": ["0.mp4"]}])
def test_files_that_cannot_be_read_are_named(hearing: Path, tmp_path: Path, row: dict) -> None:
    make_films(tmp_path, 1)
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    name = row["audios"][0]
    said = {"0.wav": "names the audio '0.wav', which does not exist", "bad.wav": "bad.wav cannot be read as audio: "}
    with pytest.raises(DataError, match=said.get(name, "0.mp4 holds no audio; expected a file with audio")):
        train(hearing, tmp_path / "out", dataset=(str(write_rows(tmp_path, [row])),))


def test_sounds_are_brought_to_the_rate_of_the_processor(tmp_path: Path) -> None:
    make_sounds(tmp_path, 1, rate=8_000, seconds=0.5)
    samples = decode.sound(str(tmp_path / "0.wav"), 16_000)
    assert abs(len(samples) - 8_000) <= 32 and samples.dtype.name == "float32"
    assert 0.2 < abs(samples).max() < 0.35  # 9000 of 32768


def test_frames_are_those_that_the_processor_chooses(tmp_path: Path) -> None:
    make_films(tmp_path, 1, frames=8, rate=8)
    every, facts = decode.video(str(tmp_path / "0.mp4"), None)
    assert every.shape == (8, 56, 56, 3) and (facts["total_num_frames"], facts["fps"]) == (8, 8.0)
    some, facts = decode.video(str(tmp_path / "0.mp4"), lambda metadata: [0, metadata.total_num_frames - 1])
    assert (some == every[[0, 7]]).all() and facts["frames_indices"] == [0, 7]
    some, facts = decode.video(str(tmp_path / "0.mp4"), lambda metadata: [0, 4, metadata.total_num_frames])
    assert (some == every[[0, 4]]).all() and facts["frames_indices"] == [0, 4]  # Qwen2-VL may round to one too many


def copied(film: Path, copy: Path, *, cut: float) -> Path:
    """Copy a video like ``ffmpeg -ss CUT -c copy -movflags faststart``, without encoding it."""
    import av

    with av.open(film) as old, av.open(copy, "w", options={"movflags": "faststart"}) as new:
        stream = old.streams.video[0]
        made = new.add_stream_from_template(stream)
        for packet in old.demux(stream):
            if packet.dts is None or packet.pts is None or stream.time_base is None:
                continue
            packet.pts -= int(cut / stream.time_base)
            packet.dts -= int(cut / stream.time_base)
            packet.stream = made
            new.mux(packet)
    return copy


def test_frames_that_a_cut_without_encoding_hides_are_not_counted(tmp_path: Path) -> None:
    make_films(tmp_path, 1, frames=20, rate=8)
    cut = copied(tmp_path / "0.mp4", tmp_path / "cut.mp4", cut=5 / 8)
    whole, _ = decode.video(str(tmp_path / "0.mp4"), None)
    for sampler, expected in ((None, range(15)), (lambda facts: [0, facts.total_num_frames - 1], [0, 14])):
        shown, facts = decode.video(str(cut), sampler)
        assert (shown == whole[[5 + index for index in expected]]).all()
        assert (facts["total_num_frames"], facts["duration"]) == (15, 15 / 8)
    content = cut.read_bytes()
    cut.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=r"though its header says 20 frames|cut\.mp4 cannot be read as video"):
        decode.video(str(cut), None)


def test_only_answers_are_learned_and_what_is_cut_is_text(hearing: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    from ebbtide_recipes.sft import data

    rows = make_sounds(tmp_path, 2)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[1]["response"] = "It does."
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    processor = AutoProcessor.from_pretrained(hearing)
    table = data.load_both(SftConfig(dataset=(str(rows),)), chat=True, takes=("audio",))[0]
    batch = MediaCollator(processor=processor, max_length=256, completion_only=True)(list(table))
    learned = [ids[labels != -100] for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)]
    told = [processor.tokenizer.decode(ids).strip() for ids in learned]
    assert told == ["It returns the value of the argument. " * 3 + " <|end|>", "It does. <|end|>"]
    assert batch["attention_mask"].sum(1).tolist()[0] > batch["attention_mask"].sum(1).tolist()[1]
    whole = MediaCollator(processor=processor, max_length=256, completion_only=False)(list(table))
    places = whole["input_ids"] == processor.audio_token_id
    assert places.any() and torch.equal(whole["labels"] != -100, (whole["attention_mask"] == 1) & ~places)
    length = int(batch["attention_mask"][0].sum()) - 3
    cut = MediaCollator(processor=processor, max_length=length, completion_only=True)([table[0]])
    assert torch.equal(cut["input_ids"][0], batch["input_ids"][0][:length])
    with pytest.raises(DataError, match=f"row 1 of .* has {length + 3} tokens, and truncation is 'error'"):
        MediaCollator(processor=processor, max_length=length + 2, completion_only=True, cuts=False)([table[0]])
    MediaCollator(processor=processor, max_length=length + 3, completion_only=True, cuts=False)([table[0]])
    before = int((batch["labels"][0] != -100).nonzero()[0])
    MediaCollator(processor=processor, max_length=before + 1, completion_only=True)([table[0]])
    with pytest.raises(DataError, match=f"row 1 of .* has {before} tokens before its answer"):
        MediaCollator(processor=processor, max_length=before, completion_only=True)([table[0]])


@pytest.mark.parametrize(
    "content",
    [
        "<audio>What?",
        [{"type": "audio", "audio": "0.wav"}, {"type": "text", "text": "What?"}],
        [{"type": "audio"}, {"type": "text", "text": "What?"}],
    ],
)
def test_files_are_named_in_a_column_or_in_the_message(tmp_path: Path, content: Any) -> None:
    from ebbtide_recipes.sft import data

    make_sounds(tmp_path, 1)
    inline = isinstance(content, list) and "audio" in content[0]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A tone."}]}
    text = json.dumps(row if inline else {**row, "audio": "0.wav"})
    (tmp_path / "rows.jsonl").write_text(text + "\n")
    config = SftConfig(dataset=(str(tmp_path / "rows.jsonl"),))
    (read,) = data.load_both(config, chat=True, takes=("audio",))[0].to_list()
    assert read["messages"][0]["content"] == [{"type": "audio", "text": None}, {"type": "text", "text": "What?"}]
    assert read["audios"] == [str(tmp_path / "0.wav")]
