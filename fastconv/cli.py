"""The command line: `fastconv info | demo | explain | tune | trace | bench`."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from fastconv import cli_megakernel, cli_tune
from fastconv.cli_support import (
    BatchOption,
    DeviceOption,
    ImageOption,
    JsonOption,
    MaxErrorOption,
    NetworkOption,
    Precision,
    PrecisionOption,
    console,
    device_named,
    fail,
    numbers,
    split,
    write_json,
)

# torch takes seconds to import, and `--help` needs none of it: every command imports what it runs.


class Commands(TyperGroup):
    """Ends what a user or a machine can cause in a message and exit code 1; FASTCONV_LOG=debug shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # RuntimeErrors too
            raise
        except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
            if os.environ.get("FASTCONV_LOG") == "debug":
                raise
            raise fail(f"{error}") from None


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


bench_app = typer.Typer(help="Time ours against PyTorch and cuDNN, and draw what was measured.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def gather_info() -> dict[str, Any]:
    """Build, GPUs, versions, and what is usable here and why the rest is not."""
    import torch

    import fastconv
    from fastconv import _C, built, measured, ops

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
            "choices": Counter(device for device, _ in measured.choices()),
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
    for gpu in found["gpus"]:
        own, used = int(gpu["compute_capability"].replace(".", "")), gpu["kernels_of"]
        kernels = "" if used in (None, own) else f", kernels of sm_{used}"
        facts.add_row("gpu", f"{gpu['name']}, sm_{own}{kernels}, {gpu['memory_gib']} GiB")
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
    from fastconv.bench import environment

    rows = [{**dataclasses.asdict(item), "problem": item.problem} for item in passes]
    write_json(json_path, {**environment.describe("demo", where), "rows": rows})
    bad = [item for item in passes if item.problem]
    if bad:
        raise fail(f"{len(bad)} of {len(passes)} passes failed")


@app.command()
def explain(
    n: Annotated[int, typer.Option(min=0, help="Batch.")] = 1,
    c: Annotated[int, typer.Option(min=0, help="Input channels.")] = 64,
    h: Annotated[int, typer.Option(min=0, help="Input height.")] = 56,
    w: Annotated[int | None, typer.Option(min=0, help="Input width; default h.")] = None,
    k: Annotated[int | None, typer.Option(min=0, help="Output channels; default c.")] = None,
    r: Annotated[int, typer.Option(min=1, help="Kernel height.")] = 3,
    s: Annotated[int | None, typer.Option(min=1, help="Kernel width; default r.")] = None,
    stride: Annotated[int, typer.Option(min=1)] = 1,
    padding: Annotated[int | None, typer.Option(min=0, help="Default r // 2.")] = None,
    dilation: Annotated[int, typer.Option(min=1)] = 1,
    groups: Annotated[int, typer.Option(min=1)] = 1,
    precision: PrecisionOption = Precision.fp32,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="NHWC in memory.")] = False,
    max_error: MaxErrorOption = None,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Every algorithm on one convolution: fits or why not, estimated cost, and the choice."""
    import fastconv
    from fastconv.models.compare import CLASS_DTYPE, precision_of

    if c % groups:
        raise ValueError(f"groups is {groups}; expected a divisor of c = {c}")
    explanation = fastconv.explain(
        (n, c, h, w if w is not None else h),
        (k if k is not None else c, c // groups, r, s or r),
        stride=stride,
        padding=r // 2 if padding is None else padding,
        dilation=dilation,
        groups=groups,
        dtype=CLASS_DTYPE[precision.value],
        device=None if device == "auto" else device,
        precision=precision_of(precision.value),
        layout="nhwc" if channels_last else "nchw",
        max_error=max_error,
    )
    console.print(str(explanation), markup=False, highlight=False)
    write_json(json_path, dataclasses.asdict(explanation))


@bench_app.command("layers")
def bench_layers(
    layers: Annotated[str | None, typer.Option(help="Some of the layers, with commas between; default all.")] = None,
    layer_set: Annotated[
        str, typer.Option("--set", help="layers (3x3), pointwise, strided, stems, groups, lenet5.")
    ] = "layers",
    batch: Annotated[str, typer.Option(help="Batch sizes; default 64,1, of lenet5 10000,1000,100.")] = "",
    direction: Annotated[
        str, typer.Option("--pass", help="forward, backward_weight, backward_input, bias_relu, bias_residual_relu.")
    ] = "forward",
    classes: Annotated[str, typer.Option(help="Accuracy classes; default all, on the CPU fp32.")] = "",
    algorithms: Annotated[str, typer.Option(help="Of ours; default all.")] = "",
    layouts: Annotated[str, typer.Option(help="Of ours: nchw, nhwc; default nhwc, on the CPU both.")] = "",
    max_error: Annotated[
        float, typer.Option("--max-error", min=1.0, help="Also show what auto takes within this multiple.")
    ] = 1.5,
    rounds: Annotated[int, typer.Option(min=1, help="Times each contender runs.")] = 20,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no layer after.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has of this commit.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """A layer set: every algorithm of ours against PyTorch in both layouts and every cuDNN algorithm."""
    import fastconv
    from fastconv.bench import layer_suite
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    known = [algorithm.name for algorithm in fastconv.algorithms()]
    document = layer_suite.run(
        batch_sizes=numbers(batch, "batch") if batch else None,
        classes=split(classes, "classes", list(CLASS_DTYPE)) if classes else None,
        layers=layers.split(",") if layers else None,
        layer_set=layer_set,
        direction=direction,
        algorithms=split(algorithms, "algorithms", known) if algorithms else None,
        rounds=rounds,
        budget_s=budget,
        resume=resume,
        out=json_path,
        device=where,
        layouts=split(layouts, "layouts", ["nchw", "nhwc"]) if layouts else None,
        console=console,
        max_error=max_error,
    )
    check_measured(document)


@bench_app.command("build-cutlass")
def bench_build_cutlass(
    headers: Annotated[Path, typer.Argument(help="CUTLASS's folder with include/ and tools/util/include.")],
    architecture: Annotated[str, typer.Option(help="Compute capability to compile for.")] = "90",
    out: Annotated[Path | None, typer.Option(help="The library; default where the bench looks for it.")] = None,
) -> None:
    """Compiles CUTLASS's 3xTF32 convolution, a rival of class fp32 in the layer sets, with nvcc."""
    from fastconv.bench import cutlass

    console.print(f"built {cutlass.build(headers, architecture, out or cutlass.LIBRARY)}", markup=False)


@bench_app.command("sweep")
def bench_sweep(
    c: Annotated[str, typer.Option("--c", help="Numbers of channels.")] = "16,32,64,128,256,512",
    k: Annotated[str, typer.Option("--k", help="Numbers of filters, each with each C; default C's own.")] = "",
    sizes: Annotated[str, typer.Option("--hw", help="Heights and widths of square maps.")] = "7,14,28,56,112",
    kernel: Annotated[int, typer.Option(min=1, help="R and S.")] = 3,
    stride: Annotated[int, typer.Option(min=1)] = 1,
    padding: Annotated[int | None, typer.Option(min=0, help="Default: an odd kernel keeps the size.")] = None,
    dilation: Annotated[int, typer.Option(min=1)] = 1,
    groups: Annotated[int, typer.Option(min=1)] = 1,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "64",
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp32",
    algorithms: Annotated[str, typer.Option(help="Of ours; default all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Times each contender runs.")] = 20,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """A grid of channels, filters and maps, timed like `bench layers`: where ours wins, by what, and where not."""
    import fastconv
    from fastconv.bench import layer_suite
    from fastconv.bench.layers import grid
    from fastconv.models.compare import CLASS_DTYPE

    filters = numbers(k, "k") if k else None
    layers = grid(numbers(c, "c"), filters, numbers(sizes, "hw"), kernel, stride, padding, dilation, groups)
    known = [algorithm.name for algorithm in fastconv.algorithms()]
    document = layer_suite.run(
        batch_sizes=numbers(batch, "batch"),
        classes=split(classes, "classes", list(CLASS_DTYPE)),
        layers=layers,
        layer_set="sweep",
        algorithms=split(algorithms, "algorithms", known) if algorithms else None,
        rounds=rounds,
        out=json_path,
        device=device_named(device),
        console=console,
    )
    names = {layer.layer for layer in layers}  # the file may have rows of earlier sweeps, of other kernels
    for table in layer_suite.grid_tables([row for row in document["rows"] if row["layer"] in names]):
        console.print(table)
    check_measured(document)


def check_measured(document: dict[str, Any]) -> None:
    """Ends the command with exit code 1 if its suite has nothing, or not all that was asked for."""
    if not document["rows"]:
        raise fail("nothing was measured")
    if document.get("failed"):
        raise fail("; ".join(document["failed"]))


@bench_app.command("networks")
def bench_networks(
    network: NetworkOption = "all",
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp32,tf32,fp16,bf16",
    modes: Annotated[str, typer.Option(help="How ours runs: eager, compile, graph, fused, fused_graph.")] = "",
    peers: Annotated[
        str,
        typer.Option(
            help="How PyTorch runs: torch, folded (batch norms), each with _eager, _graph; compile, frozen, each with "
            "_default, _reduce_overhead, _max_autotune; cudnn_best_layers."
        ),
    ] = "",
    layouts: Annotated[str, typer.Option(help="nchw, nhwc.")] = "nchw,nhwc",
    compiled_layouts: Annotated[
        str, typer.Option(help="Of compiled networks; default nchw in ieee and fp32, else nhwc.")
    ] = "",
    algorithm: Annotated[str, typer.Option(help="Ask for this one in every layer.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Forward passes of each contender.")] = 20,
    batch: BatchOption = None,
    image: ImageOption = None,
    compile_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="What is not compiled by then is given up.")
    ] = 120.0,
    compile_workers: Annotated[int, typer.Option(min=0, help="Processes that first compile everything.")] = 0,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Compile and begin nothing after.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Pass over what the file already holds.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Whole networks: swapped and fused against every form of PyTorch, in both layouts, time and error."""
    from fastconv.bench import environment, networks, results
    from fastconv.models import MAIN_NETWORKS, NETWORKS
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    out = json_path or results.default_path(environment.describe(networks.suite_name(where), where))
    document = networks.run(
        list(MAIN_NETWORKS) if network == "all" else split(network, "network", list(NETWORKS)),
        split(classes, "classes", list(CLASS_DTYPE)),
        split(modes, "modes", list(networks.MODES)) if modes else None,
        rounds,
        where,
        out,
        peers=split(peers, "peers", list(networks.PEER_NAMES)) if peers else None,
        layouts=split(layouts, "layouts", list(networks.LAYOUTS)),
        compiled_layouts=split(compiled_layouts, "compiled_layouts", list(networks.LAYOUTS))
        if compiled_layouts
        else None,
        algorithm=algorithm,
        batch=batch,
        image=image,
        compile_limit_s=compile_limit,
        compile_workers=compile_workers,
        budget_s=budget,
        resume=resume,
        report=lambda line: console.print(line, markup=False, highlight=False),
    )
    console.print(f"written: {out}", highlight=False)
    missing = [f"{row['network']} {row['class']} {row['mode']}" for row in document["rows"] if row["us"] is None]
    if missing or not document["rows"]:
        raise fail(f"not measured: {', '.join(missing) or 'anything'}")


@bench_app.command("soak")
def bench_soak(
    algorithms: Annotated[str, typer.Option(help="Of ours; default all.")] = "",
    classes: Annotated[str, typer.Option(help="Accuracy classes; default all.")] = "",
    launches: Annotated[int, typer.Option(min=1, help="Of each algorithm in each class.")] = 100_000,
    layers: Annotated[int, typer.Option(min=1, help="Random layers among which they are divided.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the random layers.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Launch each algorithm very often on two streams beside a third: the same bits every time (GPU)."""
    import torch

    import fastconv
    from fastconv.bench import soak
    from fastconv.models.compare import CLASS_DTYPE

    if not torch.cuda.is_available():
        raise fail("no CUDA GPU on this machine: nothing was launched")
    own = [algorithm.name for algorithm in fastconv.algorithms() if algorithm.family != "library"]
    document = soak.run(
        split(algorithms, "algorithms", own) if algorithms else own,
        split(classes, "classes", list(CLASS_DTYPE)) if classes else list(CLASS_DTYPE),
        launches=launches,
        layers=layers,
        seed=seed,
        out=json_path,
        report=lambda line: console.print(line, markup=False, highlight=False),
    )
    wrong = sum(row["mismatches"] for row in document["rows"])
    if wrong or not document["rows"]:
        raise fail(f"{wrong} launches gave other bits" if wrong else "nothing was launched")


@bench_app.command("report")
def bench_report(
    root: Annotated[Path, typer.Argument(help="The checkout.")] = Path("."),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a document is out of date.")] = False,
    one_commit: Annotated[
        bool, typer.Option("--one-commit", help="Fail if the GPU files' rows are of several commits.")
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Draw the plots, and fill the tables of README and docs, from the result files."""
    from fastconv.bench import report

    folders = {path.parent.name for path in (root / report.RESULTS).glob("*/*.json")} - {"cpu"} if one_commit else set()
    for gpu in sorted(folders):
        found = report.commits(root / report.RESULTS, gpu)
        if len({commit for its in found.values() for commit in its}) > 1:
            raise fail(f"{gpu}: " + "; ".join(f"{suite} is of {', '.join(its)}" for suite, its in found.items()))
    paths = [str(path) for path in report.main(root, check=check)]
    for path in paths:
        console.print(path, markup=False, highlight=False)
    write_json(json_path, paths)
    if check and paths:
        raise fail(f"{len(paths)} documents are out of date; run fastconv bench report")


app.command()(cli_tune.tune)
app.command()(cli_megakernel.trace)
bench_app.command("megakernel")(cli_megakernel.bench)
bench_app.command("megakernel-soak")(cli_megakernel.soak)


def main() -> None:
    """The entry point of the command `fastconv`."""
    app()


if __name__ == "__main__":
    main()
