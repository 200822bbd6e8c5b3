"""Draws `images/rel_shift.png` of `positions.md`: scores by distance are viewed as scores by key, without a copy.

Run with `python docs/draw_rel_shift.py`. The script passes the cell numbers through `align_relative_scores` and labels
the cells with the result.
"""

from pathlib import Path

import matplotlib
import torch

from hf_txl.positions_transfo_xl import align_relative_scores

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

# Q queries (the segment)   K keys (memory and segment)   N = K + Q columns: distances K - 1 … 0, then the future
MEMORY, QUERIES = 2, 3
KEYS = MEMORY + QUERIES
COLUMNS = KEYS + QUERIES
PATH = Path(__file__).parent / "images" / "rel_shift.png"

DISTANCE_COLORS = ["#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef"]
QUERY_COLORS = ["#b5442c", "#2d7a3e", "#6c3f99"]
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def draw_cell(axis: Axes, x: float, y: float, cell: int, faded: bool = False) -> None:
    """Cell number `cell` of the score matrix with its lower left corner at `(x, y)`."""
    query, column = divmod(cell, COLUMNS)
    distance = KEYS - 1 - column
    if distance < 0:
        axis.add_patch(Rectangle((x, y), 1, 1, fc="#f1f1f1", ec="#d0d0d0", lw=0, hatch="////"))
        axis.add_patch(Rectangle((x, y), 1, 1, fc="none", ec="white", lw=1.5))
        text, color = "−∞", "#444444"
    else:
        axis.add_patch(Rectangle((x, y), 1, 1, fc=DISTANCE_COLORS[distance], ec="white", lw=1.5))
        text, color = f"q{query}·r{distance}".translate(SUBSCRIPTS), "white" if distance < 2 else "#10243c"
    if faded:
        axis.add_patch(Rectangle((x, y), 1, 1, fc="white", ec="white", lw=1.5, alpha=0.72))
        color = "#8a8a8a"
    axis.text(x + 0.5, y + 0.48, text, ha="center", va="center", fontsize=11, color=color)


def frame_row(axis: Axes, x: float, y: float, width: float, query: int) -> None:
    axis.add_patch(Rectangle((x + 0.04, y + 0.04), width - 0.08, 0.92, fc="none", ec=QUERY_COLORS[query], lw=2.6))


def label(axis: Axes, x: float, y: float, text: str, **style: object) -> None:
    settings = {"ha": "center", "va": "center", "fontsize": 11, "color": "#222222"} | style
    axis.text(x, y, text, **settings)


def draw_by_distance(axis: Axes, left: float, top: float, cells: torch.Tensor) -> None:
    """The product of queries and projected distances, what each query needs framed."""
    label(axis, left, top + 1.75, "1  scores by distance", ha="left", fontsize=14, weight="bold")
    label(axis, left + KEYS / 2, top + 1.0, "distance")
    label(axis, left + KEYS + QUERIES / 2, top + 1.0, "future: masked")
    for first, last in ((0, KEYS), (KEYS, COLUMNS)):
        axis.plot([left + first + 0.1, left + last - 0.1], [top + 0.7] * 2, color="#999999", lw=1.2)
    for column in range(COLUMNS):
        label(axis, left + column + 0.5, top + 0.35, str(KEYS - 1 - column).replace("-", "−"), color="#555555")
    for query in range(QUERIES):
        y = top - 1 - query
        label(axis, left - 0.6, y + 0.5, f"q{query}".translate(SUBSCRIPTS), color=QUERY_COLORS[query], weight="bold")
        for column in range(COLUMNS):
            draw_cell(axis, left + column, y, int(cells[query, column]))
        frame_row(axis, left + QUERIES - 1 - query, y, KEYS, query)


def draw_by_key(axis: Axes, left: float, top: float, aligned: torch.Tensor) -> None:
    """The result, one column per key."""
    label(axis, left, top + 1.75, "3  scores by key", ha="left", fontsize=14, weight="bold")
    label(axis, left + MEMORY / 2, top + 1.0, "memory")
    label(axis, left + MEMORY + QUERIES / 2, top + 1.0, "segment")
    for first, last in ((0, MEMORY), (MEMORY, KEYS)):
        axis.plot([left + first + 0.1, left + last - 0.1], [top + 0.7] * 2, color="#999999", lw=1.2)
    for key in range(KEYS):
        name = f"m{key}" if key < MEMORY else f"x{key - MEMORY}"
        label(axis, left + key + 0.5, top + 0.35, name.translate(SUBSCRIPTS), color="#555555")
    for query in range(QUERIES):
        y = top - 1 - query
        label(axis, left - 0.6, y + 0.5, f"q{query}".translate(SUBSCRIPTS), color=QUERY_COLORS[query], weight="bold")
        for key in range(KEYS):
            draw_cell(axis, left + key, y, int(aligned[query, key]))
        frame_row(axis, left, y, KEYS, query)


def draw_in_memory(axis: Axes, left: float, top: float, aligned: torch.Tensor) -> None:
    """The same numbers as they lie in memory, with the rows of the view marked."""
    label(axis, left, top + 1.5, "2  the same numbers in memory", ha="left", fontsize=14, weight="bold")
    text = f"stored: a row every {COLUMNS} numbers;  read: from number {QUERIES - 1} on, a row every {COLUMNS - 1}"
    label(axis, left + 8.9, top + 1.5, text, ha="left", fontsize=12)
    used = set(aligned.flatten().tolist())
    for cell in range(QUERIES * COLUMNS):
        draw_cell(axis, left + cell, top - 1, cell, faded=cell not in used)
        label(axis, left + cell + 0.5, top + 0.28, str(cell), fontsize=9, color="#777777")
    for query in range(QUERIES):
        # the stored row, above
        start = left + query * COLUMNS
        axis.plot([start + 0.1, start + COLUMNS - 0.1], [top + 0.62] * 2, color="#999999", lw=1.2)
        label(axis, start + COLUMNS / 2, top + 0.88, f"row {query}", fontsize=10, color="#777777")
        # the row that is read, below
        first = int(aligned[query, 0])
        frame_row(axis, left + first, top - 1, KEYS, query)
        name = f"q{query}".translate(SUBSCRIPTS)
        text = f"{name}: {KEYS} numbers from {first} on"
        label(axis, left + first + KEYS / 2, top - 1.38, text, color=QUERY_COLORS[query], weight="bold")
    for query in range(QUERIES - 1):
        first, following = left + int(aligned[query, 0]), left + int(aligned[query + 1, 0])
        y = top - 1.95
        axis.annotate("", (following, y), (first, y), arrowprops={"arrowstyle": "<->", "color": "#555555"})
        label(axis, (first + following) / 2, y - 0.32, f"{COLUMNS - 1} numbers", fontsize=10, color="#555555")


def main() -> None:
    cells = torch.arange(QUERIES * COLUMNS).view(QUERIES, COLUMNS)
    aligned = align_relative_scores(cells, KEYS)
    figure, axis = plt.subplots(figsize=(15, 7.0))
    draw_by_distance(axis, 1.0, 5.2, cells)
    draw_by_key(axis, 15.5, 5.2, aligned)
    axis.annotate(
        "",
        (14.3, 3.7),
        (9.7, 3.7),
        arrowprops={"arrowstyle": "-|>,head_width=0.4,head_length=0.8", "color": "#444444"},
    )
    label(axis, 11.9, 4.25, "a view:", fontsize=12)
    label(axis, 11.9, 3.15, "no copy, no arithmetic", fontsize=12)
    draw_in_memory(axis, 0.0, -0.8, aligned)
    axis.set_xlim(-0.6, QUERIES * COLUMNS + 0.1)
    axis.set_ylim(-3.4, 7.4)
    axis.set_aspect("equal")
    axis.axis("off")
    figure.savefig(PATH, dpi=110, bbox_inches="tight", pad_inches=0.12, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
