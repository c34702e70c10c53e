"""Pages of the documentation in hints: by path in a checkout, and by address where the package is installed alone."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

_CHECKOUT = Path(__file__).parents[3]
_PAGE = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")
_INDEX = "docs/README.md"


def with_addresses(text: str) -> str:
    """Return a text in which pages, such as ``docs/guides/sft.md``, can be found: a wheel has none of them."""
    if not _PAGE.search(text) or (_CHECKOUT / _INDEX).is_file():
        return text
    root = _address().removesuffix(_INDEX)
    return _PAGE.sub(lambda page: root + page[0], text)


def _address() -> str:
    """Return the address of the documentation's index, from the package's metadata; empty if it has none."""
    try:
        urls = importlib.metadata.metadata("ebbtide").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    named = (str(url).partition(", ") for url in urls)
    return next((url for name, _, url in named if name == "Documentation" and url.endswith(_INDEX)), "")
