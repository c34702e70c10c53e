"""The result of ``ebbtide plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.planner.machines import Machine
from ebbtide.planner.profile import Profile
from ebbtide_recipes.plan.config import PlanConfig
from ebbtide_recipes.plan.model import Outline
from ebbtide_recipes.plan.options import Limits, Option, best
from ebbtide_recipes.plan.picture import Pareto


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result.

    Attributes:
        config: The request.
        outline: The model.
        machine: The machine to train on.
        profile: The simulated step.
        room: The memory to fit into.
        options: The cost of each option.
        pareto: The points of the picture; None: not requested.
    """

    config: PlanConfig
    outline: Outline
    machine: Machine
    profile: Profile
    room: Limits
    options: Sequence[Option]
    pareto: Pareto | None = None

    @property
    def recommended(self) -> Option | None:
        """The recommended option; None: none fits."""
        return best(self.options)
