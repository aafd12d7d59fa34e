"""Faults in the tile of ``kernels/common/quantize_tile.py``, each of which the simulation has to see: ``python -m
tests.cases.quantize_faults`` builds them in one by one and runs a case that a kernel without them passes."""

from __future__ import annotations

from collections.abc import Callable

from . import simt
from .cute_quantize import BLOCK, Case, simulated


def _unswizzled(tile) -> None:
    tile._chunk = lambda self, chunk, low, high: chunk * 16


def _unsorted(tile) -> None:
    tile._matrix_row = staticmethod(lambda matrix, row: matrix * 8 + row)


def _fetched(tile) -> None:
    tile._ok = lambda self, row, column: row >= 0


def _written(tile) -> None:
    write = tile._write
    tile._write = lambda self, at, words, there, *rest: write(self, at, words, at >= 0, *rest)


def _behind(tile) -> None:
    write = tile._write
    tile._write = lambda self, at, words, there, place, *rest: write(self, at, words, there, place - 8, *rest)


def _swapped(tile) -> None:
    both = tile._both
    tile._both = lambda self, own: both(self, own)[::-1]


# fault -> (how it is made, what the report of it holds)
FAULTS: dict[str, tuple[Callable[[type], None], str]] = {
    "chunks lie in order": (_unswizzled, "meet in a bank"),
    "rows of a matrix are neighbours": (_unsorted, "data_t"),
    "rows behind the end are fetched": (_fetched, "outside of every tensor"),
    "lines behind the end are written": (_written, "outside of every tensor"),
    "values behind the end of a line are written": (_behind, "outside of every tensor"),
    "a lane takes the other line's scale": (_swapped, "data"),
}


def main() -> None:
    simt.install()
    from layerplan.kernels.common.quantize_tile import QuantizeTile as tile

    clean = dict(vars(tile))
    for name, (make, words) in FAULTS.items():
        make(tile)
        try:
            simulated(Case(9, 40, BLOCK))
        except Exception as error:
            assert words in str(error), (name, error)
        else:
            raise AssertionError(f"not seen: {name}")
        finally:
            for method in ("_chunk", "_matrix_row", "_ok", "_write", "_both"):
                setattr(tile, method, clean[method])
    simulated(Case(9, 40, BLOCK))
    print(f"{len(FAULTS)} faults are seen")


if __name__ == "__main__":
    main()
