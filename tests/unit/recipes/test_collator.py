"""Rows with files, where no processor is needed to see what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError

from ebbtide.base.errors import DataError
from ebbtide_recipes.sft import collator
from ebbtide_recipes.sft.media import WHERE


def test_a_chat_that_the_template_refuses_is_named_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: object) -> Any:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(collator, "apply_chat_template", refuses)
    made = collator.MediaCollator(processor=SimpleNamespace(), max_length=8, completion_only=False)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"refuses row 3 of data set 'a': roles must alternate.*\nhint: "):
        made([{"messages": [], WHERE: "row 3 of data set 'a'"}])
