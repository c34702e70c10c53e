"""The scripts of examples/: bash runs each, a fake ebbtide records its command, which then runs on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.commands import ROOT, Forks, replaced
from tests.integrations.conftest import make_tiny_model
from tests.integrations.families import make_llava, make_pictures

SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.sh"))
MODES = ("plain", "checkpointing", "ebbtide")
RUNS = [(script, "ebbtide") for script in SCRIPTS] + [("examples/8b-lora.sh", mode) for mode in MODES[:2]]
VARIABLES = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "ROWS": "rows.jsonl"}
NOTING = """#!{python}
import json, os, sys
told = {{"argv": sys.argv[1:], "ranks": os.environ.get("NPROC_PER_NODE"), "nodes": os.environ.get("NNODES")}}
open(os.environ["NOTED"], "w").write(json.dumps(told))
"""


def command_of(script: str, mode: str, folder: Path) -> dict[str, object]:
    """Let bash run a script with a stand-in for ebbtide; return its arguments."""
    stand_in = folder / "bin" / "ebbtide"
    stand_in.parent.mkdir()
    stand_in.write_text(NOTING.format(python=sys.executable))
    stand_in.chmod(0o755)
    noted = folder / "noted.json"
    environment = {**os.environ, **VARIABLES, "MODE": mode, "NOTED": str(noted)}
    environment["PATH"] = f"{stand_in.parent}{os.pathsep}{environment['PATH']}"
    subprocess.run(["bash", script], cwd=ROOT, env=environment, check=True, timeout=60, capture_output=True)
    return json.loads(noted.read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as made:
        yield made


@pytest.mark.parametrize("mode", [*MODES, "fast"])
def test_a_mode_of_a_script_is_the_mode_of_the_run(mode: str, tmp_path: Path) -> None:
    from ebbtide.cli.arguments import read_arguments
    from ebbtide_recipes.sft.config import SftConfig

    if mode == "fast":
        with pytest.raises(subprocess.CalledProcessError) as caught:
            command_of("examples/8b-full.sh", mode, tmp_path)
        assert b"MODE is fast; expected plain, checkpointing or ebbtide" in caught.value.stderr
        return
    argv = command_of("examples/8b-full.sh", mode, tmp_path)["argv"]
    config = read_arguments(SftConfig, argv[1:], prog="ebbtide sft")
    assert config is not None and (config.mode, config.output_dir) == (mode, f"runs/8b-full-{mode}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "mode"), RUNS, ids=[f"{script[9:]}-{mode}" for script, mode in RUNS])
def test_a_script_trains_a_tiny_model_on_two_ranks(
    script: str, mode: str, model: Path, forks: Forks, tmp_path: Path
) -> None:
    noted = command_of(script, mode, tmp_path)
    words, out = noted["argv"][1:], tmp_path / "out"
    values = {
        "--model": str(model), "--dataset": "builtin:pydoc#60", "--max_length": "256", "--output_dir": str(out),
        "--gradient_accumulation_steps": "2", "--dataloader_num_workers": "0", "--attn_impl": "sdpa",
        "--use_hf": "true", "--max_steps": "2", "--nproc_per_node": "2",
    }  # fmt: skip
    seeing = "rows.jsonl" in words
    if seeing:
        values |= {"--model": str(make_llava(tmp_path / "llava", model))}
        values |= {"--dataset": str(make_pictures(tmp_path / "pictures", count=32))}
        words += ["--per_device_train_batch_size", "8"]
    words = replaced(words, values)
    words += [] if "--max_steps" in words else ["--max_steps", "2"]
    words += [] if seeing or "--packing" in words else ["--packing", "true"]
    forks.sft(words, 2)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["mode"], summary["status"], summary["steps"], summary["world_size"]) == (mode, "ok", 2, 2)
    if mode == "ebbtide":
        assert summary["memory_saved_bytes"] > 0
        assert "for FSDP2 strategy" in (out / "training.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", sorted(path.name for path in (ROOT / "examples" / "presets").glob("*.yaml")))
def test_a_preset_trains_a_tiny_model(preset: str, model: Path, forks: Forks, tmp_path: Path) -> None:
    if preset == "least-memory.yaml":
        pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    words = [f"examples/presets/{preset}", "--model", str(model), "--dataset", "builtin:pydoc#60", "--packing", "true"]
    words += ["--max_length", "256", "--max_steps", "2", "--gradient_accumulation_steps", "2"]
    forks.sft([*words, "--output_dir", str(out)], 1)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["mode"], summary["status"], summary["steps"]) == ("ebbtide", "ok", 2)
    assert summary["memory_saved_bytes"] > 0
    assert summary["plan"]["name"] == ("minimal" if preset == "least-memory.yaml" else "auto")
