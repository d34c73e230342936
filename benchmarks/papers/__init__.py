"""The experiments of the five sources (docs/concepts/algorithms.md), repeated: one module per source.

Each module has `PARTS`, its experiments by name, which measure by the suites of layers and networks and return their
documents; `GPU_PARTS` are those of them that a CPU is not asked for. Files are
`results/<gpu>/papers/<source>/<experiment>.json`, a part each, but that the megakernel's parts with rows of one kind
share `layers`; `benchmarks/reports/papers` draws docs/papers from them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.runs import deadline_of, seconds_to
from fastconv import environment

NAMES = ("megakernel", "textbook", "cuconv", "single_image", "lenet5")  # in the order of the sources


@dataclass(frozen=True)
class Options:
    """What a run is asked for; None: the experiment's own.

    folder: where the files go, None: `benchmarks/results/<gpu>`. workers: processes, of which one at a time has the GPU
    to time. budget_s: nothing is begun after so many seconds, of all parts together. resume: rows that the files hold
    of this machine, versions and commit are not measured again. layers: names or their beginnings, with commas between.
    image: side of the pictures of networks.
    """

    device: str = "cpu"
    parts: Sequence[str] | None = None
    classes: Sequence[str] | None = None
    batches: Sequence[int] | None = None
    layers: str | None = None
    networks: Sequence[str] | None = None
    rounds: int = 10
    workers: int = 1
    budget_s: float | None = None
    compile_limit_s: float = 60.0
    image: int | None = None
    resume: bool = False
    folder: Path | None = None
    report: Callable[[str], None] = print

    def suite(self, name: str) -> str:
        """The name of a file's suite: on the CPU with the device behind, as the other suites'."""
        return name if self.device.startswith("cuda") else f"{name}_cpu"

    def out(self, name: str) -> Path:
        """The file of a suite."""
        if self.folder is not None:
            return results.path_of(self.folder, self.suite(name))
        return results.default_path(environment.describe(self.suite(name), self.device))

    def file(self, name: str) -> dict[str, Any]:
        """It and the suite's name on the device, as whoever measures takes them."""
        return {"out": self.out(name), "suite": self.suite(name)}

    def held(self, name: str, key: tuple[str, ...]) -> tuple[Path, results.Document]:
        """The file of a suite, and what to add rows to, as `results.merge`."""
        out = self.out(name)
        return out, results.merge(out, environment.describe(self.suite(name), self.device), key)


def run(name: str, options: Options) -> dict[str, dict[str, Any]]:
    """Runs a source's experiments; part -> its document. Raises ValueError for an unknown name or part, or one that
    needs a GPU where there is none."""
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; expected one of {', '.join(NAMES)}")
    module = importlib.import_module(f"benchmarks.papers.{name}")
    beyond_device = () if options.device.startswith("cuda") else getattr(module, "GPU_PARTS", ())
    parts = list(options.parts or (part for part in module.PARTS if part not in beyond_device))
    for part in parts:
        if part not in module.PARTS:
            raise ValueError(f"part is {part!r}; expected one of {', '.join(module.PARTS)}")
        if part in beyond_device:
            raise ValueError(f"device is {options.device!r}; part {part} of the {name} needs cuda")
    deadline = deadline_of(options.budget_s)
    return {part: module.PARTS[part](replace(options, budget_s=seconds_to(deadline))) for part in parts}
