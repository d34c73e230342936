"""What the sources' experiments share."""

from __future__ import annotations

from benchmarks.harness import results
from benchmarks.layers.sets import floor_here
from fastconv.models.layers import Layer

KERNEL_KEY = ("layer", "n", "class", "layout", "algorithm")  # of rows that say what an algorithm launches
DIRECTION = "bias_relu"  # batch norm folded into filter and bias, then ReLU


def empty_row(layer: Layer, n: int, accuracy: str, layout: str, direction: str = "forward") -> results.Row:
    """A row of the contract in which nothing is timed."""
    nothing = ("us", "us_q25", "us_q75", "error", "max_error", "best_peer", "best_peer_us", "peer_error")
    row: results.Row = {**layer.fields(), "n": n, "class": accuracy, "layout": layout, "pass": direction}
    row |= {"algorithm": "", **dict.fromkeys(nothing), "algorithms": {}, "peers": {}, "notes": {}}
    return row | {"floor_us": floor_here(layer, n, accuracy)}
