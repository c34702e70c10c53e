"""Batches of rows with images, videos and sounds, made by the model's own processor on demand.

[Note: prompts and completions apart]
The processor gets the prompt with its files; the tokens of the completion are appended. They are those by which the
tokenised text of both goes on where it differs from the tokenised prompt: some tokenizers, as Llama's, put a space
before any text, and a token may hold the end of the prompt and the beginning of the completion. So the tokens are those
of the same text as a row of messages. Such a row is a prompt without completion, all of which is learned but the
placeholders of its files: no model generates them. Rows of both kinds may be mixed, as in evaluation.

[Note: lengths without pixels]
How many tokens an image becomes is known only to the processor, and most processors compute it from the image's size,
which is in the first bytes of its file. So rows that are too long are found before training, and not when they are
drawn. The processor's count is a hint: what it calls too long is processed before it is refused. Videos, sounds, and
images of other processors are checked when they are drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ebbtide.base.errors import ConfigError, DataError, first_line
from ebbtide_recipes.language.templates import rendering
from ebbtide_recipes.sft import decode
from ebbtide_recipes.sft.media import WHERE
from ebbtide_recipes.sft.roles import with_texts
from ebbtide_recipes.skeleton.rows import Row

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, ProcessorMixin

    from ebbtide_recipes.language.models import ModelSource
    from ebbtide_recipes.sft.config import SftConfig

LOGGER = logging.getLogger("ebbtide.sft")

_SEEN = "cross_attention_mask"
"""Of each token in Llama 3.2's processor: which images it sees. A completion's see those that the last token sees."""
_BY_TOKEN = ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", _SEEN)
"""What the processor returns for each token in addition to its number; 0 for padding, and a type of 0 is text."""

_MISJUDGED = 3
"""Rows that fit against the processor's count, after which the count is not used any more."""

_PLACES = ("image_token_id", "video_token_id", "audio_token_id")


def made(config: SftConfig, source: ModelSource, dataset: Dataset) -> MediaCollator:
    """Return a collator for rows with files, after a test with the first row.

    So a general problem is found before weights are loaded.

    Raises:
        ConfigError: Rows are to be packed.
        DataError: The processor does not take the first row.
    """
    if config.packing:
        raise ConfigError(
            "packing is true, and the rows have images, videos or sounds",
            expected="one row per sequence",
            hint="leave --packing out",
        )
    processor: Any = source.processor
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    collator = MediaCollator(
        processor=processor,
        config=source.config,
        max_length=config.max_length,
        cuts=config.truncation == "right",
        completion_only=bool(config.completion_only_loss),
    )
    collator([dataset[0]])
    return collator


@dataclass(frozen=True, kw_only=True)
class MediaCollator:
    """Makes batches of rows with files.

    Attributes:
        processor: The model's.
        max_length: Tokens in a sequence; longer rows are cut unless that cuts a file.
        completion_only: Whether only the completion is learned of a row that has one.
        cuts: Whether a longer row is cut; else it is refused.
        config: The model's, which names the tokens that its features replace; a processor may name others.
    """

    processor: ProcessorMixin
    max_length: int
    completion_only: bool
    cuts: bool = True
    config: PreTrainedConfig | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return a batch: ``input_ids``, ``labels`` ``[B, S]`` and the processor's tensors of the files.

        Raises:
            DataError: A file cannot be read or sampled, or a row is too long for its files.
        """
        texts = [self._rendered(row) for row in rows]
        prompts = [text.get("text", text.get("prompt", "")) for text in texts]
        batch = self._processed(rows, prompts)
        joined, answers = zip(*(self._answer(row, text) for row, text in zip(rows, texts, strict=True)), strict=True)
        lengths = (batch["attention_mask"].sum(1) - torch.tensor(joined)).tolist()
        for row, ids, length, answer in zip(rows, batch["input_ids"], lengths, answers, strict=True):
            self._check_length(row, ids[:length], len(answer or ()))
        pads = {**dict.fromkeys(_BY_TOKEN, 0), "input_ids": self.processor.tokenizer.pad_token_id}
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in (*pads, "labels") if name in (*batch, "labels")}
        for index, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
            for name in columns:
                columns[name].append(self._column(name, batch, index, length, answer)[: self.max_length])
        padded = {
            name: pad_sequence(values, batch_first=True, padding_value=-100 if name == "labels" else pads[name])
            for name, values in columns.items()
        }
        return {**batch, **padded}

    def check(self, dataset: Dataset) -> None:
        """Find rows that no batch can be made of, before training. See [Note: lengths without pixels].

        Raises:
            DataError: There is one.
        """
        if "images" not in dataset.column_names or not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return
        LOGGER.info("looking at the sizes of the images of %d rows", len(dataset))
        misjudged = 0
        for row in dataset:
            try:
                if row.get("videos") or row.get("audios") or self._seems_to_fit(row):
                    continue
            except (TypeError, ValueError, AttributeError, KeyError) as error:  # a private function of each processor
                self([row])  # raises, if the row is at fault and not the function
                LOGGER.debug("lengths of rows with images are checked when they are drawn: %s", first_line(error))
                return
            self([row])  # raises, unless the processor makes fewer tokens than it says
            misjudged += 1
            if misjudged == _MISJUDGED:
                return

    def _seems_to_fit(self, row: Row) -> bool:
        """Whether a row with images is short enough, by the sizes of the images."""
        processor: Any = self.processor
        text = self._rendered(row)
        joined, answer = self._answer(row, text)
        sizes = [decode.size(path) for path in row["images"]]
        counts = iter(processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens if sizes else ())
        ids: list[int] = []
        for token in self._tokens(text.get("text", text.get("prompt", ""))):
            ids += [token] * (next(counts, 1) if token == getattr(processor, "image_token_id", None) else 1)
        try:
            self._check_length(row, torch.tensor(ids[: len(ids) - joined]), len(answer or ()))
        except DataError:
            return False
        return True

    def _column(self, name: str, batch: Any, index: int, length: int, answer: list[int] | None) -> torch.Tensor:
        """Return one row of a column, followed by its completion."""
        tail = batch["input_ids"].new_tensor(answer or [])
        if name == "labels":
            head = batch["input_ids"][index, :length]
            alone = self.completion_only and answer is not None
            hidden = torch.isin(head, head.new_tensor(sorted(self._places()))) | alone
            return torch.cat([head.masked_fill(hidden, -100), tail])
        head = batch[name][index, :length]
        if name == "input_ids":
            return torch.cat([head, tail])
        more = head[-1:] if name == _SEEN else head.new_tensor([int(name == "attention_mask")])
        return torch.cat([head, more.expand(len(tail), *head.shape[1:])])

    def _rendered(self, row: Row) -> Row:
        """Return the texts of a row, as the chat template writes them."""
        bare = _bare(row)
        with rendering(row[WHERE]):
            try:
                return self._written(bare)
            except TypeError:  # as of a template that joins text and a call's arguments
                return self._written({**bare, **with_texts(bare)})

    def _written(self, row: Row) -> Row:
        """Return the text of a chat, or of a prompt and of its completion, which end and begin as in rows of text."""
        write = partial(self.processor.apply_chat_template, tokenize=False)
        if "messages" in row:
            return {"text": write(row["messages"])}
        prompt, both = write(row["prompt"], add_generation_prompt=True), write([*row["prompt"], *row["completion"]])
        prompt = commonprefix([prompt, both])
        return {"prompt": prompt, "completion": both[len(prompt) :]}

    def _places(self) -> set[int]:
        """Return the tokens in whose places a model puts its features of files."""
        found: list[int | None] = []
        for name in _PLACES:  # Gemma 3's processor names its own in image_token_ids, and Llama 4's does not name it
            found += getattr(self.processor, f"{name}s", None) or ()
            found += [getattr(owner, name, None) for owner in (self.processor, self.config)]
        return {int(token) for token in found if token is not None}

    def _answer(self, row: Row, text: Row) -> tuple[int, list[int] | None]:
        """Return how many of a prompt's last tokens are joined with its completion, and the tokens from these on."""
        # See [Note: prompts and completions apart]. `None`: the row has no completion.
        if "completion" not in text:
            return 0, None
        prompt, both = self._tokens(text["prompt"]), self._tokens(text["prompt"] + text["completion"])
        same = len(commonprefix([prompt, both]))
        answer = both[same:]
        if found := self._places() & set(answer):
            raise DataError(
                f"{row[WHERE]} has {self.processor.tokenizer.decode(found.pop())!r} in its answer: in this model's "
                "text it marks the position of a file",
                expected="files before the answer",
                hint="write it in other letters, or remove the row",
            )
        return len(prompt) - same, answer

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text without files."""
        return self.processor.tokenizer(text, add_special_tokens=self._begins(text))["input_ids"]

    def _begins(self, text: str) -> bool:
        """Whether the tokenizer, and not the chat template, writes the token that begins a text, as for inference."""
        tokenizer = self.processor.tokenizer
        begin = tokenizer.bos_token
        return bool(begin) and not text.startswith(begin) and tokenizer("")["input_ids"] == [tokenizer.bos_token_id]

    def _processed(self, rows: Sequence[Row], texts: list[str]) -> Any:
        files: dict[str, Any] = {}
        images = [[decode.image(path) for path in row.get("images", [])] for row in rows]
        if any(images):
            files["images"] = images
        try:
            videos = [decode.video(path, self._sampler()) for row in rows for path in row.get("videos", [])]
            if videos:
                frames, facts = zip(*videos, strict=True)
                files |= {"videos": list(frames), "video_metadata": list(facts), "do_sample_frames": False}
            rate = int(getattr(audio_reader(self.processor), "sampling_rate", None) or 16_000)
            sounds = [decode.sound(path, rate) for row in rows for path in row.get("audios", [])]
            if sounds:
                files |= {"audio": sounds, "sampling_rate": rate}
            return self.processor(
                text=texts,
                **files,
                padding=True,
                padding_side="right",
                return_tensors="pt",
                add_special_tokens=self._begins(texts[0]),
            )
        except (ValueError, TypeError, IndexError, ArithmeticError) as error:
            raise DataError(
                f"the model's processor does not take {_listed(rows)}: {first_line(error)}",
                expected="files with the sizes, frame rates and sample rates that it takes",
                hint="the processor's settings are in the model's folder: preprocessor_config.json, "
                "video_preprocessor_config.json; or convert the files with ffmpeg",
            ) from error

    def _sampler(self) -> decode.Sampler | None:
        """Return the processor's choice of frames: by its rate or number of frames; ``None``: all."""
        reader: Any = self.processor.video_processor
        rate, count = getattr(reader, "fps", None), getattr(reader, "num_frames", None)
        if rate and not count:
            return partial(reader.sample_frames, fps=rate)  # InternVL's does not look at its own
        return reader.sample_frames if count or getattr(reader, "do_sample_frames", None) else None

    def _check_length(self, row: Row, ids: torch.Tensor, answer: int) -> None:
        """Reject a row of which ``max_length`` would cut a file: its features would outnumber its placeholders."""
        if not self.cuts and len(ids) + answer > self.max_length:
            raise DataError(
                f"{row[WHERE]} has {len(ids) + answer} tokens, and truncation is 'error'",
                expected=f"at most {self.max_length}, the max_length",
                hint="use a larger --max_length, or --truncation right, which cuts text at the end",
            )
        places = self._places()
        smaller = "use a larger --max_length, or smaller and shorter files"
        if row.get("videos"):
            smaller += '; "fps": 2 in the model\'s video_preprocessor_config.json reads two frames of each second'
        cut = ids[self.max_length :].tolist()
        if cut and (not places or places & set(cut)):
            raise DataError(
                f"{row[WHERE]} has {len(ids)} tokens with its files",
                expected=f"at most {self.max_length}, the max_length, to the end of the last file",
                hint=smaller,
            )
        if self.completion_only and answer and len(ids) >= self.max_length:
            raise DataError(
                f"{row[WHERE]} has {len(ids)} tokens before its answer, which max_length cuts off",
                expected=f"answers that begin within the first {self.max_length} tokens",
                hint=smaller,
            )


def taken_by(processor: Any) -> tuple[str, ...]:
    """Return the kinds of files that a model's processor takes; a plain tokenizer takes none."""
    readers = {
        "image": getattr(processor, "image_processor", None),
        "video": getattr(processor, "video_processor", None),
        "audio": audio_reader(processor),
    }
    return tuple(kind for kind, reader in readers.items() if reader is not None)


def audio_reader(processor: Any) -> Any:
    """Return the audio part of a processor; ``None``: it has none."""
    return getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)


def _bare(row: Row) -> Row:
    """Return the texts of a row, without the empty fields that its table has."""
    return {
        name: [
            {**m, "content": [{k: v for k, v in p.items() if v is not None} for p in m["content"]]} for m in row[name]
        ]
        for name in ("messages", "prompt", "completion")
        if name in row
    }


def _listed(rows: Sequence[Row]) -> str:
    return rows[0][WHERE] if len(rows) == 1 else f"one of {', '.join(row[WHERE] for row in rows)}"
