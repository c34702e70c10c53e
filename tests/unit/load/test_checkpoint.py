"""Finding a checkpoint's files, and refusing those that do not belong together."""

from __future__ import annotations

import errno
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ebbtide
from ebbtide.base.errors import ConfigError, DataError
from ebbtide.load.checkpoint import checkpoint_of, is_present, open_checkpoint
from ebbtide.load.filling import Values
from ebbtide.load.layout import Box, Piece
from ebbtide.load.reader import SliceReader
from tests.helpers.failing import failing


def write(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """Write two files and their index."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
    for number, name in enumerate(tensors, 1):
        save_file({name: tensors[name]}, folder / f"{stem}-{number}.safetensors")
    weights = {"a": f"{stem}-1.safetensors", "b": f"{stem}-2.safetensors"}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return tensors


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model", "of_my_own"])
def test_a_folder_is_entered_by_its_index(tmp_path: Path, stem: str) -> None:
    tensors = write(tmp_path, stem)
    for path in (tmp_path, tmp_path / f"{stem}.safetensors.index.json"):
        found = open_checkpoint(path)
        assert {k: (e.shape, e.dtype) for k, e in found.entries.items()} == {
            k: (tuple(t.shape), t.dtype) for k, t in tensors.items()
        }
        assert [e.nbytes for e in found.entries.values()] == [6 * 4, 4 * 8]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "whatever.safetensors")
    assert list(open_checkpoint(tmp_path).entries) == ["a"]
    assert list(open_checkpoint(tmp_path / "whatever.safetensors").entries) == ["a"]


def test_a_copy_elsewhere_is_the_same_checkpoint_and_another_dtype_is_not(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    save_file({"b": torch.arange(4, dtype=torch.int32)}, tmp_path / "three/model-2.safetensors")
    one, two, three = (open_checkpoint(tmp_path / name).digest() for name in ("one", "two", "three"))
    assert one == two != three
    save_file({"b": torch.arange(4).flip(0)}, tmp_path / "two/model-2.safetensors")
    assert open_checkpoint(tmp_path / "two").digest() != one  # the same except its values


def test_other_values_in_memory_or_in_a_pickle_are_another_checkpoint(tmp_path: Path) -> None:
    values = {
        "a": torch.arange(6.0).view(2, 3).t(),
        "b": torch.tensor(True),
        "c": torch.ones(0, 3),
        "d": torch.ones(9)[::5][:1],
    }
    others = values | {"b": torch.tensor(False)}
    digests = [checkpoint_of(each, "values").digest() for each in (values, dict(values), others)]
    assert digests[0] == digests[1] != digests[2]
    for number, each in enumerate((values, values, others)):
        (tmp_path / str(number)).mkdir()
        torch.save(each, tmp_path / str(number) / "pytorch_model.bin")
        digests[number] = open_checkpoint(tmp_path / str(number), allow_pickle=True).digest()
    assert digests[0] == digests[1] != digests[2]
    one, other = ({"a": torch.ones(2), "(buffer) b": torch.full((2,), value)} for value in (1.0, 2.0))
    assert checkpoint_of(one, "model").digest() == checkpoint_of(other, "model").digest()


def test_a_file_with_all_is_preferred_to_the_index_of_an_earlier_save(tmp_path: Path) -> None:
    write(tmp_path)
    save_file({"c": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path).entries) == ["c"]


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(DataError, match=r"1 of 2 files of .* are missing: model-2\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_names_and_no_file_has_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["aa"] = "model-1.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(DataError, match="names 1 tensors that are not in their files: aa") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "did you mean 'a'?"


def test_a_tensor_in_another_file_than_the_index_has_it_is_named_with_a_hint(tmp_path: Path) -> None:
    write(tmp_path)
    weights = {"a": "model-2.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(DataError, match="names 2 tensors that are not in their files: a, c") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint.startswith("index and files belong to different checkpoints")


def test_a_name_on_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, downloads in (("owner/model", True), ("model", False), ("../model", False), (tmp_path / "a", False)):
        with pytest.raises(DataError, match="does not exist") as caught:
            open_checkpoint(path)
        assert ("snapshot_download" in caught.value.hint) == downloads


@pytest.mark.parametrize("file", ["../model-1.safetensors", "/etc/passwd", "", "."])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: str) -> None:
    write(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(DataError, match="expected names of files in the same folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [(text, "is not JSON") for text in ("", "\x00", "[" * 100_000)]
    + [("[]", r"is \[\]"), ("{}", "has None as weight_map"), ('{"weight_map": 3}', "has 3 as weight_map")]
    + [('{"weight_map": {"a": 3}}', "has {'a': 3} as weight_map")],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, found: str) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=rf"index\.json' {found}") as caught:
        open_checkpoint(tmp_path)
    assert "weight_map" in caught.value.expected and caught.value.hint


def test_a_tensor_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(DataError, match="'a' is in .*model-1.* and in .*model-2"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match="no index of a model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()], ids=["nothing", "an empty folder"])
def test_a_missing_checkpoint_is_reported(tmp_path: Path, make: object) -> None:
    make(tmp_path / "here")  # type: ignore[operator]
    with pytest.raises(DataError, match="hint: .*file system"):
        open_checkpoint(tmp_path / "here")


def test_a_checkpoint_of_torch_distributed_is_named(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    assert is_present(tmp_path)
    with pytest.raises(DataError, match="torch.distributed.checkpoint") as caught:
        open_checkpoint(tmp_path)
    assert "dcp_to_torch_save" in caught.value.hint


def test_a_pickled_checkpoint_is_read_only_on_request(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="is a pickled checkpoint"):
        open_checkpoint(tmp_path)
    found = open_checkpoint(tmp_path, allow_pickle=True)
    assert found.entries["a"].shape == (2, 2) and found.files == (str(tmp_path / "pytorch_model.bin"),)


def test_a_pickled_file_is_read_where_its_tensors_lie(tmp_path: Path) -> None:
    base = torch.arange(60.0).view(6, 10)
    values = {
        "a": base,
        "turned": base.t(),
        "part": base[2:4, 3:],
        "rows": base[1:5],
        "small": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(7),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    torch.save({"state_dict": values}, tmp_path / "model.bin")
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, torch.empty_like(value, device="meta"))
    loaded = dict(ebbtide.load_sharded(model, tmp_path, allow_pickle=True).named_buffers())
    assert {name: torch.equal(loaded[name], value) for name, value in values.items()} == dict.fromkeys(values, True)
    assert open_checkpoint(tmp_path, allow_pickle=True).values.keys() == {"turned", "part", "conjugate", "negative"}


def test_a_scattered_tensor_is_read_once_for_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reads for others is asked for it in many messages."""
    values = {"one": torch.arange(60.0).view(6, 10).t(), "other": torch.arange(6.0).view(2, 3).t()}
    torch.save(values, tmp_path / "model.bin")
    found, reads = open_checkpoint(tmp_path, allow_pickle=True), list[int]()
    read = SliceReader.read
    monkeypatch.setattr(SliceReader, "read", lambda *args: (reads.append(1), read(*args)))
    source = Values(found.values)
    for key, count in (("one", 1), ("other", 2), ("one", 3)):
        rows = values[key].shape[0]
        for row in range(rows):
            part = torch.empty(1, values[key].shape[1])
            source.read([Piece(key=key, box=Box(start=(row, 0), size=tuple(part.shape)), into=part)])
            assert torch.equal(part[0], values[key][row])
        assert len(reads) == count


CUT = """
import os, sys, torch, ebbtide
from torch import nn

for path in sys.argv[1:]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    try:
        ebbtide.load_sharded(model, path, shard=lambda _: os.truncate(path, 1 << 20), allow_pickle=True)
    except ebbtide.EbbtideError as error:
        print(error)
"""


@pytest.mark.timeout(300)
def test_a_pickled_file_that_is_cut_while_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    values = {"rows": torch.ones(1024, 1024), "columns": torch.ones(1024, 1024).t()}
    for name, value in values.items():
        torch.save({f"{i}.weight": value.clone() for i in range(4)}, tmp_path / f"{name}.bin")
    files = [str(tmp_path / f"{name}.bin") for name in values]
    run = subprocess.run([sys.executable, "-c", CUT, *files], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("written or replaced after its header was read") == 2 and "hint:" in run.stdout


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # since torch 2.14
@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_a_pickled_tensor_without_a_place_is_named(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"a": value}, tmp_path / "model.bin")
    # Since torch 2.14 reading itself looks at the indices of sparse tensors.
    with pytest.raises(DataError, match="has no data for 'a'|its data is not allocated yet"):
        open_checkpoint(tmp_path, allow_pickle=True)
    torch.save({"a": torch.ones(2)}, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"cannot be read \(it is in the format of torch before 1\.6\)"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_pickled_files_hold_each_tensor_once_and_where_the_index_has_it(tmp_path: Path) -> None:
    names = [f"pytorch_model-{number}.bin" for number in (1, 2)]
    torch.save({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / names[0])
    torch.save({"a": torch.zeros(2)}, tmp_path / names[1])
    for paths in ([tmp_path / name for name in names], [_index(tmp_path, {"a": names[0], "b": names[1]})]):
        with pytest.raises(DataError, match=r"'a' is in .*model-1\.bin.* and in .*model-2\.bin"):
            open_checkpoint(*paths, allow_pickle=True)
    torch.save({"c": torch.zeros(2)}, tmp_path / names[1])
    with pytest.raises(DataError, match="names 1 tensors that are not in their files: b"):
        open_checkpoint(tmp_path, allow_pickle=True)
    _index(tmp_path, {"a": names[0], "b": names[0], "c": names[1]})
    assert open_checkpoint(tmp_path, allow_pickle=True).entries.keys() == {"a", "b", "c"}


def _index(folder: Path, weights: dict[str, str]) -> Path:
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    return index


def test_an_index_or_a_folder_is_passed_alone(tmp_path: Path) -> None:
    write(tmp_path)
    file, index = tmp_path / "model-1.safetensors", tmp_path / "model.safetensors.index.json"
    for paths in ([index, file], [file, index], [file, tmp_path]):
        with pytest.raises(ConfigError, match="is one of 2 paths"):
            open_checkpoint(*paths)
    assert list(open_checkpoint(file, tmp_path / "model-2.safetensors").entries) == ["a", "b"]


@pytest.mark.parametrize("call", ["exists", "is_file"])
def test_a_folder_that_this_user_may_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(tmp_path)
    monkeypatch.setattr(Path, call, failing(errno.EACCES))
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\).*\nhint: .*readable by this user"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_is_not_seen(tmp_path: Path) -> None:
    """For example if a file system is not mounted: another rank may see the weights."""
    (tmp_path / "config.json").write_text("{}")
    assert not is_present(tmp_path) and not is_present(tmp_path / "absent") and is_present(tmp_path / "config.json")
    write(tmp_path)
    assert is_present(tmp_path)


STATES = (
    "rng_state.pth", "rng_state_8.pth", "device_rng_state_8.pth", "rollout_8.pt", "optimizer.pt", "optimizer_1.bin",
    "scheduler.pt", "scaler.pt", "sampler.bin", "dl_state_dict.bin", "training_args.bin",
)  # fmt: skip


def test_what_a_trainer_saves_beside_weights_is_no_checkpoint(tmp_path: Path) -> None:
    """Every rank writes some of it into a folder of its own machine, and another machine may have the weights."""
    for name in STATES:
        torch.save({"a": torch.ones(1)}, tmp_path / name)
        assert not is_present(tmp_path), name
    with pytest.raises(DataError, match="holds no checkpoint"):
        open_checkpoint(tmp_path, allow_pickle=True)
    torch.save({"b": torch.ones(1)}, tmp_path / "of_my_own.pt")
    assert is_present(tmp_path) and open_checkpoint(tmp_path, allow_pickle=True).entries.keys() == {"b"}
    assert open_checkpoint(tmp_path / "optimizer.pt", allow_pickle=True).entries.keys() == {"a"}


class _Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    torch.save({"a": _Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="cannot be read"):
        open_checkpoint(tmp_path, allow_pickle=True)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(DataError, match="cannot be read"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_an_error_without_a_message_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*given: object, **others: object) -> None:
        raise EOFError

    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setattr(torch, "load", end)
    with pytest.raises(DataError, match=r"cannot be read \(EOFError\(\)\)"):
        open_checkpoint(tmp_path, allow_pickle=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"a": 3}, "holds 'a', a int"), ({"a": torch.ones(1, device="meta")}, "has no data for 'a': it is on meta")],
)
def test_values_that_are_none_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        checkpoint_of(values, "the given state dict")


def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint(".").entries.keys() == {"a", "b"} and is_present(".")
    for paths in ([""], ["model-1.safetensors", ""]):
        with pytest.raises(ConfigError, match="a path is empty") as caught:
            open_checkpoint(*paths)
        assert caught.value.hint
