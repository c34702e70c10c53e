"""Plans determined by a policy alone: all but those that ``Auto`` makes from measured steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ebbtide.base.actions import ALWAYS, Action, Candidate, Explained
from ebbtide.base.errors import ConfigError
from ebbtide.config import POLICIES, Auto, Inputs, Keep, Minimal, Offload, Policy

CHECKPOINT_ABOVE = 3.0
"""A block whose bytes without a recipe exceed this many times its inputs is checkpointed under ``Minimal``."""

CHEAP_FLOP_PER_BYTE = 4.0
"""``Auto`` recomputes tensors that cost no more than this: element-wise chains, depthwise convolutions of a few taps.
No matrix product of a useful width is as cheap."""


@dataclass(frozen=True, repr=False)
class PolicyPlan(Explained):
    """The plan that a policy alone determines: see ``ebbtide.base.actions.StandingPlan`` and ``SavablePlan``."""

    policy: Policy
    name: str
    text: str

    reads_kept_bytes = False

    @property
    def recomputes(self) -> bool:
        """Whether anything may be recomputed."""
        return isinstance(self.policy, (Auto, Minimal))

    def stands_until(self, candidate: Candidate) -> int:
        """Return that it does not matter how much is kept."""
        return ALWAYS

    def explain(self) -> str:
        """Describe the policy."""
        return self.text

    def save(self, path: str | Path) -> None:
        """Raise: the plan is determined by its policy.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"the plan of policy {self.name!r} follows from the policy",
            expected="a plan of Auto, of make_plan or of a plan file, or a mix of Minimal",
            hint=f"nothing needs to be saved: pass policy={self.name!r}",
        )

    def choose(self, candidate: Candidate) -> Action:
        """Return the action of a storage."""
        match self.policy:
            case Keep():
                return Action.KEEP
            case Inputs():
                return Action.OFFLOAD if candidate.block_input else Action.KEEP
            case Offload():
                most_flops = -1.0
            case Minimal():
                most_flops = math.inf
            case Auto():
                most_flops = CHEAP_FLOP_PER_BYTE * candidate.nbytes
        flops = candidate.recompute_flops
        return Action.RECOMPUTE if flops is not None and flops <= most_flops else Action.OFFLOAD

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return CHECKPOINT for a block that the rules cover badly, under ``Minimal``."""
        too_much = input_bytes > 0 and must_keep_bytes > CHECKPOINT_ABOVE * input_bytes
        return Action.CHECKPOINT if too_much and isinstance(self.policy, Minimal) else Action.KEEP


def plan_for(policy: Policy) -> PolicyPlan:
    """Return the plan that ``policy`` alone determines."""
    match policy:
        case Keep():
            text = "everything stays on the device; bytes are counted, nothing is saved"
        case Offload():
            text = (
                "every storage of min_bytes or more is offloaded, but for the end of a forward, which backward reads "
                "first; nothing is recomputed"
            )
        case Inputs():
            text = "block inputs are offloaded; all other saved tensors stay on the device"
        case Minimal():
            text = (
                "everything with a recompute rule is recomputed, matrix products too; block inputs, attention outputs "
                "and the rest are offloaded; blocks that the rules cover badly are checkpointed"
            )
        case Auto():
            text = (
                "heuristic: cheap tensors are recomputed (element-wise chains, casts, norms, views: at most "
                f"{CHEAP_FLOP_PER_BYTE:g} FLOP a byte), the rest is offloaded"
            )
    return PolicyPlan(policy, next(name for name, kind in POLICIES.items() if isinstance(policy, kind)), text)
