"""Draws `images/memory.png` of `memory.md`: how far back a token reaches through the memories of all layers.

Run with `python docs/draw_memory.py`. The lines are the attention probabilities above 0 of a model with random weights
that reads four segments with a `TransfoXLMemory`.
"""

from pathlib import Path

import matplotlib
import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

LAYERS, LENGTH, SEGMENTS = 3, 3, 4  # L = M = LENGTH
TOKENS = SEGMENTS * LENGTH
PATH = Path(__file__).parent / "images" / "memory.png"
SEGMENT_COLOR, MEMORY_COLOR, DROPPED_COLOR, PATH_COLOR = "#2d7a3e", "#3182bd", "#9a9a9a", "#b5442c"
Node = tuple[int, int]  # level (0 is the embedding) and token


def attended() -> set[tuple[Node, Node]]:
    """(upper, lower) for each output of a layer and each of its inputs that the output attends to."""
    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=20, d_model=16, n_head=2, n_layer=LAYERS, mem_len=LENGTH, clamp_len=-1, same_length=False
    )
    model = TransfoXLForCausalLM(config).eval()
    memory = TransfoXLMemory(config)
    edges = set()
    for start in range(0, TOKENS, LENGTH):
        with torch.no_grad():
            segment = torch.randint(0, 20, (1, LENGTH))
            attentions = model(segment, cache=memory, output_attentions=True).attentions
        for layer, probabilities in enumerate(attentions):
            num_keys = probabilities.shape[-1]
            for query, key in (probabilities[0].sum(0) > 0).nonzero().tolist():
                edges.add(((layer + 1, start + query), (layer, start + LENGTH - num_keys + key)))
    return edges


def reached(edges: set[tuple[Node, Node]], node: Node) -> set[tuple[Node, Node]]:
    """The edges on all ways down from a node."""
    found = {edge for edge in edges if edge[0] == node}
    return found.union(*(reached(edges, lower) for lower in {lower for _, lower in found}))


def token_color(token: int) -> str:
    segment = token // LENGTH
    return SEGMENT_COLOR if segment == SEGMENTS - 1 else MEMORY_COLOR if segment == SEGMENTS - 2 else DROPPED_COLOR


def draw_edges(axis: Axes, edges: set[tuple[Node, Node]], **style: object) -> None:
    for (level, token), (lower_level, lower_token) in edges:
        axis.plot([token, lower_token], [level, lower_level], solid_capstyle="round", **style)


def draw_segments(axis: Axes) -> None:
    names = ["dropped", "dropped", "memory, M = 3", "segment, L = 3"]
    for segment, name in enumerate(names):
        first, color = segment * LENGTH, token_color(segment * LENGTH)
        # the output of the last layer is not stored
        top = LAYERS if segment == SEGMENTS - 1 else LAYERS - 1
        box = FancyBboxPatch(
            (first - 0.3, -0.22), LENGTH - 0.4, top + 0.44, boxstyle="round,pad=0.08", fc=color, ec="none", alpha=0.13
        )
        axis.add_patch(box)
        axis.text(first + 1, -0.62, name, ha="center", va="center", fontsize=12, color=color, weight="bold")


def draw_nodes(axis: Axes, on_path: set[Node]) -> None:
    for level in range(LAYERS + 1):
        name = "embeddings" if level == 0 else f"layer {level}"
        axis.text(-0.6, level, name, ha="right", va="center", fontsize=12, color="#222222")
        for token in range(TOKENS):
            edge = PATH_COLOR if (level, token) in on_path else "white"
            is_stored = level < LAYERS or token >= TOKENS - LENGTH
            color = token_color(token) if is_stored else DROPPED_COLOR
            axis.plot(token, level, "o", ms=15, color=color, mec=edge, mew=2.2, zorder=3)


def main() -> None:
    edges = attended()
    last = (LAYERS, TOKENS - 1)
    path = reached(edges, last)
    figure, axis = plt.subplots(figsize=(12, 4.6))
    draw_segments(axis)
    draw_edges(axis, edges - path, color="#c4c4c4", lw=0.9, zorder=1)
    draw_edges(axis, path, color=PATH_COLOR, lw=1.7, zorder=2)
    draw_nodes(axis, {last} | {lower for _, lower in path})
    axis.set_xlim(-2.2, TOKENS - 0.4)
    axis.set_ylim(-0.9, LAYERS + 0.4)
    axis.axis("off")
    figure.savefig(PATH, dpi=110, bbox_inches="tight", pad_inches=0.12, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
