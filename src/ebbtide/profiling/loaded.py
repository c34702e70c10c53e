"""Blocks of which a loaded plan keeps everything run without hooks, as under the plan of ``Auto`` that was saved.

A pass with hooks shows what they save. If that is clearly more than was planned, they keep their hooks, under which the
plan keeps no more bytes; so they do if graphs overlap, which together keep no more only under hooks.
"""

from __future__ import annotations

import weakref

from ebbtide.base.actions import Action
from ebbtide.engine import Engine
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import GROWTH, StepTimer
from ebbtide.planner import TablePlan
from ebbtide.store.meter import meter_for


def unhook(engine: Engine, plan: TablePlan) -> None:
    """Let the blocks of which a plan keeps everything run without hooks once a pass has shown what they save.

    Args:
        engine: Carries the plan out.
        plan: The loaded plan.
    """
    treated = {name for (name, _), action in plan.actions.items() if action is not Action.KEEP}
    kept, found, planned = {name for name, _ in plan.actions} - treated, weakref.ref(engine), plan.predicted
    most = GROWTH * (planned.kept_bytes + planned.offloaded_bytes + planned.recomputed_bytes)

    def saw_step(step: TimedStep) -> bool:
        if (engine := found()) is not None and engine.timer is not None:
            engine.timer.unhooked = frozenset(kept if step.alone and step.saved_bytes <= most else ())
            engine.timer.planned(step.saved_bytes)
        return False

    if kept:
        engine.timer = StepTimer(meter_for(engine.tier), saw_step, waited=dict[str, float], memory=False)
        engine.timer.want()
