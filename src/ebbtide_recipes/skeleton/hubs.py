"""Names on hubs: on ModelScope with its package, on Hugging Face without long waits where there is no network."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ebbtide.base.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.config import RecipeConfig


ON_MODELSCOPE = "--use_hf false looks names up on ModelScope (pip install 'ebbtide[modelscope]')"
"""A hint for names that Hugging Face does not know."""


@contextmanager
def cached_without_network() -> Generator[None]:
    """Let Hugging Face's packages look only into their caches while the hub's name leads nowhere.

    They would repeat each request for half a minute.
    """
    constants: Any = importlib.import_module("huggingface_hub.constants")
    modules: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in modules]
    if not constants.HF_HUB_OFFLINE and not _is_known(urlsplit(constants.ENDPOINT).hostname or ""):
        for module in modules:
            module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, offline in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = offline


def _is_known(host: str) -> bool:
    """Whether the name of a host leads anywhere; behind a proxy, which looks it up itself, this is not known."""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def check(config: RecipeConfig) -> None:
    """Reject names of ModelScope if its package is not installed.

    Raises:
        ConfigError: It is not.
    """
    if not config.use_hf and importlib.util.find_spec("modelscope") is None:
        raise ConfigError(
            "use_hf is false, and the package modelscope is not installed",
            expected="modelscope, which knows ModelScope's names",
            hint="pip install 'ebbtide[modelscope]', or leave --use_hf out for names on Hugging Face",
        )


def from_modelscope(what: Literal["model", "data set"], name: str) -> str:
    """Return the folder of a model or a data set of ModelScope, fetched if need be.

    Raises:
        DataError: It cannot be fetched.
    """
    modelscope: Any = importlib.import_module("modelscope")
    fetch = "snapshot_download" if what == "model" else "dataset_snapshot_download"
    try:
        return str(getattr(modelscope, fetch)(name))
    except Exception as error:  # its hub errors have no common root
        raise DataError(
            f"{what} {name!r} cannot be fetched from ModelScope: {first_line(error)}",
            expected=f"a {what} of ModelScope",
            hint="check the name; --use_hf true means Hugging Face, and a local path needs no network",
        ) from error
