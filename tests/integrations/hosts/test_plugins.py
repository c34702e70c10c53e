"""The code of the page of trainers for frameworks with plugins, run unchanged in the real packages."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.integrations.transformers import OffloadCallback
from tests.helpers.hosts import STEPS, Trained, batch, differences, encoder_layers, seeded, trained

PAGE = Path(__file__).parents[3] / "docs/guides/trainers.md"

# Of the packages, at import.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def plugin(host: str, monkeypatch: pytest.MonkeyPatch, **names: object) -> Any:
    """Return the page's code for a host as the module ``offload``, with these names predefined."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {host}\n")[2]
    code = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0]
    module = ModuleType("offload")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "offload", module)
    exec(compile(code, f"{host} of {PAGE.name}", "exec"), vars(module))
    return module


def test_axolotls_manager_of_plugins_adds_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    base = pytest.importorskip("axolotl.integrations.base", reason="needs axolotl: pip install axolotl")
    plugin("axolotl", monkeypatch)
    manager = base.PluginManager()
    monkeypatch.setattr(manager, "plugins", {})
    manager.register("offload.Offload")
    (callback,) = manager.add_callbacks_post_trainer({}, None)
    assert isinstance(callback, OffloadCallback)


def test_torchtitans_llama_is_bitwise_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = pytest.importorskip("torchtitan.models.llama3", reason="needs torchtitan: pip install torchtitan")
    from torchtitan.models.common.attention import ScaledDotProductAttention

    def train(policy: Any) -> Trained:
        seeded()
        config = llama.llama3_configs["debugmodel"](attn_backend="flex")
        for layer in config.layers:  # flex attention would be compiled
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        model: Any = config.build()
        model.init_weights(buffer_device=torch.device("cpu"))
        if policy is not None:
            policy.apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses: list[Tensor] = []
        for step in range(STEPS):
            tokens = (batch(step, 2, 65).abs() * 500).long() % 2048
            positions = torch.arange(64).repeat(2, 1)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1], positions).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return trained(losses, model, None if policy is None else policy.handle)

    policy = plugin("torchtitan", monkeypatch).Offload.Config().build()
    plain, ours = train(None), train(policy)
    policy.handle.close()
    assert differences(plain, ours) == []
    assert ours.stats is not None and ours.stats.total_copy_out_bytes + ours.stats.total_recomputes > 0


def test_torchtitans_policy_is_applied_to_a_model_and_to_its_vision_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan.distributed.activation_checkpoint", reason="needs torchtitan")
    policy = plugin("torchtitan", monkeypatch).Offload.Config().build()
    model: Any = nn.Module()
    model.layers, model.vision_encoder = encoder_layers(), nn.Module()
    model.vision_encoder.layers = encoder_layers()
    policy.apply(model)
    policy.apply(model.vision_encoder)
    assert len(policy.handle.blocks) == len(model.layers) + len(model.vision_encoder.layers)
    policy.handle.close()


def test_fastvideos_callbacks_offload_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = pytest.importorskip("fastvideo.train.callbacks.callback", reason="needs FastVideo")
    plugin("FastVideo", monkeypatch)
    student = nn.Module()
    student.transformer = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, batch_first=True) for _ in range(3)])
    method: Any = nn.Module()
    method.student = student
    made = callbacks.CallbackDict({"offload": {"_target_": "offload.Offload"}}, None)
    made.on_train_start(method)
    student.transformer(batch(0, 8, 128, 32)).sum().backward()
    made.on_train_end(method)
    (callback,) = made._callbacks.values()
    assert callback.handle.stats().packs > 0 and not callback.handle.enabled


def test_ms_swifts_sft_is_bitwise_the_same(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swift = pytest.importorskip("swift.pipelines.train.sft", reason="needs ms-swift: pip install ms-swift")
    made: list[OffloadCallback] = []

    def recorded() -> OffloadCallback:
        made.append(OffloadCallback(min_bytes=0))
        return made[-1]

    plugin("ms-swift", monkeypatch).OffloadCallback = recorded
    rows = [{"role": "user", "content": "What does it return?"}, {"role": "assistant", "content": "The value."}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': rows})}\n" * 12, encoding="utf-8")

    def train(callbacks: list[str]) -> Trained:
        run = swift.SwiftSft(
            ["--model", str(tiny_model), "--model_type", "llama", "--template", "chatml", "--tuner_type", "full",
             "--dataset", str(tmp_path / "rows.jsonl"), "--split_dataset_ratio", "0", "--torch_dtype", "float32",
             "--output_dir", str(tmp_path / "out"), "--max_steps", str(STEPS), "--save_strategy", "no",
             "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1", "--logging_steps", "1",
             "--report_to", "none", "--gradient_checkpointing", "false", *callbacks]
        )  # fmt: skip
        losses = [entry["loss"] for entry in run.main()["log_history"] if "loss" in entry]
        return trained(losses, run.model, made[-1].handle if callbacks else None)

    plain, ours = train([]), train(["--callbacks", "ebbtide"])
    assert len(plain.losses) == STEPS and differences(plain, ours) == []
    assert ours.stats is not None and ours.stats.total_copy_out_bytes + ours.stats.total_recomputes > 0


def test_twinkles_model_is_bitwise_the_same(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("twinkle.model", reason="needs twinkle: pip install twinkle-kit")
    import twinkle
    from accelerate.state import AcceleratorState
    from twinkle.utils import Platform

    AcceleratorState._reset_state(reset_partial_state=True)  # of another test's trainer

    monkeypatch.setattr(Platform, "get_local_device", staticmethod(lambda *args, **kwargs: "cpu"))  # it knows no CPU
    twinkle.initialize(mode="local", seed=1)
    smallest = SimpleNamespace(
        enable_activation_offloading=functools.partial(ebbtide.enable_activation_offloading, min_bytes=0)
    )

    def train(*, offloads: bool) -> Trained:
        seeded()
        model = models.TransformersModel(model_id=str(tiny_model), mixed_precision="no")
        handle = plugin("twinkle", monkeypatch, ebbtide=smallest, model=model).handle if offloads else None
        model.set_processor("InputProcessor")
        model.set_loss("CrossEntropyLoss")
        model.set_optimizer("AdamW", lr=1e-3)
        losses: list[float] = []
        for step in range(STEPS):
            tokens = ((torch.arange(24) * 7 + step) % 250).numpy()
            losses.append(model.forward_backward(inputs=[{"input_ids": tokens, "labels": tokens}])["loss"])
            model.step()
            model.zero_grad()
        if handle is not None:
            handle.close()
        return trained(losses, model.model, handle)

    plain, ours = train(offloads=False), train(offloads=True)
    assert len(set(plain.losses)) > 1 and differences(plain, ours) == []
    assert ours.stats is not None and ours.stats.total_copy_out_bytes + ours.stats.total_recomputes > 0
