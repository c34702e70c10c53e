"""What the site does beyond mkdocs: links that leave ``docs/`` lead to the repository's pages."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(\]\()(\.\./[^)#\s]*)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrite relative links to files outside ``docs/``; called by mkdocs for each page."""
    return outward(markdown, page.file.src_uri, config.repo_url)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Show the two colons before a docstring's example as one; called by mkdocs for each page."""
    return html.replace("<p>Example::</p>", "<p>Example:</p>")


def outward(markdown: str, path: str, repository: str) -> str:
    """Return a page in which links that leave ``docs/`` are links to the repository.

    Args:
        markdown: The page.
        path: Its path in ``docs/``.
        repository: The repository's address.
    """

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), match[2]))
        inside = target == "docs" or target.startswith("docs/")
        return match[0] if inside else f"{match[1]}{repository}/blob/main/{target}"

    return _LINK.sub(rewritten, markdown)
