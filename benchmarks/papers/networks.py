"""A source's networks: the suite of networks, as its options ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import results
from benchmarks.networks import suite, workers
from benchmarks.papers import Options


def run(options: Options, name: str, networks: Sequence[str], classes: Sequence[str], **own: Any) -> results.Document:
    """A row per network, class and mode, in the file of the suite `name`. own: what else benchmarks.networks.suite.run
    takes, by its names."""
    arguments: dict[str, Any] = {
        "rounds": options.rounds,
        "device": options.device,
        "budget_s": options.budget_s,
        "resume": options.resume,
        "report": options.report,
        **options.file(name),
        **own,
    }
    if options.workers > 1:
        return workers.run(networks, classes, options.workers, **arguments)
    return suite.run(networks, classes, **arguments)
