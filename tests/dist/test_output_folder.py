"""If checkpoints would be written, an output folder that ranks do not share is refused on all of them."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ebbtide.base.errors import DataError
from ebbtide_recipes.skeleton.outputs import check_shared
from tests.helpers.spawn import run_cases


def refused(folders: list[str], *of_latents: str) -> str:
    try:
        check_shared(Path(folders[dist.get_rank()]), *of_latents)
    except DataError as error:
        return str(error)
    return ""


def test_a_folder_of_its_own_on_a_rank_is_refused_on_all(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    cases = {
        "shared": (refused, ([str(shared)] * 2,)),
        "own": (refused, ([str(shared), str(other)],)),
        "latents": (refused, ([str(shared), str(other)], "latents_dir", "share of the latents", "copies")),
    }
    results = run_cases(cases, 2)
    assert results["shared"].values() == ["", ""]
    for rank, text in enumerate(results["own"].values()):
        assert f"{str((shared, other)[rank])!r} on rank 1 is not the folder of rank 0; expected " in text
        assert "\nhint: " in text
    for rank, text in enumerate(results["latents"].values()):
        assert f"latents_dir {str((shared, other)[rank])!r} on rank 1 is not the folder of rank 0; expected " in text
        assert "every rank writes its share of the latents there\nhint: --latents_dir on a file system" in text
        assert text.endswith(", or copies")
    assert [*shared.iterdir(), *other.iterdir()] == []
