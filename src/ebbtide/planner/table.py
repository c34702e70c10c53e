"""A plan as a table: an action for every block and site, and the predicted cost."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ebbtide.base.actions import ALWAYS, Action, Candidate, Explained, NoRecipe, Plan, Site
from ebbtide.base.errors import ConfigError, DataError, few
from ebbtide.base.files import check_json_name, write_text
from ebbtide.base.units import format_size
from ebbtide.config import Auto
from ebbtide.planner.policies import plan_for
from ebbtide.planner.solve import Solution, keep_everything

logger = logging.getLogger("ebbtide")

SCHEMA = 2
"""Schema of the plan file."""

NOISE_PERCENT = 1e-9
"""A smaller overhead is the rounding of sums of seconds."""

MILLISECONDS_PER_MB = 1e3 * 1e6
"""Milliseconds per MB in one second per byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted cost of a plan.

    Attributes:
        step_seconds: Time of the step.
        overhead_percent: Extra time relative to the step that keeps everything.
        bound_percent: Lower bound of it for any schedule that keeps as few bytes at the start of backward.
        peak_bytes: Most device memory.
        peak_everything_kept_bytes: The same when everything is kept.
        kept_bytes: Saved bytes that stay on the device.
        offloaded_bytes: Bytes that are offloaded.
        moved_bytes: Bytes across the link, each way; fewer if stored in a narrower type.
        recomputed_bytes: Bytes that are dropped and recomputed.
    """

    step_seconds: float
    overhead_percent: float
    bound_percent: float
    peak_bytes: int
    peak_everything_kept_bytes: int
    kept_bytes: int
    offloaded_bytes: int
    moved_bytes: int
    recomputed_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that blocks save."""
        return self.kept_bytes + self.offloaded_bytes + self.recomputed_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TablePlan(Explained):
    """Looks up the action of a site; unknown sites follow the heuristic, but for those of ``keeps_others``.

    A batch that saves more than the profiled one keeps no more bytes: the excess is offloaded.

    Attributes:
        name: Short name for logs and reports.
        actions: Path of the block and site → action.
        predicted: Its predicted cost.
        reasons: One line per site kind.
        keeps_others: Blocks without a row keep everything; else they follow the heuristic. Not in a plan file.
        heuristic: The plan for sites without a row. Not in a plan file.
    """

    recomputes = True
    name: str
    actions: Mapping[tuple[str, Site], Action]
    predicted: Prediction
    reasons: tuple[str, ...] = ()
    keeps_others: bool = field(default=False, compare=False)
    heuristic: Plan = field(default_factory=lambda: plan_for(Auto()), compare=False)
    _inputs: Mapping[str, Action] = field(init=False, compare=False)
    """Block → action for its inputs, if it is checkpointed."""
    _without_recomputes: Set[str] = field(init=False, compare=False)
    """Blocks in which nothing is recomputed."""
    _planned: Set[str] = field(init=False, compare=False)
    """Blocks that have a row."""

    def __post_init__(self) -> None:
        checkpointed = {name for (name, _), action in self.actions.items() if action is Action.CHECKPOINT}
        inputs = dict.fromkeys(checkpointed, Action.OFFLOAD)
        for (name, _), action in self.actions.items():
            if name in checkpointed and action is not Action.CHECKPOINT:
                inputs[name] = action
        object.__setattr__(self, "_inputs", inputs)
        recomputing = {name for (name, _), action in self.actions.items() if action is Action.RECOMPUTE}
        object.__setattr__(self, "_planned", {name for name, _ in self.actions})
        object.__setattr__(self, "_without_recomputes", self._planned - recomputing)

    def choose(self, candidate: Candidate) -> Action:
        """Return the action of a storage."""
        action = self.actions.get((candidate.block_name, candidate.site))
        if candidate.block_name in self._inputs:
            # A checkpoint's input is saved by the block itself, not by a module in it.
            if candidate.block_input and not candidate.site.module:
                return self._inputs[candidate.block_name]
            action = None
        if self._keeps(candidate.block_name):
            return Action.KEEP
        if action is None:
            return self.heuristic.choose(candidate)
        if action is Action.RECOMPUTE and candidate.recompute_flops is None:
            return Action.OFFLOAD
        if action is Action.KEEP and candidate.kept_bytes + candidate.nbytes > self.predicted.kept_bytes:
            return self.heuristic.choose(candidate)
        return action

    def _keeps(self, block_name: str) -> bool:
        """Whether a block keeps everything because it has no row."""
        return self.keeps_others and block_name not in self._planned

    def stands_until(self, candidate: Candidate) -> int | None:
        """Return up to how many kept bytes ``choose`` gives the same answer. See ``StandingPlan``."""
        action = self.actions.get((candidate.block_name, candidate.site))
        if action is not Action.KEEP or candidate.block_name in self._inputs:
            return ALWAYS
        most = self.predicted.kept_bytes - candidate.nbytes
        return most if candidate.kept_bytes <= most else None

    def needs_recipe(self, candidate: Candidate) -> bool:
        """Whether ``choose`` may answer RECOMPUTE for the candidate."""
        action = self.actions.get((candidate.block_name, candidate.site))
        if candidate.block_name in self._inputs or action not in (Action.KEEP, Action.OFFLOAD):
            return not self._keeps(candidate.block_name)
        return action is Action.KEEP and candidate.kept_bytes + candidate.nbytes > self.predicted.kept_bytes

    def recomputes_in(self, block_name: str) -> bool:
        """Whether anything in a block is recomputed; True for an unknown block that follows the heuristic."""
        return block_name not in self._without_recomputes and not self._keeps(block_name)

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        """Return KEEP: saved tensors are decided one by one."""
        return Action.KEEP

    def checkpoints(self, block_name: str) -> bool:
        """Whether a block is checkpointed."""
        return block_name in self._inputs

    may_checkpoint = checkpoints

    def check_blocks(self, blocks: Iterable[tuple[str, str]]) -> None:
        """Raise if the plan is for another model: it has rows, and none for these blocks; log a warning for some.

        Args:
            blocks: Path and class of the model's blocks: a site of another class is another one.

        Raises:
            ConfigError: No row is for any of them.
        """
        planned = dict.fromkeys(f"{name} ({site.block_kind})" for name, site in self.actions)
        present = dict.fromkeys(f"{name} ({kind})" for name, kind in blocks)
        foreign = [block for block in planned if block not in present]
        if foreign and len(foreign) == len(planned):
            raise ConfigError(
                f"the plan has rows for {few(foreign)}, and the model's blocks are {few(present)}",
                expected="a plan that was made for this model",
                hint="make the plan again; paths are those in the model before it was wrapped",
            )
        if foreign:
            logger.warning("the plan has rows for %s, which are no blocks of this model", few(foreign))

    def explain(self) -> str:
        """Describe the actions, the predicted cost and the reasons, a line per site kind."""
        p = self.predicted
        saved = p.saved_bytes
        base = "" if p.peak_everything_kept_bytes > saved else " of activations"  # only a budget measures the rest
        head = (
            f"of {format_size(saved)} that blocks save, "
            f"{format_size(p.kept_bytes)} stay, {format_size(p.offloaded_bytes)} are offloaded, "
            f"{format_size(p.recomputed_bytes)} are recomputed; predicted: peak {format_size(p.peak_bytes)}{base} "
            f"(everything kept: {format_size(p.peak_everything_kept_bytes)}), step {p.step_seconds:.4g} s, "
            f"{p.overhead_percent:+z.1f} % (no schedule beats {p.bound_percent:+z.1f} %)"
        )
        return "\n".join([head, *self.reasons])

    def save(self, path: str | Path) -> None:
        """Write the plan into a file that ``load_plan`` reads.

        Raises:
            DataError: The name does not end in .json, or the file cannot be written.
        """
        check_json_name(Path(path), repr(str(path)), hint="policy= reads such names, as plan.json, as plan files")
        rows = [[name, *site, action.value] for (name, site), action in self.actions.items()]
        document = {
            "schema": SCHEMA,
            "name": self.name,
            "predicted": asdict(self.predicted),
            "reasons": list(self.reasons),
            "actions": rows,
        }
        write_text(Path(path), json.dumps(document, indent=1) + "\n")


def table_plan(solution: Solution, name: str, *, keeps_others: bool = False) -> TablePlan:
    """Return a solution as a plan."""
    profile, found = solution.profile, solution.predicted
    actions: dict[tuple[str, Site], Action] = {}
    for place, number, unit in profile.units():
        actions[profile.blocks[place].name, unit.site] = solution.assignment[place][number]
    step = profile.step_seconds or 1.0
    overhead = 100 * found.overhead_seconds / step
    predicted = Prediction(
        step_seconds=found.step_seconds,
        overhead_percent=overhead if abs(overhead) > NOISE_PERCENT else 0.0,
        bound_percent=100 * solution.bound_seconds / step,
        peak_bytes=found.peak_bytes,
        peak_everything_kept_bytes=keep_everything(profile).predicted.peak_bytes,
        kept_bytes=found.kept_bytes,
        offloaded_bytes=found.offloaded_bytes,
        moved_bytes=found.moved_bytes,
        recomputed_bytes=found.recomputed_bytes,
    )
    return TablePlan(
        name=name, actions=actions, predicted=predicted, reasons=_reasons(solution), keeps_others=keeps_others
    )


def load_plan(path: str | Path) -> TablePlan:
    """Read a plan file.

    Raises:
        DataError: There is none, or it is no plan of this release.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        for name in ("actions", "reasons"):
            if not isinstance(document[name], list):
                raise TypeError(f"{name} is {document[name]!r:.60}")
        if not document["actions"]:
            raise ValueError("actions is empty")
        return TablePlan(
            name=str(document["name"]),
            actions={_key(row): Action(row[5]) for row in document["actions"]},
            predicted=_prediction(document["predicted"]),
            reasons=tuple(map(str, document["reasons"])),
        )
    except OSError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error.strerror})",
            expected="a plan file",
            hint="handle.plan.save(path) writes one once the plan is made",
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{str(path)!r} is no plan file of this release ({type(error).__name__}: {error})",
            expected=f"a file that handle.plan.save(path) wrote (schema {SCHEMA})",
            hint="make the plan again on the machine that trains",
        ) from error


def _prediction(figures: dict[str, Any]) -> Prediction:
    """Return the predicted cost of a plan file; raise for figures that are missing, unknown or impossible."""
    for name, value in figures.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (value < 0 and not name.endswith("_percent")):
            raise ValueError(f"{name} is {value!r:.60}")
    return Prediction(**figures)


def _key(row: list[Any]) -> tuple[str, Site]:
    name, kind, module, node, ordinal = row[:5]
    return str(name), Site(str(kind), str(module), str(node), int(ordinal))


def _reasons(solution: Solution) -> tuple[str, ...]:
    """Return one line per site kind: actions, number of blocks, reason; largest first."""
    groups: dict[Site, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    nbytes: dict[Site, int] = defaultdict(int)
    recompute: dict[Site, float | NoRecipe | None] = {}
    for place, number, unit in solution.profile.units():
        groups[unit.site][solution.assignment[place][number]] += 1
        nbytes[unit.site] += unit.nbytes
        if unit.recompute_seconds is not None:
            recompute[unit.site] = unit.recompute_seconds / max(unit.nbytes, 1)
        else:
            recompute.setdefault(unit.site, unit.no_recipe)
    moving = 1 / solution.profile.rates.out_bytes_per_second
    lines: list[str] = []
    for site in sorted(groups, key=lambda s: -nbytes[s]):
        done = ", ".join(f"{action.value} x{count}" for action, count in groups[site].items() if count)
        found = recompute[site]
        if found is None or isinstance(found, NoRecipe):
            cost = "cannot be recomputed" if found is None else found.value
        else:
            cost = f"recompute: {found * MILLISECONDS_PER_MB:.3g} ms/MB"
        lines.append(
            f"{format_size(nbytes[site]):>10}  {done:<28}  {site} ({cost}; a copy that does not hide: "
            f"{moving * MILLISECONDS_PER_MB:.3g} ms/MB)"
        )
    return tuple(lines)
