"""PEP 517 backend: setuptools', plus the build requirements that depend on the machine.

The CUDA compiler is the system's nvcc if there is one, else NVIDIA's own packages of PyPI, so that GPU code is built on
any machine. Whether a GPU is present is never asked: the machine that builds need not be the one that runs.
"""

import python_version  # noqa: F401  (ends a build for a Python that is too old)
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)
from toolchain import find_nvcc, wants_cuda

# torch names the toolkit that it was built with, in this same package, and pip takes the compiler that belongs to it.
# But pip has to decide torch first: with a newer toolkit in hand it downloads one torch after the other, to find one
# that agrees. Whatever the order here, it decides first what has `==`, or an upper bound.
TORCH = "torch==2.*,>=2.10"
COMPILER = "cuda-toolkit[nvcc,cccl,cudart]>=13"


def _requirements() -> list[str]:
    requirements = [TORCH, "ninja", "pybind11>=2.13"]
    if wants_cuda() and find_nvcc() is None:
        requirements.append(COMPILER)
    return requirements


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements()


if __name__ == "__main__":  # for an environment that builds without isolation
    print("\n".join(_requirements()))
