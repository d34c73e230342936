"""Fast 2-D convolutions for PyTorch.

`conv2d` and `Conv2d` mean what `torch.nn.functional.conv2d` and `torch.nn.Conv2d` mean; `swap_` puts the layers into
an existing model; `fuse` makes a copy of one for inference, with batch norms, residuals and activations inside the
convolutions; `explain` says which algorithm runs, and why not the others; `tune` measures which is the fastest here.
"""

from fastconv import built, integrations, measured  # noqa: F401  (built first: it says what is wrong with a build)
from fastconv.compiler import compile
from fastconv.compiler.ahead import export
from fastconv.explain import AlgorithmInfo, Explanation, algorithms, explain
from fastconv.functional import conv2d
from fastconv.fuse import FusedModule, fuse
from fastconv.nn import Conv2d, FusedConv2d, refresh
from fastconv.ops import UnsupportedError, last_call
from fastconv.rewrites.report import RewriteReport as CompileReport
from fastconv.rewrites.report import RewriteReport as FuseReport
from fastconv.swap import SwapReport, swap_
from fastconv.tuning import TuneReport, tune
from fastconv.views import Conv1d, ConvTranspose2d, conv1d, conv_transpose2d

__version__ = built.version()

__all__ = [
    "AlgorithmInfo",
    "CompileReport",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "Explanation",
    "FuseReport",
    "FusedConv2d",
    "FusedModule",
    "SwapReport",
    "TuneReport",
    "UnsupportedError",
    "__version__",
    "algorithms",
    "compile",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "explain",
    "export",
    "fuse",
    "last_call",
    "refresh",
    "swap_",
    "tune",
]

measured.load()
