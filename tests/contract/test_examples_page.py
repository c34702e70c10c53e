"""The planned figures of examples/README.md are those that the suite computes from its counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results_folder import with_tables
from benchmarks.suites.examples import BEGIN, END, EXAMPLES, PAGE, table

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("examples_*/run.json"))


def test_the_page_holds_what_was_counted() -> None:
    found = json.loads(RESULTS[-1].read_text())["bytes_per_token_and_block"]
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    expected = with_tables(text, BEGIN, END, table(found))
    assert expected == text, "python -m benchmarks.suites.examples --page rewrites it"
    assert RESULTS[-1].parent.name in text


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.script)
def test_a_planned_example_is_what_its_script_asks_for(example: object) -> None:
    script = (ROOT / "examples" / example.script).read_text()
    assert f"--max_length {example.tokens} " in script
    assert f"--nproc_per_node {example.ranks} " in script
    assert f"--train_type {'lora' if example.adapters else 'full'} " in script
    assert "Qwen/Qwen3-8B" in script


def test_weights_and_states_are_those_of_eight_billion_weights() -> None:
    full, adapters = EXAMPLES[0], EXAMPLES[1]
    # 8.19e9 weights as Qwen3-8B's card has it: 2 bytes each, gradients too, and two moments.
    assert full.state_bytes() * full.ranks == pytest.approx(8.19e9 * 8, rel=0.01)
    assert adapters.state_bytes() * adapters.ranks == pytest.approx(8.19e9 * 2, rel=0.01)
