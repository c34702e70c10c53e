"""Blocks of which a loaded plan keeps everything run without hooks, as under the plan of ``Auto`` that was saved.

A pass with hooks shows what they save. If that is clearly more than was planned, they keep their hooks, under which the
plan keeps no more bytes; so they do if graphs overlap, which together keep no more only under hooks.
"""

from __future__ import annotations

import logging
import weakref

from ebbtide.base.actions import Action
from ebbtide.base.units import format_size
from ebbtide.engine import Engine
from ebbtide.engine.timed import TimedStep
from ebbtide.engine.timing import GROWTH, StepTimer
from ebbtide.planner import TablePlan
from ebbtide.store.meter import meter_for

logger = logging.getLogger("ebbtide")


def warn_of_unplanned(engine: Engine) -> None:
    """Warn if an engine's first pass saved clearly other storages than those that a loaded plan was made for."""
    plan = engine.plan
    if not isinstance(plan, TablePlan):
        return
    saved, planned = engine.last_tally.unique, plan.predicted.saved_bytes
    without_row = {
        (name, site): candidate.nbytes
        for name, known in engine.known_sites.items()
        for (site, _), candidate in known.candidates.items()
        if (name, site) not in plan.actions
    }
    again = "hint: make it again with this model, dtype and length of batches, or save one that policy 'auto' measured"
    if (unplanned := sum(without_row.values())) > (GROWTH - 1) * saved:
        logger.warning(
            "%s of the %s that blocks save have no row in the plan: the heuristic treats them; %s",
            format_size(unplanned), format_size(saved), again,
        )  # fmt: skip
    elif saved > GROWTH * planned:
        logger.warning(
            "blocks save %s, and the plan is for %s: it keeps no more bytes than planned; %s",
            format_size(saved), format_size(planned), again,
        )  # fmt: skip


def let_kept_blocks_run_plain(engine: Engine) -> None:
    """Let the blocks of which a loaded plan keeps everything run without hooks once a pass has shown what they save."""
    plan = engine.plan
    if not isinstance(plan, TablePlan):
        return
    treated = {name for (name, _), action in plan.actions.items() if action is not Action.KEEP}
    kept, found, planned = {name for name, _ in plan.actions} - treated, weakref.ref(engine), plan.predicted
    most = GROWTH * planned.saved_bytes

    def saw_step(step: TimedStep) -> bool:
        if (engine := found()) is not None and engine.timer is not None:
            engine.timer.unhooked = frozenset(kept if step.alone and step.saved_bytes <= most else ())
            engine.timer.planned(step.saved_bytes)
        return False

    if kept:
        engine.timer = StepTimer(meter_for(engine.tier), saw_step)
        engine.timer.want()
