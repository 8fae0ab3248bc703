"""Load or compute over a grid of storms under virtual time: the engine's choice against the best there is.

    python bench/load_or_compute.py [--every N] [--out DIR] [--json]

Exits with 1 when the regret of mean TTFT is above 5 % in any cell. Writes load_or_compute.svg, a heat map.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track

from forebay.bench.choice.grid import judge, source_cells, storm_cells
from forebay.bench.choice.picture import regret_svg

LIMIT = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="take every N-th cell only")
    parser.add_argument("--out", type=Path, default=Path(), help="directory of the picture")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cells = [*storm_cells(), *source_cells()][:: arguments.every]
    judged = [judge(cell) for cell in track(cells, "cells", console=Console(stderr=True))]
    storms = [each for each in judged if not each.cell.slow_share]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "load_or_compute.svg").write_text(regret_svg(storms))
    worst = max(judged, key=lambda each: each.regret)
    summary = {
        "cells": len(judged),
        "cells_above_limit": sum(each.regret > LIMIT for each in judged),
        "worst_regret": worst.regret,
        "worst_against_ends": max(each.regret_of_ends for each in judged),
        "mean_regret": sum(each.regret for each in judged) / len(judged),
        "worst_cell": worst,
    }
    if arguments.json:
        print(msgspec.json.encode({**summary, "judged": judged}).decode())
    else:
        print(
            f"{len(judged)} cells: regret at most {worst.regret:.1%}, on average {summary['mean_regret']:.1%}; "
            f"against the better of loading all and computing all at most {summary['worst_against_ends']:.1%}\n"
            f"worst: {worst}"
        )
    return 1 if worst.regret > LIMIT else 0


if __name__ == "__main__":
    raise SystemExit(main())
