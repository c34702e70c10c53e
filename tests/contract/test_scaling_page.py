"""The tables of docs/concepts/scaling.md are those that the suite computes from its counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.results_folder import with_tables
from benchmarks.suites.scaling import (
    BEGIN,
    DEVICES,
    END,
    MACHINES,
    MODELS,
    PAGE,
    SHOWN,
    Job,
    Model,
    counted,
    jobs,
    slowdown,
    tables,
    together,
)

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("scaling_*/run.json"))


def test_the_page_holds_what_was_counted() -> None:
    result = json.loads(RESULTS[-1].read_text())
    rows = f"{tables(result['bytes_per_token_and_block'])}\n\n{together(result['jobs'])}"
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert with_tables(text, BEGIN, END, rows) == text, "python -m benchmarks.suites.scaling --page rewrites it"
    assert RESULTS[-1].parent.name in text


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_engine_counts_what_was_counted(model: Model) -> None:
    """A new or removed rule changes the page: rewrite it."""
    assert counted(model) == json.loads(RESULTS[-1].read_text())["bytes_per_token_and_block"][model.name]


def test_a_job_takes_what_its_nodes_take() -> None:
    text = PAGE.read_text()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    nodes = {r[0]: float(r[1].removesuffix(" GiB")) for r in rows if len(r) == 4 and r[1].endswith(" GiB")}
    found = re.search(r"A job on (\d+) devices takes ([\d.]+) TiB", text)
    assert found is not None and int(found[1]) == SHOWN[-1] and {*nodes} == {machine.name for machine in MACHINES}
    for machine in MACHINES:
        of_a_node = 1024 * float(found[2]) / (SHOWN[-1] // machine.ranks)
        assert of_a_node == pytest.approx(nodes[machine.name], rel=0.07)  # GiB have no digit behind the point
        assert machine.link_bytes_per_second * machine.ranks <= machine.host_bytes_per_second


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_forward_takes_what_its_products_take(model: Model) -> None:
    machine = MACHINES[0]
    weights = model.hidden * (2 * model.heads + 2 * model.kv_heads) * 128 + 3 * model.hidden * model.inner
    short = model.forward_seconds(1024, machine)
    assert short == pytest.approx(2 * 1024 * weights / machine.flop_per_second, rel=0.2)
    # Four times the tokens: four times the weight products, sixteen times the attention.
    assert 4 * short < model.forward_seconds(4096, machine) < 16 * short


def test_jobs_of_one_node_are_simulated_as_they_were() -> None:
    result = json.loads(RESULTS[-1].read_text())
    moved = result["bytes_per_token_and_block"][MODELS[0].name]
    assert [Job(**{name: row[name] for name in Job.__annotations__}) for row in result["jobs"]] == list(jobs())
    for job, row in zip(jobs(), result["jobs"], strict=True):
        assert slowdown(job, DEVICES[0], moved[job.policy]) == pytest.approx(row[str(DEVICES[0])], abs=1e-9)


def test_more_devices_take_no_longer_and_what_holds_one_node_up_holds_up_all() -> None:
    rows = json.loads(RESULTS[-1].read_text())["jobs"]
    for row in rows:
        assert row["1024"] <= row["64"] + 1e-9 <= row["8"] + 2e-9
    by_link = {
        (row["link"], row["disturbance"]): row["1024"]
        for row in rows
        if row["machine"] == MACHINES[0].name and row["policy"] == "auto"
    }
    assert by_link["one for two", "none"] > by_link["its own", "none"] > 0
    assert by_link["its own", "one host at a quarter of its memory rate"] > by_link["its own", "none"]
