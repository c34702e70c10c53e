"""A running training program: its model, optimizer and handles, and the record of every step."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.base.actions import Action, Candidate
from tests.helpers.handles import Unlimited
from tests.helpers.loop_events import EVENTS
from tests.helpers.loop_oddities import MAKERS
from tests.helpers.loop_parts import WIDTH, Piece, numerics
from tests.helpers.loop_programs import Part, Program, Setting
from tests.helpers.loop_steps import STEPS

Snapshot = dict[str, Any]


class Layer(nn.Module):
    """A block: its parts one after the other, and a residual."""

    def __init__(self, parts: tuple[Part, ...], index: int) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(MAKERS[p.kind](p.variant, index) for p in parts)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for piece in self.pieces:
            h = piece(h)
        return (x + 0.3 * h).to(x.dtype)


class Model(nn.Module):
    """A stem, a stack of blocks that are called in the program's way, and a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(program.parts, k) for k in range(program.blocks))
        self.calls, self.step, self.fails, self.turned = program.calls, 0, False, False

    def turn_round(self) -> None:
        """Reverse the order in which the blocks are called."""
        self.turned = not self.turned

    def order(self) -> list[int]:
        """Return the blocks in the order of their calls."""
        every = list(range(len(self.layers)))
        if self.calls == "twice":
            every = [k for k in every for _ in range(2)]
        elif self.calls == "shared":
            every = [0] * len(every)
        elif self.calls == "skipping":
            every = [k for k in every if (k + self.step) % 3]
        elif self.calls == "reversing" and self.step % 2:
            every.reverse()
        return every[::-1] if self.turned else every

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.to(self.stem.weight.dtype))
        for n, k in enumerate(self.order()):
            for piece in self.layers[k].pieces:
                piece.turn(n)
            h = self.layers[k](x=h) if self.calls == "by_name" else self.layers[k](h)
            if self.fails:
                raise InterruptedError("planted")
        return self.head(h)


class Training:
    """A running program.

    Args:
        program: The program to train.
        setting: Ebbtide's settings; None: ordinary training.
        around: Make the context of every forward (``contextlib.nullcontext``, or hooks to compare with).
    """

    def __init__(self, program: Program, setting: Setting | None, around: Callable[[], Any]) -> None:
        self.program, self.setting, self.around = program, setting, around
        self.step, self.phase, self.snapshot = 0, "build", {}
        self.average: list[Tensor] | None = None
        self.hooked, self.handles, self.losses = False, [], 0
        self.generator = nn.Linear(WIDTH, WIDTH)
        self.model = Model(program)
        if program.precision == "bf16":
            self.model.to(torch.bfloat16)
        _require(self.model, program.trains, program.blocks)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS.get(program.optimizer, _no_optimizer)(self.trained)
        if program.optimizer.startswith("in_backward"):
            self._step_in_backward(torch.optim.AdamW if "fused" in program.optimizer else torch.optim.SGD)
        self.other: Model | None = None
        self.enable(self.model)

    def enable(self, model: nn.Module) -> None:
        """Put a model under a handle, if there is a setting."""
        if self.setting is not None:
            self.handles.append(_enable(model, self.setting))

    def close(self) -> None:
        """Close all handles."""
        for handle in self.handles:
            handle.close()

    def release(self) -> None:
        """Drop what holds graphs: kept weights, and tensors that weight norm and pruning leave on their modules."""
        for model in filter(None, (self.model, self.other)):
            for piece in self.pieces(model):
                piece.forget()
            for module in model.modules():
                for name, value in vars(module).items():
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        module.__dict__[name] = value.detach()
        self.clear()

    def pieces(self, model: Model | None = None) -> list[Piece]:
        """Return all parts of all blocks."""
        return [piece for layer in (model or self.model).layers for piece in layer.pieces]

    def take_step(self) -> Snapshot:
        """Take a step; return its record."""
        program, self.snapshot, self.losses = self.program, {}, 0
        self.model.step = self.step
        for k, layer in enumerate(self.model.layers):
            for part, piece in zip(program.parts, layer.pieces, strict=True):
                piece.prepare(self.step, self.step >= part.step and k >= part.block)
        self.clear()
        STEPS[program.loop if self.step >= program.loop_step else "plain"](self)
        self.happen("end")
        for name, value in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.note(f"after the step: {name}", value)
        self.note("python's random state", random.getstate())
        self.note("numpy's random state", repr(np.random.get_state()))
        self.note("torch's random state", torch.get_rng_state())
        self.step += 1
        return self.snapshot

    def happen(self, phase: str) -> None:
        """Run the program's events of a phase."""
        self.phase = phase
        if phase == "after":
            self.note("numerics", numerics())
        for event in self.program.events:
            if self.step >= event.step and (self.step - event.step) % event.every == 0:
                action = EVENTS[event.kind].get(phase)
                if action is not None:
                    action(self)

    def note(self, name: str, value: Any) -> None:
        """Record a value for the comparison. A repeated name gets a number."""
        while name in self.snapshot:
            name += "'"
        self.snapshot[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def batch(self) -> Tensor:
        """Return the next batch."""
        lengths = self.program.lengths
        x = torch.randn(3, lengths[self.step % len(lengths)], WIDTH)
        return x.requires_grad_(self.program.input_grads)

    def generated(self) -> Tensor:
        """Return a batch made by the generator."""
        return self.generator(self.batch().detach())

    def forward(self, x: Tensor | None = None, *, call: Any = None, body_only: bool = False) -> Tensor:
        """Run the model, or ``call``, on a batch."""
        x = self.last_batch = self.batch() if x is None else x
        precise = self.program.precision != "autocast"
        with contextlib.nullcontext() if precise else torch.autocast("cpu", torch.bfloat16), self.around():
            out = (call or self.model)(x)
        return out.float() if body_only else out

    def loss(self, out: Tensor, power: int = 1) -> Tensor:
        """Return the loss of the model's output, and record it."""
        loss = (out.float() - 0.1).square().mean() ** power
        self.note("loss", loss)
        return loss

    def backward(self, loss: Tensor, **given: Any) -> None:
        """Run the backward of a loss."""
        self.phase = "backward"
        loss.backward(**given)
        self.phase = "after backward"

    def evaluate(self, *, train: bool = False, inference: bool = False) -> None:
        """Run the model without gradients."""
        before = self.model.training
        self.model.train(train)
        with torch.inference_mode() if inference else torch.no_grad():
            out = self.model(torch.randn(3, 4, WIDTH))
        self.note("evaluated", out.float().mean().item())
        self.model.train(before)

    def update(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Record the gradients, then let the optimizer step."""
        for name, p in self.model.named_parameters():
            self.note(f"gradient of {name}", p.grad)
        if self.optimizer is not None:
            self.optimizer.step(closure or (self._reevaluate if self.program.optimizer == "lbfgs" else None))

    def update_generator(self) -> None:
        """Step the generator of a GAN."""
        for name, p in self.generator.named_parameters():
            self.note(f"gradient of generator.{name}", p.grad)
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1)

    def clear(self, *, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for p in (*self.model.parameters(), *self.generator.parameters()):
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()

    def twin(self) -> Model:
        """Return the second model."""
        if self.other is None:
            self.other = Model(self.program)
            self.enable(self.other)
        return self.other

    def _reevaluate(self) -> Tensor:
        self.clear()
        loss = self.loss(self.forward())
        self.backward(loss)
        return loss.detach()

    def _step_in_backward(self, kind: Any) -> None:
        optimizers = {
            id(p): kind([p], lr=0.01, **({"fused": True} if kind is torch.optim.AdamW else {})) for p in self.trained
        }
        names = {id(p): n for n, p in self.model.named_parameters()}

        def step(p: Tensor) -> None:
            self.note(f"gradient of {names[id(p)]} in backward", p.grad)
            optimizers[id(p)].step()
            p.grad = None

        for p in self.trained:
            p.register_post_accumulate_grad_hook(step)


def _no_optimizer(parameters: list[nn.Parameter]) -> None:
    return None


def _bnb(parameters: list[nn.Parameter]) -> Any:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, lr=0.01)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "bnb_adamw8bit": _bnb,
}


def _require(model: nn.Module, trains: str, blocks: int) -> None:
    chosen: dict[str, Callable[[str], bool]] = {
        "all": lambda n: True,
        "biases": lambda n: n.endswith("bias"),
        "no_biases": lambda n: not n.endswith("bias"),
        "no_stem": lambda n: not n.startswith("stem"),
        "no_norms": lambda n: "norm" not in n,
        "last_block": lambda n: n.startswith((f"layers.{blocks - 1}.", "head")),
        "first_block": lambda n: n.startswith("layers.0."),
        "adapters": lambda n: "adapter" in n or n.startswith("head"),
        "weights": lambda n: "weight" in n,
    }
    for name, p in model.named_parameters():
        p.requires_grad_(chosen[trains](name))


@dataclass(frozen=True)
class DrawnPlan:
    """A plan that gives every site a random action, the same for the same salt; or checkpoints every block."""

    salt: int
    checkpoints: bool
    name: str = "drawn"
    recomputes: bool = True

    def choose(self, candidate: Candidate) -> Action:
        actions = [Action.KEEP, Action.OFFLOAD]
        if candidate.recompute_flops is not None:
            actions += [Action.RECOMPUTE] * 2
        return random.Random(f"{self.salt}/{candidate.site}/{candidate.block_name}").choice(actions)

    def block_action(self, kind: str, index: int, *, input_bytes: int, must_keep_bytes: int) -> Action:
        return Action.CHECKPOINT if self.checkpoints and input_bytes else Action.KEEP

    def explain(self) -> str:
        return f"actions drawn from {self.salt}"


def _enable(model: nn.Module, setting: Setting) -> ebbtide.Handle:
    drawn = setting.policy in ("drawn", "checkpoint")
    given: dict[str, Any] = {"policy": "minimal" if drawn else setting.policy}
    if setting.policy == "auto_relaxed":
        given["policy"] = Unlimited(max_slowdown=10.0)
    elif setting.policy == "ckpt":
        given = {"enable_ckpt": True}
    plan = DrawnPlan(setting.salt, setting.policy == "checkpoint")
    with contextlib.ExitStack() as stack:
        if drawn:
            stack.enter_context(mock.patch("ebbtide.api.measured_plan", lambda *args: None))
            stack.enter_context(mock.patch("ebbtide.api.plan_for", lambda policy: plan))
        return ebbtide.enable_activation_offloading(model, target="disk", min_bytes=0, verify=setting.verify, **given)
