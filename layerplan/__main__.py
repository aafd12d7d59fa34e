"""``python -m layerplan`` and the ``layerplan`` script: an absent package is a line that says what to install."""

from __future__ import annotations

import json
import sys

from .integration.engines.packages import remedy_for


def main() -> None:
    """Run the command line. Exits 1 with the remedy where a package is not installed; a module of ours that is absent
    keeps its traceback."""
    try:
        from .integration.cli import app

        app(prog_name="layerplan")
    except ModuleNotFoundError as error:
        remedy = remedy_for(error.name or "")
        if remedy is None:
            raise
        doctor = sys.argv[1:2] == ["doctor"]
        if doctor:  # its facts need neither typer nor rich; only their layout does
            from .integration.doctor import collect

            print(json.dumps(collect(), indent=2))
        more = "" if doctor else " ('layerplan doctor' says more)"
        print(f"layerplan: {error.name} is not installed: {remedy}{more}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
