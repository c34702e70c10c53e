"""Known defects of other activation offloaders, each row run alone and sharded by FSDP2 on two ranks."""

from __future__ import annotations

import pytest

from tests.dist.defects import LAYERS, ROWS, run_row
from tests.dist.trial import Findings, check
from tests.helpers.spawn import CaseResult, run_cases


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, CaseResult]:
    """Results of the selected rows on ranks, in one group of processes."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    return run_cases({p["row"]: (_on_a_rank, (p["row"],)) for p in params}, 2, timeout_seconds=60.0)


def _on_a_rank(row: str) -> dict[str, Findings]:
    return run_row(row, sharded=True)


def _check(row: str, values: list[dict[str, Findings]]) -> None:
    check(values, blocks=LAYERS)
    for by_policy in values:
        assert set(by_policy) == set(ROWS[row].policies)
        for found in by_policy.values():
            assert bool(found.said) == ROWS[row].raises and all(found.said)
            assert found.largest_bytes <= (ROWS[row].kept or found.largest_bytes)


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.alone])
def test_alone(row: str) -> None:
    _check(row, [run_row(row, sharded=False)])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ROWS)
def test_sharded(results: dict[str, CaseResult], row: str) -> None:
    _check(row, results[row].values())
    assert all(
        found.units == LAYERS * (1 + (ROWS[row].units != "blocks")) + 1
        for v in results[row].values_
        for found in v.values()
    )
