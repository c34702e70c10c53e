"""Takes a part of a product of three parameters in every run, and the rest in the slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def all_pairs(names: Iterable[str], precisions: Iterable[str], policies: Iterable[str]) -> list[Any]:
    """Return the parameter sets of a product, all but those that every run takes marked slow.

    Every run takes each name under each policy in one precision, the next one for the next policy and for the next
    name: where there are at least as many names and policies as precisions, every pair of values is among them.
    """
    names, precisions, policies = tuple(names), tuple(precisions), tuple(policies)
    rows: list[Any] = []
    for name, precision, policy in product(names, precisions, policies):
        turn = names.index(name) + policies.index(policy)
        often = precisions[turn % len(precisions)] == precision
        rows.append(pytest.param(name, precision, policy, marks=() if often else pytest.mark.slow))
    return rows
