"""The Python of the quick start, run unchanged on a tiny model; and the plan of the page on plans."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.cli import main as command_line
from tests.helpers.torches import needs_slots

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "quick-start.md"
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}  # fmt: skip


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def names(place: Path) -> dict[str, Any]:
    """Names that the page leaves to its reader: a model, an optimizer, rows, a loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(256).reshape(2, 128) % 300
    loader = [{"input_ids": ids, "labels": ids}] * 2

    def train() -> None:
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "loader": loader, "train": train}


def test_a_loop_of_ones_own(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = names(tiny_model)
    exec(blocks()[0], given)
    assert not given["handle"].enabled
    stats = given["handle"].stats()
    assert stats.packs > 0 and stats.unique_bytes > 0
    said = capsys.readouterr().out
    assert "offloaded" in said and "recomputed" in said and "LlamaDecoderLayer/" in said


def test_the_replacement_of_save_on_cpu(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    given = {"ebbtide": __import__("ebbtide"), "model": model, "x": torch.randn(128, 64)}
    exec(blocks()[1], given)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(given["x"]).sum().backward()
    assert all(a.equal(b.grad) for a, b in zip(gradients, model.parameters(), strict=True))


def test_tracking_and_its_report(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {**names(tiny_model), "ebbtide": __import__("ebbtide")}
    exec(blocks()[2], given)
    assert json.loads(Path("run/summary.json").read_text())["peak_host_bytes"] > 0
    assert command_line(["report", "run/"]) == 0
    assert "<html" in Path("run/report.html").read_text()


@needs_slots
def test_the_page_on_plans_has_what_its_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.with_name("plan.md").read_text()
    found = re.search(r"^```\n(ebbtide plan .*?)\n```\n+```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    Path("Qwen3-8B").mkdir()
    Path("Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B))
    assert command_line(shlex.split(found[1])[1:]) == 0
    assert capsys.readouterr().out.startswith(found[2])
