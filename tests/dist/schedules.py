"""Orders of the forwards and backwards of one optimizer step: a table of functions of a ``Step``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.dist.trial import Job, Record, note_step

Order = Sequence[int] | None
MICROBATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of a rank.

    Attributes:
        models: The trained models: one, or two for the schedules of two.
        loss: ``loss(model, number, order)``: a forward with the batch of that number through the blocks in that order.
        note: ``note(name, loss)``: record the current gradients for the comparison.
    """

    models: Sequence[nn.Module]
    loss: Callable[[nn.Module, int, Order], Tensor]
    note: Callable[[str, Tensor | None], None]

    @property
    def model(self) -> nn.Module:
        """The first model."""
        return self.models[0]

    def forward(self, number: int, order: Order = None) -> Tensor:
        """Run a forward of the first model and return its loss."""
        return self.loss(self.model, number, order)


def one(step: Step) -> None:
    loss = step.forward(0)
    loss.backward()
    step.note("", loss)


def accumulated(step: Step) -> None:
    """Gradients are reduced in the last microbatch only; FSDP2 keeps its weights unsharded until then."""
    model = step.model
    for i in range(MICROBATCHES):
        last = i == MICROBATCHES - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else no_sync():
            loss = step.forward(i)
            loss.backward()
        step.note(str(i), loss)


def several_forwards(step: Step) -> None:
    losses = torch.stack([step.forward(i) for i in range(MICROBATCHES)])
    losses.sum().backward()
    step.note("together", losses)


def forwards_then_backwards(step: Step) -> None:
    losses = [step.forward(i) for i in range(MICROBATCHES)]
    for i in (1, 2, 0):
        losses[i].backward()
        step.note(str(i), losses[i])


def looked_at(step: Step) -> None:
    """Forwards without gradients between the others: in train mode, in eval mode, and generation."""
    model = step.model
    step.forward(0).backward()
    with torch.no_grad():
        step.note("without gradients", step.forward(1))
    model.eval()
    # Sharded weights that are gathered in inference mode stay inference tensors: torch refuses them afterwards.
    with torch.inference_mode() if _whole(model) else torch.no_grad():
        step.note("evaluated", step.forward(2))
        _generate(model)
    model.train()
    loss = step.forward(3)
    loss.backward()
    step.note("again", loss)


def dropped(step: Step) -> None:
    """A graph without backward, one that lives through the step, and one with a backward."""
    step.forward(0)
    kept = step.forward(1)
    step.forward(2).backward()
    step.note("one of three", kept)
    del kept
    step.forward(3).backward()
    step.note("after", None)


def skipped_and_repeated(step: Step) -> None:
    step.forward(0, (0, 1, 0)).backward()
    step.note("repeated", None)
    step.forward(1, (1,)).backward()
    step.note("skipped", None)


def raised(step: Step) -> None:
    """A forward that fails on every rank in the second block, then a step."""
    block = [m for k, m in step.model.named_modules() if k.split(".")[-1] == "mlp"][1]
    hook = block.register_forward_pre_hook(_fail)
    with contextlib.suppress(ArithmeticError):
        step.forward(0)
    hook.remove()
    for unit in step.model.modules():  # torch leaves the weights of an interrupted forward unsharded
        if isinstance(unit, FSDPModule):
            unit.reshard()
    loss = step.forward(1)
    loss.backward()
    step.note("after", loss)


def two_models(step: Step) -> None:
    """A student learns from a teacher that also learns: graphs of both in one backward."""
    student, teacher = step.models
    losses = step.loss(student, 0, None), step.loss(teacher, 1, None)
    ((losses[0] - losses[1]).square() + losses[1]).backward()
    step.note("both", torch.stack(losses))


Loss = Callable[[nn.Module, int, Order], Tensor]

SCHEDULES: dict[str, Callable[[Step], None]] = {
    "one": one,
    "accumulated": accumulated,
    "several forwards": several_forwards,
    "forwards, then backwards": forwards_then_backwards,
    "looked at": looked_at,
    "dropped": dropped,
    "skipped and repeated": skipped_and_repeated,
    "raised": raised,
    "two models": two_models,
}


def job_of(schedule: str, make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], loss: Loss) -> Job:
    """Return a job that follows a schedule.

    Args:
        schedule: A name of ``SCHEDULES``.
        make: Return a model, ready to train, and its weights before sharding.
        loss: As in ``Step``; numbers do not repeat between steps.
    """
    made = [make() for _ in range(2 if schedule == "two models" else 1)]
    models = [model for model, _ in made]
    whole = {f"{i} {name}": weight for i, (_, weights) in enumerate(made) for name, weight in weights.items()}
    trained = models[0] if len(models) == 1 else nn.ModuleList(models)

    def step(number: int, record: Record) -> None:
        def note(name: str, value: Tensor | None) -> None:
            note_step(record, f"{number} {name}", trained, value)

        def numbered(model: nn.Module, batch: int, order: Order) -> Tensor:
            return loss(model, 10 * number + batch, order)

        SCHEDULES[schedule](Step(models=models, loss=numbered, note=note))

    return Job(model=trained, step=step, whole=whole)


def _fail(*_: object) -> None:
    raise ArithmeticError("this forward fails")


def _whole(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def _generate(model: nn.Module) -> None:
    """Generate some tokens, with the model's own method if it has one; lengths stay even, for split sequences."""
    ids = torch.arange(8).reshape(2, 4)
    if hasattr(model, "generate"):
        generator: Any = model
        generator.generate(ids, max_new_tokens=2, do_sample=False)
        return
    for _ in range(2):
        result: Any = model(ids)
        logits = result if isinstance(result, Tensor) else result.logits
        ids = torch.cat([ids, logits[:, -2:].argmax(-1)], 1)
