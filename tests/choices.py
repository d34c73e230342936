"""What the tests of measured choices share."""

import torch

import fastconv
from fastconv import _C, measured

CPU = torch.device("cpu")
X, W = torch.randn(2, 8, 11, 9), torch.randn(4, 8, 3, 3)
SIZES = {"n": 2, "c": 8, "h": 11, "w": 9, "k": 4, "r": 3, "s": 3}
PROBLEM = _C.ConvProblem(**SIZES)  # of X and W


def choice(algorithm, problem=PROBLEM, device=None, pass_="forward"):
    return measured.Choice(device or measured.device_name(CPU), repr(problem), algorithm, {algorithm: 1.0}, pass_)


def activate(*choices):
    measured._activate({entry.key: entry for entry in choices})


def ran(*args, **kwargs):
    fastconv.conv2d(*args, **kwargs)
    return fastconv.last_call()["algorithm"]


def other_than(name):
    return "direct" if name != "direct" else "im2col_gemm"
