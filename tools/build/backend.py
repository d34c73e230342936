"""PEP 517 backend: setuptools', plus the build requirements that depend on the machine.

The CUDA compiler is the system's nvcc if there is one, else NVIDIA's own packages of PyPI, so that GPU code is built on
any machine. Whether a GPU is present is never asked: the machine that builds need not be the one that runs.
"""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)

from toolchain import find_nvcc, wants_cuda

COMPILER_PACKAGES = [
    f"{name}==13.0.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
]


def _requirements() -> list[str]:
    requirements = ["torch>=2.10", "ninja", "pybind11>=2.13"]
    if wants_cuda() and find_nvcc() is None:
        requirements += COMPILER_PACKAGES
    return requirements


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _requirements()
