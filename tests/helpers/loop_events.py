"""The events around the steps of a training program: see ``Event``.

Each event defines what it does ``before`` the forward, ``between`` forward and backward, ``after`` the backward (before
the update) and at the ``end`` of the step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tests.helpers.torches import CURRENT_PRECISIONS

if TYPE_CHECKING:
    from tests.helpers.loop_training import Training

Happening = Callable[["Training"], object]


def weights(t: Training) -> list[nn.Parameter]:
    return list(t.model.parameters())


def add_noise(t: Training) -> None:
    t.noise = [torch.randn_like(p) * 0.1 for p in weights(t)]
    for p, n in zip(weights(t), t.noise, strict=True):
        p.data.add_(n)


def take_noise(t: Training) -> None:
    for p, n in zip(weights(t), t.noise, strict=True):
        p.data.sub_(n)


def change_weights_with_versions(t: Training, name: str = "") -> None:
    with torch.no_grad():
        for n, p in t.model.named_parameters():
            if name in n:
                p.mul_(1.01)


@contextlib.contextmanager
def averaged(t: Training, put: Callable[[Tensor, Tensor], object]) -> Iterator[None]:
    """Put the average of the weights in their place for a while."""
    if t.average is None:
        t.average = [p.detach().clone() * 0.9 for p in weights(t)]
    own = [p.detach().clone() for p in weights(t)]
    with torch.no_grad():
        for p, a in zip(weights(t), t.average, strict=True):
            a.lerp_(p.detach().to(a.dtype), 0.5)
            put(p, a)
    yield
    with torch.no_grad():
        for p, o in zip(weights(t), own, strict=True):
            put(p, o)


def evaluate_average(t: Training) -> None:
    with averaged(t, lambda p, value: p.data.copy_(value)):
        t.evaluate()


def evaluate_average_with_versions(t: Training) -> None:
    with averaged(t, lambda p, value: p.copy_(value)):
        t.evaluate()


def assign_data(t: Training) -> None:
    for p in weights(t):
        p.data = p.data * 1.5


def assign_data_and_back(t: Training) -> None:
    own = [p.data for p in weights(t)]
    assign_data(t)
    t.evaluate()
    for p, o in zip(weights(t), own, strict=True):
        p.data = o


def require(t: Training, wanted: bool, name: str = "") -> None:
    kept = {id(p) for p in t.trained}
    for n, p in t.model.named_parameters():
        if name in n and not n.startswith("head"):
            p.requires_grad_(wanted and id(p) in kept)


def freeze(name: str) -> dict[str, Happening]:
    return {"before": lambda t: require(t, False, name), "end": lambda t: require(t, True, name)}


def swap_parameters(t: Training) -> None:
    """Give the linear layers new parameters, as a loader of weights would."""
    t.swapped = []
    for m in t.model.modules():
        if type(m) is nn.Linear and "weight" in m._parameters:
            t.swapped.append((m, m.weight))
            m.weight = nn.Parameter(m.weight.detach() * 1.5)


def swap_back(t: Training) -> None:
    for m, w in t.swapped:
        m.weight = w


def each_piece(name: str) -> Happening:
    return lambda t: [getattr(piece, name)() for piece in t.pieces()]


def merge_for_evaluation(t: Training) -> None:
    each_piece("merge")(t)
    t.evaluate()
    each_piece("unmerge")(t)


def flash(on: bool) -> Happening:
    return lambda t: torch.backends.cuda.enable_flash_sdp(on)


def precision(of: str, value: str) -> Happening:
    def choose(t: Training) -> None:
        if not CURRENT_PRECISIONS:
            return
        b = torch.backends
        modules = {"all": b, "conv": b.mkldnn.conv, "matmul": b.mkldnn.matmul, "cuda": b.cuda.matmul}
        modules[of].fp32_precision = value

    return choose


def evaluate_with(train: bool) -> Happening:
    return lambda t: t.evaluate(train=train)


def handles(name: str) -> Happening:
    return lambda t: [getattr(handle, name)() for handle in t.handles if handle.enabled or name != "disable"]


def enable(t: Training) -> None:
    for handle in t.handles:
        if not handle._closed:
            handle.enable()


def drop(t: Training) -> None:
    t.forward()


def fail(t: Training) -> None:
    t.model.fails = True
    with contextlib.suppress(InterruptedError):
        t.forward()
    t.model.fails = False


def clip(t: Training) -> None:
    nn.utils.clip_grad_norm_(weights(t), 0.1)


def load(t: Training) -> None:
    t.model.load_state_dict({n: v.clone() for n, v in t.model.state_dict().items()})


def copy_model(t: Training) -> None:
    for piece in t.pieces():
        piece.forget()
    other = copy.deepcopy(t.model)
    t.loss(other(t.batch())).backward()
    t.note("copy's gradients", sum(p.grad.double().sum() for p in other.parameters() if p.grad is not None))


def add_hook(t: Training) -> None:
    if not t.hooked:
        t.hooked = True
        for layer in t.model.layers:
            layer.register_forward_hook(lambda m, given, result: result * 0.9)


def change_input(t: Training) -> None:
    with torch.no_grad():
        t.last_batch.mul_(0.5)


def change_buffers(t: Training) -> None:
    for b in t.model.buffers():
        if b.is_floating_point() and b.numel():
            b.mul_(0.9)


def toggle_mode(t: Training) -> None:
    t.model.train(not t.model.training)


def seed(t: Training) -> None:
    torch.manual_seed(t.step)


def step_optimizer(t: Training) -> None:
    """Let the optimizer step with gradients left by something else."""
    for p in t.trained:
        p.grad = torch.full_like(p, 0.01)
    t.update()
    t.clear()


def to_bf16(t: Training) -> None:
    t.model.to(torch.bfloat16)


EVENTS: dict[str, dict[str, Happening]] = {
    "weight_noise": {"before": add_noise, "between": take_noise},
    "noise_copied": {"between": change_weights_with_versions},
    "biases_changed_between": {"between": lambda t: change_weights_with_versions(t, "bias")},
    "ema_between": {"between": evaluate_average},
    "ema_copied_between": {"between": evaluate_average_with_versions},
    "ema_steps": {"end": evaluate_average},
    "data_assigned": {"between": assign_data},
    "data_assigned_back": {"between": assign_data_and_back},
    "frozen_between": {"between": lambda t: require(t, False), "end": lambda t: require(t, True)},
    "thawed_between": {
        "before": lambda t: require(t, False),
        "between": lambda t: require(t, True),
        "end": lambda t: require(t, True),
    },
    "freeze_biases": freeze("bias"),
    "freeze_norms": freeze("norm"),
    "freeze_weights": freeze("weight"),
    "freeze_blocks": freeze("layers.0"),
    "freeze_all_but_biases": {
        "before": lambda t: (require(t, False), require(t, True, "bias")),
        "end": lambda t: require(t, True),
    },
    "swapped_parameters": {"between": swap_parameters, "after": swap_back},
    "switched": {"before": each_piece("switch")},
    "switched_between": {"between": each_piece("switch")},
    "merged_between": {"between": merge_for_evaluation},
    "merged_steps": {"end": merge_for_evaluation},
    "matmul_precision": {
        "before": lambda t: torch.set_float32_matmul_precision("medium"),
        "between": lambda t: torch.set_float32_matmul_precision("highest"),
    },
    "conv_precision": {"before": precision("conv", "bf16"), "between": precision("conv", "none")},
    "fp32_precision": {"before": precision("matmul", "bf16"), "between": precision("matmul", "none")},
    "deterministic": {
        "between": lambda t: torch.use_deterministic_algorithms(True, warn_only=True),
        "end": lambda t: torch.use_deterministic_algorithms(False),
    },
    "default_dtype": {
        "between": lambda t: torch.set_default_dtype(torch.float64),
        "after": lambda t: torch.set_default_dtype(torch.float32),
    },
    "sdpa": {"before": flash(False), "between": flash(True)},
    "eval_between": {"between": evaluate_with(False)},
    "train_between": {"between": evaluate_with(True)},
    "inference_between": {"between": lambda t: t.evaluate(inference=True)},
    "disabled": {"before": handles("disable"), "end": enable},
    "closed_between": {"between": handles("close")},
    "disabled_between": {"between": handles("disable"), "end": enable},
    "dropped": {"before": drop},
    "failed_forward": {"before": fail},
    "clipped": {"after": clip},
    "zeroed": {"end": lambda t: t.clear(set_to_none=False)},
    "loaded": {"end": load},
    "loaded_between": {"between": load},
    "copied_model": {"before": copy_model},
    "hook_added": {"before": add_hook},
    "eval_from": {"before": lambda t: t.model.eval()},
    "reversed": {"before": lambda t: t.model.turn_round()},
    "input_changed_between": {"between": change_input},
    "buffers_changed_between": {"between": change_buffers},
    "mode_between": {"between": toggle_mode, "end": toggle_mode},
    "seeded_between": {"between": seed},
    "stepped_between": {"between": step_optimizer},
    "tf32_asked": {"before": precision("cuda", "tf32")},
    "bf16_from": {"before": to_bf16},
    "grads_off_inside": {"before": lambda t: t.evaluate(train=True)},
}
"""What interprets ``Event.kind``: what happens in which phase."""
