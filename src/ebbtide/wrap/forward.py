"""The replacement of a module's ``forward``, or of its compiled call.

[Note: copies]
A copied or unpickled model has no offloading: a copied replacement would still call the first model with its weights.
So it pickles as the ``forward`` that it replaces; and ``copy.copy`` and the replicas of ``DataParallel``, which take
the module's state directly, omit it. Their methods are looked up on the instance before its class.
Accelerate copies a module's ``__dict__`` itself (regional compilation) and rebinds each bound method in it, by
``__func__`` and ``__self__``. So the stand-in has these, and the replaced methods of copying are bound methods.
Others copy it as it is (``clone_module`` of learn2learn, ``higher``, a ``__copy__`` that updates a new ``__dict__``).
Such a copy holds the stand-in together with the replaced methods of copying, still bound to the first model: when torch
calls it, the copy's own ``forward`` runs. A module that was only given another's ``forward`` holds none of them.

[Note: the original forward]
A class may get another ``forward`` at any time (a method that is patched or reloaded, ``torch.fx`` that recompiles a
graph), and a module another class. So a stand-in holds only a ``forward`` that the instance had; that of the class is
looked up at each call, and so is each attribute that a stand-in does not have itself: ``inspect`` and ``torch.export``
read the original's code. Code that wraps a module's ``forward`` keeps the bound method of that time, which a later one
of the class does not change. So under a wrapper the stand-in follows the class no further: the ``forward`` that was
looked up last runs. The class's new ``forward`` may be a wrapper around that of an instance, and so call the stand-in
(accelerate, on a graph's class): the one that it replaced runs then. ``torch.jit.script`` accepts only functions
and methods; it compiles modules without stand-ins, which share the weights.

[Note: wrappers that forward]
A wrapper may forward attribute assignments to the inner module: Lightning Fabric's does for each name that the module
has, including ``forward``. The replacement of the wrapper's forward would then recurse into itself. So it is written
into the module's ``__dict__``, bypassing any ``__setattr__``.

[Note: compiled blocks]
Hooks opened in compiled code are a graph break, or an error with ``fullgraph=True``; any difference between blocks,
such as a replaced forward or a module hook, makes torch compile every block separately until it gives up. So compiled
blocks and their modules are left clean: the hooks go around the compiled call, ``_compiled_call_impl``. A block
compiled while a handle is open is found when the next forward of the model begins. If it is traced before that, the
replacement just calls the original forward and reports it: while tracing, Dynamo calls functions marked as constant,
and omits them from the graph. The module hooks inside an eager block do the same if a part of the block is compiled
unnoticed (a method, a function that calls modules): they are removed from that part when the block's forward ends.

[Note: fused layers]
``nn.TransformerEncoderLayer`` has a fused path, of other rounding, which it does not take if any module in it has
hooks. It is for evaluation, with or without gradients around it. So modules of such a layer have no hooks then.

[Note: device graphs]
A device graph replays kernels at fixed addresses. A captured forward (``torch.cuda.graph``) must not query events or
copy to reused memory, so it runs as without ebbtide. A compiled block of ``mode="reduce-overhead"`` saves tensors in
the pool of Inductor's graphs, which checks at each replay which of them are alive: hooks would free none of that pool,
and would cause graphs to be recorded repeatedly.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConflictError

logger = logging.getLogger("ebbtide.wrap")

GRAPH_CAPTURE = "the capture of a device graph"
TORCH_EXPORT = "tracing (torch.export, make_fx)"
INSIDE = "nothing is offloaded inside %s: the model runs there as without ebbtide"

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class StandIn:
    """Calls ``call(forward, args, kwargs)`` wherever the module's ``forward`` is called.

    Args:
        module: The module; its attribute ``name`` is replaced on the instance.
        call: The replacement; it receives the original.
        name: ``"forward"`` or ``"_compiled_call_impl"``.
        traced: Called when the stand-in is compiled into surrounding code, where it has no effect unless ``compiles``.
        compiles: ``call`` may be compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        name: str = "forward",
        *,
        traced: Callable[[], None] | None = None,
        compiles: bool = False,
    ) -> None:
        self._first = behind = getattr(module, name)  # TorchScript writes it into the instance
        self.__doc__, self.__module__ = behind.__doc__, str(getattr(behind, "__module__", ""))
        self._module, self._name, self._call = module, name, call
        self._traced, self._compiles = while_tracing(traced), compiles
        self._own = module.__dict__.get(name)
        self._known = self._followed = self._find()  # a later one of the class may call the stand-in
        for method, without in _COPIED_BY.items():
            if method not in module.__dict__:
                module.__dict__[method] = MethodType(without, module)
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._traced()
            own = self.__wrapped__
            return self._call(own, args, kwargs) if self._compiles else own(*args, **kwargs)
        found = self._find()
        if self._own is None and found is not self._known and _calls(found, self._name):
            return self._first(*args, **kwargs)
        caller = sys._getframe(1)
        called = caller.f_locals.get("self") if caller.f_code in _MODULE_CALLS else None
        if called is not None and called is not self._module and self._copied_to(called):
            own = StandIn.left_out(called.__dict__).get(self._name)
            own = getattr(type(called), self._name).__get__(called) if own is None else own
            return own(*args, **kwargs)
        return self._call(self._bind(found), args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original. See [Note: the original forward]."""
        found = self._find()
        return self._first if getattr(found, "__wrapped__", None) is self else self._bind(found)

    def _find(self) -> Any:
        """Return the original as the instance or its class holds it, or held it before the stand-in was wrapped."""
        if self._own is not None:
            return self._own
        module, name = self._module, self._name
        above = module.__dict__.get(name, self)
        while above is not self and _is_stand_in(above):
            above = above._own
        if above is not self:
            return self._followed
        for parent in type(module).__mro__:
            if name in parent.__dict__:
                if not torch.compiler.is_compiling():  # Dynamo reports side effects
                    self._followed = parent.__dict__[name]
                return parent.__dict__[name]
        return self

    def _bind(self, found: Any) -> Callable[..., Any]:
        if found is self:  # accelerate writes it into a graph's class
            return self._first
        if self._own is None and type(found) is FunctionType and torch.compiler.is_compiling():
            return functools.partial(found, self._module)  # Dynamo of torch 2.8 cannot trace ``__get__``
        bind = None if self._own is not None else getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, self._module, type(self._module))

    def _copied_to(self, module: nn.Module) -> bool:
        """Whether a module's attributes were copied from this one's. See [Note: copies]."""
        return any(getattr(module.__dict__.get(name), "__self__", None) is self._module for name in _COPIED_BY)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the original."""
        if name in ("_own", "_module", "__wrapped__"):  # of an incomplete stand-in
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def __code__(self) -> Any:
        """The code of the original forward, which ``torch.export`` reads."""
        return inspect.unwrap(self.__wrapped__).__code__

    @property
    def __self__(self) -> nn.Module:
        """The module, as of a bound method."""
        return self._module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The forward as a function of a module; of another module it is the original. See [Note: copies]."""
        self._find()  # a wrapper is made of it

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is self._module:
                return self(*args, **kwargs)
            own = getattr(type(module), self._name) if self._own is None else getattr(self._own, "__func__", None)
            return self._own(*args, **kwargs) if own is None else own(module, *args, **kwargs)  # pyright: ignore

        return forward

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """See [Note: copies]."""
        return (getattr, (self._module, self._name)) if self._own is None else (_as_it_is, (self._own,))

    def remove(self) -> None:
        """Restore the original, unless somebody has replaced the stand-in since. Another stand-in may be around it."""
        held = self._module.__dict__
        above = held.get(self._name)
        if above is not self:
            while isinstance(above, StandIn) and above._own is not self:
                above = above._own
            if isinstance(above, StandIn):
                above._own = self._own
        elif self._own is None:
            del held[self._name]
        else:
            held[self._name] = self._own
        if not any(_is_stand_in(value) for value in held.values()):
            for method in _COPIED_BY:
                held.pop(method, None)

    @staticmethod
    def left_out(held: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of a module without stand-ins. See [Note: copies]."""
        kept = {name: value for name, value in held.items() if name not in _COPIED_BY}
        for name, value in held.items():
            if _is_stand_in(value):
                del kept[name]
                own = value._own
                while _is_stand_in(own):  # one around another
                    own = own._own
                if own is not None:
                    kept[name] = own
        return kept


def _calls(forward: Any, name: str) -> bool:
    """Whether a forward calls the caller, directly or through functions, though not by its name: as what it wraps."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    forward = getattr(forward, "__func__", forward)
    code = getattr(forward, "__code__", None) or getattr(type(forward).__call__, "__code__", None)
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in (StandIn.__call__.__code__, _CALL):
        if frame.f_code is code:
            return name not in frame.f_code.co_names  # else it calls itself
        frame = frame.f_back
    return False


_CALL = nn.Module._call_impl.__code__
_MODULE_CALLS = {_CALL, *filter(inspect.iscode, _CALL.co_consts), nn.Module._slow_forward.__code__}
"""Code that calls ``self.forward``: in a module's call, in the function there for module hooks, and while tracing."""


def _is_stand_in(value: Any) -> bool:
    return issubclass(type(value), StandIn)  # ``isinstance`` raises for a proxy of a dead object


def called_attribute(module: nn.Module) -> str:
    """Return the attribute that calls of ``module`` run: if it is compiled, only the compiled call, not ``forward``."""
    return "forward" if module._compiled_call_impl is None else "_compiled_call_impl"


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` was returned by ``torch.compile(block)``: its own forward is the compiled call."""
    return "_orig_mod" in module._modules


def is_scripted(module: nn.Module) -> bool:
    """Whether ``module`` is TorchScript (``torch.jit.script``, ``torch.jit.trace``): it takes no module hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs compiled code, with or without a stand-in."""
    return module._compiled_call_impl is not None or is_compiled_wrapper(module)


def replays_graphs() -> bool:
    """Whether Inductor has made device graphs in this process. Checked with torch 2.13."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    containers = trees.get_obj(trees.local, "tree_manager_containers")
    return any(container.tree_manager is not None for container in containers.values())


def eager_parts(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside a block, with their paths, except those in compiled or scripted parts."""
    below = [m for m in block.modules() if m is not block or is_scripted(m)]
    compiled = [m for m in below if is_compiled(m) or is_scripted(m)]
    left_out = {id(block), *(id(inner) for module in compiled for inner in module.modules())}
    return [(name, module) for name, module in block.named_modules() if id(module) not in left_out]


def encoder_layers(module: nn.Module) -> dict[int, weakref.ref[nn.Module]]:
    """Return which modules, by ``id``, are in which layers with a fused path. See [Note: fused layers]."""
    layers: list[nn.Module] = [layer for layer in module.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    return {id(part): weakref.ref(layer) for layer in layers for part in layer.modules()}


def refuse_compiled_around(model: nn.Module, block: str) -> None:
    """Raise if a module around a block is compiled: our hooks do not run in compiled code.

    Raises:
        ConflictError: One is.
    """
    parts = block.split(".")[:-1]
    for path in (".".join(parts[:n]) for n in range(len(parts) + 1)):
        module = model.get_submodule(path)
        if is_compiled(module):
            raise ConflictError(
                f"block {block!r} is a part of compiled code ({path or 'the model'} is compiled)",
                expected="compiled blocks, or none: hooks inside compiled code would break its graph",
                hint="compile the blocks: `for block in model.layers: block.compile()`; "
                "or put `with ebbtide.offload_saved_tensors():` around the forward",
            )


def in_backward() -> bool:
    """Whether the current code is called by autograd's backward."""
    return torch._C._current_graph_task_id() != -1


def running_transform() -> str | None:
    """Return the name of the transform or tracer that runs the current code; None if there is none."""
    tracer = sys.modules.get("torch.fx._symbolic_trace")
    # The first was not there in torch 2.8; where it is, the second warns.
    is_tracing = getattr(tracer, "is_fx_symbolic_tracing", None) or getattr(tracer, "is_fx_tracing", None)
    if is_tracing is not None and is_tracing():
        return "tracing (torch.fx)"
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        return "torch.func transforms"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:  # pyright: ignore
        return TORCH_EXPORT
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "tracing (torch.jit.trace)"
    return None


def while_tracing(on_trace: Callable[..., None] | None) -> Callable[..., None]:
    """Return a function that Dynamo calls while tracing and omits from the compiled code."""

    def call(*arguments: Any) -> None:
        if on_trace is not None:
            on_trace(*arguments)

    # What torch.compiler.assume_constant_result sets, without importing Dynamo.
    call._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _as_it_is(value: Any) -> Any:
    return value


def _state_without(module: nn.Module) -> Any:
    """Return the state that ``copy`` and ``pickle`` take of a module, without stand-ins."""
    state = type(module).__getstate__(module)
    return StandIn.left_out(state) if isinstance(state, dict) else state


@functools.cache
def _warn_of_replicas() -> None:
    logger.warning(
        "nothing is offloaded in the copies that nn.DataParallel makes of the model in each step; "
        "hint: start one process per device with torchrun and wrap the model in DistributedDataParallel"
    )


def _replica_without(module: nn.Module) -> nn.Module:
    """Return the replica that ``DataParallel`` makes of a module, without stand-ins."""
    _warn_of_replicas()
    replica = type(module)._replicate_for_data_parallel(module)
    replica.__dict__ = StandIn.left_out(replica.__dict__)
    return replica


def _scriptable_without(module: nn.Module) -> nn.Module:
    """Return what ``torch.jit.script`` compiles for a module. See [Note: the original forward]."""
    if is_scripted(module):
        return module
    twins = {id(part): part if is_scripted(part) else part.__new__(type(part)) for part in module.modules()}
    for part in module.modules():
        if not is_scripted(part):
            modules = {name: twins.get(id(child)) for name, child in part._modules.items()}
            twins[id(part)].__dict__ = {**StandIn.left_out(part.__dict__), "_modules": modules}
    twin = twins[id(module)]
    prepare: Callable[[], nn.Module] | None = getattr(twin, "__prepare_scriptable__", None)
    return twin if prepare is None else prepare()


def _reduced_without(module: nn.Module, protocol: Any) -> Any:
    """Return how to pickle a module whose class decides that, such as one of ``torch.fx``, without stand-ins."""

    def cleaned(value: Any) -> Any:
        return StandIn.left_out(value) if isinstance(value, dict) else value

    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str):
        return reduced
    make, arguments, *more = reduced
    return make, tuple(map(cleaned, arguments)), *map(cleaned, more)


_COPIED_BY: dict[str, Callable[..., Any]] = {
    "__getstate__": _state_without,
    "__reduce_ex__": _reduced_without,
    "__prepare_scriptable__": _scriptable_without,
    "_replicate_for_data_parallel": _replica_without,
}
"""Methods that copy a module → their replacements on a module with a stand-in."""
