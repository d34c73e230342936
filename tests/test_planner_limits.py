"""What the planner must refuse, and the memory that it must ask for: where nothing else stands between a kernel and an
index that wraps, an instruction that the GPU lacks, or a write behind the workspace."""

import itertools
import re
from pathlib import Path

import pytest
from test_planner import planned

from fastconv import _C

# Expected errors of docs/concepts/numerics.md, "Bounds and measurements": (algorithms, classes, expected, ...).
FIVE = ("direct", "direct_tiled", "im2col_gemm", "fused_unroll", "two_stage")


def documented_multiples():
    text = (
        (Path(__file__).resolve().parent.parent / "docs" / "concepts" / "numerics.md")
        .read_text()
        .split("## Bounds and measurements")[1]
    )
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 8 or not cells[2][:1].isdigit():
            continue
        names = FIVE if cells[0] == "those five" else [cells[0].strip("`")]
        classes = ["ieee", "fp32", "tf32", "fp16", "bf16"] if cells[1] == "all" else re.findall(r"`(\w+)`", cells[1])
        for name, cls in itertools.product(names, classes):
            # One number for all of the row's classes, and behind it those of single ones.
            own = re.search(rf"`{cls}` ([\d.]+)", cells[2])
            yield (name, cls), float(own[1] if own else re.match(r"[\d.]+", cells[2])[0])


def test_expected_errors_are_the_documented_ones():
    """A tolerance is never loosened by hand: what an algorithm declares, and the tests allow, is what is derived."""
    declared = {(row["name"], cls): error for row in _C.algorithms() for cls, error in row["accuracy"].items()}
    documented = dict(documented_multiples())
    assert {key for key in declared if key[0] != "torch"} == set(documented)
    for key, error in documented.items():
        assert declared[key] == pytest.approx(error, abs=0.06), key


WINOGRAD = [row["name"] for row in _C.algorithms() if row["family"] == "winograd"]


@pytest.mark.parametrize("device", [_C.h200_device(), _C.cpu_device(2)], ids=["h200", "cpu"])
@pytest.mark.parametrize("algorithm", WINOGRAD)
def test_winograd_refuses_what_its_tiles_are_not_for(algorithm, device):
    def code(**change):
        arguments = {"n": 2, "c": 8, "h": 14, "w": 14, "k": 8, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}
        return planned(algorithm, _C.ConvProblem(**arguments | change), device)["code"]

    assert code() == code(padding=(2, 2)) == code(padding=(0, 2)) == ""
    assert {code(padding=pair) for pair in ((3, 0), (0, 3))} == {"padding"}
    assert {code(stride=pair) for pair in ((2, 1), (1, 2))} == {"stride"}
    assert {code(dilation=pair) for pair in ((2, 1), (1, 2))} == {"dilation"}
    assert {code(r=r, s=s) for r, s in ((3, 1), (1, 3), (5, 5))} == {"kernel_size"}
    assert code(groups=2) == "groups"


@pytest.mark.parametrize("capability", [70, 75, 80, 86, 89, 100, 120])
def test_hopper_s_kernels_run_on_hopper_alone(capability):
    """Elsewhere their bodies are compiled empty: nothing but the planner keeps them from running."""
    device = _C.h200_device()
    device.compute_capability = capability
    arguments = {"n": 8, "c": 64, "h": 28, "w": 28, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}
    for dtype in ("float32", "float16", "bfloat16"):
        problem = _C.ConvProblem(**arguments, dtype=dtype)
        for name in ("winograd_fused", "winograd_megakernel"):
            assert planned(name, problem, device)["code"] == "device", name
        for name in ("implicit_gemm", "winograd_f4"):
            row = planned(name, problem, device)
            assert not row["ok"] or "wgmma" not in row["config"]
            assert _C.choose_weight_gradient(name, problem, device)["algorithm"] == "torch"
        assert (planned("implicit_gemm", problem, device)["code"] == "device") == (capability < 80)
    ieee = planned("winograd_megakernel", _C.ConvProblem(**arguments, precision="ieee"), device)
    assert (ieee["code"] == "device") == (capability < 80)


# What the kernels number with 31 bits, and a H200 has room for: too large, and a size that is not.
HUGE = [
    ("winograd_fused", {"h": 5793, "w": 5793}, {"h": 5792, "w": 5792}),
    ("winograd_fused", {"w": 1 << 20, "k": 1 << 7, "h": 1}, {"w": 1 << 19, "k": 1 << 7, "h": 1}),
    ("winograd_f2", {"n": 1 << 19, "h": 128, "w": 128, "c": 1}, {"n": 1 << 18, "h": 128, "w": 128, "c": 1}),
    ("winograd_f4", {"n": 1 << 19, "h": 128, "w": 128, "c": 1}, {"n": 1 << 18, "h": 128, "w": 128, "c": 1}),
    ("winograd_megakernel", {"c": 1 << 22, "h": 4, "w": 4}, {"c": 2_000_000, "h": 4, "w": 4}),
    ("implicit_gemm", {"n": 1 << 17, "h": 128, "w": 126}, {"n": 1 << 16, "h": 128, "w": 126}),
    ("fused_unroll", {"c": 1 << 16, "h": 128, "w": 128}, {"c": 1 << 15, "h": 128, "w": 128}),
    ("im2col_gemm", {"c": 1 << 18, "w": 1 << 10, "h": 4}, {"c": 1 << 17, "w": 1 << 10, "h": 4}),
]
HUGE_GRADIENTS = [
    ("implicit_gemm", {"n": 1 << 16, "c": 32}, {"n": (1 << 16) - 1, "c": 32}),
    ("implicit_gemm", {"c": 1 << 19, "h": 64, "w": 64}, {"c": 1 << 18, "h": 64, "w": 64}),
    ("implicit_gemm", {"c": 1 << 15, "k": 1 << 14, "h": 3, "w": 3}, {"c": 1 << 13, "k": 1 << 14, "h": 3, "w": 3}),
    ("implicit_gemm", {"n": 1 << 14, "c": 32, "h": 400, "w": 400}, {"n": 1 << 13, "c": 32, "h": 400, "w": 400}),
    ("winograd_f4", {"n": 32, "c": 512, "k": 512, "h": 256, "w": 256}, {"n": 4, "c": 256, "k": 256, "h": 99, "w": 99}),
    ("direct_tiled", {"c": 1 << 16, "h": 128, "w": 128, "k": 1 << 16, "groups": 1 << 16},
     {"c": 1 << 15, "h": 128, "w": 128, "k": 1 << 15, "groups": 1 << 15}),
    ("direct_tiled", {"n": 1 << 17, "h": 128, "w": 128, "groups": 8}, {"n": 1 << 15, "h": 128, "w": 128, "groups": 8}),
]  # fmt: skip


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "weight gradient"])
def test_sizes_beyond_the_kernels_numbers_are_refused(gradient):
    """Whatever else changes, no kernel is given what it cannot count: its indices would wrap."""
    arguments = {"n": 1, "c": 8, "h": 64, "w": 64, "k": 8, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}

    def takes(algorithm, sizes):
        problem = _C.ConvProblem(**arguments | sizes)
        if gradient:
            return _C.choose_weight_gradient(algorithm, problem, _C.h200_device())["algorithm"] == algorithm
        row = planned(algorithm, problem, _C.h200_device())
        assert row["ok"] or row["code"] == "size", row
        return row["ok"]

    for algorithm, large, small in HUGE_GRADIENTS if gradient else HUGE:
        assert takes(algorithm, small), (algorithm, small)
        assert not takes(algorithm, large), (algorithm, large)


def ceil_div(count, size):
    return (count + size - 1) // size


def align(count):
    return 256 * ceil_div(count, 256)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_workspaces_hold_what_their_kernels_keep_in_them(dtype, layout):
    """The parts that the configurations name, counted once more: a missing one is written behind the workspace."""
    n, c, h, w, k = 160, 200, 27, 30, 136
    problem = _C.ConvProblem(n=n, c=c, h=h, w=w, k=k, r=3, s=3, padding=(1, 1), dtype=dtype, layout=layout)
    device, halves = _C.h200_device(), dtype != "float32"
    size = 2 if halves else 4
    turned = align(n * c * h * w * size) if layout == "nchw" else 0  # x in NHWC
    assert planned("winograd_fused", problem, device)["workspace_bytes"] == turned

    for name, m in (("winograd_f2", 2), ("winograd_f4", 4)):
        tiles, alpha = n * ceil_div(h, m) * ceil_div(w, m), (m + 2) ** 2
        groups = 1 if halves else ceil_div(c, 64)
        c_pad, k_pad = (c, k) if halves else (groups * 8 * ceil_div(ceil_div(c, groups), 8), 16 * ceil_div(k, 16))
        exponents = align(4 * 4 * ceil_div(tiles, 4)) * (1 if halves else 1 + groups)
        v = align(alpha * tiles * c_pad * 2 * (1 if halves else 2))
        products = align(alpha * (tiles if halves else 8 * ceil_div(tiles, 8)) * k_pad * 4)
        row = planned(name, problem, device)
        assert row["config"].endswith("chunks 1")
        assert row["workspace_bytes"] == v + products + exponents + turned
        assert row["packed_bytes"] == align(alpha * k * c_pad * 2 * (1 if halves else 2)) + align(4 * k)

    task_map, chunks, blocks = _C.task_map(problem, device), ceil_div(c, 64), ceil_div(k, 128)
    tile = 128 * 64 * 2 * chunks * (1 if halves else 2)  # of V, a point of a group
    parts = [
        task_map.v_groups * 36 * tile,
        task_map.m_groups * 36 * blocks * 128 * 128 * size,
        task_map.groups * 128 * chunks * 4,  # exponents
        4 * (2 * 32 + 1 + 3 * task_map.groups + (task_map.groups if halves else 0)),  # tickets, counters
    ]
    row = planned("winograd_megakernel", problem, device)
    assert row["workspace_bytes"] == sum(map(align, parts)) + turned
    assert row["packed_bytes"] == align(36 * blocks * tile) + align(4 * k)


@pytest.mark.parametrize("kib", [48, 99, 227])
@pytest.mark.parametrize("size", [11, 31, 61, 91, 131, 201])
def test_direct_tiled_asks_for_the_shared_memory_that_there_is(size, kib):
    device = _C.h200_device()
    device.shared_memory_bytes = kib * 1024
    for k in (1, 64):
        row = planned("direct_tiled", _C.ConvProblem(n=1, c=4, h=300, w=300, k=k, r=size, s=size), device)
        if row["ok"]:
            assert int(re.search(r"(\d+) bytes shared", row["config"])[1]) <= kib * 1024
        else:
            assert row["code"] == "kernel_size"


@pytest.mark.parametrize(
    ("architectures", "capability", "kernels_of"),
    [
        ("90a;80+PTX", 90, 90),
        ("80,90a", 90, 90),
        ("90a;80+PTX", 86, 86),
        ("90a;80+PTX", 120, 120),  # from PTX
        ("90a;80+PTX", 75, None),
        ("90a", 80, None),
        ("90a", 100, None),
        ("80", 89, 89),
        ("80", 90, None),
        ("86", 80, None),
        ("80+PTX", 90, 80),  # Hopper's own kernels are empty there: the portable ones
        ("90", 90, 80),
        ("100f", 103, 103),
        ("100f+PTX", 120, None),
        ("compute_90a; compute_80", 90, 90),  # compiled when they are loaded
        ("compute_90a", 100, None),
        ("compute_80", 120, 120),
    ],
)
def test_a_device_offers_what_the_build_has_for_it(architectures, capability, kernels_of):
    """What machine code and PTX run on; and `auto` answers where nothing of ours can be loaded."""
    device = _C.h200_device()
    device.compute_capability = capability
    _C.limit_to_build(device, architectures)
    assert device.has_kernels == (kernels_of is not None)
    if kernels_of is not None:
        assert device.compute_capability == kernels_of
        return
    problem = _C.ConvProblem(64, 64, 56, 56, 64, 3, 3, padding=(1, 1), precision="fp32")
    assert _C.choose("auto", problem, device)["algorithm"] == "torch"
    assert "FASTCONV_CUDA_ARCHS" in planned("implicit_gemm", problem, device)["reason"]


def test_a_gpu_of_the_table_has_its_rates_and_another_one_shares_of_its_peaks():
    known, other = _C.h200_device(), _C.h200_device()
    _C.set_rates(known, 1e9, 1e12)  # what the driver says of its clocks does not matter
    assert known.bandwidth_bytes_per_s == 4.3e12
    other.name, other.compute_capability, other.processors = "NVIDIA RTX 6000", 89, 100
    _C.set_rates(other, 2e9, 1e12)
    assert other.bandwidth_bytes_per_s == pytest.approx(0.88e12)
    assert other.fp32_flops_per_s == pytest.approx(0.70 * 2e9 * 100 * 256)
    assert other.fp16_tensor_flops_per_s == pytest.approx(0.65 * 2e9 * 100 * 1024)
    assert 1e9 < other.clock_hz < 2e9
    a100 = _C.h200_device()
    a100.name, a100.compute_capability, a100.processors = "NVIDIA A100-PCIE-40GB", 80, 108
    _C.set_rates(a100, 1.41e9, 1.55e12)
    assert a100.fp32_flops_per_s < 19.5e12  # its peak: half the units of the architectures since


@pytest.mark.parametrize("device", [_C.h200_device(), _C.cpu_device(2)], ids=["cuda", "cpu"])
@pytest.mark.parametrize("change", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [2**28, 3 << 28, 2**31 - 1, 2**31, 2**40, 2**60])
def test_absurd_geometry_is_refused_or_planned(device, change, value):
    """No overflow and no division by zero on the way: the planner ended the process once. `auto` always answers."""
    h = 2**61 if change == "dilation" else 56
    arguments = {"padding": (1, 1)} | {change: (value, value)}
    for axis in (arguments[change], (value, 1), (1, value)):
        problem = _C.ConvProblem(1, 64, h, h, 64, 3, 3, **arguments | {change: axis})
        assert _C.choose("auto", problem, device)["algorithm"]
        for row in _C.candidates(problem, device):
            assert row["ok"] or row["reason"]
            if value >= 2**31 and row["algorithm"] != "torch":
                assert not row["ok"], row


@pytest.mark.parametrize("device", [_C.h200_device(), _C.cpu_device(2)], ids=["cuda", "cpu"])
def test_outputs_beyond_the_kernels_numbers_are_refused(device):
    """By rows, whose number padding brings beyond 31 bits, and by what plans multiply them with."""
    row = _C.ConvProblem(1, 8, 2**31 - 1, 1, 4, 3, 3, padding=(2, 1))
    taps = _C.ConvProblem(1, 1, 1, 1, 2, 2, 2, padding=(2**30, 2**30))
    for problem in (row, taps):
        for row in _C.candidates(problem, device):
            assert row["algorithm"] == "torch" or row["code"] == "size", row


def test_an_empty_batch_of_ranges_is_planned():
    geometry = {"padding": (1, 1), "dtype": "float16", "layout": "nhwc"}
    problem = _C.ConvProblem(0, 64, 7, 7, 256, 3, 3, **geometry, residual=True, y_channels=512)
    assert any(row["ok"] for row in _C.candidates(problem, _C.h200_device()))


@pytest.mark.parametrize(("width", "has_room"), [(2**30 // 3, False), (2**30 // 3 - 1, True)])
def test_first_layers_count_bytes_from_the_boundary_in_front_of_an_image(width, has_room):
    """With 32 bits: 4 GiB of float32 less what may lie in front, up to three values."""
    problem = _C.ConvProblem(2, 3, 1, width, 2, 1, 1, layout="nhwc", precision="fp32")
    config = planned("implicit_gemm", problem, _C.h200_device())["config"]
    assert config.startswith("few channels") == has_room, config


@pytest.mark.parametrize("sizes", [{"c": 3_000_000}, {"k": 3_000_000}])
def test_channels_beyond_a_grid_are_refused_on_cuda(sizes):
    problem = _C.ConvProblem(**{"n": 1, "c": 8, "h": 4, "w": 4, "k": 8, "r": 3, "s": 3, "padding": (1, 1)} | sizes)
    for row in _C.candidates(problem, _C.h200_device()):
        assert row["algorithm"] == "torch" or row["code"] == "size", row


def test_weight_gradient_keeps_its_unrolled_input_small():
    """Few channels become taps times channels for the whole batch: 12.8 GiB here, 2.6 in ResNet's first layer."""

    def answer(n, c, hw, k, r, stride):
        geometry = {"stride": (stride, stride), "padding": (r // 2, r // 2), "precision": "fp32"}
        problem = _C.ConvProblem(n, c, hw, hw, k, r, r, **geometry)
        return _C.choose_weight_gradient("implicit_gemm", problem, _C.h200_device())

    assert answer(256, 3, 224, 64, 7, 2)["algorithm"] == "implicit_gemm"
    refused = answer(16, 16, 512, 32, 7, 1)
    assert refused["code"] == "workspace", refused


@pytest.mark.parametrize(("n", "c", "hw", "k"), [(1, 3, 9, 5), (2, 512, 7, 512), (64, 64, 56, 64), (32, 33, 31, 70)])
def test_weight_gradients_have_room_for_both_operands_in_nhwc(n, c, hw, k):
    """In memory that they need later, too; where they read NHWC of NCHW tensors, and nowhere else."""

    def rows(layout, device):
        problem = _C.ConvProblem(n, c, hw, hw, k, 3, 3, padding=(1, 1), precision="fp32", layout=layout)
        return {row["algorithm"]: row for row in _C.weight_gradients(problem, device)}

    there, here = (rows(layout, _C.h200_device())["winograd_f4"] for layout in ("nhwc", "nchw"))
    operands = align(4 * n * (c + k) * hw * hw)
    assert there["reads_nhwc"]
    assert here["reads_nhwc"]
    assert max(there["workspace_bytes"], operands) <= here["workspace_bytes"] <= there["workspace_bytes"] + operands
    assert here["cost_us"] > there["cost_us"]
    readers = {name for name, row in rows("nchw", _C.h200_device()).items() if row["reads_nhwc"]}
    assert readers == {"winograd_f4"}
    assert not any(row["reads_nhwc"] for row in rows("nchw", _C.cpu_device(2)).values())


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_megakernel_in_fp32_arithmetic_runs_where_a_block_has_the_shared_memory(capability):
    """A block takes 148 224 bytes; GPUs of 8.6, 8.9 and 12.0 offer 101 376 at most."""
    device = _C.h200_device()
    device.compute_capability = capability
    device.shared_memory_bytes = {80: 166912, 90: 232448, 100: 232448}.get(capability, 101376)
    problem = _C.ConvProblem(1, 128, 56, 56, 128, 3, 3, padding=(1, 1), precision="ieee")
    row = planned("winograd_megakernel", problem, device)
    assert (row["ok"], row["code"]) == ((True, "") if device.shared_memory_bytes > 148224 else (False, "device"))
    assert row["ok"] or "148224" in row["reason"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_last_layers_of_decoders_have_a_kernel_for_few_filters(layout):
    arguments = {"n": 1, "c": 64, "h": 512, "w": 512, "k": 3, "r": 3, "s": 3, "padding": (1, 1), "layout": layout}
    choice = _C.choose("auto", _C.ConvProblem(**arguments, precision="fp32"), _C.h200_device())
    assert choice["algorithm"] == "direct_tiled"
    assert choice["config"].startswith("few filters")
    others = ({"n": 0}, {"k": 5}, {"c": 8}, {"stride": (2, 2)}, {"dilation": (2, 2)}, {"s": 5}, {"groups": 3, "c": 66})
    for changes in others:
        row = planned("direct_tiled", _C.ConvProblem(**arguments | changes), _C.h200_device())
        assert "few filters" not in row["config"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_1x1_layers_of_small_maps_have_a_kernel_in_fp32_arithmetic(layout):
    arguments = {"n": 1, "c": 512, "h": 14, "w": 14, "k": 128, "r": 1, "s": 1, "layout": layout, "precision": "ieee"}
    choice = _C.choose("auto", _C.ConvProblem(**arguments), _C.h200_device())
    assert choice["algorithm"] == "direct_tiled"
    assert choice["config"].startswith("1x1")
    strided = planned("direct_tiled", _C.ConvProblem(**arguments | {"stride": (2, 2)}), _C.h200_device())
    assert strided["config"].startswith("1x1")
    for changes in ({"n": 512}, {"padding": (1, 1)}, {"groups": 2}, {"c": 8192}, {"dtype": "float16"}, {"s": 3}):
        row = planned("direct_tiled", _C.ConvProblem(**arguments | changes), _C.h200_device())
        assert not row["config"].startswith("1x1"), changes
    portable = _C.h200_device()
    portable.compute_capability = 80
    assert not planned("direct_tiled", _C.ConvProblem(**arguments), portable)["config"].startswith("1x1")
