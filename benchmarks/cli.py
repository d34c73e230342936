"""The command line of the benchmarks: `python -m benchmarks ...`, `fastconv bench ...`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import everything, merge
from benchmarks.papers.command import paper
from benchmarks.regret.command import fit, regret
from benchmarks.studies.command import builds, floors, megakernel, stages
from fastconv.cli.support import (
    BatchOption,
    Commands,
    DeviceOption,
    ImageOption,
    JsonOption,
    Precision,
    console,
    device_named,
    fail,
    numbers,
    say,
    split,
    write_json,
)
from fastconv.models.layers import SETS

# torch takes seconds to import, and `--help` needs none of it: every command imports what it runs.

app = typer.Typer(
    cls=Commands,
    help="Time ours against PyTorch and cuDNN, and draw what was measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command("layers")
def layers(
    layers: Annotated[str | None, typer.Option(help="Some of the layers, with commas between; default all.")] = None,
    layer_set: Annotated[
        str, typer.Option("--set", help=f"{', '.join(SETS)}; the last by --pass backward_input.")
    ] = "layers",
    batch: Annotated[str, typer.Option(help="Batch sizes; default the set's own, mostly 64,1.")] = "",
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
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that take turns on the GPU while others build cuDNN's plans.")
    ] = 1,
    triton: Annotated[bool, typer.Option("--triton", help="An implicit GEMM in Triton is a rival, too.")] = False,
    plans: Annotated[
        list[Path] | None, typer.Option(help="A file of this cuDNN: its plans are tried, none is searched.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the file has of this commit.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """A layer set: every algorithm of ours against PyTorch in both layouts and every cuDNN algorithm."""
    import fastconv
    from benchmarks.layers import suite
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    known = [algorithm.name for algorithm in fastconv.algorithms()]
    document = suite.run(
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
        workers=workers,
        triton=triton,
        plans=plans or (),
    )
    check_measured(document)


@app.command("build-cutlass")
def build_cutlass(
    headers: Annotated[Path, typer.Argument(help="CUTLASS's folder with include/ and tools/util/include.")],
    architecture: Annotated[str, typer.Option(help="Compute capability to compile for.")] = "90",
    out: Annotated[Path | None, typer.Option(help="The library; default where the bench looks for it.")] = None,
) -> None:
    """Compiles CUTLASS's 3xTF32 convolution, a rival of class fp32 in the layer sets, with nvcc."""
    from benchmarks.peers import cutlass

    console.print(f"built {cutlass.build(headers, architecture, out or cutlass.LIBRARY)}", markup=False)


@app.command("sweep")
def sweep(
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
    from benchmarks.layers import suite
    from benchmarks.layers.sets import grid
    from fastconv.models.compare import CLASS_DTYPE

    filters = numbers(k, "k") if k else None
    layers = grid(numbers(c, "c"), filters, numbers(sizes, "hw"), kernel, stride, padding, dilation, groups)
    known = [algorithm.name for algorithm in fastconv.algorithms()]
    document = suite.run(
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
    for table in suite.grid_tables([row for row in document["rows"] if row["layer"] in names]):
        console.print(table)
    check_measured(document)


def check_measured(document: dict[str, Any]) -> None:
    """Ends the command with exit code 1 if its suite has nothing, or not all that was asked for."""
    if not document["rows"]:
        raise fail("nothing was measured")
    if document.get("failed"):
        raise fail("; ".join(document["failed"]))


def check_timed(document: dict[str, Any], names: tuple[str, ...], out: Path) -> None:
    """Says where the rows are; ends the command with exit code UNTIMED if one has no time. names: what a row is called
    by."""
    console.print(f"written: {out}", highlight=False)
    check_measured(document)
    if missing := [" ".join(row[name] for name in names) for row in document["rows"] if row["us"] is None]:
        fail(f"not measured: {', '.join(missing)}")
        raise typer.Exit(everything.UNTIMED)


@app.command("networks")
def networks(
    network: Annotated[
        str, typer.Option(help="Some networks, with commas between, the corpus's too; all: the four of the demo.")
    ] = "all",
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp32,tf32,fp16,bf16",
    modes: Annotated[
        str,
        typer.Option(help="How ours runs: eager, graph, compile, compile_default, compile_graph, fused, fused_graph."),
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            help="How PyTorch runs: torch, folded (batch norms), each with _eager, _graph; compile, frozen, each with "
            "_default, _graph, _reduce_overhead, _max_autotune; cudnn_best_layers."
        ),
    ] = "",
    layouts: Annotated[str, typer.Option(help="nchw, nhwc.")] = "nchw,nhwc",
    compiled_layouts: Annotated[str, typer.Option(help="If compiled; default nchw in ieee and fp32, else nhwc.")] = "",
    algorithm: Annotated[str, typer.Option(help="Ask for this one in every layer.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Forward passes of each contender.")] = 20,
    batch: BatchOption = None,
    image: ImageOption = None,
    compile_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="What is not compiled by then is given up.")
    ] = 120.0,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes, a network and class each, that compile together and time in turns.")
    ] = 1,
    compile_workers: Annotated[int, typer.Option(min=0, help="Processes that first compile everything.")] = 0,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Compile and begin nothing after.")] = None,
    energy: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.1, help="So long for the energy of an image."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Pass over what the file already holds.")] = False,
    suite_name: Annotated[str, typer.Option("--suite", help="Of the file, if not networks.")] = "",
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Whole networks: swapped and fused against every form of PyTorch, in both layouts, time and error."""
    from benchmarks.harness import results
    from benchmarks.networks import suite, zoo
    from benchmarks.networks import workers as by_workers
    from fastconv import environment
    from fastconv.models import MAIN_NETWORKS
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    name = suite_name or suite.suite_name(where)
    out = json_path or results.default_path(environment.describe(name, where))
    names = list(MAIN_NETWORKS) if network == "all" else split(network, "network", zoo.names())
    wanted = split(classes, "classes", list(CLASS_DTYPE))
    arguments: dict[str, Any] = {
        "modes": split(modes, "modes", list(suite.MODES)) if modes else None,
        "rounds": rounds,
        "device": str(where),
        "out": out,
        "suite": name,
        "energy_s": energy,
        "peers": split(peers, "peers", list(suite.PEER_NAMES)) if peers else None,
        "layouts": split(layouts, "layouts", list(suite.LAYOUTS)),
        "compiled_layouts": split(compiled_layouts, "layouts", list(suite.LAYOUTS)) if compiled_layouts else None,
        "algorithm": algorithm,
        "batch": batch,
        "image": image,
        "compile_limit_s": compile_limit,
        "compile_workers": compile_workers,
        "budget_s": budget,
        "resume": resume,
        "report": say,
    }
    run = suite.run if workers == 1 else partial(by_workers.run, workers=workers)
    document = run(names, wanted, **arguments)
    asked = [row for row in document["rows"] if row["network"] in names and row["class"] in wanted]
    check_timed({**document, "rows": asked}, ("network", "class", "mode"), out)


@app.command("host")
def host(
    layers: Annotated[str, typer.Option(help="3x3, 1x1, or none.")] = "all",
    network: Annotated[str, typer.Option(help="Networks at batch 1, with commas between, or none.")] = "resnet50",
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp16,fp32",
    forms: Annotated[str, typer.Option(help="Of ours: swapped, frozen, functional, fused.")] = "all",
    calls: Annotated[str, typer.Option(help="no_grad, forward, forward_backward, compile.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of calls of each contender.")] = 20,
    image: ImageOption = None,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Begin no layer or class after.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Pass over what the file already holds.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """The host's time of a call: ours beside nn.Conv2d, F.conv2d, the modules that a fused layer replaces, and an
    operator that does nothing."""
    from benchmarks.harness import results
    from benchmarks.host import suite
    from fastconv import environment
    from fastconv.models import NETWORKS
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    out = json_path or results.default_path(environment.describe(suite.suite_name(where), where))
    known = {layer.layer: layer for layer in suite.LAYERS}
    document = suite.run(
        [known[name] for name in split(layers, "layers", list(known))] if layers != "none" else (),
        split(network, "network", list(NETWORKS)) if network != "none" else (),
        split(classes, "classes", list(CLASS_DTYPE)),
        split(forms, "forms", list(suite.LAYER_FORMS)),
        split(calls, "calls", list(suite.CALLS)),
        rounds,
        where,
        out,
        image=image,
        budget_s=budget,
        resume=resume,
        report=say,
    )
    check_timed(document, ("layer", "class", "form", "call"), out)


@app.command("training")
def training(
    network: Annotated[str, typer.Option(help="Some networks, with commas between.")] = "all",
    classes: Annotated[str, typer.Option(help="fp32, tf32, amp_fp16, amp_bf16.")] = "all",
    modes: Annotated[str, typer.Option(help="eager, compile.")] = "eager",
    compiled: Annotated[
        str, typer.Option(help="How mode compile compiles: compile_default, compile_reduce_overhead.")
    ] = "compile_default",
    algorithm: Annotated[str, typer.Option(help="Ask for this one in every layer.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each contender.")] = 20,
    batch: Annotated[int | None, typer.Option(min=1, help="Images; default the network's own.")] = None,
    image: ImageOption = None,
    compile_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="What is not compiled by then is given up.")
    ] = 120.0,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Compile and begin nothing after.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Pass over what the file already holds.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Whole training steps, swapped against PyTorch: time, kernels by group, memory, error of loss and gradient."""
    from benchmarks.harness import results
    from benchmarks.training import suite
    from fastconv import environment
    from fastconv.models import NETWORKS

    where = device_named(device)
    out = json_path or results.default_path(environment.describe(suite.suite_name(where), where))
    document = suite.run(
        list(suite.BATCHES) if network == "all" else split(network, "network", list(NETWORKS)),
        split(classes, "classes", list(suite.CLASSES)),
        split(modes, "modes", list(suite.MODES)),
        rounds,
        where,
        out,
        compiled=split(compiled, "compiled", list(suite.MODES["compile"])),
        algorithm=algorithm,
        batch=batch,
        image=image,
        compile_limit_s=compile_limit,
        budget_s=budget,
        resume=resume,
        report=say,
    )
    check_timed(document, ("network", "class", "mode"), out)


@app.command("soak")
def soak(
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
    from benchmarks.soaks import algorithms as soaks
    from fastconv.models.compare import CLASS_DTYPE

    if not torch.cuda.is_available():
        raise fail("no CUDA GPU on this machine: nothing was launched")
    own = [algorithm.name for algorithm in fastconv.algorithms() if algorithm.family != "library"]
    document = soaks.run(
        split(algorithms, "algorithms", own) if algorithms else own,
        split(classes, "classes", list(CLASS_DTYPE)) if classes else list(CLASS_DTYPE),
        launches=launches,
        layers=layers,
        seed=seed,
        out=json_path,
        report=say,
    )
    wrong = sum(row["mismatches"] for row in document["rows"])
    if wrong or not document["rows"]:
        raise fail(f"{wrong} launches gave other bits" if wrong else "nothing was launched")


@app.command("report")
def report(
    root: Annotated[Path, typer.Argument(help="The checkout.")] = Path("."),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a document is out of date.")] = False,
    one_commit: Annotated[
        bool, typer.Option("--one-commit", help="Fail if the GPU files' rows are of several commits.")
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Draw the plots, and fill the tables of README and docs, from the result files."""
    from benchmarks.reports import documents

    files = root / documents.RESULTS
    folders = {path.name for path in files.glob("*")} - {"cpu"} if one_commit else set()
    for gpu in sorted(folders):
        found = documents.commits(files, gpu)
        if len({commit for its in found.values() for commit in its}) > 1:
            raise fail(f"{gpu}: " + "; ".join(f"{suite} is of {', '.join(its)}" for suite, its in found.items()))
    paths = [str(path) for path in documents.main(root, check=check)]
    for path in paths:
        console.print(path, markup=False, highlight=False)
    write_json(json_path, paths)
    if check and paths:
        raise fail(f"{len(paths)} documents are out of date; run fastconv bench report")


@app.command("megakernel-soak")
def megakernel_soak(
    launches: Annotated[int, typer.Option(min=1, help="Of all classes together.")] = 1_000_000,
    shapes: Annotated[int, typer.Option(min=1, help="Random layers of each class.")] = 200,
    classes: Annotated[str, typer.Option(help="Accuracy classes.")] = "fp32,ieee",
    seed: Annotated[int, typer.Option(help="Of layers, maps and grids.")] = 0,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="No layer begins after.")] = 600.0,
    json_path: JsonOption = None,
) -> None:
    """Launch winograd_megakernel very often on several streams, each time with another map, grid and delays, beside a
    competing kernel: the same bits every time, and no hang (GPU)."""
    import torch

    from benchmarks.soaks import megakernel as soaks

    wanted = split(classes, "classes", [each.value for each in Precision])
    if not torch.cuda.is_available():
        raise fail("no CUDA GPU on this machine: nothing was launched")
    document = soaks.run(
        launches=launches, shapes=shapes, classes=wanted, seed=seed, budget_s=budget, out=json_path, report=say
    )
    wrong = sum(row["mismatches"] for row in document["rows"])
    if wrong or not document["rows"]:
        raise fail(f"{wrong} launches gave other bits" if wrong else "nothing was launched")


@app.command("weights-soak")
def weights_soak(
    modes: Annotated[str, typer.Option(help="How models are called, with commas between.")] = "all",
    classes: Annotated[str, typer.Option(help="Accuracy classes; default all, on the CPU fp32,fp16,bf16.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Writes, in all modes together.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of models, writes and values.")] = 0,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="No step begins after.")] = 600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on behind the rounds that the file has.")] = False,
    device: DeviceOption = "auto",
    json_path: JsonOption = None,
) -> None:
    """Write weights in every way, and call them in every mode: no result is of a weight that is gone, where the
    documents say that it is not."""
    from benchmarks.soaks import weights as soaks
    from fastconv.models.compare import CLASS_DTYPE

    where = device_named(device)
    document = soaks.run(
        split(modes, "modes", list(soaks.MODES)),
        split(classes, "classes", list(CLASS_DTYPE)) if classes else soaks.classes_of(where),
        steps=steps,
        seed=seed,
        budget_s=budget,
        resume=resume,
        device=where,
        out=json_path,
        report=say,
    )
    for line in document["failed"]:
        say(line)
    wrong = sum(row["failures"] for row in document["rows"])
    if wrong or not document["rows"]:
        raise fail(f"{wrong} calls were wrong" if wrong else "nothing was called")


for name, function in (
    ("all", everything.command), ("merge", merge.command), ("paper", paper), ("fit", fit), ("regret", regret),
    ("megakernel", megakernel), ("builds", builds), ("stages", stages), ("floors", floors),
):  # fmt: skip
    app.command(name)(function)
