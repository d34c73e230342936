from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

class DeviceType(Enum):
    cpu = ...
    cuda = ...

class InstructionSet(Enum):
    generic = ...
    avx2 = ...
    avx512 = ...

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
    clock_hz: float
    has_kernels: bool
    instruction_set: InstructionSet

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
        max_error: float | None = None,
        max_workspace: int | None = None,
        residual_after: bool = False,
        max_pool: bool = False,
        input_activation: str | None = None,
        x_channels: int = 0,
        y_channels: int = 0,
    ) -> None: ...
    @property
    def n(self) -> int: ...
    @property
    def c(self) -> int: ...
    @property
    def h(self) -> int: ...
    @property
    def w(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def r(self) -> int: ...
    @property
    def s(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def stride(self) -> tuple[int, int]: ...
    @property
    def padding(self) -> tuple[int, int]: ...
    @property
    def dilation(self) -> tuple[int, int]: ...
    @property
    def p(self) -> int: ...
    @property
    def q(self) -> int: ...
    @property
    def max_pool(self) -> bool: ...
    @property
    def direct_flops(self) -> float: ...
    @property
    def compulsory_bytes(self) -> float: ...
    @property
    def accuracy(self) -> str: ...

class TaskMap:
    def __init__(
        self,
        tiles: int,
        c: int,
        k: int,
        group_tiles: int,
        input: tuple[int, int],  # tiles x channels of an ITrans task
        gemm: tuple[int, int],  # points x filters of a GEMM task
        output: tuple[int, int],  # tiles x filters of an OTrans task
        filter: tuple[int, int] | None = None,  # filters x channels of an FTrans task; None: there are none
        d_ig: int = 0,
        d_go: int = 0,
        m: int = 1,
        bounded: bool = True,
        points: int = 36,
    ) -> None: ...
    tiles: int
    c: int
    k: int
    groups: int
    n_f: int
    s_i: int
    s_g: int
    s_o: int
    last_s_i: int
    last_s_o: int
    m: int
    lead: int
    delay: int
    v_groups: int
    m_groups: int
    def __len__(self) -> int: ...
    def arguments(self) -> dict[str, Any]: ...
    def targets(self) -> list[int]: ...
    def task_at(self, position: int) -> tuple[int, int, int]: ...
    def tasks(self) -> npt.NDArray[np.int32]: ...  # [tasks, (kind, group, index)]
    def waits(self) -> npt.NDArray[np.int32]: ...  # [tasks, 3, (counter or -1, value)]
    def raises(self) -> npt.NDArray[np.int32]: ...  # [tasks]
    def extents(self) -> npt.NDArray[np.int32]: ...  # [tasks, (tile, tiles, channel, channels, point, points)]

def task_map(problem: ConvProblem, device: DeviceInfo) -> TaskMap: ...
def instrumented_task_map(
    problem: ConvProblem,
    device: DeviceInfo,
    d_ig: int | None = None,
    d_go: int | None = None,
    m: int | None = None,
    filters: bool = False,
) -> TaskMap: ...
def cpu_device(threads: int, instruction_set: InstructionSet = ...) -> DeviceInfo: ...
def h200_device() -> DeviceInfo: ...
def limit_to_build(device: DeviceInfo, architectures: str) -> None: ...
def set_rates(device: DeviceInfo, boost_hz: float, memory_bytes_per_s: float) -> None: ...
def algorithms() -> list[dict[str, Any]]: ...
def candidates(problem: ConvProblem, device: DeviceInfo) -> list[dict[str, Any]]: ...
def choose(algorithm: str, problem: ConvProblem, device: DeviceInfo) -> dict[str, Any]: ...
def error_limit(problem: ConvProblem, device: DeviceInfo) -> float: ...
def weight_gradients(problem: ConvProblem, device: DeviceInfo) -> list[dict[str, Any]]: ...
def choose_input_gradient(
    algorithm: str, problem: ConvProblem, device: DeviceInfo, own: bool = False
) -> dict[str, Any]: ...
def input_gradients(problem: ConvProblem, device: DeviceInfo) -> list[dict[str, Any]]: ...
def choose_by_cost(pass_: str, problem: ConvProblem, device: DeviceInfo) -> str: ...
def choose_weight_gradient(algorithm: str, problem: ConvProblem, device: DeviceInfo) -> dict[str, Any]: ...
def fitted() -> list[dict[str, Any]]: ...
def set_fitted(algorithm: str, name: str, kind: str, value: float) -> None: ...
def preference(algorithm: str, device: DeviceInfo) -> float: ...
def costs_us(
    algorithm: str, problems: list[ConvProblem], device: DeviceInfo, pass_: str = "forward"
) -> list[float]: ...
def set_measured(lines: str) -> None: ...
def measured_device(device: DeviceInfo) -> str: ...
def has_group_norm(n: int, c: int, h: int, w: int, dtype: str, device: DeviceInfo) -> bool: ...
def packed_weight_bytes(algorithm: str, problem: ConvProblem, device: DeviceInfo) -> int: ...

built_with_cuda: bool
cuda_architectures: str
cuda_compiler: str
