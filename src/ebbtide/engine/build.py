"""Build a recipe from autograd's graph when a tensor is saved.

[Note: operand sources]
The pack hook gets a tensor with its ``grad_fn``, and that node names its operands. An operand is searched in this
order: a ticket of this block's forward for the same value (``grad_fn`` and ``output_nr``); the node's own saved slot,
whose packed object is a ticket and is read without unpacking; a weight (the next node is ``AccumulateGrad``); the
recipe of the next node in ``next_functions``, as an inner expression. A value counts as saved if a view of it was: a
linear layer over three dimensions saves its input flattened. A block input is an operand only if it was saved. An alias
of an unsaved live tensor never is: changing it in place later is legal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.engine.declared import DeclaredRule, input_shape, signed
from ebbtide.engine.guard import Watched
from ebbtide.engine.inputs import AccumulateGrad, BlockInputs, node_of
from ebbtide.engine.layout import Layout
from ebbtide.engine.modules import InPlace, Record, Running, in_place, record_of
from ebbtide.engine.recipe import MAX_DEPTH
from ebbtide.engine.slots import UnreadableSlot, packed_in
from ebbtide.engine.storages import storage_key
from ebbtide.engine.tickets import UNCHECKED, Expr, KeptTicket, LightTicket, Operand, Ticket
from ebbtide.engine.weights import Weights

if TYPE_CHECKING:
    from torch.autograd.graph import Node

logger = logging.getLogger("ebbtide.engine")

Rule = Callable[["NodeView"], "Expr | None"] | DeclaredRule

_PASSED_ON = {"ViewBackward0", "UnsafeViewBackward0", "ToCopyBackward0", "PermuteBackward0", "TransposeBackward0"}
"""What leaf modules do with the value that they compute: a linear layer over three dimensions, a norm in float32."""


class NodeView:
    """A rule's view of an autograd node: its constants and its operands.

    Args:
        node: The autograd node of the operator that made the value.
        output_nr: Index of the value among the operator's outputs.
        builder: Finds operands.
    """

    __slots__ = ("_builder", "node", "output_nr")

    def __init__(self, node: Node, output_nr: int, builder: Builder) -> None:
        self.node, self.output_nr, self._builder = node, output_nr, builder

    def constant(self, name: str) -> Any:
        """Return the saved attribute ``name`` that is not a tensor (``"dim"``, ``"alpha"``)."""
        return signed(getattr(self.node, "_saved_" + name))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return tuple(self.node._input_metadata[self.output_nr].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the value."""
        return self.node._input_metadata[self.output_nr].dtype

    @property
    def device(self) -> torch.device:
        """Device of the value."""
        return self.node._input_metadata[self.output_nr].device

    @property
    def record(self) -> Record | None:
        """The record of the leaf module that computed this value in this block's forward, if there is one."""
        return self._builder.records.get((id(self.node), self.output_nr))

    @property
    def in_place(self) -> InPlace | None:
        """What the layer that computed this value in place computes, if there is one."""
        return self._builder.in_place.get((id(self.node), self.output_nr))

    def slot(self, name: str) -> Operand | None:
        """Return the node's own saved tensor ``name`` as an operand; None if it saved none."""
        return self._builder.packed_operand(_packed(self.node, name))

    def slots(self, name: str) -> tuple[list[Operand | None], list[bool]]:
        """Return the node's saved list of tensors ``name``.

        Returns:
            The operands, None for unavailable ones; and for each place in the list whether it has a tensor.
        """
        packed = [packed_in(saved) for saved in getattr(self.node, "_raw_saved_" + name)]
        present = [p is not None for p in packed]
        return [self._builder.packed_operand(p) for p in packed if p is not None], present

    def saved(self, name: str) -> bool:
        """Whether the node saved a tensor ``name``."""
        return _packed(self.node, name) is not None

    def input_shape(self, index: int) -> tuple[int, ...] | None:
        """Return the shape of the operator's input ``index``; None if it needs no gradient."""
        return input_shape(self.node, index)

    def input(self, index: int, *, loose: bool = False) -> Operand | None:
        """Return the operator's input ``index`` as an operand, by where it came from.

        Args:
            index: Its number.
            loose: Whether it may be loose: see ``Expr``.
        """
        functions = self.node.next_functions
        return self._builder.value(*functions[index], loose=loose) if index < len(functions) else None

    def needs_no_gradient(self, index: int) -> bool:
        """Whether the operator's input ``index`` takes no gradient, so that the graph does not have its origin."""
        functions = self.node.next_functions
        return index >= len(functions) or functions[index][0] is None

    def operand(self, name: str, index: int) -> Operand | None:
        """Return input ``index``, by its saved slot ``name`` or by where it came from."""
        saved = getattr(self.node, "_raw_saved_" + name, None) if name else None
        found = None if saved is None else self._builder.packed_operand(getattr(saved, "data", None))
        if found is None:
            functions = self.node.next_functions
            found = self._builder.value(*functions[index]) if index < len(functions) else None
        return found

    def weight(self, tensor: torch.Tensor | None) -> Operand | None:
        """Return a weight of a recorded module as an operand."""
        return self._builder.weight(tensor) if tensor is not None else None


class Builder:
    """Builds recipes during one block's forward; its state is dropped at the end.

    Args:
        rules: Node name to rule.
        weights: The block's weights.
        inputs: The block's inputs.
        saved_input: Returns the ticket of an input, if it was saved.
        watch: Returns a weight, at a version, as an operand. See [Note: watched weights].
        checks_weights: Whether reading a weight checks that it was not changed in place.
    """

    def __init__(
        self,
        rules: dict[str, Rule],
        weights: Weights,
        inputs: BlockInputs,
        saved_input: Callable[[torch.Tensor], Ticket | KeptTicket | None],
        watch: Callable[[torch.Tensor, int | None], Watched],
        *,
        checks_weights: bool = True,
    ) -> None:
        self.rules, self._weights, self.checks_weights = rules, weights, checks_weights
        self._inputs, self._saved_input, self._watch = inputs, saved_input, watch
        self._watched: dict[tuple[Layout, int, int], Watched] = {}
        self.tickets: dict[tuple[int, int], Ticket | LightTicket] = {}
        self._of_views: dict[tuple[int, int], tuple[Ticket | KeptTicket, Layout]] = {}
        self.records: dict[tuple[int, int], Record] = {}
        self.in_place: dict[tuple[int, int], InPlace] = {}  # values of version 1
        self._known: dict[tuple[int, int], Expr | None] = {}
        self._depth = 0  # of rules that run inside one another: a rule may need the recipe of an operand
        self._cut: list[tuple[int, int]] = []  # values without a recipe because that was too deep
        self._alive: list[Node] = []  # an id is valid only while its node is alive

    def note_ticket(self, node: Node, output_nr: int, ticket: Ticket | LightTicket) -> None:
        """Remember the ticket of a value."""
        self._alive.append(node)
        key = (id(node), output_nr)
        known = self.tickets.setdefault(key, ticket)
        if known is not ticket and known.changed:  # under no_grad: the node stays, the value does not
            self.tickets[key] = ticket

    def note_view(self, base: torch.Tensor, ticket: Ticket | KeptTicket) -> None:
        """Remember the ticket of a view of a value."""
        node = base.grad_fn
        known = self._of_views.get((id(node), base.output_nr))
        if node is not None and (known is None or known[0].changed):
            self._alive.append(node)
            self._of_views[id(node), base.output_nr] = ticket, Layout.of(base)

    def note_module(self, running: Running, output: torch.Tensor) -> None:
        """Remember which leaf module has just computed a value: only nodes made while it ran are its own."""
        if output._version == 1:
            self.note_in_place(running, output)
        node, record = node_of(output), record_of(running)
        number = output.output_nr
        while node is not None and record is not None and node._sequence_nr() >= running.since:
            self._alive.append(node)
            self.records.setdefault((id(node), number), record)  # modules around it only pass it on
            if type(node).name(node) not in _PASSED_ON:  # as ``name_of``, without the call
                break
            node, number = node.next_functions[0]

    def note_in_place(self, running: Running, tensor: torch.Tensor) -> None:
        """Remember that a layer in place has computed all of a value, of version 1: nothing else has written it."""
        base = tensor if tensor._base is None else tensor._base
        node = node_of(base)
        if node is None or node._sequence_nr() < running.since:
            return
        complete = base is tensor or Layout.of(tensor).covers(base.untyped_storage().nbytes())
        if complete and (computed := in_place(running.module)) is not None:
            self._alive.append(node)
            self.in_place[id(node), base.output_nr] = computed

    def recipe(self, node: Node, output_nr: int) -> Expr | None:
        """Return the recipe of a value from its node, or None if no rule covers it or an operand is missing."""
        key = (id(node), output_nr)
        if key in self._known:
            return self._known[key]
        if self._depth == MAX_DEPTH:
            self._cut.append(key)
            return None
        self._alive.append(node)
        self._known[key] = expr = None  # a value cannot be its own operand
        # Operands of an earlier pass may have changed since.
        name = type(node).name(node)
        rule = self.rules.get(name) if self._weights.model.since <= node._sequence_nr() else None
        if rule is not None:
            self._depth += 1
            try:
                if isinstance(rule, DeclaredRule):
                    expr = rule.expression(name, node, output_nr, self)
                else:
                    expr = rule(NodeView(node, output_nr, self))
            except (MemoryError, torch.OutOfMemoryError):  # says nothing about the rule
                raise
            except UnreadableSlot:
                expr = None
            except RecursionError:  # says nothing about the rule either
                self._cut.append(key)
            except Exception as error:  # a failing rule must not end the step
                what = f"{type(error).__name__}: {error}"
                logger.warning("the rule for %s failed and is left out: %s", name, what)  # no traceback is kept alive
                self.rules.pop(name, None)
            finally:
                self._depth -= 1
            if expr is not None and expr.depth > MAX_DEPTH:
                expr = None
        if self._cut and not self._depth:
            for cut in self._cut:  # recomputed on its own, it may have a recipe
                self._known.pop(cut, None)
            self._cut.clear()
        elif self._cut and expr is None:
            self._cut.append(key)
        self._known[key] = expr
        return expr

    def value(self, node: Node | None, output_nr: int, *, loose: bool = False) -> Operand | None:
        """Return a value as an operand. See [Note: operand sources]."""
        if node is None:
            return None
        key = (id(node), output_nr)
        ticket = self.tickets.get(key)
        if ticket is None and key in self._of_views:
            ticket = self._by_view(key)
        if ticket is not None:
            return self._usable(ticket)
        if type(node) is AccumulateGrad:  # a weight, or an activation that somebody else holds and may change
            return self.weight(node.variable) if self._weights.include(node.variable) else None
        if key not in self._inputs.values:
            inner = self.recipe(node, output_nr)
            return None if inner is None or (inner.loose and not loose) else inner
        input_tensor = self._inputs.value(key)
        ticket = None if input_tensor is None else self._saved_input(input_tensor)
        return None if ticket is None else self._usable(ticket)

    def _by_view(self, key: tuple[int, int]) -> Ticket | LightTicket | None:
        """Return the ticket of a value of which a view was saved, if that view's entry stands for all of it."""
        ticket, layout = self._of_views[key]
        if isinstance(ticket, KeptTicket):
            kept_ticket = self.tickets[key] = ticket.over(layout)
            return kept_ticket
        if layout.first < ticket.entry.first or layout.last > ticket.entry.last:
            return None
        full_ticket = self.tickets[key] = Ticket(ticket.entry, layout, ticket.run, ticket.probe, ticket.version)
        return full_ticket

    def packed_operand(self, packed: Any) -> Operand | None:
        """Return what a slot holds as an operand."""
        if isinstance(packed, Ticket):
            sure = self.checks_weights and packed.probe._version == packed.version
            return packed if sure else self._usable(packed)
        if isinstance(packed, LightTicket):
            return self._usable(packed)
        if isinstance(packed, torch.Tensor) and _is_number(packed):
            with torch._C._DisableTorchDispatch():  # a mode above would be handed the number itself, and fail
                number = packed.item()
            return Expr(lambda: number, (), key=("number", type(number)))  # type: ignore[arg-type, return-value]
        return None

    def weight(self, tensor: torch.Tensor) -> Operand | None:
        """Return a parameter or buffer as an operand.

        None if its bytes will be missing in backward, or if it may have changed since an operator read it, which only
        its version at the beginning of the pass shows.
        """
        version = self._weights.model.version(tensor)
        return None if version is None or not self._weights.usable(tensor) else self.watched(tensor, version)

    def watched(self, weight: torch.Tensor, version: int) -> Watched:
        """Return a weight, or a view of one, that was read at a version, as an operand."""
        key = (Layout.of(weight), storage_key(weight.untyped_storage()), version)
        found = self._watched.get(key)
        if found is None:
            checked = self.checks_weights and version != UNCHECKED
            found = self._watched[key] = self._watch(weight, version if checked else None)
        return found

    def _usable(self, ticket: Ticket | LightTicket) -> Operand | None:
        if isinstance(ticket, Ticket):
            if ticket.probe._version != ticket.version:
                return None
            moved = not self.checks_weights and not self._weights.can_recompute(ticket.entry.recipe)
            return None if moved or ticket.entry.part_only else ticket
        if ticket.version != UNCHECKED and ticket.tensor._version != ticket.version:
            return None
        if not ticket.weight:
            return ticket
        return self.watched(ticket.tensor, ticket.version) if self._weights.usable(ticket.tensor) else None


def _packed(node: Node, name: str) -> Any:
    """Return what was packed into a node's slot; None if it saved nothing there."""
    saved = getattr(node, "_raw_saved_" + name, None)
    return None if saved is None else packed_in(saved)


def _is_number(packed: torch.Tensor) -> bool:
    """Whether a slot that no hook saw holds a Python number: torch gives those the widest types."""
    wide = packed.dtype in (torch.float64, torch.int64, torch.complex128, torch.bool)
    return packed.ndim == 0 and wide and not packed.requires_grad and not packed._version
