"""The examples for Slurm, Kubernetes and Ray: torchrun and sft know the arguments of their launchers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.cluster import ray_train
from tests.integrations.commands import ROOT, surroundings

CLUSTER = ROOT / "examples" / "cluster"
LIMIT_SECONDS = 550


def launched(words: Sequence[str]) -> tuple[Any, Any]:
    """Return torchrun's settings and the recipe's config from the words after ``torchrun``."""
    from torch.distributed.run import get_args_parser

    from ebbtide.cli.arguments import read_arguments
    from ebbtide_recipes.sft.config import SftConfig

    settings = get_args_parser().parse_args(words)
    assert (settings.module, settings.training_script, settings.training_script_args[0]) == (True, "ebbtide", "sft")
    return settings, read_arguments(SftConfig, settings.training_script_args[1:], prog="ebbtide sft")


def test_slurm_starts_a_torchrun_on_each_node(tmp_path: Path) -> None:
    commands = {
        "srun": 'exec "$@"',
        "scontrol": "printf 'node-a\\nnode-b\\n'",
        "torchrun": f"exec {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = CLUSTER / "slurm.sbatch"
    result = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True, timeout=60)
    settings, config = launched(json.loads(result.stdout))
    assert (settings.nnodes, settings.nproc_per_node, settings.max_restarts) == ("2", "8", 3)
    assert (settings.rdzv_backend, settings.rdzv_endpoint, settings.rdzv_id) == ("c10d", "node-a:29500", "7")
    assert (config.mode, config.fsdp_strategy, config.resume_from_checkpoint) == ("ebbtide", "hybrid_shard", "latest")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "1", "8")


def test_pods_run_torchrun_with_the_settings_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    (pod,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    elastic, shared = job["spec"]["elasticPolicy"], [mount["mountPath"] for mount in pod["volumeMounts"]]
    operator = {
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }
    for name, value in operator.items():
        monkeypatch.setenv(name, value)
    assert pod["command"][0] == "torchrun"
    settings, config = launched([*pod["command"][1:], *pod["args"]])
    assert (settings.nnodes, settings.nproc_per_node, settings.max_restarts) == ("2:2", "8", 3)
    assert settings.rdzv_backend == "c10d"
    assert config.mode == "ebbtide" and config.resume_from_checkpoint == "latest"
    assert config.output_dir.startswith(shared[0]) and config.disk_path == shared[1]
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])


def test_rays_workers_get_a_config_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide_recipes.sft import recipe

    monkeypatch.chdir(tmp_path)
    started: list[Any] = []
    monkeypatch.setattr(recipe, "main", started.append)
    arguments = ray_train.parser().parse_args(["Qwen/Qwen3-8B", "rows.jsonl", "out", "--devices"])
    ray_train.train(ray_train.flags_of(arguments))
    (config,) = started
    assert (config.model, config.mode, config.fsdp_strategy) == ("Qwen/Qwen3-8B", "ebbtide", "full_shard")
    assert config.dataset == (str(tmp_path / "rows.jsonl"),) and config.output_dir == str(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_of_ray_train_a_tiny_model(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs ray[train]")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": f"It returns the value {n} of the argument. " * 20}) + "\n" for n in range(60))
    )
    out = tmp_path / "out"
    command = [sys.executable, str(CLUSTER / "ray_train.py"), str(tiny_model), str(rows), str(out)]
    command += ["--max_length", "128", "--max_steps", "3"]
    environment = surroundings() | {"RAY_USAGE_STATS_ENABLED": "0"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["world_size"], summary["mode"], summary["steps"], summary["status"]) == (2, "ebbtide", 3, "ok")
