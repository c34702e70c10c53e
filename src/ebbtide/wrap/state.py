"""The state of a block's Python objects: recorded, and restored for a second forward.

[Note: state] A forward may read anything its modules can reach: parameters swapped by ``functional_call``, the active
adapter, a tuple set before each call, values of the previous step, a counter. So all mutable containers reachable from
the modules' attributes are recorded: dictionaries (which hold attributes, parameters, buffers and submodules), lists,
sets, subclasses of these (``Counter``), arrays, and the attributes and slots of other objects, tensors of classes that
are not torch's (8-bit weights) included. Contents are compared by identity; only references and arrays are copied.

A block reaches some hundred containers, and searching for them costs a millisecond, but usually none has changed since
the block's last forward. So a state is used again where all its containers still hold the same: see ``States``.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide.wrap.arrays import MOST_ARRAY_BYTES, MOST_DIGESTED_BYTES, HeldArray, is_writeable, size_of
from ebbtide.wrap.called import is_refused
from ebbtide.wrap.contents import Contents, Slots
from ebbtide.wrap.roles import Role, has_attributes, is_machinery, role, slots_of

MOST = 4000
"""Most containers recorded for one block, besides those of each of its modules; a reference to its trainer may reach
the whole program."""
OF_A_MODULE = 32
"""Containers of a module itself: its attributes, parameters, buffers, and dictionaries of hooks."""

MOST_ELEMENTS = 100_000
"""Most elements of these containers, besides ``ELEMENTS_OF_A_MODULE`` of each module: each forward compares them."""
ELEMENTS_OF_A_MODULE = 256

PROVEN = 2
"""Forwards that found the state of the one before: what a later one changes is found by the next."""

_COPIED = (dict, OrderedDict, defaultdict, list, set, deque)


class State:
    """The current contents of the containers that some modules can reach. See [Note: state].

    Attributes:
        tensors: All tensors that were found.
        generators: All generators, and files that are attributes of the modules, which have a position.
        large_arrays: Arrays that are too large to be recorded.
        too_much: The modules can reach more than is recorded: what they change may not be found.
        complete: It has everything that the modules can reach, and no arrays: ``same`` tells whether anything changed.
        found: Forwards that began with it, after the first.

    Args:
        modules: A block and all modules in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        attributes = [vars(module) for module in modules]
        self._of_modules = {id(x) for own in attributes for x in (own, own.get("_parameters"), own.get("_buffers"))}
        self._held: list[tuple[Any, Any]] = []  # each container and its contents
        self._objects: list[Any] = []
        self._attributes: list[Any] = []  # the dictionary of each object's attributes
        self._contents: Contents | None = None
        self._copied: set[int] = set()  # ids of containers in whose place it has copies
        self.tensors: list[torch.Tensor] = []
        self.generators: list[Any] = [value for own in attributes for value in own.values() if _is_file(value)]
        self.large_arrays: list[Any] = []
        self.too_much = self._collect(deque(attributes)) or sum(map(size_of, self.large_arrays)) > MOST_DIGESTED_BYTES
        arrays = any(isinstance(container, HeldArray) for container, _ in self._held)
        self.complete = not self.too_much and not arrays
        self.found = 0

    def _collect(self, pending: deque[Any]) -> bool:
        """Record what can be reached, the nearest first; return whether that is too much."""
        seen: set[int] = set()
        alive: list[Any] = []  # an id is valid only while its object is alive
        most, left = MOST + OF_A_MODULE * len(pending), MOST_ELEMENTS + ELEMENTS_OF_A_MODULE * len(pending)
        while pending and len(self._held) < most:
            value = pending.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            alive.append(value)
            kind = type(value)
            what = role(kind)
            if what in (Role.DICT, Role.CONTAINER, Role.TUPLE):
                left -= _length(value)
                if left < 0:
                    return True
            match what:
                case Role.TENSOR:
                    self.tensors.append(value)
                    if not is_machinery(kind):
                        pending.append(self._attributes_of(value))
                case Role.GENERATOR:
                    self.generators.append(value)
                case Role.TUPLE:
                    pending += _followed(value)
                case Role.DICT:
                    pending += _followed(self._hold(value).values())
                    if kind is not dict and has_attributes(kind):
                        pending.append(self._attributes_of(value))
                case Role.CONTAINER:
                    pending += _followed(self._hold(value))
                    if has_attributes(kind):
                        pending.append(self._attributes_of(value))
                case Role.ARRAY:
                    if is_writeable(value) and size_of(value) <= MOST_ARRAY_BYTES:
                        self._hold(HeldArray(value))
                    elif is_writeable(value):
                        self.large_arrays.append(value)
                case Role.OBJECT:
                    if has_attributes(kind):
                        pending.append(self._attributes_of(value))
                    if slots := slots_of(kind):
                        pending += _followed(self._hold(Slots(value, slots)).values())
                case Role.PLAIN | Role.FILE:  # a class may return a dictionary of another type
                    continue
        return bool(pending)

    def _hold(self, container: Any) -> Any:
        """Record the contents of a container, and return them."""
        held = _copied(container)
        self._held.append((container, held))
        return held

    def _attributes_of(self, value: Any) -> Any:
        held = vars(value)
        self._objects.append(value)
        self._attributes.append(held)
        return held

    def leave_graphs(self) -> bool:
        """Hold tensors that were computed, such as a metric of the last step, without their graphs, if possible.

        A second forward reads their values. Their graphs would hold the blocks of the last step, whose states would
        hold the graphs of the step before, and so on. So would a list that is replaced in each step: it is copied.

        Returns:
            False: an object that is no module holds one, or a container of another class: these cannot be copied.
        """
        others = [t for t in self.tensors if type(t) is not nn.Parameter]
        instead: dict[int, Any] = {id(t): _without_graph(t) for t in others if _is_computed(t)}
        found = len(instead)
        while found:  # what holds a container that is copied is copied too
            stay = self._of_modules | instead.keys()
            more = [container for container, then in self._held if id(container) not in stay and _holds(then, instead)]
            own = [attributes for attributes in self._attributes if id(attributes) not in self._of_modules]
            objects = any(_holds(attributes, instead) for attributes in own)
            if objects or any(type(container) not in _COPIED for container in more):
                return False
            instead |= {id(container): _empty(container) for container in more}
            found = len(more)
        if not instead:
            return True
        self._copied |= instead.keys()
        self.tensors = [instead.get(id(t), t) for t in self.tensors]
        self._held = [(instead.get(id(c), c), _exchanged(then, instead)) for c, then in self._held]
        self._contents = None
        return True

    def versioned(self) -> list[torch.Tensor]:
        """Return the tensors that have memory now, and a version."""
        return [t for t in self.tensors if (type(t) is nn.Parameter or not is_lazy(t)) and not t.is_inference()]

    @property
    def lazy(self) -> bool:
        """Whether the next forward makes parameters, of ``nn.LazyLinear`` and the like: no second one can."""
        return any(type(t) is not nn.Parameter and is_lazy(t) for t in self.tensors)

    def holds(self, containers: Iterable[Any]) -> bool:
        """Whether the modules reach any of these containers."""
        ids = set(map(id, containers))
        return not ids.isdisjoint(self._copied) or any(id(container) in ids for container, _ in self._held)

    def same(self) -> bool:
        """Whether all containers hold the same objects in the same order. Arrays are left out: see ``complete``."""
        if self._contents is None:
            self._contents = Contents(self._held, self._objects, self._attributes)
        return self._contents.same()

    def now(self) -> State:
        """Return the current contents of the same containers."""
        if self.complete and self.same():
            return self
        state = State(())
        state._held, state.complete = [(container, _copied(container)) for container, _ in self._held], self.complete
        return state

    def restore(self, instead: Mapping[int, Any] = MappingProxyType({}), *, tensors: bool = True) -> None:
        """Restore the contents of the containers.

        Args:
            instead: Id of a value → its replacement.
            tensors: Restore tensors too. FSDP replaces those of its modules itself.
        """
        if not instead and self.complete and self.same():
            return
        for container, then in self._held:
            if isinstance(container, HeldArray):
                container.restore(then)
            elif isinstance(container, Slots):
                container.restore(_exchanged(then, instead), tensors)
            elif not then and not len(container):
                continue  # most are: each module has a dozen dictionaries of hooks
            elif isinstance(container, dict):
                _put_dict(container, _exchanged(then, instead) if instead else then, tensors)
            elif isinstance(container, set):
                if container != then:
                    set.clear(container)
                    set.update(container, then)
            elif tensors or not any(map(_is_tensor, then)):
                values = [_exchanged_value(value, instead) for value in then]
                if [id(value) for value in container] != [id(value) for value in values]:
                    base: Any = deque if isinstance(container, deque) else list
                    base.clear(container)
                    base.extend(container, values)


class States:
    """The last state of each block, used again where nothing changed.

    A kept state holds references: it is dropped where the forward changed something, or if it would keep a graph alive.
    """

    def __init__(self) -> None:
        self.last: dict[nn.Module, State] = {}

    def before(self, module: nn.Module) -> State:
        """Return the state before a forward of the block ``module``."""
        last = self.last.pop(module, None)
        if last is None or not last.same():
            return State(module.modules())
        last.found += 1
        return last

    def after(self, module: nn.Module, state: State) -> None:
        """Keep the state after a forward, if the next forward probably begins with it."""
        if state.found < PROVEN:
            # Not ``is_leaf``: autograd refuses that question of FSDP1's views, which are written in place.
            graph = any(t.requires_grad and not isinstance(t, nn.Parameter) for t in state.tensors)
            if not state.complete or graph or not state.same():
                return
        self.last[module] = state


def _copied(container: Any) -> Any:
    """Return the contents of a container, by the built-in methods and not those of a subclass."""
    if type(container) is dict:
        return container.copy()
    if isinstance(container, OrderedDict):
        return dict(container)  # in its own order
    base: Any = next((base for base in (dict, list, set) if isinstance(container, base)), None)
    if base is not None:
        return base.copy(container)
    return list(container) if isinstance(container, deque) else container.copy()


def _length(container: Any) -> int:
    """Return the number of elements of a container, by the built-in methods and not those of a subclass."""
    base: Any = next(base for base in (dict, list, set, deque, tuple) if isinstance(container, base))
    return base.__len__(container)


def _is_file(value: Any) -> bool:
    """Whether a value is an open file. Standard streams are not: what is written to them is for people."""
    standard = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    return role(type(value)) is Role.FILE and not any(value is stream for stream in standard)


def _is_tensor(value: Any) -> bool:
    return role(type(value)) is Role.TENSOR  # ``isinstance`` raises for a proxy of a dead object


def _followed(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if role(type(value)) is not Role.PLAIN]


def _exchanged(then: Any, instead: Mapping[int, Any]) -> Any:
    """Return the contents of a container with other values in place of some, also of those in tuples."""
    if isinstance(then, dict):
        return {key: _exchanged_value(value, instead) for key, value in then.items()}
    return type(then)(_exchanged_value(x, instead) for x in then) if type(then) in (list, set) else then


def _exchanged_value(value: Any, instead: Mapping[int, Any]) -> Any:
    if role(type(value)) is Role.TUPLE:
        values = [_exchanged_value(x, instead) for x in value]
        if any(map(operator.is_not, values, value)):
            return _tuple_of(type(value), values)
    return instead.get(id(value), value)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach().requires_grad_()
    vars(leaf).update(vars(tensor))
    return leaf


def _tuple_of(kind: Any, values: list[Any]) -> Any:
    try:
        return tuple.__new__(kind, values)
    except TypeError:  # as torch.return_types, which are made by C
        return kind(values)


def _empty(container: Any) -> Any:
    if type(container) is deque:
        return deque(maxlen=container.maxlen)
    return defaultdict(container.default_factory) if type(container) is defaultdict else type(container)()


def _is_computed(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a graph. FSDP1's views of its weights, which raise where they are written, are not meant."""
    plain = tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    return plain and not is_refused(tensor) and not tensor.is_leaf


def _holds(contents: Any, these: Mapping[int, Any]) -> bool:
    """Whether a container's contents, or a tuple among them, include one of these values."""
    values = contents.values() if isinstance(contents, dict) else contents
    return isinstance(contents, (dict, list, set, tuple)) and any(
        id(x) in these or (issubclass(type(x), tuple) and _holds(x, these)) for x in values
    )


def _put_dict(container: dict[Any, Any], then: dict[Any, Any], tensors: bool) -> None:
    base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
    if not tensors:
        then = {k: base.get(container, k, v) if _is_tensor(v) else v for k, v in then.items()}
        then |= {k: v for k, v in base.items(container) if k not in then and _is_tensor(v)}
    keys = base.keys(container)
    if keys != then.keys() or (tensors and [*map(id, keys)] != [*map(id, then)]):
        base.clear(container)  # the order of keys is that of parameters and submodules
        base.update(container, then)
        return
    for key, value in then.items():
        if base.__getitem__(container, key) is not value:
            base.__setitem__(container, key, value)
