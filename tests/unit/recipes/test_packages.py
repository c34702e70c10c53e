"""The packages of the recipe: a missing or old one is reported before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.base import extras
from ebbtide.base.errors import EbbtideError
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.recipe import RECIPE, main
from ebbtide_recipes.skeleton import run
from ebbtide_recipes.skeleton.logging import quiet_bitsandbytes


@pytest.fixture
def config(tmp_path: Path) -> Iterator[SftConfig]:
    extras.check_version.cache_clear()
    yield SftConfig(model="builtin:smollm2", dataset=("builtin:pydoc",), output_dir=str(tmp_path / "run"))
    extras.check_version.cache_clear()


@pytest.mark.parametrize("package", RECIPE.packages)
def test_a_package_that_is_too_old_is_refused(
    config: SftConfig, monkeypatch: pytest.MonkeyPatch, package: str, tmp_path: Path
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1" if name == package else real(name))
    with pytest.raises(EbbtideError, match=rf"^{package} 0\.0\.1 is installed; expected [\d.]+ or newer"):
        main(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", RECIPE.packages)
def test_a_package_that_is_absent_is_refused(
    config: SftConfig, monkeypatch: pytest.MonkeyPatch, package: str, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))
    with pytest.raises(EbbtideError, match=rf"(?s)^{package} is not installed.*hint: pip install 'ebbtide\[recipes\]'"):
        main(config)
    assert list(tmp_path.iterdir()) == []


KERNELS = (
    "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure you already `pip install ...`"
)


def test_only_the_known_warning_of_bitsandbytes_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with quiet_bitsandbytes():
        with quiet_bitsandbytes():
            logger.warning(KERNELS, "no module")
        logger.warning(KERNELS, "no module")
        logger.warning("Failed to load %s", "a library")
    assert caplog.messages == ["Failed to load a library"]
    logger.warning(KERNELS, "no module")
    assert len(caplog.messages) == 2


def test_the_warning_is_hidden_where_the_packages_are_imported(
    config: SftConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def require(*args: object, **kwargs: object) -> None:
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning(KERNELS, "no module")
        raise EbbtideError("stop", expected="", hint="")

    monkeypatch.setattr(run, "require", require)
    with pytest.raises(EbbtideError, match="stop"):
        main(config)
    assert caplog.messages == []
