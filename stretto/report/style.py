"""How the charts of benchmarks and studies look, which matplotlib draws."""

from __future__ import annotations

from typing import Any

INK, RULE, TRAIN, EVAL = "#59636e", "#d8dee4", "#2a6fb0", "#c4560b"

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 12, "savefig.bbox": None, "savefig.facecolor": "none", "text.usetex": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.linewidth": 0.8,
    "xtick.major.width": 0.8, "xtick.major.size": 3, "ytick.major.size": 0,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": RULE, "grid.linewidth": 0.8, "axes.axisbelow": True,
}  # fmt: skip
