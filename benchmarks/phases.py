"""What `fastconv bench all` measures: phases of steps, each a command of the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus.networks import DECODERS
from benchmarks.harness.results import CLASSES, path_of
from benchmarks.layers.sets import FUSED, suite_of
from benchmarks.training import suite as training
from fastconv.models import MAIN_NETWORKS
from fastconv.models.layers import SETS

CARD = 80 * 10**9  # bytes of memory that the numbers of processes below were chosen for


@dataclass(frozen=True)
class Step:
    """One command of the benchmarks. suite: of its result file. folder: it is told where its file goes, and not the
    file. beside: suites whose files it also reads there, or adds to."""

    suite: str
    command: tuple[str, ...]
    folder: bool = False
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(self.command)

    @property
    def words(self) -> set[str]:
        """Of its command, those in lists, too: a network, a layer set, a class, a pass."""
        return {word for text in self.command for word in text.split(",")}

    def arguments(self, folder: Path, budget_s: float, plans: Sequence[Path] = (), memory: int = CARD) -> list[str]:
        """All of the command line, for a folder of result files. plans: others, whose plans layers are to try. memory:
        bytes of the GPU's, of which a step's processes are each to have as much as those of an 80 GB card."""
        where = ["--folder", str(folder)] if self.folder else ["--json", str(path_of(folder, self.suite))]
        known = [path_of(each, self.suite) for each in plans if self.command[0] == "layers"]
        taken = [text for path in known if path.exists() for text in ("--plans", str(path))]
        more = self.workers(memory)
        workers = ["--workers", str(more)] if more > self.workers() else []  # of two the latter counts
        return [*self.command, *where, "--budget", f"{budget_s:.0f}", "--resume", *workers, *taken]

    def workers(self, memory: int = CARD) -> int:
        """Its processes beside each other, on a GPU of so many bytes."""
        own = int(self.command[self.command.index("--workers") + 1]) if "--workers" in self.command else 1
        return max(own, own * memory // CARD) if own > 1 else 1


Queue = tuple[Step, ...]


@dataclass(frozen=True)
class Phase:
    """quiet: what it measures is the host's time, too, so that nothing else goes on meanwhile; each of its steps is one
    process, and several GPUs run one each."""

    queues: tuple[Queue, ...]
    quiet: bool = False

    def only(self, words: Sequence[str]) -> Phase:
        """The steps whose command has one of the words among its own, or in a list of them; all if there are none."""
        chosen = [tuple(step for step in queue if not words or step.words & set(words)) for queue in self.queues]
        return Phase(tuple(filter(None, chosen)), self.quiet)


def _layers(layer_set: str, workers: int, direction: str = "forward", *options: str) -> Step:
    command = ("layers", "--set", layer_set, "--pass", direction, "--workers", str(workers), *options)
    return Step(suite_of(layer_set, direction), command)


_BOTH = ("--layouts", "nchw,nhwc")  # of ours; PyTorch is in both anyway


# 3x3 layers take longest: in parts of about equal length, so that several GPUs share them.
_PUBLISHED = tuple(
    _layers("layers", 5, "forward", *_BOTH, "--batch", batch, "--classes", classes)
    for batch, classes in (("64", "ieee,fp32,bf16"), ("64", "tf32,fp16"), ("1", ",".join(CLASSES)))
)


def _at_64(layer_set: str, workers: int, direction: str, classes: str) -> Queue:
    """Of 3x3 layers a step for each class, for the same reason."""
    each = classes.split(",") if layer_set == "layers" else [classes]
    return tuple(_layers(layer_set, workers, direction, "--batch", "64", "--classes", its) for its in each)


def _gradients(direction: str, classes: str) -> Queue:
    # Layers with strides are the largest: one process, whose plans have the card's memory for themselves.
    sets = (("layers", 4), ("pointwise", 4), ("groups", 3), ("stems", 3), ("strided", 1))
    steps = (_at_64(layer_set, workers, f"backward_{direction}", classes) for layer_set, workers in sets)
    return tuple(itertools.chain.from_iterable(steps))


def _paper(source: str, part: str, *options: str, experiment: str | None = None) -> Step:
    """A part of a source's experiments; experiment: whose file it shares."""
    return Step(f"papers/{source}/{experiment or part}", ("paper", source, "--parts", part, *options), folder=True)


def _survey(batches: str, workers: int) -> Step:
    return _paper("cuconv", "survey", "--batch", batches, "--workers", str(workers))


def _series(batches: str) -> Step:
    return _paper("megakernel", "layers", "--batch", batches, "--classes", "ieee,fp32")


# The forms of PyTorch that were ever its fastest, and what its users have, of which the compiled one without a graph
# also tells its memory: each takes memory, and time to compile.
_FORMS = (
    "torch_eager,torch_graph,folded_graph,folded_graph_all_plans,compile_default,compile_reduce_overhead,"
    "frozen_reduce_overhead,frozen_graph"
)
_MODES = "eager,compile,compile_default,compile_graph,graph,fused,fused_graph"
# Of any network the fastest to within 2 %, in all rows that have the others, too (docs/log/150-graphs-by-hand.md).
_FASTEST_FORMS = "folded_graph,compile_reduce_overhead,frozen_reduce_overhead,frozen_graph"
_FASTEST_MODES = "compile,compile_graph,fused_graph"
_CLASSES, _OTHER_CLASSES = "fp32,tf32,fp16", "bf16,ieee"


def _network(name: str, classes: str = "fp32,tf32,fp16,bf16", workers: int = 4) -> Step:
    """A network of README's table, in every form that it shows. workers: as many as a card of 80 GB has room for."""
    forms = ("--modes", _MODES, "--peers", _FORMS, "--energy", "2")
    command = ("networks", "--network", name, "--classes", classes, "--workers", str(workers), *forms)
    return Step("networks", (*command, "--compile-limit", "150"))


def _another_network(
    name: str, classes: str = "fp16,tf32", workers: int = 4, batch: int | None = None, image: int | None = None
) -> Step:
    """One that our choices were not made for, or that README's table has in another batch or size, in the forms that
    are the fastest of ours and of PyTorch."""
    layouts = "nchw,nhwc" if {"fp32", "ieee"} & set(classes.split(",")) else "nhwc"  # which of PyTorch's is faster
    forms = ("--layouts", layouts, "--classes", classes, "--workers", str(workers), "--compile-limit", "150")
    sizes = {"--batch": batch, "--image": image}
    asked = (text for option, size in sizes.items() if size is not None for text in (option, str(size)))
    return _networks("networks_others", _FASTEST_FORMS, "--network", name, *forms, *asked, modes=_FASTEST_MODES)


def _networks(
    suite: str, peers: str, *options: str, modes: str = "compile,fused_graph", beside: tuple[str, ...] = ()
) -> Step:
    """Whole networks against other rivals, in a file of their own. Ours is timed again, in the forms that are its
    fastest: a speed is a ratio of times of one run."""
    command = ("networks", "--suite", suite, "--modes", modes, "--peers", peers, *options)
    return Step(suite, command, beside=beside)


_LAYER_FILES = ("network_layers", *map(suite_of, SETS))  # what cudnn_best_layers reads, and adds to
# Those of README's table in its classes, the least work first; DenseNet has 86 different layers.
_PAIRS = (
    *itertools.product(
        ("vgg16", "resnet50", "unet", "rrdb", "sd_vae_decoder", "yolov3"), ("fp32", "tf32", "fp16", "bf16")
    ),
    ("densenet161", "fp32"),
)
_OTHERS = (
    "efficientnet_b0", "hrnet_w18", "segformer_mit_b2", "repvgg_a2", "mobilenet_v3_large", "convnext_tiny", "yolov8n",
    "retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn", "sd15_unet", "sdxl_unet",
)  # fmt: skip
# Of equal use the longest come first, so that several GPUs end together.
PHASES: dict[str, Phase] = {
    "layers": Phase(
        (
            (*_PUBLISHED, _layers("strided", 3, "forward", *_BOTH)),
            (
                _layers("groups", 3),
                _layers("pointwise", 3, "forward", *_BOTH),
                _layers("stems", 3),
                Step("megakernel", ("megakernel", "--parts", "layers,rivals")),
            ),
        )
    ),
    # With bias and ReLU, and with a residual between them, where cuDNN's graphs have the fusion.
    "layers_fused": Phase(
        (
            tuple(
                step
                for layer_set in ("layers", "pointwise")
                for direction in FUSED
                for step in _at_64(layer_set, 4, direction, _CLASSES)
            ),
        )
    ),
    "networks": Phase(
        (
            (
                _network("yolov3", "fp32,tf32", 1),
                _network("rrdb"),
                _network("vgg16", workers=2),
                _network("densenet161", "fp32,tf32", 2),
                _network("densenet161", "fp16,bf16", 2),
                _network("yolov3", "fp16,bf16", 2),
                *map(_network, ("sd_vae_decoder", "resnet50", "unet")),
            ),
        )
    ),
    # One queue: the plans of eight processes are more than a card of 80 GB.
    "gradients": Phase(((*_gradients("weight", _CLASSES), *_gradients("input", _CLASSES)),)),
    # The sources' experiments. Whoever compiles keeps all others from timing all the while.
    "papers": Phase(
        (
            # VGG-19's first layers with their rivals' workspaces take most of a card of 80 GB.
            (_survey("256", 2), _survey("128", 2), _survey("64,32", 4), _survey("16,8,1", 4)),
            (
                _paper("lenet5", "network"),
                _paper("megakernel", "filters", experiment="layers"),
                _paper("megakernel", "resnet2"),
            ),
        )
    ),
    "papers_layers": Phase(
        (
            (
                _paper("lenet5", "layers", "--workers", "2"),
                _paper("textbook", "ladder", "--workers", "2"),
                _paper("textbook", "kernels"),
            ),
            (
                _paper("single_image", "layers", "--workers", "3"),
                _paper("single_image", "kernels"),
                _series("64,1,128"),
                _paper("megakernel", "mapping", experiment="layers"),
                _paper("megakernel", "distribution", experiment="layers"),
                _paper("megakernel", "networks", "--workers", "2"),
                _series("8,32,2,16,4"),
            ),
        )
    ),
    "papers_compiled": Phase(
        (
            (
                # A step for all: what compiles is the host, and the largest takes as long as the others together.
                _paper(
                    "single_image", "networks", "--network", "resnet152,resnet101,resnet50,resnet34,resnet18",
                    "--workers", "5", "--compile-limit", "240",
                ),
                _paper("single_image", "blocks"),
            ),
        )
    ),
    # Last, since some drivers give none.
    "papers_counters": Phase(((_paper("megakernel", "counters"), _paper("cuconv", "counters")),)),
    "networks_others": Phase(
        (
            (
                *map(_another_network, _OTHERS),
                *(_another_network(name, its, 1) for its in ("fp32,tf32", "fp16,bf16") for name in DECODERS),
                *(_another_network(name, _CLASSES, 2, 8) for name in ("sd_vae_decoder", "rrdb")),
                _another_network("unet", batch=4, image=512, classes="fp32,tf32,fp16,bf16"),
                *(_another_network(name, _CLASSES, batch=n) for n in (8, 1) for name in (*MAIN_NETWORKS, "unet")),
            ),
        )
    ),
    # Problems of the third of the corpus that constants are not fitted to, drawn anew.
    "regret": Phase(
        (
            tuple(
                Step("regret", ("regret", "--split", "judge", "--workers", "4", "--classes", _CLASSES, *options))
                for options in (
                    ("--sample", "110", "--seed", "80", "--layouts", "nhwc"),
                    ("--sample", "40", "--seed", "81", "--layouts", "nchw"),
                    ("--sample", "40", "--seed", "82", "--layouts", "nhwc", "--pass", "backward_input"),
                    ("--sample", "40", "--seed", "83", "--layouts", "nhwc", "--pass", "backward_weight"),
                )
            ),
        )
    ),
    # Where ours was lost or not timed: few channels, odd or small maps, nn.Conv1d, nn.ConvTranspose2d.
    "layers_others": Phase(
        (
            tuple(
                _layers(layer_set, 4, direction, *_BOTH, "--classes", _CLASSES)
                for layer_set, direction in (
                    ("transposed", "backward_input"), ("narrow", "forward"), ("ragged", "forward"), ("deep", "forward"),
                    ("sequences", "forward"),
                )
            ),
        )
    ),
    "training_compiled": Phase(
        (tuple(Step("training", ("training", "--network", name, "--modes", "compile")) for name in training.BATCHES),),
        quiet=True,
    ),
    "alone": Phase(
        (
            (
                *(Step("training", ("training", "--network", name)) for name in training.BATCHES),
                Step("host", ("host",)),
            ),
        ),
        quiet=True,
    ),
    "gradients_others": Phase(((*_gradients("weight", _OTHER_CLASSES), *_gradients("input", _OTHER_CLASSES)),)),
    # What is timed of cuDNN alone goes with the leanest kernels around it, which are those of frozen networks. Neither
    # these nor `fused` are graphs, so that the memory that they take can be told.
    "networks_cudnn": Phase(
        (
            tuple(
                _networks(
                    "networks_cudnn", "torch_eager,folded_eager,frozen_default,cudnn_best_layers", "--network", name,
                    "--classes", cls, "--compile-limit", "150", modes="fused,compile,fused_graph", beside=_LAYER_FILES,
                )
                for name, cls in _PAIRS
            ),
        )
    ),
    # Compiled code in graphs by hand, on both sides, which "networks" has for README's table, too.
    "networks_graphs": Phase(
        (
            tuple(
                _networks(
                    "networks_graphs", "frozen_reduce_overhead,frozen_graph", "--network", name, "--classes", cls,
                    "--layouts", "nhwc", "--compile-limit", "150", modes=_FASTEST_MODES,
                )
                for name, cls in _PAIRS
            ),
        )
    ),
    # Compiled beside each other for the caches alone; what max-autotune keeps it has timed with the GPU for itself.
    "networks_autotune": Phase(
        (
            tuple(
                _networks(
                    "networks_autotune", "compile_max_autotune,frozen_max_autotune", "--network", name,
                    "--classes", cls, "--compile-workers", "3", "--compile-limit", "600",
                )
                for name, cls in _PAIRS
            ),
        )
    ),
}  # fmt: skip
