"""Scales from a workspace to their places, alone and of more tiles than a block of threads takes at once.

``python -m tests.cases.scale_places`` runs ``kernels/common/scale_places.py`` thread by thread on a CPU
(``tests/cases/simt.py``)."""

from __future__ import annotations

import torch

from layerplan.kernels.common.quantized import workspace_bytes

from . import simt, simt_ptx

SHAPES = ((1, 4232), (4230, 8), (131, 261), (128, 256))  # rows, values of a row: tiles 1 x 34, 34 x 1, 2 x 3, 1 x 2


def expected(workspace: torch.Tensor, rows: int, width: int) -> list[torch.Tensor]:
    """[rows, tiles] and [columns, tiles down] of [tiles down, tiles, 2, 128]."""
    near, far = workspace.unbind(2)
    return [near.transpose(1, 2).flatten(0, 1)[:rows], far.permute(1, 2, 0).flatten(0, 1)[:width]]


def run(rows: int, width: int) -> None:
    from cutlass import Int32, Int64

    from layerplan.kernels.common.scale_places import SIDE, ScalePlaces

    down, across = -(-rows // SIDE), -(-width // SIDE)
    workspace = torch.randn(down, across, 2, SIDE, generator=torch.Generator().manual_seed(0))
    assert workspace.nbytes == workspace_bytes(rows, width)
    want = expected(workspace, rows, width)
    got = [torch.full(t.shape, float("nan")) for t in want]
    simt.conflicts.clear()
    simt_ptx.forget()
    simt_ptx.allow(workspace, *got)
    ScalePlaces(width, overlap=True)(Int32(rows), *(Int64(t.data_ptr()) for t in (workspace, *got)), None)
    for a, b, name in zip(got, want, ("rows", "columns"), strict=True):
        assert torch.equal(a, b), f"{rows} x {width}: {int((a != b).sum())} of {b.numel()} scales of {name} are others"
    assert not simt.conflicts, f"{len(simt.conflicts)} accesses meet in a bank: {simt.conflicts[0]}"


if __name__ == "__main__":
    simt.install()
    for shape in SHAPES:
        run(*shape)
    print(f"{len(SHAPES)} workspaces are where they belong")
