"""Checkpoints around a block: the tensors they keep are offloaded; the checkpoints themselves stay.

[Note: checkpoints around blocks]
A loop that calls ``checkpoint(layer, x)`` (older transformers, hand-written code) calls the block inside the
checkpoint. Our hooks would be the innermost ones there: everything would be saved and the checkpoint silently
cancelled. So none are opened. The checkpoint keeps the block's inputs as saved tensors, which accept hooks afterwards
(``SavedTensor.register_hooks``): each of them gets ours.

A non-reentrant checkpoint is recognised by its hooks, which are the innermost ones and refer to its frame. A reentrant
one saves its inputs in an autograd node that is made after its function has run: it is found behind the input of the
next block. There is none after the last block, whose inputs are read first in backward and stay.

A torch that does not show what slots hold (before 2.10) does not tell another offloader's object from ours: nothing is
reported, and that offloader keeps the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ebbtide.engine.inputs import node_of
from ebbtide.engine.slots import packed_in, readable
from ebbtide.engine.tickets import LightTicket, Ticket
from ebbtide.engine.wrappers import WrapperTicket

logger = logging.getLogger("ebbtide.wrap")

REENTRANT = "CheckpointFunctionBackward"
NEAR = 16
"""Most nodes searched behind a block's input: a checkpoint's output reaches it directly, or through a sum."""

HAS_HOOKS = "hooks have already been set"

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Kept:
    """The tensors that one checkpoint keeps, as ``torch._C._autograd.SavedTensor`` objects."""

    def __init__(self, saved: Sequence[Any]) -> None:
        self._saved = saved

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that have no hooks yet."""
        return [t for s in self._saved if isinstance(t := packed_in(s), torch.Tensor)]

    def hook(self, hooks: Hooks) -> object | None:
        """Give pack and unpack hooks to tensors without hooks.

        Returns:
            The object that another offloader packed a tensor into, if one was first; else None.
        """
        for saved in self._saved:
            try:
                saved.register_hooks(*hooks)
            except RuntimeError as error:
                if HAS_HOOKS not in str(error):
                    raise
        return self.taken()

    def taken(self) -> object | None:
        """Return the object that another offloader packed a tensor into; None if there is no other."""
        packed = [packed_in(s) for s in self._saved] if readable() else []  # ours, if two blocks share a checkpoint
        ours = (torch.Tensor, Ticket, LightTicket, WrapperTicket, type(None))
        return next((p for p in packed if not isinstance(p, ours) and not _of_checkpoint(type(p))), None)


def name_checkpoints(logged: set[str], block: str, *, known: bool = True) -> None:
    """Log once that the model itself checkpoints blocks, in which ebbtide then has little to choose.

    Args:
        known: Whether the checkpoint is torch's; otherwise what it keeps is not found.
    """
    if "checkpointed" not in logged:
        logged.add("checkpointed")
        logger.warning(
            "the model itself checkpoints blocks (%s, perhaps others): ebbtide %s; "
            "hint: set gradient_checkpointing=False (activation_checkpointing=False in newer transformers), which "
            "TRL's trainers have on by default, or model.disable_gradient_checkpointing() in diffusers, and ebbtide "
            "chooses for each saved tensor "
            "(policy 'minimal': with the memory of checkpointing)",
            block,
            "offloads what these checkpoints keep and chooses nothing else in such blocks"
            if known
            else "offloads nothing of them, as the checkpoint is an autograd function that is not torch's (reversible "
            "layers keep nothing that could be offloaded)",
        )


def in_reentrant_checkpoint() -> bool:
    """Whether the calling code runs in a reentrant checkpoint: in the forward of an autograd function of any name.

    Such a forward has no gradients in either direction; ``no_grad`` leaves those of forward mode on, and in
    ``inference_mode`` no checkpoint keeps anything.
    """
    gradients = torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled()
    return not (gradients or torch.is_inference_mode_enabled())


def innermost_hooks() -> Any:
    """Return the pack hook of the innermost saved-tensor hooks that are open; None: there are none."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return None if top is None else top[0]


def checkpoint_around(pack: Any) -> Kept | None:
    """Return the tensors of the non-reentrant checkpoint whose hook ``pack`` is; None if it is no checkpoint's."""
    if not _of_checkpoint(pack):
        return None
    frame = _frame_of(pack)
    saved: list[Any] | None = getattr(frame, "saved_args", None)
    if saved is None:  # torch before 2.12 keeps them in a node
        node = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
        saved = list(getattr(node, "_raw_saved_tensors", ()))
    return Kept([s for s in saved if hasattr(s, "register_hooks")])


def checkpoint_before(inputs: Iterable[torch.Tensor]) -> Kept | None:
    """Return the tensors of the reentrant checkpoint that produced one of ``inputs``; None if none did."""
    pending = [node_of(t) for t in inputs]
    seen = 0
    while pending and seen < NEAR:
        node, seen = pending.pop(0), seen + 1
        if node is None:
            continue
        if type(node).name(node) == REENTRANT:
            saved: Sequence[Any] = node._raw_saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
            return Kept(saved) if saved else None  # DeepSpeed's, of the same name, has its tensors as an attribute
        pending += [function for function, _ in node.next_functions]
    return None


def _of_checkpoint(thing: Any) -> bool:
    return getattr(thing, "__module__", None) == checkpoint.__module__


def _frame_of(pack: Any) -> Any:
    names, cells = pack.__code__.co_freevars, pack.__closure__ or ()
    return dict(zip(names, cells, strict=False))["frame"].cell_contents if "frame" in names else None
