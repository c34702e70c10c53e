"""What an autograd node saved, read without unpacking it.

[Note: saved slots]
Recent torch tells what a pack hook returned (``SavedTensor.data``). Before, the slot is unpacked to find out: the
unpack hook notes the ticket that it is handed and answers with an empty tensor. Only slots that our own hook packed may
be asked so, for another's hook, a checkpoint's, would do its work. They are told by the number that autograd gives each
node as it makes it, which is the latest one while the node's tensors are packed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import Node

TELLS = hasattr(torch._C._autograd.SavedTensor, "data")  # pyright: ignore[reportAttributeAccessIssue]
"""Whether this torch tells what was packed."""


class Peek:
    """Lets the unpack hook note what it is handed instead of unpacking it, in the thread that asks."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._heard: list[Any] = []

    def hears(self, ticket: object) -> bool:
        """Note a ticket; False where nobody listens in this thread."""
        if self._thread is None or self._thread != threading.get_ident():
            return False
        self._heard.append(ticket)
        return True

    def ask(self, node: Node, name: str) -> tuple[Any, list[Any]]:
        """Return the attribute ``name`` of a node, and the tickets that its reading unpacked."""
        heard: list[Any] = []
        self._thread, self._heard = threading.get_ident(), heard
        try:
            return getattr(node, name, None), heard
        except RuntimeError:  # freed by a backward
            return None, []
        finally:
            self._thread, self._heard = None, []  # what it holds would live on


class Slots:
    """Reads the slots of nodes made in one block's forward. See [Note: saved slots].

    Args:
        peek: The engine's.
    """

    def __init__(self, peek: Peek) -> None:
        self._peek, self._tells = peek, TELLS
        self._ours: set[int] = set()

    def note_saver(self) -> None:
        """The node that is being made now packs with our hook."""
        if not self._tells:
            number: int = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
            self._ours.add(number - 1)

    def read(self, node: Node, name: str) -> Any:
        """Return what was packed into the slot ``name``; None if nothing was, or if it cannot be told."""
        if self._tells:
            saved = getattr(node, "_raw_saved_" + name, None)
            return None if saved is None else saved.data
        value, heard = self._asked(node, name)
        return heard[0] if heard else value

    def read_list(self, node: Node, name: str) -> list[Any] | None:
        """Return what was packed into each place of a slot that is a list, None for an empty place.

        Returns None if it cannot be told.
        """
        if self._tells:
            return [saved.data for saved in getattr(node, "_raw_saved_" + name)]
        value, heard = self._asked(node, name)
        if value is None:
            return None
        tickets = iter(heard)
        return [None if place is None else next(tickets, None) for place in value]

    def _asked(self, node: Node, name: str) -> tuple[Any, list[Any]]:
        return self._peek.ask(node, "_saved_" + name) if node._sequence_nr() in self._ours else (None, [])
