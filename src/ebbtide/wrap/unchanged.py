"""What a forward changes in the tensors that a block can reach, and in its arguments; what changes these after it.

[Note: renewed parameters] A parameter may get a new version without a change: PEFT computes with experts' parameters
plus adapters (``target_parameters``) by a parametrization that each forward registers and removes again, and torch does
so by ``parameter.set_(parameter)``. A second forward may do that once more, and afterwards the version is set back. So
a parameter whose memory and bytes are the same after a block's first forward may get new versions in its later ones,
and until its backward, too. Then it is compared as weights without versions are, those of FSDP; a write that a later
forward begins is found there. Buffers are different: what forwards write in them often changes nothing at first (a sum
of zeros).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ebbtide.engine.fingerprint import Compared
from ebbtide.engine.guard import Watched, WeightGuard
from ebbtide.engine.passes import Pass
from ebbtide.engine.run import BlockRun
from ebbtide.engine.tickets import version_probe
from ebbtide.wrap.called import Called, is_refused
from ebbtide.wrap.outside import Snapshot


def unchanged(
    own: Sequence[torch.Tensor], versions: Sequence[int], before: Sequence[Watched], guard: WeightGuard
) -> bool:
    """Return whether a forward has left the tensors of a block as they were.

    Args:
        own: The tensors.
        versions: Those that they had.
        before: All their bytes, in a first forward: some kernels do not bump the version of a changed tensor, such as
            batch norm's of its running statistics.
        guard: Knows the parameters that get new versions without a change; a first forward adds to them.
    """
    if not all(watched.same for watched in before):
        return False
    new = [i for i, (t, then) in enumerate(zip(own, versions, strict=True)) if t._version != then]
    if before:
        stay = (own[i] for i in new if not before[i].replaces(own[i]))
        guard.renew([t for t in stay if type(t) is nn.Parameter])
    return all(own[i] in guard.renewed for i in new)


class Unseen:
    """What a forward may do without a new version of a tensor: compared around a block's first forward only."""

    def __init__(self, own: Sequence[torch.Tensor], called: Called) -> None:
        self._weights = [t for t in own if isinstance(t, nn.Parameter)]  # FSDP1's views refuse ``is_leaf``
        self._left = Snapshot(_left_on(self._weights))
        arguments = [x for x in called.tensors if not x.is_inference()]
        self._arguments = [(x, x.requires_grad, Watched(x, None, Compared.FULL)) for x in arguments]

    def why(self) -> str | None:
        """Return why a second forward would differ, if it would."""
        if not self._left.same(_left_on(self._weights)):
            return "write gradients or register hooks of their weights, which a second forward would do again"
        if any(needed and not x.requires_grad for x, needed, _ in self._arguments):
            return "detach their inputs, which a second forward cannot"
        if not all(watched.same for _, _, watched in self._arguments):
            return "change their inputs, which a second forward would change again"
        return None


class WatchedInputs:
    """The tensors that the first forwards of blocks were called with, by kind, in the latest pass of each.

    Not every operator saves its inputs: a cast, a sum and dropout do not. So a model may change what a block got in
    place (``x += block(x)``): ordinary backward never reads it, but a second forward does. Once the pass has ended, a
    change may come after its backward, and is nothing to a second forward.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[weakref.ref[Pass], list[tuple[torch.Tensor, int]]]] = {}

    def add(self, run: BlockRun, called: Called) -> None:
        """Add those of a call; their memory is not held."""
        known = self.kinds.get(run.block.kind)
        if known is None or known[0]() is not run.pass_:
            known = self.kinds[run.block.kind] = weakref.ref(run.pass_), []
        for x in called.tensors:
            plain = type(x) is torch.Tensor and x.layout is torch.strided and not (x.is_nested or x.is_inference())
            if plain and not is_refused(x):
                known[1].append((version_probe(x, run.engine.empty(x)), x._version))

    def changed(self) -> list[str]:
        """Return the kinds of which one was changed in place after its block's forward."""
        of_live_passes = [
            (kind, probes)
            for kind, (reference, probes) in self.kinds.items()
            if (pass_ := reference()) is not None and not pass_.ended
        ]
        return [kind for kind, probes in of_live_passes if any(probe._version != at for probe, at in probes)]


def _left_on(weights: Sequence[torch.Tensor]) -> list[Any]:
    """Return what backwards and hooks leave on weights: gradients, and the numbers of hooks."""
    hooks = ((weight._backward_hooks, weight._post_accumulate_grad_hooks) for weight in weights)
    return [*(weight.grad for weight in weights), *(key for two in hooks for one in two for key in one or ())]
