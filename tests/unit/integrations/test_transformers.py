"""OffloadCallback in a trainer of transformers: on, off, twice, after an error, with another offloader."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.training_args import ParallelMode

import ebbtide
from ebbtide.base.errors import ConfigError, ConflictError, DataError, StrategyError
from ebbtide.integrations.transformers import (
    OffloadCallback,
    OffloadMixin,
    add_offloading,
    refuse_other_offloaders,
    wanted,
)
from ebbtide.report import load_run


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "seed": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**values, **changes})


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 64, (8, 128)).tolist()]
    return {"model": LlamaForCausalLM(config), "train_dataset": rows}


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def test_a_callback_offloads_while_training_and_changes_nothing_else(tmp_path: Path) -> None:
    callback = OffloadCallback(target="disk", disk_path=tmp_path)
    plain, ours = (
        Trainer(args=arguments(tmp_path), **parts()),
        Trainer(args=arguments(tmp_path), callbacks=[callback], **parts()),
    )
    plain.train()
    ours.train()
    assert all(a.equal(b) for a, b in zip(weights(plain), weights(ours), strict=True))
    handle = callback.handle
    assert handle is not None and not handle.enabled
    assert handle.stats().memory_saved_bytes > 0
    ours.train()  # again: a new handle
    assert callback.handle is not handle


def test_the_model_is_offloaded_where_the_trainer_passes_an_object_that_holds_it(tmp_path: Path) -> None:
    """As setfit does: its callbacks get a SetFitModel, which is no module, and the handler has the module."""
    callback = OffloadCallback(target="disk", disk_path=tmp_path)
    trainer = Trainer(args=arguments(tmp_path), callbacks=[callback], **parts())
    handler, holder = trainer.callback_handler, SimpleNamespace(model_body=trainer.model)

    def call_event(self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for one in self.callbacks:
            control = getattr(one, event)(args, state, control, model=holder, **kwargs) or control
        return control

    handler.call_event = lambda *args, **kwargs: call_event(handler, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train()
    assert callback.handle is not None and callback.handle.stats().memory_saved_bytes > 0


class Tracker(TrainerCallback):
    """Keeps its logs, like the callbacks of TensorBoard and W&B, which come before a user's callbacks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.seen.append(dict(logs))


FIGURES = ("memory_saved(GiB)", "kept(GiB)", "offloaded(GiB)", "stall(s)", "recompute(s)")


@pytest.mark.parametrize("position", [0, 1])
def test_trackers_see_the_figures_of_each_training_log(tmp_path: Path, position: int) -> None:
    tracker, callback = Tracker(), OffloadCallback(target="disk", disk_path=tmp_path, policy="offload")
    callbacks: list[TrainerCallback] = [tracker]
    callbacks.insert(position, callback)
    trainer = Trainer(args=arguments(tmp_path, logging_steps=1), callbacks=callbacks, **parts())
    trainer.train()
    assert callbacks[position] is callback  # the user's own list is unchanged
    steps = [logs for logs in tracker.seen if "loss" in logs]
    assert len(steps) == 2
    for logs in steps:
        assert all(logs[name] >= 0 for name in FIGURES)
    stats = callback.handle.stats()
    assert steps[-1]["offloaded(GiB)"] == stats.offloaded_bytes / 1024**3 > 0
    assert steps[-1]["memory_saved(GiB)"] == stats.memory_saved_bytes / 1024**3 > 0
    assert not any(name in logs for logs in tracker.seen if "loss" not in logs for name in FIGURES)
    assert [logs["offloaded(GiB)"] for logs in trainer.state.log_history if "loss" in logs] == [
        logs["offloaded(GiB)"] for logs in steps
    ]


def test_a_stock_trainer_under_track_memory_has_the_whole_report(tmp_path: Path) -> None:
    changes = {"logging_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 3, "per_device_train_batch_size": 2}
    callback = OffloadCallback(target="disk", disk_path=tmp_path, policy="offload")
    trainer = Trainer(args=arguments(tmp_path, **changes), callbacks=[callback], **parts())
    with ebbtide.track_memory(tmp_path / "run"):
        trainer.train()
    run = load_run(tmp_path / "run")
    assert [e["step"] for e in run.all("step")] == [1, 2, 3] == [e["step"] for e in run.all("log") if e["logs"]]
    assert run.summary["loss"] == [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    names = [span.name for span in sorted(run.phases, key=lambda span: span.begin) if span.step == 2]
    assert names == ["forward", "backward"] * 2 + ["optimizer"]
    weights = sum(p.nbytes for p in trainer.model.parameters())
    assert run.all("parts")[0]["weights"] == {"LlamaForCausalLM": weights}
    assert run.summary["stall_seconds"] is not None and run.summary["activation_bytes"]["offloaded"] > 0


def test_a_used_callback_is_copied_and_pickled_as_its_settings(tmp_path: Path) -> None:
    callback = OffloadCallback(policy="minimal")
    trainer = Trainer(args=arguments(tmp_path, max_steps=1), **parts())
    callback.follow(trainer)
    trainer.train()
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.options == callback.options and copied.handle is None
        Trainer(args=arguments(tmp_path, max_steps=1), callbacks=[copied], **parts()).train()
        assert copied.handle is not None and copied.handle is not callback.handle


def test_an_error_in_training_leaves_a_handle_that_close_closes(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("the disk is gone")

    callback = OffloadCallback()
    trainer = Trainer(args=arguments(tmp_path), callbacks=[callback, Failing()], **parts())
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    handle = callback.handle
    assert handle is not None and handle.enabled
    trainer.remove_callback(Failing)
    trainer.train()  # not refused as a second offloader: the old handle is closed first
    assert not handle.enabled
    callback.close()
    callback.close()
    assert callback.handle is not handle and callback.handle.stats().packs > 0  # the figures remain


@pytest.mark.parametrize("lost", [False, True], ids=["a new callback", "a lost callback"])
def test_after_an_interrupted_training_the_model_trains_with_another_callback(tmp_path: Path, lost: bool) -> None:
    shared = parts()
    first, second = OffloadCallback(), OffloadCallback()
    first.on_train_begin(arguments(tmp_path), TrainerState(), TrainerControl(), model=shared["model"])
    assert first.handle is not None and first.handle.enabled
    handle = weakref.ref(first.handle)
    if lost:
        del first
        gc.collect()
    Trainer(args=arguments(tmp_path), callbacks=[second], **shared).train()
    assert second.handle is not None and second.handle.stats().packs > 0
    assert (still := handle()) is None or not still.enabled


def test_two_callbacks_in_a_trainer_are_refused(tmp_path: Path) -> None:
    both = [OffloadCallback(), OffloadCallback(policy="minimal")]
    with pytest.raises(ConflictError, match="the trainer has 2 OffloadCallbacks; .*\nhint: "):
        Trainer(args=arguments(tmp_path), callbacks=both, **parts()).train()
    assert [callback.handle for callback in both] == [None, None]


def test_a_handle_that_is_no_callbacks_stays_and_the_error_carries_it(tmp_path: Path) -> None:
    shared = parts()
    handle = ebbtide.enable_activation_offloading(shared["model"])
    with pytest.raises(ConflictError, match="another handle") as caught:
        Trainer(args=arguments(tmp_path), callbacks=[OffloadCallback()], **shared).train()
    assert caught.value.handle is handle and handle.enabled
    caught.value.handle.close()
    Trainer(args=arguments(tmp_path), callbacks=[OffloadCallback()], **shared).train()


def test_a_trainer_over_several_devices_of_one_process_is_refused(tmp_path: Path) -> None:
    args, model = arguments(tmp_path), parts()["model"]
    args._n_gpu = 2  # as without torchrun on a machine with two devices
    callback = OffloadCallback()
    with pytest.raises(StrategyError, match=r"(?s)DataParallel over 2 devices.*hint: torchrun --nproc-per-node 2"):
        callback.on_train_begin(args, TrainerState(), TrainerControl(), model=model)
    assert callback.handle is None
    model.is_loaded_in_8bit = True  # those are not put in DataParallel
    callback.on_train_begin(args, TrainerState(), TrainerControl(), model=model)
    callback.close()


@pytest.mark.parametrize(("mode", "accepted"), [(ParallelMode.DISTRIBUTED, True), (ParallelMode.NOT_PARALLEL, False)])
def test_the_ddp_strategy_accepts_what_the_trainer_wraps(
    tmp_path: Path, mode: ParallelMode, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "parallel_mode", mode)
    callback = OffloadCallback(strategy="ddp")
    with nullcontext() if accepted else pytest.raises(StrategyError, match="wrapped as 'single'"):
        callback.on_train_begin(arguments(tmp_path), TrainerState(), TrainerControl(), model=parts()["model"])
    assert (callback.handle is not None) is accepted
    callback.close()


@pytest.mark.parametrize(("switch", "count"), [(True, 1), ("true", 1), (False, 0), (None, 0)])
def test_the_switch_in_the_fsdp_config_adds_the_callback_once(tmp_path: Path, switch: object, count: int) -> None:
    class OffloadingTrainer(OffloadMixin, Trainer): ...

    settings = {} if switch is None else {"activation_cpu_offload": switch}
    trainer = OffloadingTrainer(args=arguments(tmp_path, fsdp_config=settings), **parts())
    found = [c for c in trainer.callback_handler.callbacks if isinstance(c, OffloadCallback)]
    assert len(found) == count  # before a manual call of add_offloading: the mixin has made it
    assert add_offloading(trainer) is (found[0] if found else None)
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, OffloadCallback)] == found


@pytest.mark.parametrize("form", ["path", "nested", "json", "prefix"])
def test_the_mixin_reads_every_form_of_the_settings(tmp_path: Path, form: str) -> None:
    class OffloadingTrainer(OffloadMixin, Trainer): ...

    settings: dict[str, Any] = {"fsdp_version": 2, "activation_cpu_offload": True}
    if form == "nested":
        settings = {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    if form == "prefix":
        settings = {"fsdp_activation_cpu_offload": "true"}
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(settings))
    given = file.read_text() if form == "json" else str(file)
    # Only the mixin adds the callback; without ``fsdp`` transformers leaves the text unparsed.
    trainer = OffloadingTrainer(args=arguments(tmp_path, fsdp_config=given), **parts())
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, OffloadCallback)]
    assert Trainer(args=arguments(tmp_path, fsdp_config=given), **parts()).callback_handler.callbacks != [callback]
    trainer.train()
    assert callback.handle is not None and callback.handle.stats().packs > 0


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    for given, said in (
        ("nowhere.json", "fsdp_config 'nowhere.json' cannot be read"),
        ("{broken", "fsdp_config .{broken. is not JSON"),
        (str(tmp_path / "list.json"), r"fsdp_config '.*list.json' is \[1\]; expected a JSON file with FSDP's settings"),
        ({"fsdp_config": "nowhere.json"}, "fsdp_config 'nowhere.json' cannot be read"),
        ({"fsdp_config": [1]}, r"fsdp_config is \[1\]; expected FSDP's settings"),
    ):
        with pytest.raises(DataError, match=rf"{said}.*\nhint: "):
            wanted(given)


def test_a_switch_that_is_neither_is_refused() -> None:
    assert wanted(None) is False and wanted({"activation_cpu_offload": "null"}) is False
    with pytest.raises(
        ConfigError, match="activation_cpu_offload of fsdp_config is 'maybe'; expected true or false\nhint: "
    ):
        wanted({"activation_cpu_offload": "maybe"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_offloading": True}, "activation_offloading"),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, r"gradient_checkpointing_kwargs\['offload'\]"),
        ({"activation_checkpointing_kwargs": {"offload": True}}, r"activation_checkpointing_kwargs\['offload'\]"),
        ({"fsdp_config": {"activation_checkpointing_offload": True}}, "activation_checkpointing_offload"),
        ({"fsdp_plugin_args": {"activation_checkpointing_offload": True}}, "activation_checkpointing_offload"),
    ],
)
def test_a_trainer_that_offloads_itself_is_refused_and_the_flag_named(changes: dict, named: str) -> None:
    values = {"fsdp_config": None, "fsdp_plugin_args": None, "gradient_checkpointing_kwargs": None}
    refuse_other_offloaders(SimpleNamespace(**values))
    with pytest.raises(
        ConflictError, match=rf"the trainer's own .*{named}.* is on together with ebbtide.*\nhint: unset .*{named}"
    ):
        refuse_other_offloaders(SimpleNamespace(**{**values, **changes}))


def test_the_callback_has_the_parameters_of_the_public_function() -> None:
    public = inspect.signature(ebbtide.enable_activation_offloading).parameters
    own = inspect.signature(OffloadCallback).parameters
    assert {name: p.default for name, p in own.items()} == {n: p.default for n, p in public.items() if n != "model"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("policy", "minmal"),
        ("strategy", "fsdp3"),
        ("target", "hots"),
        ("window", 0),
        ("blocks", []),
        ("keep_filter", 3),
    ],
)
def test_a_bad_value_fails_where_the_callback_is_made(option: str, value: object) -> None:
    with pytest.raises(ebbtide.ConfigError, match=option):
        OffloadCallback(**{option: value})
