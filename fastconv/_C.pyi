from enum import Enum
from typing import Any

class DeviceType(Enum):
    cpu = ...
    cuda = ...

class DeviceInfo:
    type: DeviceType
    index: int
    name: str
    compute_capability: int
    processors: int
    shared_memory_bytes: int
    l2_bytes: int
    bandwidth_bytes_per_s: float
    fp32_flops_per_s: float
    fp16_tensor_flops_per_s: float
    has_kernels: bool

class ConvProblem:
    def __init__(
        self,
        n: int,
        c: int,
        h: int,
        w: int,
        k: int,
        r: int,
        s: int,
        stride: tuple[int, ...] = (1, 1),
        padding: tuple[int, ...] = (0, 0),
        dilation: tuple[int, ...] = (1, 1),
        groups: int = 1,
        dtype: str = "float32",
        precision: str = "fp32",
        layout: str = "nchw",
        bias: bool = False,
        residual: bool = False,
        activation: str = "none",
    ) -> None: ...
    @property
    def p(self) -> int: ...
    @property
    def q(self) -> int: ...
    @property
    def direct_flops(self) -> float: ...
    @property
    def compulsory_bytes(self) -> float: ...
    @property
    def accuracy(self) -> str: ...

def cpu_device(threads: int) -> DeviceInfo: ...
def h200_device() -> DeviceInfo: ...
def algorithms() -> list[dict[str, Any]]: ...
def candidates(problem: ConvProblem, device: DeviceInfo) -> list[dict[str, Any]]: ...
def choose(algorithm: str, problem: ConvProblem, device: DeviceInfo) -> dict[str, Any]: ...
def packed_weight_bytes(algorithm: str, problem: ConvProblem, device: DeviceInfo) -> int: ...

built_with_cuda: bool
cuda_architectures: str
cuda_compiler: str
