"""The texts of errors that are raised inside the hooks: each names the block, the site and the action."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ebbtide.base.errors import DiskError, EbbtideError, RestoreError, note_place
from ebbtide.engine import recompute as recompute_module
from ebbtide.store.disk import DiskSlot
from ebbtide.store.diskwork import DiskWork
from tests.helpers.handles import training
from tests.helpers.oracle import same_bits
from tests.helpers.texts import lacks

Patch = pytest.MonkeyPatch


def _no_read(patch: Patch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(5, os.strerror(5))

    patch.setattr(os, "preadv", fail)


def _wrong_bytes(patch: Patch) -> None:
    intact = DiskSlot.take

    def corrupt(self: DiskSlot) -> torch.Tensor:
        content = intact(self)
        content[17] ^= 1
        return content

    patch.setattr(DiskSlot, "take", corrupt)


def _dead_reader(patch: Patch) -> None:
    def die(self: DiskWork, read: Any) -> None:
        raise MemoryError("no more")

    patch.setattr(DiskWork, "_fetch", die)


CASES: dict[str, tuple[str, Callable[[Patch], None], type[EbbtideError], tuple[str, ...]]] = {
    "a read that fails": (
        "offload",
        _no_read,
        DiskError,
        (
            "7.5 KiB",
            "[Errno 5]",
            "Mlp/down/MulBackward0#0",
            "'layers.2'",
            "disk_path",
        ),
    ),
    "a read that fails for an operand": (
        "minimal",
        _no_read,
        DiskError,
        (
            "4.5 KiB",
            "[Errno 5]",
            "Mlp/norm/input#0",
            "Mlp/down/MulBackward0#0",
            "'layers.2'",
            "disk_path",
        ),
    ),
    "a reader thread that dies": (
        "offload",
        _dead_reader,
        DiskError,
        (
            "'no more'",
            "Mlp/down/MulBackward0#0",
            "'layers.2'",
        ),
    ),
    "bytes that came back different": (
        "offload",
        _wrong_bytes,
        RestoreError,
        (
            "Mlp/down/MulBackward0#0",
            "'layers.2'",
            "`ebbtide doctor --versions`",
            "keep_filter",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_has_the_facts_and_a_hint(name: str, monkeypatch: Patch) -> None:
    policy, plant, kind, facts = CASES[name]
    with training(policy, "disk", window=1, verify=kind is RestoreError) as trainee:
        plant(monkeypatch)
        with pytest.raises(EbbtideError) as caught:
            trainee.step()
        monkeypatch.undo()
    assert type(caught.value) is kind
    assert lacks(str(caught.value), facts) == []
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_cap_names_what_did_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    with training("offload", "host", window=1, room_bytes=5000) as trainee, caplog.at_level("WARNING"):
        assert all(map(same_bits, trainee.step(), trainee.expected))
        trainee.step()
    (message,) = [record.getMessage() for record in caplog.records]
    assert lacks(message, ("4.5 KiB", "4.7 KiB in use", "host budget of 4.9 KiB")) == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, KeyboardInterrupt])
def test_an_error_of_torch_while_recomputing_keeps_its_class_and_message(
    error: type[BaseException], monkeypatch: Patch
) -> None:
    with training("minimal", "disk") as trainee:
        trainee.step()  # in measured steps, recipes are timed when their tensor is saved

        def no_memory(*args: Any) -> torch.Tensor:
            raise error("tried to allocate 2 GiB")

        monkeypatch.setattr(recompute_module, "evaluate", no_memory)
        with pytest.raises(error) as caught:
            trainee.step()
        monkeypatch.undo()
        assert type(caught.value) is error and str(caught.value) == "tried to allocate 2 GiB"
        assert caught.value.__notes__ == ["while restoring Mlp/down/MulBackward0#0 of block 'layers.2' (recompute)"]


def test_a_place_stands_before_the_hint() -> None:
    error = DiskError("found", expected="more", hint="help")
    note_place(error, "while here")
    note_place(error, "while there")
    assert str(error) == "found; expected more\nwhile here\nwhile there\nhint: help"
    assert not hasattr(error, "__notes__")  # a traceback would print it twice
