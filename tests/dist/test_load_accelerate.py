"""Under accelerate, models loaded inside the context equal models loaded without it, and train like them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from tests.dist.accelerated import Way, compare_prepared, refused, write_model
from tests.helpers.spawn import CaseResult, run_cases

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

WAYS = (
    Way(),
    Way(precision="bf16"),
    Way(precision="bf16", stored="float32"),
    Way(precision="bf16", stored="float32", version=1),
    Way(efficient=True, dtype="float32"),
    Way(checkpointing=True),
    Way(adapters=True, storage="bfloat16"),
    Way(version=1),
)
CASES = {
    " ".join(f"{f.name}={getattr(w, f.name)}" for f in fields(w) if getattr(w, f.name) != f.default) or "plain": w
    for w in WAYS
}
REFUSED = {
    "device map": "device_map is",
    "shapes": "ignore_mismatched_sizes is set",
    "names": "key_mapping is set",
    "quantisation": "the model is quantised by",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, CaseResult]]:
    folders = {stored: str(tmp_path_factory.mktemp(stored)) for stored in ("bfloat16", "float32")}
    for stored, folder in folders.items():
        write_model(folder, dtype=stored)
    cases = {name: (compare_prepared, (way, folders[way.stored])) for name, way in CASES.items()}
    cases |= {f"refused {name}": (refused, (name, folders["bfloat16"])) for name in REFUSED}
    yield run_cases(cases, 2, timeout_seconds=120.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_what_is_prepared_trains_as_what_was_loaded_plainly(results: dict[str, CaseResult], name: str) -> None:
    for found in results[name].values():
        assert found["sharded"]
        assert found["losses"][0] == found["losses"][1]
        assert len(set(found["losses"][0])) == 2
        assert found["trained"] == []
        assert found["names"] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_in_environment_plugin_library_or_accelerator(
    results: dict[str, CaseResult], name: str
) -> None:
    for found in results[name].values():
        assert found["left"] == {"environment": True, "plugin": {}, "library": True, "prepare": False}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_weights_at_once_is_refused(results: dict[str, CaseResult], name: str) -> None:
    for message in results[f"refused {name}"].values():
        assert REFUSED[name] in message
        assert "hint:" in message


def test_without_sharding_models_are_loaded_as_usual(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from ebbtide.base.errors import ConfigError
    from ebbtide.integrations.accelerate import memory_efficient_init

    write_model(str(tmp_path))
    with (
        caplog.at_level(logging.INFO, "ebbtide.integrations"),
        memory_efficient_init(Accelerator(cpu=True)) as later,
    ):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert later is None and "does not shard" in caplog.text
    assert not any(p.is_meta for p in model.parameters())
    with pytest.raises(ConfigError, match="accelerator is a str"), memory_efficient_init("cuda"):  # type: ignore[arg-type]
        pass
