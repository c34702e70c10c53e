"""Rules that are declared: what they read of an autograd node, and the function that follows from that.

[Note: declared rules]
In each step a rule meets the same operators with the same numbers. A declared rule makes its function once for each set
of numbers, and then looks it up; only the operands are found each time. So it may follow from nothing but what the rule
declares. A rule that must look at its operands, at a module's record or at a setting of torch is a function of a
``NodeView`` instead, which runs each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ebbtide.engine.inputs import AccumulateGrad
from ebbtide.engine.tickets import Expr, Operand, Ticket

if TYPE_CHECKING:
    from torch.autograd.graph import Node

Fn = Callable[..., torch.Tensor]

Fact = Callable[["Node", int], Hashable]
"""Returns what the graph knows of output ``n`` of a node."""

MOST_FUNCTIONS = 256
"""Functions that a rule remembers: lengths that change from step to step would fill the memory."""

_WITH_SIGN = float, complex
"""Types of numbers of which equal ones may differ: 0.0 and -0.0."""

_WRAP = 1 << 63
"""Node attributes print negative dimensions as unsigned 64-bit numbers."""


class Made(NamedTuple):
    """What a rule makes of a node.

    Attributes:
        fn: Called with the operands' values.
        flops: Multiply-add work in FLOP.
        loose: See ``Expr``.
    """

    fn: Fn
    flops: float = 0.0
    loose: bool = False


class From(NamedTuple):
    """Where an operand is found.

    Attributes:
        number: Of the operator's input, found by where it came from; None: only in the slot.
        slot: The node's saved tensor of this name, which is tried first; "": none.
        loose: Whether an input may be loose: see ``Expr``.
    """

    number: int | None
    slot: str = ""
    loose: bool = False


class Operands(Protocol):
    """Finds the operands of a node: the builder of a block's recipes."""

    checks_weights: bool

    def value(self, node: Node | None, output_nr: int, *, loose: bool = False) -> Operand | None: ...

    def packed_operand(self, packed: Any) -> Operand | None: ...


class DeclaredRule:
    """A rule of which everything but the operands is declared. See [Note: declared rules].

    Args:
        make: Returns the function, or None where the value is not recomputed; its arguments are what ``constants``,
            ``metadata`` and ``facts`` read, in this order.
        operands: Where the function's arguments are found, in order.
        constants: Names of attributes that the node saved and that are no tensors.
        metadata: What it depends on of the value: ``"shape"``, ``"dtype"``, ``"device"``.
        facts: What else it depends on.
    """

    def __init__(
        self,
        make: Callable[..., Fn | Made | None],
        operands: Sequence[From],
        *,
        constants: Sequence[str] = (),
        metadata: Sequence[str] = (),
        facts: Sequence[Fact] = (),
    ) -> None:
        self._make, self._metadata, self._facts = make, metadata, facts
        self._operands = [(o.slot and "_raw_saved_" + o.slot, o.number, o.loose) for o in operands]
        self._constants = ["_saved_" + name for name in constants]
        self._known: dict[tuple[Any, ...], tuple[Made | None]] = {}

    def expression(self, name: str, node: Node, output_nr: int, sources: Operands) -> Expr | None:
        """Return the expression of output ``output_nr`` of a node; None if it is not recomputed or lacks an operand.

        Args:
            name: The node's.
            node: The node.
            output_nr: Index of the value among the operator's outputs.
            sources: Finds the operands.
        """
        key: list[Any] = []
        for attribute in self._constants:
            constant = getattr(node, attribute)
            key.append(str(constant) if constant.__class__ in _WITH_SIGN else constant)
        metadata = node._input_metadata[output_nr]
        for attribute in self._metadata:
            fact = getattr(metadata, attribute)
            key.append(tuple(fact) if attribute == "shape" else fact)  # else a list
        for read in self._facts:
            key.append(read(node, output_nr))
        try:
            known = self._known.get(tuple(key))
        except TypeError:  # a length that is a symbol
            known = (self._made(node, output_nr),)
        if known is None:
            if len(self._known) >= MOST_FUNCTIONS:
                self._known.clear()
            known = self._known[tuple(key)] = (self._made(node, output_nr),)
        made = known[0]
        if made is None:
            return None
        found: list[Operand] = []
        functions = node.next_functions
        for slot, number, loose in self._operands:
            operand = None
            if slot:
                packed = getattr(getattr(node, slot, None), "data", None)
                # As ``packed_operand`` does, without the call: what takes part of the model's memory away is rare.
                if type(packed) is Ticket and sources.checks_weights and packed.probe._version == packed.version:
                    operand = packed
                elif packed is not None:
                    operand = sources.packed_operand(packed)
            if operand is None and number is not None and number < len(functions):
                operand = sources.value(*functions[number], loose=loose)
            if operand is None:
                return None
            found.append(operand)
        dtype = metadata.dtype
        return Expr(made.fn, tuple(found), key=(name, dtype), flops=made.flops, dtype=dtype, loose=made.loose)

    def _made(self, node: Node, output_nr: int) -> Made | None:
        constants = [signed(getattr(node, attribute)) for attribute in self._constants]
        metadata = [getattr(node._input_metadata[output_nr], attribute) for attribute in self._metadata]
        made = self._make(*constants, *metadata, *(fact(node, output_nr) for fact in self._facts))
        return made if made is None or isinstance(made, Made) else Made(made)


def signed(value: Any) -> Any:
    """Return a node's attribute with its negative numbers as such."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value - 2 * _WRAP if value >= _WRAP else value
    return tuple(map(signed, value)) if isinstance(value, tuple) else value  # pyright: ignore


def output_number(node: Node, output_nr: int) -> int:
    """Return the number of the output itself."""
    return output_nr


def input_shape(node: Node, index: int) -> tuple[int, ...] | None:
    """Return the shape of an operator's input ``index``; None if it needs no gradient."""
    functions = node.next_functions
    source, output_nr = functions[index] if index < len(functions) else (None, 0)
    if source is None:
        return None
    return tuple(source.variable.shape if type(source) is AccumulateGrad else source._input_metadata[output_nr].shape)
