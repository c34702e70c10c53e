"""Where the bytes of an entry are, in the order in which a reader asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.base.actions import Site
from ebbtide.engine.layout import Layout
from ebbtide.engine.mover import SlotMover
from ebbtide.engine.tickets import Entry, Expr, Residence
from ebbtide.schedule import CopyIn, LiveCount, Window
from tests.unit.schedule.test_copies import Run, Slot, Tier


def entry(**fields: Any) -> Entry:
    """Return an entry of 16 bytes, with these fields."""
    made = Entry(
        torch.empty(0), site=Site("Block", "", "node", 0), region=(0, 16), base_layout=Layout.of(torch.zeros(4)), at=0,
        live=LiveCount(),
    )  # fmt: skip
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def reference(nbytes: int) -> Any:
    """Return a function that finds a storage of this size, like a weak reference to a live one."""
    storage = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
    return lambda: storage


def recipe() -> Expr:
    return Expr(lambda: torch.zeros(4), (), key=("zeros",))


HERE: dict[str, Any] = {"source": torch.zeros(16, dtype=torch.uint8)}
AGAIN: dict[str, Any] = {"restored": torch.zeros(16, dtype=torch.uint8)}
LIVES: dict[str, Any] = {"storage_ref": reference(16)}
EMPTIED: dict[str, Any] = {"storage_ref": reference(0)}
DEAD: dict[str, Any] = {"storage_ref": lambda: None}
STORED: dict[str, Any] = {"slot": Slot()}
MAKES: dict[str, Any] = {"recipe": recipe()}
KEPT: dict[str, Any] = {"kept": torch.zeros(16, dtype=torch.uint8).untyped_storage()}
TAINTED: dict[str, Any] = {"tainted": True}


@pytest.mark.parametrize(
    ("fields", "unchanged", "changed"),
    [
        (HERE | STORED | LIVES, Residence.RESIDENT, Residence.LOST),
        (KEPT | LIVES, Residence.RESIDENT, Residence.LOST),
        (AGAIN | LIVES | STORED, Residence.RESTORED, Residence.STORED),
        (AGAIN | MAKES, Residence.RESTORED, Residence.RECOMPUTABLE),
        (LIVES | STORED, Residence.ELSEWHERE, Residence.STORED),
        (EMPTIED | STORED, Residence.STORED, Residence.STORED),
        (DEAD | MAKES, Residence.RECOMPUTABLE, Residence.RECOMPUTABLE),
        (STORED | MAKES, Residence.STORED, Residence.STORED),
        (STORED | TAINTED, Residence.STORED, Residence.LOST),
        ({}, Residence.LOST, Residence.LOST),
    ],
)
def test_where_bytes_are(fields: dict[str, Any], unchanged: Residence, changed: Residence) -> None:
    made = entry(**fields)
    assert made.residence is unchanged
    made.probe = torch.zeros(4)
    assert made.residence is unchanged
    made.probe.add_(1)
    assert made.residence is changed


def test_what_somebody_else_keeps_is_not_prefetched() -> None:

    wanted, lives = entry(slot=Slot(copied_out=True)), entry(slot=Slot(copied_out=True), **LIVES)
    CopyIn(Run([wanted, lives]).upcoming(), Window(100), SlotMover(Tier())).advance()  # type: ignore[arg-type]
    assert wanted.slot is not None and lives.slot is not None
    assert (wanted.slot.asked, lives.slot.asked) == (["prefetch"], [])  # type: ignore[attr-defined]
