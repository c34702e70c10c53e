"""The tables of docs/concepts/scaling.md are those that the suite computes from what it counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.suites.scaling import BEGIN, DEVICES, END, MACHINES, MODELS, PAGE, Model, counted, page, tables

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("scaling_*/run.json"))


def test_the_page_holds_what_was_counted() -> None:
    moved = json.loads(RESULTS[-1].read_text())["bytes_per_token_and_block"]
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert page(text, tables(moved)) == text, "python -m benchmarks.suites.scaling --page writes it anew"
    assert RESULTS[-1].parent.name in text


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_engine_counts_what_was_counted(model: Model) -> None:
    """A rule more or less changes the page: it is to be written anew."""
    assert counted(model) == json.loads(RESULTS[-1].read_text())["bytes_per_token_and_block"][model.name]


def test_jobs_of_any_size_ask_the_same_of_a_node() -> None:
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    jobs = [r for r in rows if len(r) == 8 and r[1].isdigit()]
    assert [int(r[1]) for r in jobs] == list(DEVICES) * len(MACHINES)
    for machine in MACHINES:
        mine = [r for r in jobs if r[0] == machine.name]
        assert len({(r[3], r[5], r[6]) for r in mine}) == 1
        assert [int(r[2]) * machine.ranks for r in mine] == list(DEVICES)
        assert machine.link_bytes_per_second * machine.ranks <= machine.host_bytes_per_second


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_forward_takes_what_its_products_take(model: Model) -> None:
    machine = MACHINES[0]
    weights = model.hidden * (2 * model.heads + 2 * model.kv_heads) * 128 + 3 * model.hidden * model.inner
    short = model.forward_seconds(1024, machine)
    assert short == pytest.approx(2 * 1024 * weights / machine.flop_per_second, rel=0.2)
    # Four times the tokens: four times the products with weights, sixteen times the attention.
    assert 4 * short < model.forward_seconds(4096, machine) < 16 * short
