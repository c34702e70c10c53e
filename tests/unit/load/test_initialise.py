"""The tensors that each initialising call of a model writes, found on meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ebbtide
from ebbtide.base.errors import ConfigError, DataError
from ebbtide.load.initialise import Initialiser
from ebbtide.load.initialisers import WriteWatch


class Reached(TorchDispatchMode):
    """Records the executed operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_operators_that_set_all_of_a_tensor_on_meta_are_noted_and_not_executed() -> None:
    whole, real = torch.empty(4, 3, device="meta"), torch.zeros(2)
    names, numels = {whole.untyped_storage()._cdata: "whole"}, {"whole": 12}
    with Reached() as reached, WriteWatch(names, numels) as watch:
        assert whole.normal_(0, 1) is whole
        whole.mul_(2)
        real.fill_(5)
    assert watch.writes == {"whole": True}
    assert reached.names == ["mul_", "fill_"]
    assert real.eq(5).all()
    with WriteWatch(names, numels) as watch:
        whole[1].zero_()
    assert watch.writes == {"whole": False}


def test_only_calls_that_write_a_wanted_tensor_are_made() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    initialiser = Initialiser(model, None, seed=1)
    made = dict(initialiser.values(["1.running_var"], torch.device("cpu")))
    assert list(made) == ["1.running_var"] and made["1.running_var"].eq(1).all()
    assert [(call.name, sorted(call.writes)) for call in initialiser._calls or ()] == [
        ("0.reset_parameters", ["0.bias", "0.weight"]),
        ("1.reset_parameters", ["1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"]),
    ]


def test_values_on_the_cpu_leave_the_random_numbers_of_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    state = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("accelerators were seeded, too"))
    made = dict(Initialiser(model, None, seed=1).values(["weight"], torch.device("cpu")))
    assert made["weight"].std() > 0 and torch.equal(torch.get_rng_state(), state)


class Parts(nn.Module):
    """Sets a tensor row by row, or only some of it, or only scales what a constructor would have set."""

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = 4, factor: float = 0) -> None:
        super().__init__()
        self.rows, self.factor = rows, factor
        self.register_buffer("table", torch.zeros(4, 2, dtype=dtype))

    def reset_parameters(self) -> None:
        if self.factor:
            self.table.mul_(self.factor)
        for row in range(0 if self.factor else self.rows):
            self.table[row].fill_(row % 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8])
def test_an_initialiser_sets_all_of_a_tensor(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        complete, half = Parts(dtype), Parts(dtype, rows=3)
    ((_, made),) = Initialiser(complete, None, seed=1).values(["table"], torch.device("cpu"))
    assert made.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    with pytest.raises(DataError, match="table: the initializer sets only a part"):
        list(Initialiser(half, None, seed=1).values(["table"], torch.device("cpu")))


def rows_of(made: torch.Tensor, *, rows: int = 4) -> torch.Tensor:
    """Set rows of a causal mask, or of its numeric opposite, where no value is free to mark an element."""
    for row in range(rows):
        ahead = torch.arange(4) > row
        made[row] = ~ahead if made.dtype == torch.bool else ahead * torch.iinfo(made.dtype).max
    return made


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64])
def test_an_initialiser_may_set_every_value_that_its_dtype_has(dtype: torch.dtype, rows: int) -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.empty(4, 4, dtype=dtype, device="meta"))

        def reset_parameters(self) -> None:
            rows_of(self.mask, rows=rows)

    made = Initialiser(Mask(), None, seed=1).values(["mask"], torch.device("cpu"))
    if rows == 4:
        assert torch.equal(next(made)[1], rows_of(torch.empty(4, 4, dtype=dtype)))
        return
    with pytest.raises(DataError, match="mask: the initializer sets only a part"):
        next(made)


def test_a_function_that_fails_for_modules_that_it_does_not_know_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.PReLU())
    model[2].register_parameter("scale", nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(
        DataError, match=r"2\.init failed \(AttributeError.*\nhint: init= is called with every module: ret"
    ):
        list(Initialiser(model, lambda m: m.absent.fill_(1), seed=1).values(["2.scale"], torch.device("cpu")))


def test_an_initialiser_that_only_scales_sets_nothing() -> None:
    with torch.device("meta"):
        scaled = Parts(factor=0.5)
    with pytest.raises(DataError, match="table: the initializer sets only a part"):
        list(Initialiser(scaled, None, seed=1).values(["table"], torch.device("cpu")))


class Computed(nn.Module):
    """Computes a buffer from another one."""

    def __init__(self, compute: Callable[[Any], object]) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.zeros(2))

    def reset_parameters(self) -> None:
        self.compute(self)


def from_a_part(module: Computed) -> None:
    module.scale[0].fill_(3)
    module.table.copy_(module.scale)


def from_nothing(module: Computed) -> None:
    module.table = module.scale * 2


@pytest.mark.parametrize("compute", [from_a_part, from_nothing])
def test_an_initialiser_computes_nothing_from_tensors_without_values(compute: Callable[[Any], object]) -> None:
    with torch.device("meta"):
        model = Computed(compute)
    with pytest.raises(DataError, match="table: .*computes it from tensors without values") as caught:
        list(Initialiser(model, None, seed=1).values(["table"], torch.device("cpu")))
    assert caught.value.hint and model.table.is_meta


class Reading(nn.Module):
    """Reads a value while it initialises, which is impossible on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and float(module.weight.abs().max()) >= 0:
            module.weight.fill_(5)


class Broken(nn.Linear):
    def reset_parameters(self) -> None:
        if self.weight.isnan().any():
            raise ValueError("no values")


def test_an_initialiser_that_reads_values_runs_with_them() -> None:
    with torch.device("meta"):
        model = Reading()
    made = dict(Initialiser(model, None, seed=1).values(["linear.weight", "linear.bias"], torch.device("cpu")))
    assert made["linear.weight"].eq(5).all() and made["linear.bias"].any()
    with torch.device("meta"):
        broken = nn.Linear(3, 4)
    broken.__class__ = Broken
    with pytest.raises(DataError, match=r"initializer reset_parameters failed \(ValueError: no values\)"):
        list(Initialiser(broken, None, seed=1).values(["weight"], torch.device("cpu")))


def test_a_function_of_the_same_name_that_takes_no_module_is_no_initialiser() -> None:
    class Merger(nn.Module):  # as in MiniCPM-V
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def _init_weights(self) -> None:
            raise AssertionError

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.merger = Merger()

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)

    with torch.device("meta"):
        model = Model()
    ((_, made),) = Initialiser(model, None, seed=1).values(["merger.linear.weight"], torch.device("cpu"))
    assert made.eq(1).all()


class Scaled(nn.Module):
    """Computes one tensor from others, which may have values before it is loaded."""

    def __init__(self, *, reading: bool) -> None:
        super().__init__()
        self.reading, self.linear = reading, nn.Linear(3, 4)
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.register_buffer("table", torch.zeros(2))

    def reset_parameters(self) -> None:
        factor = self.scale.max().item() if self.reading else self.scale
        self.table.copy_(torch.arange(2.0) * factor)
        self.scale.zero_()


@pytest.mark.parametrize("reading", [False, True])
def test_values_that_are_there_are_not_copied_but_where_they_are_needed(reading: bool) -> None:
    """Copies of all of them would be in memory for as long as the load."""
    model = nn.Sequential(Scaled(reading=reading), nn.BatchNorm1d(4), nn.Linear(3, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].table = torch.empty(2, device="meta")
    model[1].bias = nn.Parameter(torch.empty(4, device="meta"))
    model[2].bias = nn.Parameter(torch.empty(4, device="meta"))
    initialiser = Initialiser(model, None, seed=1)
    copies = [name for name, value in initialiser._model.state_dict().items() if not value.is_meta]
    made = dict(initialiser.values(["0.table", "1.bias", "2.bias"], torch.device("cpu")))
    assert made["0.table"].tolist() == [0, 3] and not made["1.bias"].any() and made["2.bias"].any()
    kept = {name: torch.equal(before[name], value) for name, value in model.state_dict().items() if not value.is_meta}
    assert len(kept) == len(before) - 3 and all(kept.values())
    assert not copies


def watched(act: Callable[[torch.Tensor], object]) -> tuple[dict[str, bool], set[str], bool]:
    """Return what a function writes and uses of a tensor of ``[4, 4]`` on meta, and whether it draws."""
    whole = torch.empty(4, 4, device="meta")
    with torch.no_grad(), WriteWatch({whole.untyped_storage()._cdata: "whole"}, {"whole": 16}) as watch:
        act(whole)
    return watch.writes, watch.used, watch.draws


@pytest.mark.parametrize(
    ("act", "complete"),
    [
        (lambda w: nn.init.eye_(w), True),
        (lambda w: torch.add(torch.ones(4, 4, device="meta"), 1, out=w), True),
        (lambda w: torch.mul(w, 2, out=w), False),
        (lambda w: w.copy_(w * 0.5), False),
        (lambda w: w.copy_(w.t()), False),
        (lambda w: w.data.zero_(), True),
        (lambda w: torch._foreach_zero_([w[:2], w[2:]]), False),
        (lambda w: w[1].add_(1), False),
    ],
    ids=["eye", "out", "out of itself", "scaled", "a view", "data", "list", "row"],
)
def test_what_a_call_writes_is_all_of_a_tensor_only_if_it_was_not_read_before(
    act: Callable[[torch.Tensor], object], complete: bool
) -> None:
    assert watched(act) == ({"whole": complete}, {"whole"}, False)


def test_random_numbers_and_reads_are_noted() -> None:
    assert watched(lambda w: w.sum()) == ({}, {"whole"}, False)
    assert watched(lambda w: w.detach().uniform_()) == ({"whole": True}, {"whole"}, True)
    assert watched(lambda w: torch.randn(2)) == ({}, set(), True)


def replace_data(module: nn.Linear) -> None:
    module.weight.data = torch.full_like(module.weight, 5)


def replace_parameter(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.full((3, 3), 5.0))


@pytest.mark.parametrize("set_weight", [replace_data, replace_parameter])
def test_tensors_that_a_function_replaces_are_initialised_by_it(set_weight: Callable[[nn.Linear], None]) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            set_weight(module)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    initialiser = Initialiser(model, init, seed=1)
    names = ["0.weight", "1.weight"]
    made = dict(initialiser.values(names, torch.device("cpu")))
    assert [made[name].tolist() for name in names] == [[[5.0] * 3] * 3] * 2
    assert all(parameter.is_meta for parameter in initialiser._model.parameters())
    assert len([*initialiser._model.parameters()]) == 3


def test_a_buffer_that_a_module_makes_anew_is_initialised() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(4, dtype=torch.bool))

        def reset_parameters(self) -> None:
            self.table = torch.ones(4, dtype=torch.bool)  # the value that marks what is not set

    with torch.device("meta"):
        model = Table()
    ((_, made),) = Initialiser(model, None, seed=1).values(["table"], torch.device("cpu"))
    assert made.all()


def test_a_function_may_scale_what_the_model_sets() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.copy_(module.weight * 0.5)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4))
    (own,), (scaled,) = (
        [made for _, made in Initialiser(model, one, seed=1).values(["0.weight"], torch.device("cpu"))]
        for one in (None, init)
    )
    assert own.any() and torch.equal(scaled, own * 0.5)


def test_an_initialiser_that_removes_a_parameter_is_named() -> None:
    with pytest.raises(ConfigError, match="'bias' is no longer in the model") as caught:
        ebbtide.load_sharded(nn.Linear(2, 2, device="meta"), init=lambda module: setattr(module, "bias", None))
    assert "init=" in caught.value.hint
