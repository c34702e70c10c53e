"""Other offloaders: a second handle, and saved-tensor hooks that are not ours, around a block or inside it.

[Note: two offloaders]
Only the innermost saved-tensor hooks see a tensor. Another offloader's hooks around a block see nothing while ours are
open; opened inside it, as transformers does around the checkpoint in its layers (``offload=True``), they silently
disable ours. Both raise. Hooks that take some of a block's tensors are logged once, and the rest is offloaded.

Code inside a block may also free the memory of what the block saved (``resize_(0)``) and compute it again in backward,
as Megatron's ``recompute_modules`` does. A copy may then still read the memory, a recipe may read it before that, and a
second forward of the block frees what it has just computed. A block's first forward shows that: it raises.

The module of a pack hook identifies the offloader, and the error names the flag that turns it off. torch's compiler
offloads inside compiled code without hooks; its own switch is read.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ebbtide.base.errors import ConflictError
from ebbtide.engine import Block
from ebbtide.engine.run import BlockRun
from ebbtide.wrap.foreign_checkpoints import checkpoint_around, in_reentrant_checkpoint, innermost_hooks
from ebbtide.wrap.forward import is_compiled

logger = logging.getLogger("ebbtide.wrap")


OFFLOADERS = (
    ("trl.", "TRL", "set activation_offloading=False in the trainer's config"),
    ("torchtune.", "torchtune", "set enable_activation_offloading: False in the recipe"),
    (
        "transformer_engine.",
        "TransformerEngine",
        "pass enabled=False to get_cpu_offload_context; leave --cpu-offloading-num-layers of Megatron-LM out",
    ),
    ("megatron.", "Megatron-LM", "leave --fine-grained-activation-offloading and --cpu-offloading-num-layers out"),
    ("verl.", "verl", "set actor_rollout_ref.model.enable_activation_offload=False"),
    ("swift.", "ms-swift", 'set "activation_cpu_offload": false in the JSON file of --fsdp'),
    (
        "torch.autograd.graph.save_on_cpu.",
        "torch's save_on_cpu",
        "remove `with save_on_cpu()`, or unset what opens it (transformers: "
        "activation_checkpointing_kwargs['offload'])",
    ),
)
"""Prefixes of the names of other offloaders' hooks, their names, and how to turn them off, in the versions of
docs/guides/from-other-offloaders.md."""

COMPILED = "torch._functorch.config"


class Inside:
    """Foreign hooks opened inside a block during its forward. See [Note: two offloaders]."""

    def __init__(self) -> None:
        self._looked: Any = None  # at these hooks, last time
        self._found = ""
        self._logged = self._looked_for_freed = False
        self._entered = self._reentrant = False
        self.checkpointed = False
        """Whether the block's first module ran in a checkpoint, and no later one outside of it if that shows: the block
        checkpoints its own forward. Another function may run a module without gradients, too: an implicit layer."""

    def look(self, run: BlockRun) -> None:
        """Inspect the innermost hooks; called when a module of the block begins to run."""
        pack = innermost_hooks()
        if not self._entered:  # a reentrant checkpoint opens no hooks, but runs without gradients
            self._entered = True
            self._reentrant = in_reentrant_checkpoint()
            self.checkpointed = self._reentrant or checkpoint_around(pack) is not None
        elif self._reentrant and self.checkpointed:
            self.checkpointed = not torch.is_grad_enabled()
        if pack is self._looked or getattr(pack, "__self__", None) is run:
            return
        self._looked = pack
        kept = checkpoint_around(pack)
        if kept is not None:
            taken = kept.taken()
            self._found = self._found or ("" if taken is None else f"what a checkpoint keeps is a {_name(type(taken))}")
        elif pack is not None and not isinstance(_owner(pack), BlockRun):
            self._found = self._found or _name(pack)

    def check(self, block: str, run: BlockRun) -> None:
        """Report foreign hooks, after the block's forward.

        Raises:
            ConflictError: Another offloader took all tensors that the block saves, or freed one in the first forward.
        """
        found = self._found
        if found and not run.tally.packs:
            _refuse(f"block {block!r} saves all its tensors under other saved-tensor hooks inside it ({found})")
        if found and not self._logged:
            self._logged = True
            logger.warning(
                "block %r saves a part under other saved-tensor hooks (%s): ebbtide cannot offload that part",
                block, found,
            )  # fmt: skip

        if run.entries and not self._looked_for_freed:
            if (site := run.freed_site()) is not None:
                raise ConflictError(
                    f"block {block!r} freed the memory of {site}, which it had saved, to compute it again in backward",
                    expected="one offloader on a model",
                    hint="unset what frees it (Megatron-LM: recompute_granularity, --recompute-modules)",
                )
            self._looked_for_freed = True

    def forget(self) -> None:
        """Reset after a forward, even a failed one."""
        self._looked, self._found, self._entered = None, "", False


attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Blocks under a live handle, with its attachment: a block may have only one offloader."""


def open_handles(model: nn.Module) -> list[Any]:
    """Return the open handles that offload blocks of ``model``."""
    found = [held() for module in model.modules() if (held := attached.get(module)) is not None]
    return list(dict.fromkeys(attachment.handle for attachment in found if attachment is not None))


def refuse_attached(blocks: Iterable[tuple[nn.Module, Block]]) -> None:
    """Raise if a block has another handle, which the error carries.

    Raises:
        ConflictError: One has.
    """
    for module, block in blocks:
        if module in attached:
            raise ConflictError(
                f"block {block.name!r} is already offloaded by another handle",
                expected="one offloader on a model",
                hint="close the first handle (`error.handle.close()`, with this error as `error`), or keep using it",
                handle=next(iter(open_handles(module)), None),
            )


def refuse_around(block: str, found: Any) -> None:
    """Raise if another offloader is around ours.

    Args:
        block: Its name.
        found: The innermost pack hook around it, or an object that a checkpoint around it keeps; None: there is none.

    Raises:
        ConflictError: Another offloader is on.
    """
    if found is not None and not isinstance(_owner(found), BlockRun):
        _refuse(f"block {block!r} runs under other saved-tensor hooks ({_name(found)})")


def refuse_compiled(blocks: Iterable[tuple[nn.Module, Block]]) -> None:
    """Raise if torch's compiler offloads the saved tensors of compiled blocks.

    Raises:
        ConflictError: Its switch is on, and a block is compiled.
    """
    if not getattr(sys.modules.get(COMPILED), "enable_activation_offloading", False):
        return
    compiled = next((block.name for module, block in blocks if is_compiled(module)), None)
    if compiled is not None:
        raise ConflictError(
            f"block {compiled!r} is compiled, and torch's compiler offloads activations ({COMPILED})",
            expected="one offloader on a model",
            hint=f"set {COMPILED}.enable_activation_offloading = False before the blocks are compiled",
        )


def _refuse(found: str) -> None:
    for prefix, name, unset in OFFLOADERS:
        if f"({prefix}" in found:
            text = f"{found}: {name} offloads activations"
            raise ConflictError(text, expected="one offloader on a model", hint=unset)
    raise ConflictError(
        found,
        expected="one offloader on a model",
        hint="remove that context, or unset its flag (TRL and torchtune: activation_offloading, enable_activation_"
        "offloading; transformers: activation_checkpointing_kwargs['offload'])",
    )


def _owner(pack: Any) -> Any:
    return getattr(pack, "__self__", None)


def _name(thing: Any) -> str:
    """Return the name of a function or class, or that of another object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"
