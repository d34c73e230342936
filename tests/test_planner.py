"""The choice of an algorithm, over many problems and devices that are not there."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastconv import _C, settings

NAMES = [row["name"] for row in _C.algorithms()]
WINOGRAD = {row["name"] for row in _C.algorithms() if row["family"] == "winograd"}
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "h200"
CLASSES = {"float16": "fp16", "bfloat16": "bf16", "other": "other"}


def planned(algorithm, problem, device):
    """What the planner says of one algorithm."""
    return next(row for row in _C.candidates(problem, device) if row["algorithm"] == algorithm)


@st.composite
def problems(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 8, 32]))
    sizes = st.one_of(st.integers(1, 9), st.sampled_from([13, 33, 64, 224, 1025]))
    channels = st.one_of(st.integers(1, 5), st.sampled_from([16, 33, 64, 512]))
    r, s = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    arguments = {
        "n": draw(st.sampled_from([0, 1, 3, 64, 70000])),
        "c": groups * draw(channels),
        "h": max(draw(sizes), dilation[0] * (r - 1) + 1 - 2 * padding[0]),
        "w": max(draw(sizes), dilation[1] * (s - 1) + 1 - 2 * padding[1]),
        "k": groups * draw(channels),
        "r": r,
        "s": s,
        "stride": draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "dtype": draw(st.sampled_from(["float32", "float32", "float16", "bfloat16", "other"])),
        "precision": draw(st.sampled_from(["ieee", "fp32", "tf32"])),
        "layout": draw(st.sampled_from(["nchw", "nhwc"])),
        "bias": draw(st.booleans()),
        "residual": draw(st.booleans()),
        "residual_after": draw(st.booleans()),
        "activation": draw(st.sampled_from(["none", *settings.ACTIVATIONS])),
        "max_error": draw(st.sampled_from([None, None, 1, 1.5, 4, 100, math.inf])),
    }
    problem = _C.ConvProblem(**arguments)
    if min(problem.p, problem.q) >= 2 and not arguments["residual"] and draw(st.booleans()):
        arguments["max_pool"] = True
        problem = _C.ConvProblem(**arguments)
    return problem, arguments


@st.composite
def devices(draw):
    if draw(st.booleans()):
        return _C.cpu_device(draw(st.integers(1, 128)))
    device = _C.h200_device()
    device.compute_capability = draw(st.sampled_from([70, 75, 80, 86, 89, 90, 100, 120]))
    device.processors = draw(st.integers(1, 200))
    device.shared_memory_bytes = draw(st.sampled_from([48, 64, 99, 163, 227])) * 1024
    device.l2_bytes = draw(st.integers(1, 128)) << 20
    device.bandwidth_bytes_per_s = draw(st.floats(1e11, 8e12))
    device.fp32_flops_per_s = draw(st.floats(1e12, 1e14))
    device.fp16_tensor_flops_per_s = draw(st.floats(1e12, 2e15))
    device.has_kernels = draw(st.sampled_from([True, True, True, False]))
    return device


@given(problems(), devices())
def test_choice(made, device):
    problem, arguments = made
    accuracy = CLASSES.get(arguments["dtype"], arguments["precision"])
    assert problem.accuracy == accuracy
    limit = _C.error_limit(problem, device)
    if arguments["max_error"] is None:
        strict = accuracy == "fp32" and device.type == _C.DeviceType.cuda
        assert limit == (1.5 if strict else 4.0)
    else:
        assert limit == arguments["max_error"]
    rows = {row["algorithm"]: row for row in _C.candidates(problem, device)}
    assert list(rows) == NAMES
    for name, row in rows.items():
        if row["ok"]:
            assert (row["code"], row["reason"]) == ("", "")
            assert 0.0 <= row["cost_us"] < float("inf")
            assert 0 <= row["workspace_bytes"] < 2**48
            if row["auto_eligible"] or arguments["max_error"] is None:
                assert _C.choose(name, problem, device) == row
            else:
                with pytest.raises(RuntimeError, match=r"^fastconv\.UnsupportedError: .*; the limit is "):
                    _C.choose(name, problem, device)
            if shared := re.search(r"(\d+) bytes shared", row["config"]):
                assert int(shared[1]) <= device.shared_memory_bytes, row["config"]
        else:
            assert row["code"]
            assert row["reason"]
            assert not row["auto_eligible"]
            with pytest.raises(RuntimeError, match=r"^fastconv\.UnsupportedError: ") as caught:
                _C.choose(name, problem, device)
            assert row["reason"] in str(caught.value)
        if row["ok"]:
            assert row["expected_error"] > 0.0
            assert row["auto_eligible"] == (row["expected_error"] <= limit)
    assert rows["torch"]["expected_error"] == 1.0
    choice = _C.choose("auto", problem, device)
    eligible = [row for row in rows.values() if row["auto_eligible"]]
    assert choice | {"unsure": False} in eligible
    assert choice["cost_us"] == min(row["cost_us"] for row in eligible)


@pytest.mark.parametrize(
    ("algorithm", "few", "enough"),
    [("winograd_f2", 4, 8), ("winograd_fused", 8, 16), ("winograd_f4", 64, 80), ("winograd_megakernel", 96, 128)],
)
def test_class_fp32_takes_winograd_from_where_a_direct_sum_errs_as_much(algorithm, few, enough):
    """Its error hardly grows with the channels, a direct sum's does: docs/concepts/numerics.md."""

    def eligible(c, precision, device):
        problem = _C.ConvProblem(n=8, c=c, h=56, w=56, k=128, r=3, s=3, precision=precision, layout="nhwc")
        row = planned(algorithm, problem, device)
        assert row["ok"]
        return row["auto_eligible"]

    h200 = _C.h200_device()
    assert not eligible(few, "fp32", h200)
    assert eligible(enough, "fp32", h200)
    assert eligible(few, "tf32", h200)
    assert eligible(few, "fp32", _C.cpu_device(2))


def measured(cls, files="layers*.json"):
    """(row, problem) of every forward layer in the committed results of an H200."""
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(cls, "float32")
    precision = cls if dtype == "float32" else "fp32"
    for path in sorted(RESULTS.glob(files)):
        for row in json.loads(path.read_text())["rows"]:
            if row["class"] == cls and row["pass"] == "forward":
                sizes = {name: row[name] for name in ("n", "c", "h", "w", "k", "r", "s", "groups", "layout")}
                pairs = {name: (row[name], row[name]) for name in ("stride", "padding", "dilation")}
                yield row, _C.ConvProblem(**sizes, **pairs, dtype=dtype, precision=precision)


@pytest.mark.parametrize("n", [64, 1])
@pytest.mark.parametrize("cls", ["ieee", "fp32", "tf32", "fp16", "bf16"])
def test_auto_takes_about_the_fastest_of_what_was_measured(cls, n):
    """Costs may be off by more, as long as their order is right: in geometric mean 5 % are lost at most."""
    losses = []
    for row, problem in measured(cls, "layers.json"):
        if row["n"] != n:
            continue
        times = {name: us for name, us in row["algorithms"].items() if us}
        times["torch"] = row["peers"]["torch_" + row["layout"]]
        eligible = [row["algorithm"] for row in _C.candidates(problem, _C.h200_device()) if row["auto_eligible"]]
        choice = _C.choose("auto", problem, _C.h200_device())["algorithm"]
        losses.append(math.log(times[choice] / min(times[name] for name in eligible if name in times)))
    assert len(losses) == 2 * 22  # in both layouts
    assert math.exp(sum(losses) / len(losses)) < 1.05


def test_class_fp32_errs_at_most_half_as_much_again_as_cudnns_direct_sum():
    """Whatever `auto` takes for the layers that were measured."""
    direct = ("cudnn_implicit_gemm_nhwc", "cudnn_implicit_precomp_gemm_nhwc")
    held = 0
    for row, problem in measured("fp32"):
        choice = _C.choose("auto", problem, _C.h200_device())["algorithm"]
        errors = [row["peer_errors"][name] for name in direct if row["peer_errors"].get(name)]
        if errors and choice in row["errors"]:
            held += 1
            assert row["errors"][choice]["l2"] <= 1.5 * max(errors), (row["layer"], row["n"], choice)
    assert held > 60


@pytest.mark.parametrize("cls", ["ieee", "fp32", "tf32", "fp16", "bf16"])
def test_expected_errors_are_those_measured(cls):
    """Measured: at most a quarter more than expected, and of Winograd, whose errors decide, 30 % less."""
    direct = ("cudnn_implicit_gemm_nhwc", "cudnn_implicit_precomp_gemm_nhwc")
    plain = ("torch_nchw", "torch_nhwc")
    held, wrong = set(), []
    for row, problem in measured(cls):
        # PyTorch's FP32 may be an FFT or a Winograd algorithm, and its TF32 may be FP32 where cuDNN has nothing else.
        names = direct if cls in ("ieee", "fp32") else plain
        peers = [row["peer_errors"][name] for name in names if row["peer_errors"].get(name)]
        if not peers or (cls == "tf32" and max(peers) < 1e-5):
            continue
        for candidate in _C.candidates(problem, _C.h200_device()):
            name = candidate["algorithm"]
            if name in row["errors"] and candidate["ok"]:
                ratio = row["errors"][name]["l2"] / max(peers) / candidate["expected_error"]
                # At batch 1 cuBLAS may split a product, whose sums are then shorter.
                least = 0.7 if name in WINOGRAD and row["n"] > 1 else 0.0
                if not least <= ratio <= 1.25:
                    wrong.append((row["layer"], row["n"], name, round(ratio, 2)))
                held.add(name)
    assert not wrong
    assert len(held) >= 7


@given(problems(), devices())
def test_only_torch_where_nothing_of_ours_can_run(made, device):
    _, arguments = made
    problem = _C.ConvProblem(**{**arguments, "dtype": "other"})
    assert _C.choose("auto", problem, device)["algorithm"] == "torch"
    if device.type == _C.DeviceType.cuda:
        device.has_kernels = False
        assert _C.choose("auto", made[0], device)["algorithm"] == "torch"


@given(problems(), problems(), devices())
def test_packed_size_depends_on_the_weight_alone(made, other, device):
    """One packed weight serves every input: N, H, W, layout and epilogue have no say."""
    problem, arguments = made
    moved = {**arguments, **{name: other[1][name] for name in ("n", "layout", "bias", "activation")}}
    if not arguments.get("max_pool"):
        moved["residual"] = other[1]["residual"]
    moved["h"], moved["w"] = arguments["h"] + 3, arguments["w"] + 5
    if arguments["dtype"] == "other":
        return
    for row in _C.candidates(problem, device):
        if row["ok"]:
            size = _C.packed_weight_bytes(row["algorithm"], problem, device)
            assert size == _C.packed_weight_bytes(row["algorithm"], _C.ConvProblem(**moved), device)
            assert size > 0


@given(problems())
def test_problems_are_values(made):
    problem, arguments = made
    again = _C.ConvProblem(**arguments)
    assert problem == again
    assert hash(problem) == hash(again)
    assert problem != _C.ConvProblem(**{**arguments, "n": arguments["n"] + 1})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"stride": (0, 1)}, "stride"),
        ({"padding": (-1, 0)}, "padding"),
        ({"dilation": (1, 0)}, "dilation"),
        ({"groups": 3}, "groups is 3"),
        ({"h": 1}, "smaller than the kernel"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"layout": "hwcn"}, "layout is 'hwcn'"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"n": -1}, "n is -1"),
    ],
)
def test_impossible_problems_are_refused(change, word):
    arguments = {"n": 1, "c": 4, "h": 8, "w": 8, "k": 4, "r": 3, "s": 3}
    with pytest.raises(ValueError, match=word):
        _C.ConvProblem(**{**arguments, **change})


def test_unknown_algorithm():
    problem = _C.ConvProblem(n=1, c=4, h=8, w=8, k=4, r=3, s=3)
    with pytest.raises(ValueError, match="algorithm is 'best'; expected one of auto, direct"):
        _C.choose("best", problem, _C.cpu_device(1))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("n", "k", "hw", "r", "stride"), [(64, 64, 224, 3, 1), (1, 64, 224, 3, 1), (64, 96, 224, 7, 2)]
)
def test_first_layers_of_networks_keep_their_filters(n, k, hw, r, stride, layout):
    """Three channels: direct_tiled takes the kernel that was made for them, and `auto` takes direct_tiled."""
    arguments = {"n": n, "c": 3, "h": hw, "w": hw, "k": k, "r": r, "s": r, "layout": layout, "precision": "ieee"}
    problem = _C.ConvProblem(**arguments, stride=(stride, stride), padding=(r // 2, r // 2))
    choice = _C.choose("auto", problem, _C.h200_device())
    assert choice["algorithm"] == "direct_tiled"
    assert "filters that stay" in choice["config"]


def implicit_gemm(device, **arguments):
    geometry = {"n": 64, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}
    problem = _C.ConvProblem(**geometry | arguments)
    return planned("implicit_gemm", problem, device)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_implicit_gemm_takes_the_kernel_of_the_device(capability):
    """Hopper's kernel on Hopper, where rows of channels are whole pieces of 16 bytes; the portable one else."""
    device = _C.h200_device()
    device.compute_capability = capability
    on_hopper = capability == 90
    assert implicit_gemm(device)["config"].startswith("wgmma") == on_hopper
    assert implicit_gemm(device, c=68)["config"].startswith("wgmma") == on_hopper
    assert not implicit_gemm(device, c=66)["config"].startswith("wgmma")
    assert not implicit_gemm(device, c=68, dtype="float16")["config"].startswith("wgmma")
    row = implicit_gemm(device, stride=(9, 9))
    assert (row["ok"], row["code"]) == ((False, "stride") if on_hopper else (True, ""))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["3 x float16", "whole windows", "18 steps of 32"]),
        ({"precision": "tf32"}, ["1 x float16", "18 steps of 32"]),
        ({"dtype": "float16"}, ["float16", "9 steps of 64"]),
        ({"stride": (2, 2)}, ["single taps"]),
        ({"r": 1, "s": 1, "padding": (0, 0)}, ["tile 1x1x", "2 steps of 32"]),
        ({"n": 1, "c": 512, "h": 14, "w": 14, "k": 512}, [" splits"]),
        ({"n": 1, "dtype": "float16"}, ["single tile", "9 steps of 64", "whole windows"]),
        ({"n": 1, "precision": "tf32"}, ["single tile", "18 steps of 32"]),
        ({"n": 1, "dtype": "bfloat16", "stride": (2, 2)}, ["single tile", "single taps"]),
        ({"n": 1, "dtype": "float16", "layout": "nchw"}, ["single tile", "whole windows"]),
        ({"n": 1, "precision": "fp32", "k": 48}, ["single tile", "3 x float16", "48 filters"]),
        ({"n": 64, "c": 192, "h": 7, "w": 7, "k": 48, "dtype": "float16"}, ["single tile", "2 splits in a cluster"]),
        ({"k": 48}, ["48 filters"]),
        ({"k": 48, "dtype": "bfloat16"}, ["64 filters"]),
    ],
)
def test_implicit_gemm_on_hopper_plans(change, words):
    config = implicit_gemm(_C.h200_device(), **change)["config"]
    assert all(word in config for word in words), config


@pytest.mark.parametrize("change", [{"k": 60}, {"n": 64, "c": 512, "k": 512}])
def test_the_single_tile_kernel_of_implicit_gemm_leaves_what_it_cannot_do(change):
    """Filters that are no whole pieces of 16 bytes, and what is not small."""
    arguments = {"n": 1, "dtype": "float16"} | change
    assert "single tile" not in implicit_gemm(_C.h200_device(), **arguments)["config"]


def test_a_split_reduction_brings_its_workspace():
    arguments = {"n": 1, "c": 512, "h": 14, "w": 14, "k": 512}
    row = implicit_gemm(_C.h200_device(), **arguments)
    splits = int(row["config"].rsplit(" ", 2)[1])
    assert row["workspace_bytes"] == splits * 14 * 14 * 512 * 4
    assert implicit_gemm(_C.h200_device())["workspace_bytes"] == 0
    turned = implicit_gemm(_C.h200_device(), layout="nchw")["workspace_bytes"]
    assert turned == 64 * 64 * 56 * 56 * 4


@pytest.mark.parametrize("device", [_C.h200_device(), _C.cpu_device(2)], ids=["h200", "cpu"])
def test_what_follows_costs_pytorch_a_pass_and_ours_nothing(device):
    def costs(**epilogue):
        problem = _C.ConvProblem(n=64, c=64, h=56, w=56, k=256, r=1, s=1, layout="nhwc", **epilogue)
        return {row["algorithm"]: row["cost_us"] for row in _C.candidates(problem, device)}

    plain, activated, added = costs(), costs(activation="relu"), costs(activation="relu", residual=True)
    assert plain["torch"] < activated["torch"] < added["torch"]
    assert activated["implicit_gemm"] == plain["implicit_gemm"]
    assert added["torch"] - activated["torch"] > added["implicit_gemm"] - activated["implicit_gemm"]


@pytest.mark.parametrize(
    ("change", "converts"),
    [
        ({}, True),
        ({"precision": "tf32", "dtype": "float32"}, True),
        ({"precision": "fp32", "dtype": "float32"}, False),  # no tensor cores
        ({"r": 1, "s": 1, "padding": (0, 0)}, False),  # a product of matrices as they lie
        ({"r": 1, "s": 1, "padding": (0, 0), "h": 7, "w": 7}, True),  # not by pieces of 16 bytes
        ({"r": 1, "s": 1, "padding": (0, 0), "stride": (2, 2)}, True),
    ],
)
def test_pytorch_converts_nchw_for_tensor_cores(change, converts):
    arguments = {"n": 64, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "dtype": "float16"}

    def cost(layout):
        problem = _C.ConvProblem(**arguments | change, layout=layout)
        return _C.choose("torch", problem, _C.h200_device())["cost_us"]

    assert (cost("nchw") > cost("nhwc")) == converts


def test_winograd_f2_counts_on_an_early_output_transform_only_where_it_is_admitted():
    """The input transform of 409 tiles of 320 channels has 2045 blocks, of 410 2050: only up to 2048 admit the rest."""

    def cost(tiles):
        geometry = {"n": tiles, "c": 320, "h": 2, "w": 2, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}
        return planned("winograd_f2", _C.ConvProblem(**geometry), _C.h200_device())["cost_us"]

    assert cost(409) - cost(408) < 0.1
    assert cost(410) - cost(409) == pytest.approx(1.1, abs=0.1)


def fused_plan(geometry):
    """What the planner says of winograd_fused for a problem on an H200."""
    return planned("winograd_fused", _C.ConvProblem(**geometry), _C.h200_device())


def fused_fp32_plan(**change):
    geometry = {"n": 64, "c": 128, "h": 56, "w": 56, "k": 128, "r": 3, "s": 3, "padding": (1, 1), "layout": "nhwc"}
    return fused_plan(geometry | {"dtype": "float32", "precision": "fp32"} | change)


@pytest.mark.parametrize(
    ("change", "outputs"),
    [
        ({"h": 28, "w": 28}, "14x28"),
        ({}, "2x14x16"),
        ({"h": 13, "w": 13, "precision": "tf32", "dtype": "float32"}, "2x14x16"),
        ({"h": 18, "w": 18, "padding": (0, 0)}, "13x32"),  # 16 columns, but the input has 18: no two images
        ({"h": 13, "w": 13}, "2x14x16"),
        ({"n": 64, "c": 64, "h": 104, "w": 104, "k": 128}, "13x32"),  # 26 columns of tiles: wide items hold 28
        ({"n": 64, "c": 128, "h": 52, "w": 52, "k": 256, "precision": "tf32", "dtype": "float32"}, "13x32"),
        ({"n": 64, "c": 64, "h": 112, "w": 112, "k": 128}, "14x28"),  # nothing is lost
        ({"n": 1, "c": 64, "h": 104, "w": 104, "k": 128}, "14x28"),  # one wave either way
        ({"h": 52, "w": 52, "k": 60}, "14x28"),
        ({"h": 52, "w": 52, "layout": "nchw"}, "14x28"),
        ({"h": 7, "w": 7}, "4x7x8"),
        ({"k": 48}, "14x28"),  # half of the items, but one wave either way
        ({"k": 60}, "14x28"),  # no tensor copies of rows of filters
        ({"layout": "nchw"}, "14x28"),
        ({"precision": "fp32", "dtype": "float32"}, "8x32"),
        ({"precision": "fp32", "dtype": "float32", "c": 128, "h": 28, "w": 28, "k": 128}, "2x4x32"),  # 28 is 7 x 4
        ({"precision": "fp32", "dtype": "float32", "c": 128, "h": 26, "w": 28, "k": 128}, "8x32"),  # as many rows
        ({"precision": "fp32", "dtype": "float32", "c": 128, "h": 28, "w": 28, "k": 64}, "8x32"),  # one block
        ({"precision": "fp32", "dtype": "float32", "n": 1, "c": 128, "h": 28, "w": 28, "k": 128}, "8x32"),  # one wave
        ({"precision": "fp32", "dtype": "float32", "c": 128, "h": 28, "w": 28, "k": 128, "layout": "nchw"}, "8x32"),
    ],
)
def test_winograd_fused_fits_its_work_tiles_to_the_map(change, outputs):
    """Two or four images share a work tile, its columns are packed, or it is cut in two, where that saves waves."""
    geometry = {"n": 64, "c": 512, "h": 14, "w": 14, "k": 512, "r": 3, "s": 3, "padding": (1, 1), "dtype": "float16"}
    config = fused_plan(geometry | {"layout": "nhwc"} | change)["config"]
    assert f" filters, {outputs} outputs" in config, config


@pytest.mark.parametrize(
    ("change", "clusters"),
    [
        ({}, True),
        ({"c": 256, "k": 512, "h": 28, "w": 28}, True),
        ({"k": 64}, False),  # the other half of the filters would be none
        ({"k": 129}, False),  # no vectors of filters
        ({"c": 130}, False),  # no tensor copies
        ({"layout": "nchw"}, False),
    ],
)
def test_winograd_fused_splits_the_points_over_clusters(change, clusters):
    """Class fp32: two blocks share 128 filters where there are so many and tensors come and go by vectors."""
    config = fused_fp32_plan(**change)["config"]
    assert ("clusters of 2" in config) == clusters, config


@pytest.mark.parametrize(
    ("change", "m_split"),
    [
        ({}, True),
        ({"n": 1}, True),
        ({"n": 1, "k": 512}, True),
        ({"h": 28, "w": 28, "n": 21}, True),
        ({"n": 128}, False),  # one wave of whole work tiles
        ({"h": 28, "w": 28}, False),  # three waves, of whole work tiles two
        ({"n": 64, "k": 128}, False),  # two waves, of work tiles of 128 filters one
        ({"k": 47}, False),  # no vectors of filters
        ({"c": 190}, False),  # no tensor copies
        ({"layout": "nchw"}, False),
    ],
)
def test_winograd_fused_shares_work_tiles_of_64_filters_between_two_blocks(change, m_split):
    """Class fp32: a cluster has 64 filters instead of 128 where multiprocessors would be idle else."""
    config = fused_fp32_plan(**{"c": 192, "h": 14, "w": 14, "k": 48} | change)["config"]
    assert ("work tiles of 64 filters" in config and "clusters of 2" in config) == m_split, config


@pytest.mark.parametrize(
    ("change", "v_reuse"),
    [
        ({}, True),
        ({"c": 36}, True),
        ({"c": 32}, False),  # half of the room for V
        ({"c": 68}, False),  # more than there is room for
        ({"k": 64}, False),  # nothing to share
        ({"k": 192}, False),  # the last turn would have no filters
        ({"n": 1}, False),  # one wave of 64 filters
        ({"c": 62}, False),  # no tensor copies
        ({"layout": "nchw"}, False),
    ],
)
def test_winograd_fused_keeps_v_for_a_second_turn(change, v_reuse):
    """Class fp32: V of up to 64 channels serves two blocks of filters where that costs no waves."""
    config = fused_fp32_plan(**{"c": 64, "h": 112, "w": 112} | change)["config"]
    assert ("v_reuse 2" in config) == v_reuse, config


@given(
    st.integers(1, 130), st.integers(1, 70), st.integers(1, 70), st.sampled_from([16, 128]), st.sampled_from([64, 128])
)
def test_winograd_fused_never_gains_by_more_work(n, h, w, c, k):
    """Class fp32: whatever the items, another image, row, column or channel does not make a layer cheaper."""
    geometry = {"n": n, "c": c, "h": h, "w": w, "k": k}

    def cost(**change):
        return fused_fp32_plan(**geometry | change)["cost_us"]

    assert cost() <= min(cost(n=n + 1), cost(h=h + 1), cost(w=w + 1), cost(c=c + 16), cost(k=k + 64))
