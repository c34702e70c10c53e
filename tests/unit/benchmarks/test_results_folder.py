"""Results are compact: a line for each row."""

from __future__ import annotations

import json

from benchmarks.results_folder import RESULTS, rows


def test_a_row_is_a_line_and_nothing_is_lost() -> None:
    cases = [{"case": number, "seconds": [0.1] * 100} for number in range(20)]
    document = {"date": "today", "cases": cases, "by": {str(number): {"x": [1] * 300} for number in range(3)}}
    text = rows(document)
    assert json.loads(text) == document
    assert 20 + 3 <= len(text.splitlines()) < 40


def test_no_result_in_the_repository_is_a_page_of_numbers() -> None:
    found = {path: len(path.read_text().splitlines()) for path in RESULTS.glob("*/*.json")}
    assert found and {str(path): lines for path, lines in found.items() if lines > 400} == {}
