from __future__ import annotations

import dataclasses
import pickle

import pytest

from ebbtide.base.actions import Action, Candidate, Site


def test_a_site_reads_as_a_path() -> None:
    assert str(Site("LlamaDecoderLayer", "mlp.down_proj", "MulBackward0", 2)) == (
        "LlamaDecoderLayer/mlp.down_proj/MulBackward0#2"
    )
    assert str(Site("Block", "", "AddBackward0", 0)) == "Block/(block)/AddBackward0#0"


def test_sites_are_values() -> None:
    site = Site("Block", "mlp", "MulBackward0", 0)
    assert site == Site("Block", "mlp", "MulBackward0", 0)
    assert {site: 1}[pickle.loads(pickle.dumps(site))] == 1
    assert site != site._replace(ordinal=1)
    with pytest.raises(AttributeError):
        site.ordinal = 3  # type: ignore[misc]


def test_a_candidate_is_frozen_and_named_throughout() -> None:
    site = Site("Block", "mlp", "MulBackward0", 0)
    candidate = Candidate(site=site, block=1, nbytes=8, block_input=False, recompute_flops=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        candidate.nbytes = 9  # type: ignore[misc]
    later = candidate.with_kept(100)
    assert later == dataclasses.replace(candidate, kept_bytes=100) != candidate and candidate.with_kept(0) is candidate
    with pytest.raises(TypeError):
        Candidate(site, 1, 8, False, None)  # type: ignore[misc]


def test_actions_are_written_in_lower_case() -> None:
    # Run files and reports carry these values.
    assert {a.name: a.value for a in Action} == {
        "KEEP": "keep",
        "OFFLOAD": "offload",
        "RECOMPUTE": "recompute",
        "CHECKPOINT": "checkpoint",
    }
