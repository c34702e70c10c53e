"""Shapes of a training step: each calls forwards, backwards and updates in its own order.

A step is a function of a ``Training``. Between its phases it runs the program's events:
``before`` · forward · ``between`` · backward · ``after``. Gradients are recorded by ``update``, before the optimizer
changes anything; further values to compare are recorded by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

if TYPE_CHECKING:
    from tests.helpers.loop_training import Training


def plain(t: Training) -> None:
    t.happen("before")
    loss = t.loss(t.forward())
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def accumulate(t: Training) -> None:
    for _ in range(2):
        plain_without_update(t)
    t.happen("after")
    t.update()


def plain_without_update(t: Training) -> None:
    t.happen("before")
    loss = t.loss(t.forward())
    t.happen("between")
    t.backward(loss)


def two_forwards(t: Training) -> None:
    t.happen("before")
    loss = t.loss(t.forward()) + t.loss(t.forward(), 2)
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def two_losses(t: Training) -> None:
    """Step between the backwards of two losses: legal if the changed weights were not saved (only biases train)."""
    t.happen("before")
    first, second = t.loss(t.forward()), t.loss(t.forward(), 2)
    t.happen("between")
    t.backward(first)
    t.update()
    t.backward(second)
    t.happen("after")
    t.update()


def retained(t: Training) -> None:
    t.happen("before")
    loss = t.loss(t.forward())
    t.backward(loss, retain_graph=True)
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def gan(t: Training) -> None:
    """Train the generator through a frozen discriminator, then the discriminator."""
    for p in t.trained:
        p.requires_grad_(False)
    t.happen("before")
    loss = t.loss(t.forward(t.generated()))
    t.happen("between")
    t.backward(loss)
    t.update_generator()
    for p in t.trained:
        p.requires_grad_(True)
    t.clear()
    t.backward(t.loss(t.forward(t.generated().detach())) - t.loss(t.forward()))
    t.happen("after")
    t.update()


def gan_d_first(t: Training) -> None:
    """Step the discriminator before the generator's backward: ordinary training raises, or reads the new weights."""
    t.happen("before")
    fake = t.generated()
    mine = t.loss(t.forward(fake))
    t.backward(t.loss(t.forward(fake.detach())) - t.loss(t.forward()))
    t.happen("between")
    t.update()
    t.backward(mine)
    t.happen("after")
    t.update_generator()


def penalty(t: Training) -> None:
    """Penalise the gradient of the input: the gradient of a gradient."""
    t.happen("before")
    x = t.batch().requires_grad_()
    loss = t.loss(t.forward(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    t.note("input gradient", grad)
    t.happen("between")
    t.backward(loss + grad.square().mean())
    t.happen("after")
    t.update()


def functional(t: Training) -> None:
    """Run the model with other weights than its own."""
    t.happen("before")
    other = {n: (p * 1.1 if k % 2 else p) for k, (n, p) in enumerate(t.model.named_parameters())}
    loss = t.loss(t.forward(call=lambda x: functional_call(t.model, other, (x,))))
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def fast_weights(t: Training) -> None:
    """Step inside the graph, then train through the step: MAML."""
    t.happen("before")
    named = {n: p for n, p in t.model.named_parameters() if p.requires_grad}
    inner = t.loss(t.forward())
    grads = torch.autograd.grad(inner, list(named.values()), create_graph=True, allow_unused=True)
    fast = {n: p if g is None else p - 0.1 * g for (n, p), g in zip(named.items(), grads, strict=True)}
    loss = t.loss(t.forward(call=lambda x: functional_call(t.model, fast, (x,))))
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def twin(t: Training) -> None:
    """Two models, each under a handle of its own, in one loss; the second takes the output of the first."""
    t.happen("before")
    x = t.batch()
    other = t.twin()
    hidden = t.forward(x, body_only=True)
    loss = t.loss(t.forward(hidden, call=other)) + t.loss(t.forward(x))
    t.happen("between")
    t.backward(loss)
    for n, p in other.named_parameters():
        t.note(f"twin's {n}", p.grad)
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.05)
            p.grad = None
    t.happen("after")
    t.update()


def one_autocast(t: Training) -> None:
    """Take two steps inside one autocast context: in the second its cache of casts is out of date."""
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            plain(t)


def head_first(t: Training) -> None:
    t.happen("before")
    loss = t.loss(t.forward())
    heads = [p for p in t.model.head.parameters() if p.requires_grad]
    if heads:
        for k, g in enumerate(torch.autograd.grad(loss, heads, retain_graph=True)):
            t.note(f"head {k}", g)
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def carried(t: Training) -> None:
    """Cut a long sequence in two and carry the detached state over: truncated backpropagation."""
    end: Tensor | None = None
    for _ in range(2):
        t.happen("before")
        x = t.batch()
        out = t.forward(x if end is None else x + end, body_only=True)
        end = out.detach().mean((0, 1))
        loss = t.loss(out)
        t.happen("between")
        t.backward(loss)
    t.happen("after")
    t.update()


def thread(t: Training) -> None:
    """Run backward in a thread of its own."""
    t.happen("before")
    loss = t.loss(t.forward())
    t.happen("between")
    failed: list[BaseException] = []

    def run() -> None:
        try:
            t.backward(loss)
        except Exception as error:
            failed.append(error)
            torch.zeros((), requires_grad=True).clone().backward()  # the queue is the thread's own

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    if failed:
        error = failed.pop()
        try:
            raise error
        finally:
            del error  # the traceback holds this frame, the frame would hold the error
    t.happen("after")
    t.update()


def closure(t: Training) -> None:
    """Let the optimizer compute the loss as often as it likes."""

    def evaluate() -> Tensor:
        t.clear()
        loss = t.loss(t.forward())
        t.backward(loss)
        return loss.detach()

    t.happen("before")
    t.update(evaluate)
    t.happen("after")


def inside_autocast(t: Training) -> None:
    """Run backward inside the autocast context, too."""
    t.happen("before")
    with torch.autocast("cpu", torch.bfloat16):
        loss = t.loss(t.forward())
        t.happen("between")
        t.backward(loss)
    t.happen("after")
    t.update()


def inputs_only(t: Training) -> None:
    """First compute the gradient of the batch alone."""
    t.happen("before")
    x = t.batch().requires_grad_()
    loss = t.loss(t.forward(x))
    t.backward(loss, inputs=[x], retain_graph=True)
    t.note("gradient of the batch", x.grad)
    t.happen("between")
    t.backward(loss)
    t.happen("after")
    t.update()


def interleaved(t: Training) -> None:
    """Begin a forward before the backward of the previous one, and run backwards in the order of the forwards."""
    t.happen("before")
    first = t.loss(t.forward())
    t.happen("between")
    second = t.loss(t.forward(), 3)
    t.backward(first)
    third = t.loss(t.forward())
    t.backward(second)
    t.backward(third)
    t.happen("after")
    t.update()


STEPS: dict[str, Callable[[Training], None]] = {
    step.__name__: step
    for step in (
        plain, accumulate, two_forwards, two_losses, retained, gan, gan_d_first, penalty, functional, fast_weights,
        twin, one_autocast, head_first, carried, thread, closure, inside_autocast, inputs_only, interleaved,
    )
}  # fmt: skip
"""What interprets ``Program.loop``."""
