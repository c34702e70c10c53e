"""Chats that a model's chat template does not render."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ebbtide.base.errors import DataError


@contextmanager
def rendering(where: str) -> Generator[None]:
    """Turn a chat template's refusal into an error that names the chat.

    Args:
        where: The row and its data set.

    Raises:
        DataError: The template refuses the chat, or computes with values that it has in another form.
    """
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError) as error:
        raise refused_by_template(where, error) from error


def refused_by_template(where: str, error: Exception) -> DataError:
    """Return the error of a chat that the model's template does not render."""
    return DataError(
        f"the model's chat template refuses {where}: {error}",
        expected="messages in the order and the roles that the template knows",
        hint="some templates take no system message, and some no chat that the assistant begins",
    )
