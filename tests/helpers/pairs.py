"""Splits a product of parameters into a part for every run and a slow rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def all_pairs(*parameters: Iterable[Any]) -> list[Any]:
    """Return the parameter sets of a product; those that not every run takes are marked slow.

    Every run takes the sets whose middle value is the next one for the next first value and for the next last value.
    Of three parameters, that is each first value with each last one, and every pair of values where the others are at
    least as many as the middle ones. Of two, it is each first value with one of the last.
    """
    columns = [tuple(values) for values in parameters]
    rows = product(*(range(len(column)) for column in columns))
    return [
        pytest.param(
            *(column[i] for column, i in zip(columns, row, strict=True)),
            marks=() if _is_often(row, columns) else pytest.mark.slow,
        )
        for row in rows
    ]


def _is_often(row: Sequence[int], columns: Sequence[Sequence[Any]]) -> bool:
    first, middle, *last = row
    return (first + sum(last)) % len(columns[1]) == middle
