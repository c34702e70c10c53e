"""Missing, old or broken packages: reported at their first use."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.base import extras
from ebbtide.base.errors import EbbtideError

REQUIREMENTS = [
    "torch>=2.11",
    "transformers>=5.5; extra == 'recipes'",
    "other-package>=3; extra == 'recipes'",
    "any-version",
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Fake versions of installed packages, in addition to the real ones."""
    real = importlib.metadata.version

    def pretend(**versions: str) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
        extras.check_version.cache_clear()

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIREMENTS)
    yield pretend
    monkeypatch.undo()
    extras.check_version.cache_clear()


@pytest.mark.parametrize("found", ["2.11.0", "2.11", "2.11.0+cu130", "2.11.0a0+gitb4e4ee8", "2.11.1", "2.100.0", "3.0"])
def test_the_bound_and_what_is_newer_serve(installed: Callable[..., None], found: str) -> None:
    installed(torch=found)
    extras.check_version("torch")


@pytest.mark.parametrize(
    "found", ["2.10.0", "2.10.1+cu128", "2.9.1", "2", "2+cu130", "1.13.1", "2.10.0a0+b4e4ee8.nv25.12"]
)
def test_what_is_older_is_refused_each_time(installed: Callable[..., None], found: str) -> None:
    installed(torch=found)
    for _ in range(2):
        with pytest.raises(EbbtideError) as caught:
            extras.check_version("torch")
        assert str(caught.value) == (
            f"torch {found} is installed; expected 2.11 or newer\n"
            "hint: pip install --upgrade 'torch>=2.11'; docs/reference/versions.md lists the tested versions"
        )


def test_what_is_not_installed_or_has_no_bound_is_not_too_old(installed: Callable[..., None]) -> None:
    installed(**{"any-version": "0.1"})
    extras.check_version("any-version")
    extras.check_version("package-that-nobody-has")
    assert extras.oldest("other-package") == "3"
    assert extras.oldest("other") is None


def test_from_source_that_was_never_installed_nothing_is_refused(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    installed(torch="1.0")
    monkeypatch.setattr(importlib.metadata, "requires", absent)
    extras.check_version("torch")


def test_a_version_is_looked_up_once(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(torch="2.11.0")
    extras.check_version("torch")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1")
    extras.check_version("torch")


def _enable() -> object:
    return ebbtide.enable_activation_offloading(nn.Linear(2, 2))


def _offload() -> None:
    with ebbtide.offload_saved_tensors():
        raise AssertionError("entered")


def _load() -> object:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    return ebbtide.load_sharded(model)


@pytest.mark.parametrize(
    "use", [_enable, _offload, _load, lambda: ebbtide.save_sharded(nn.Linear(2, 2), "nowhere")],
    ids=["enable", "offload", "load", "save"],
)  # fmt: skip
def test_torch_is_asked_for_its_version_at_first_use(
    installed: Callable[..., None], use: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    installed(torch="2.9.1")
    with pytest.raises(EbbtideError, match=r"torch 2\.9\.1 is installed; expected 2\.11 or newer"):
        use()
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_transformers_model_need_its_conversions(installed: Callable[..., None]) -> None:
    class Model(nn.Linear):
        base_model_prefix, config = "model", None

    with torch.device("meta"):
        model = Model(2, 2)
    installed(transformers="4.57.6", torch="2.13.0")
    weights = nn.Linear(2, 2).state_dict()
    with pytest.raises(EbbtideError, match=r"transformers 4\.57\.6 is installed; expected 5\.5 or newer"):
        ebbtide.load_sharded(model, weights)
    assert model.weight.is_meta
    assert torch.equal(ebbtide.load_sharded(nn.Linear(2, 2, device="meta"), weights).weight, weights["weight"])


@pytest.mark.parametrize("check", [extras.require, extras.check_installed])
def test_a_package_of_an_extra_that_is_too_old_is_refused_and_not_imported(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, check: Callable[..., object]
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail("imported"))
    installed(**{"other-package": "2.9"})
    with pytest.raises(EbbtideError, match=r"other-package 2\.9 is installed; expected 3 or newer"):
        check("other-package", extra="recipes", use="a test")


def test_an_installed_package_is_imported() -> None:
    assert extras.require("json", extra="cli", use="a test") is sys.modules["json"]
    extras.check_installed("json", extra="cli", use="a test")


@pytest.mark.parametrize("check", [extras.require, extras.check_installed])
def test_a_missing_package_names_its_extra(check: Callable[..., object]) -> None:
    with pytest.raises(EbbtideError) as caught:
        check("package_that_nobody_has", extra="recipes", use="the sft recipe")
    assert str(caught.value) == (
        "package_that_nobody_has is not installed; expected package_that_nobody_has for the sft recipe\n"
        "hint: pip install 'ebbtide[recipes]'"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "raise ImportError('tokenizers>=0.22 is required, but found tokenizers==0.1')",
            "tokenizers>=0.22 is required",
        ),
        ("import package_that_nobody_has", "No module named 'package_that_nobody_has'"),
    ],
)
def test_a_broken_package_is_not_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    (tmp_path / "broken_package.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EbbtideError) as caught:
        extras.require("broken_package", extra="recipes", use="a test")
    text = str(caught.value)
    assert text.startswith(f"broken_package is installed but cannot be imported ({reason}")
    assert text.endswith("; expected broken_package for a test\nhint: `pip check` names incompatible packages")


def test_the_first_cause_of_a_broken_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ImportError("Could not import module 'BloomPreTrainedModel'") from error
    """
    (tmp_path / "package_on_torchvision.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EbbtideError, match="Bloom.*; cause: operator torchvision::nms does.*\nhint: .*reinstall"):
        extras.require("package_on_torchvision", extra="recipes", use="a test")
