"""The command line: `fastconv info | demo | explain | tune | trace | bench`."""

from __future__ import annotations

import dataclasses
import platform
from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table

from fastconv.cli import bench, explain, trace, tune
from fastconv.cli.support import (
    BatchOption,
    Commands,
    DeviceOption,
    ImageOption,
    JsonOption,
    NetworkOption,
    Precision,
    PrecisionOption,
    console,
    device_named,
    fail,
    split,
    write_json,
)

# torch takes seconds to import, and `--help` needs none of it: every command imports what it runs.


app = typer.Typer(
    cls=Commands,
    help="Fast 2-D convolutions for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        import torch

        import fastconv
        from fastconv import built

        made = built.built_with().get("torch", "an unknown torch")
        print(f"fastconv {fastconv.__version__}, built with torch {made}; torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def gather_info() -> dict[str, Any]:
    """Build, GPUs, versions, and what is usable here and why the rest is not."""
    import torch

    import fastconv
    from fastconv import _C, built, measured, once, ops

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        planned = ops.device_info(torch.device("cuda", index)) if _C.built_with_cuda else None
        gpus.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "has_kernels": planned is not None and planned.has_kernels,
                # Lower than its own where the build lacks 90a, or FASTCONV_MAX_COMPUTE_CAPABILITY says so.
                "kernels_of": None if planned is None else planned.compute_capability,
                "has_own_rates": planned is not None and not once.is_unknown(torch.device("cuda", index)),
            }
        )
    if not _C.built_with_cuda:
        why_not = "fastconv was built without CUDA (FASTCONV_CUDA=0, or no nvcc when it was built)"
    elif torch.version.cuda is None:
        why_not = f"PyTorch {torch.__version__} is a build without CUDA"
    elif not gpus:
        why_not = "PyTorch sees no CUDA device here (torch.cuda.is_available() is False)"
    elif not any(gpu["has_kernels"] for gpu in gpus):
        why_not = f"the kernels were built for {_C.cuda_architectures}, which none of the GPUs can run"
    else:
        why_not = ""
    return {
        "fastconv": getattr(fastconv, "__version__", "unknown"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "build": {
            "with_cuda": _C.built_with_cuda,
            "architectures": _C.cuda_architectures,
            "compiler": _C.cuda_compiler,
            "torch": built.built_with().get("torch"),
        },
        "gpus": gpus,
        "usable": {"cpu": {"ok": True, "reason": ""}, "cuda": {"ok": not why_not, "reason": why_not}},
        "algorithms": [dataclasses.asdict(algorithm) for algorithm in fastconv.algorithms()],
        # What `fastconv tune` measured: choices per device, and the file that keeps them.
        "measured": {
            "path": None if (path := measured.path()) is None else str(path),
            "choices": Counter(device for device, *_ in measured.choices()),
        },
    }


@app.command()
def info(json_path: JsonOption = None) -> None:
    """Build, GPU, versions; which algorithms there are; what is usable and why not."""
    found = gather_info()
    facts = Table.grid(padding=(0, 2))
    for name in ("fastconv", "python", "torch"):
        facts.add_row(name, found[name])
    facts.add_row("torch's cuda", found["cuda"] or "none")
    facts.add_row("cudnn", str(found["cudnn"] or "none loaded"))
    build = found["build"]
    facts.add_row("gpu code", f"{build['architectures']}, by {build['compiler']}" if build["with_cuda"] else "none")
    for index, gpu in enumerate(found["gpus"]):
        own, used = int(gpu["compute_capability"].replace(".", "")), gpu["kernels_of"]
        kernels = "" if used in (None, own) else f", kernels of sm_{used}"
        facts.add_row("gpu", f"{gpu['name']}, sm_{own}{kernels}, {gpu['memory_gib']} GiB")
        if gpu["has_kernels"] and not gpu["has_own_rates"]:
            offer = f"`fastconv tune --device cuda:{index}` measures the layers of four networks"
            yours = "`fastconv.tune(model, input)` those of yours"
            facts.add_row("", f"not measured: costs are a generic GPU's; {offer}, {yours}")
    for device, state in found["usable"].items():
        facts.add_row(device, "usable" if state["ok"] else f"not usable: {state['reason']}")
    choices = ", ".join(f"{count} on {device}" for device, count in found["measured"]["choices"].items())
    where = found["measured"]["path"] or "no file: FASTCONV_CACHE_DIR is empty"
    facts.add_row("measured", f"{choices or 'nothing'} ({where})")
    console.print(facts)
    algorithms = Table("algorithm", "devices", "classes (expected error, x PyTorch's)", "what")
    for row in found["algorithms"]:
        classes = ", ".join(f"{cls} {multiple:.2g}" for cls, multiple in row["accuracy"].items())
        algorithms.add_row(row["name"], ", ".join(row["devices"]), classes, row["summary"])
    console.print(algorithms)
    write_json(json_path, found)


@app.command()
def demo(
    network: NetworkOption = "all",
    device: DeviceOption = "auto",
    batch: BatchOption = None,
    image: ImageOption = None,
    precision: PrecisionOption = Precision.fp32,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Ask for this one; repeatable. Default: auto, then winograd_f4.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Swap real networks, feed them photographs, compare with the unswapped ones and with float64.

    On the CPU the default is 2 photographs. Fails if a network's logits differ by more than the bound, or if nothing
    was swapped.
    """
    from fastconv import demo as demonstration
    from fastconv.models import MAIN_NETWORKS, NETWORKS

    names = list(MAIN_NETWORKS) if network == "all" else split(network, "network", list(NETWORKS))
    where = device_named(device)
    passes = demonstration.run(
        names, device=where, batch=batch, image=image, precision=precision.value, algorithms=algorithm, console=console
    )
    from fastconv import environment

    rows = [{**dataclasses.asdict(item), "problem": item.problem} for item in passes]
    write_json(json_path, {**environment.describe("demo", where), "rows": rows})
    bad = [item for item in passes if item.problem]
    if bad:
        raise fail(f"{len(bad)} of {len(passes)} passes failed")


app.command()(explain.explain)
app.command()(tune.tune)
app.command()(trace.trace)
app.command(**bench.SETTINGS)(bench.bench)


def main() -> None:
    """The entry point of the command `fastconv`."""
    app()


if __name__ == "__main__":
    main()
