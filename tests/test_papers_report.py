"""What is drawn of the sources' experiments: from rows that are made up, and without any."""

from pathlib import Path

import pytest
from test_benchmarks import HEAD
from test_papers import TINY

import fastconv
from benchmarks import papers
from benchmarks.harness import results
from benchmarks.papers import megakernel_model, single_image, textbook
from benchmarks.reports import documents
from benchmarks.reports.papers import SOURCES, shared
from benchmarks.studies.megakernel import FILTER_FORMS
from fastconv.models.layers import Layer


def cuconv_row(layer, n, accuracy, us, peers, layout="nchw", **more):
    timed = {name: value for name, value in peers.items() if value}
    best = min(timed, key=lambda name: timed[name])
    row = {**layer.fields(), "n": n, "class": accuracy, "layout": layout, "pass": "forward", "algorithm": "direct"}
    row |= {"us": us["direct"], "us_q25": 1.0, "us_q75": 1.0, "error": 1e-7, "max_error": 1e-7, "algorithms": us}
    row |= {"peers": peers, "best_peer": best, "best_peer_us": timed[best], "peer_error": 1e-7, "floor_us": 1.0}
    return row | {"rounds": 5, "notes": {}, "once_us": {}} | more


@pytest.fixture
def results_folder(tmp_path):
    three, one = TINY
    rivals = {"cudnn_gemm": 20.0, "cudnn_fft_nhwc": 8.0, "cublas_nchw": 30.0}
    rows = [
        cuconv_row(three, 1, "ieee", {"direct": 16.0, "two_stage": 10.0}, rivals),
        cuconv_row(three, 8, "ieee", {"direct": 40.0, "two_stage": 25.0}, rivals),
        cuconv_row(one, 1, "ieee", {"direct": 5.0, "two_stage": 5.0}, rivals),
        cuconv_row(one, 8, "ieee", {"direct": 5.0}, rivals, once_us={"two_stage": 80.0}),
    ]
    refused = {"cudnn_gemm": 1.0, "cudnn_direct": 20.0}
    note = {"cudnn_gemm": "not a rival: error 1e-3 is beyond the class (5e-05)"}
    rows.append(cuconv_row(one, 1, "fp32", {"direct": 10.0}, refused, notes=note, best_peer="cudnn_direct"))
    rows[-1]["us_with_packing"] = 16.0
    write(tmp_path, "papers/cuconv/survey", rows)
    return tmp_path


def write(folder, suite, rows):
    results.write(folder / f"h200/{suite}.json", {**HEAD, "suite": suite, "rows": rows})


def region(folder, name):
    return documents.region(f"h200/paper/{name}", folder)


def test_the_survey_is_summed_up(results_folder):
    line = next(line for line in region(results_folder, "cuconv/overall").splitlines() if "`two_stage`" in line)
    # 20/10 and 20/5 are won, 20/25 and the one that was not timed are lost; in both layouts 8/10 is lost, 8/5 won.
    assert line == ("| `ieee` | NCHW | `two_stage` | 4 | 2 (50.0 %) | 3.00x | 4.00x | 1 (25.0 %) | 1.60x | 1.60x |")
    assert "| `fp32` | NCHW | `auto` | 1 | 1 (100.0 %) | 2.00x |" in region(results_folder, "cuconv/overall")
    packing = "| `fp32` | NCHW | auto, filters packed in every call | 1 | 1 (100.0 %) | 1.25x |"
    assert packing in region(results_folder, "cuconv/overall")
    sizes = region(results_folder, "cuconv/sizes/two_stage/ieee").splitlines()
    assert sizes[-2:] == ["| 1x1 | 100 %, 4.00x, 4.00x | 0 % |", "| 3x3 | 100 %, 2.00x, 2.00x | 0 % |"]
    said = region(results_folder, "cuconv/said")
    assert "on 50.0 % of 4 configurations (the source: 8.31 % of 602), there 3.00 times" in said
    assert (
        "on 1x1 filters up to batch 16, its home in the source, on 50.0 %, most often on 3x3 filters at batch 1" in said
    )
    assert "1 of 1; against all rivals in both layouts on 25.0 %" in said
    variants = {line.split(" | ")[0]: line for line in region(results_folder, "cuconv/variants/ieee").splitlines()}
    assert variants["| `cudnn_fft_nhwc`"] == "| `cudnn_fft_nhwc` | 4 | 2 | 1.30 | 0 |"
    assert variants["| `two_stage`"].endswith(" | 4 | 1 | 2.19 | 2 |")  # 1.25, 3.1, 1 and one not timed
    assert region(results_folder, "cuconv/machine").startswith("NVIDIA H200, driver 580")


def test_an_experiment_is_drawn_of_the_gpu_that_has_all_of_it(results_folder):
    def both(name):
        return documents.region(f"h200+h100/paper/{name}", results_folder)

    def write_h100(suite, rows):
        head = {**HEAD, "gpu": "NVIDIA H100 80GB HBM3", "suite": suite, "rows": rows}
        results.write(results_folder / f"h100/{suite}.json", head)

    survey = results.read(results_folder / "h200/papers/cuconv/survey.json")["rows"]
    assert both("cuconv/overall") == region(results_folder, "cuconv/overall")
    write_h100("papers/cuconv/survey", survey)  # as many: the first
    assert both("cuconv/machine").startswith("NVIDIA H200, ")
    assert "h200_paper_cuconv_auto_fp32.svg" in both("cuconv/sizes/auto/fp32")
    more = [*survey, {**survey[0], "n": 2}]
    write_h100("papers/cuconv/survey", more)
    assert both("cuconv/machine").startswith("NVIDIA H100 80GB HBM3, ")
    assert "h100_paper_cuconv_auto_ieee.svg" in both("cuconv/sizes/auto/ieee")
    assert "5 configurations" in both("cuconv/said")
    (line,) = (line for line in both("index").splitlines() if "[cuConv]" in line)
    assert "by 1.46x there | H100 | fastest in 60.0 % of 5" in line
    (line,) = (line for line in both("worth").splitlines() if "Two stages" in line)
    assert "| H100 |" in line
    # Rows without a number count nothing, and other experiments are chosen by themselves.
    write(results_folder, "papers/cuconv/survey", [*survey, {**survey[0], "n": 2, "us": None}])
    assert both("cuconv/machine").startswith("NVIDIA H100 80GB HBM3, ")
    lacking = counted(TINY[0], 1, "torch", us=None, notes={"torch": "ncu was found neither here nor there"})
    write(results_folder, "papers/cuconv/counters", [lacking])
    assert both("cuconv/counters").startswith("ncu was found neither")
    write_h100("papers/cuconv/counters", [counted(TINY[0], 1, "torch"), counted(TINY[0], 1, "two_stage")])
    assert "| `two_stage` |" in both("cuconv/counters")
    write(results_folder, "papers/cuconv/counters", [counted(TINY[0], 1, name) for name in ("torch", "two_stage")])
    machines = [line.split(", driver")[0] for line in both("cuconv/machine").splitlines()]
    assert machines == ["- `papers/cuconv/survey`: NVIDIA H100 80GB HBM3", "- `papers/cuconv/counters`: NVIDIA H200"]


def test_the_parts_of_a_file_are_drawn_each_of_the_gpu_that_has_all_of_it(tmp_path):
    layer = Layer("res1", 64, 56, 56, 64)
    rows = [megakernel_row(layer, 64, "ieee", 100.0, 120.0)]
    swept = rows[0] | {"part": "mapping", "variant": "planned", "d_ig": 1, "d_go": 1, "m": 1}
    write(tmp_path, "papers/megakernel/layers", rows)
    suite = "papers/megakernel/layers"
    head = {**HEAD, "gpu": "NVIDIA H100 80GB HBM3", "suite": suite, "rows": [rows[0] | {"us": 1.0}, swept]}
    results.write(tmp_path / f"h100/{suite}.json", head)
    assert "| res1 | 64->64 @56x56 | 100 |" in documents.region("h200+h100/paper/megakernel/layers/ieee", tmp_path)
    assert "| res1 | `ieee` |" in documents.region("h200+h100/paper/megakernel/best_maps", tmp_path)
    assert len(documents.region("h200+h100/paper/megakernel/machine", tmp_path).splitlines()) == 2
    said = documents.region("h200+h100/paper/megakernel/said/contest", tmp_path)
    assert said == "in `ieee` 1.00 times on 64 channels"


def test_the_figures_of_the_survey_are_drawn(results_folder):
    (results_folder / "out").mkdir()
    known = documents.figures(results_folder)
    assert {"h200_paper_cuconv_two_stage_ieee.svg", "h200_paper_cuconv_auto_fp32.svg"} <= set(known)
    for name, draw in known.items():
        draw(results_folder / "out" / name)
        assert (results_folder / "out" / name).read_text().startswith("<?xml")


def test_wins_are_counted_without_a_time_as_lost():
    assert str(shared.wins([])) == "-"
    assert str(shared.wins([None, 0.9])) == "0 %"
    found = shared.wins([2.0, 4.0, None, 0.5])
    assert (found.count, found.won, found.mean, found.most, found.share) == (4, 2, 3.0, 4.0, 0.5)


def test_single_image_is_drawn(tmp_path):
    layer = single_image.LAYERS[0]
    peers = {"cudnn_graph_nchw": 30.0, "cudnn_graph_nhwc": 24.0, "torch_nchw": 40.0, "torch_nchw_fused": 12.0}
    note = {"torch_nchw_fused": "not a rival: error 1e-3"}
    row = cuconv_row(layer, 1, "ieee", {"direct": 16.0}, peers, notes=note, best_peer="cudnn_graph_nhwc")
    row |= {"best_peer_us": 24.0, "workspace_bytes": 1 << 20, "packed_bytes": 1 << 19, "pass": "bias_relu"}
    row |= {"us_with_packing": 18.0}
    write(tmp_path, "papers/single_image/layers", [row, row | {"layout": "nhwc", "us": 20.0}])
    image, _, *_, line = region(tmp_path, "single_image/layers").splitlines()
    assert "h200_paper_single_image_layers_ieee.svg" in image
    assert line == (
        "| 3x3 128->128 | `ieee` | 95, 59 | 1.61x | 16.0 | `direct` | NCHW | 24.0 | 1.50x | 40.0 | 2.50x | 1.0e-07 "
        "| 1.00 | 0.50 | 18.0 |"
    )
    assert "class `ieee`: 1.50 to 1.50 times as fast" in region(tmp_path, "single_image/said")
    kernel = {"kernel": "void convolve<float>(Args)", "blocks": 8, "threads": 128, "registers": 64}
    kernel |= {"shared_bytes": 4096, "us": 3.0, "occupancy": 0.5}
    row |= {"us": None, "kernels": [kernel], "largest": 2e-5, "beyond": 0.002}
    write(tmp_path, "papers/single_image/kernels", [row])
    assert "| `convolve` | 8 | 128 | 64 | 4096 | 50% | 3.0 |" in region(tmp_path, "single_image/kernels")
    assert region(tmp_path, "single_image/statistic").endswith("| `direct` | `ieee` | 2.0e-05 | 0.200 % | 0 of 1 |")
    network = {"network": "resnet18", "batch": 1, "class": "ieee", "mode": "eager", "us": 900.0, "swapped": 20}
    network |= {"total": 20, "logits_error": 1e-6, "top1_agreement": 1.0, "algorithm": "auto"}
    network |= {"peers": {"torch_eager": 1800.0, "folded_graph": 450.0}, "best_peer": "folded_graph"}
    network |= {"best_peer_us": 450.0}
    write(tmp_path, "papers/single_image/networks", [network, network | {"mode": "fused_graph", "us": 300.0}])
    line = region(tmp_path, "single_image/networks").splitlines()[-1]
    assert line == "| resnet18 | `ieee` | 900 | 300 | 1800 | 450 | 1.50x | 2.00x |"


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (
            "void fastconv::algos::direct::(anonymous namespace)::convolve<float>(fastconv::Problem, float*)",
            "direct::convolve",
        ),
        ("void fastconv::studies::ladder::(anonymous namespace)::convolve<Flags<false, 0> >(Sizes)", "convolve"),
        ("void a::convolve<(a::Access)3, true>(a::Params<float>)", "a::convolve"),
        ("void a::convolve<a::Variant{1, true, (Mode)2}>(int)", "a::convolve"),
        ("void cutlass::Kernel2<cutlass_80_sgemm>(cutlass_80_sgemm::Params)", "cutlass_80_sgemm"),
        ("sm80_xmma_gemm_stage3_warpsize1x2x1_ffma", "sm80_xmma_gemm_stage3"),
    ],
)
def test_kernels_have_short_names(kernel, expected):
    assert shared.short_name(kernel) == expected


def test_columns_without_a_number_are_dropped():
    table = "| a | b | c |\n|---|---:|---:|\n| - | - | 1 |\n| x |  | - |"
    assert shared.without_empty(table) == "| a | c |\n|---|---:|\n| - | 1 |\n| x | - |"


def test_a_loss_by_little_is_a_loss(tmp_path):
    rows = [megakernel_row(Layer("res1", 64, 56, 56, 64), 64, "ieee", 100.0, 99.8)]
    write(tmp_path, "papers/megakernel/layers", rows)
    assert "| 99.8 | **1.00x** |" in region(tmp_path, "megakernel/layers/ieee")


def test_the_ladder_and_the_megakernels_networks_are_drawn(tmp_path):
    layer = textbook.LAYERS[0]
    row = cuconv_row(layer, 64, "ieee", {"direct": 4000.0, "im2col_gemm": 1000.0}, {"torch_default_nchw": 500.0})
    write(tmp_path, "papers/textbook/ladder", [row, row | {"layout": "nhwc", "algorithms": {"direct": 3000.0}}])
    lines = region(tmp_path, "textbook/ladder/ieee").splitlines()
    rate = layer.direct_flops(64) / 3000.0 / 1e6
    assert lines[-2].startswith(f"| {layer.layer} | `direct` | NHWC | 3000 | {rate:.2f} | - |")
    assert f"| {layer.layer} | `im2col_gemm` | NCHW | 1000 |" in lines[-1]
    assert " 3.00x | " in lines[-1]
    assert "`im2col_gemm` is the fastest rung, 3.0 times as fast as `direct`" in region(tmp_path, "textbook/said")
    row |= {"with_packing": {"im2col_gemm": 1100.0}, "bytes": {"im2col_gemm": [1 << 20, 1 << 19]}}
    row |= {"algorithm": "winograd_f4", "auto": "winograd_f4", "us": 300.0}
    write(tmp_path, "papers/textbook/ladder", [row])
    assert region(tmp_path, "textbook/memory").splitlines()[-1] == (  # no rival is cuDNN's by name
        f"| {layer.layer} | `ieee` | NCHW | `im2col_gemm` | 1000 | 1100 | 1.0 | 0.5 | 300 `winograd_f4` | 500 |"
    )
    for draw in documents.figures(tmp_path).values():
        draw(tmp_path / "roofline.svg")
    assert "FLOP per byte" in (tmp_path / "roofline.svg").read_text()
    network = {
        "network": "vgg16",
        "batch": 64,
        "class": "ieee",
        "mode": "eager",
        "us": 80e3,
        "swapped": 13,
        "total": 13,
    }
    network |= {"peers": {"torch_eager": 90e3}, "best_peer": "torch_eager", "best_peer_us": 90e3, "logits_error": 1e-6}
    network |= {"top1_agreement": 1.0, "own_us": 50e3, "layers_us": 60e3, "algorithm": "winograd_megakernel"}
    network |= {"peer_groups": {"torch_eager_nchw": {"convolution": 70e3, "other": 1e3}}}
    write(tmp_path, "papers/megakernel/networks", [network])
    # Of PyTorch's 70 ms of convolutions, 10 are in layers that were not exchanged.
    assert "| 80.00 | 90.00 | 1.12x | 50.00 | 60.00 | 1.20x |" in region(tmp_path, "megakernel/networks")
    assert "VGG-16 1.20 times as fast" in region(tmp_path, "megakernel/said")


def megakernel_row(layer, n, accuracy, us, series):
    times = {"winograd_megakernel": us, "winograd_megakernel_series": series, "winograd_f4": us}
    row = cuconv_row(layer, n, accuracy, {"direct": us}, {"cudnn_winograd_nonfused": 2 * us})
    return row | {"algorithms": times, "part": "layers", "variant": "", "us": us}


def test_what_the_mapping_hides_is_drawn(tmp_path):
    layer = Layer("vgg4_2", 512, 28, 28, 512)
    rows = [megakernel_row(layer, n, "ieee", 1000.0, series) for n, series in ((64, 1250.0), (1, 900.0))]
    rows.append(megakernel_row(layer, 8, "ieee", 1000.0, None))  # no room for all of V and M
    write(tmp_path, "papers/megakernel/layers", rows)
    found = megakernel_model.predicted(layer, 64)
    series, mixed = found.series, found.mixed
    line, means = region(tmp_path, "megakernel/hidden").splitlines()[2:]
    assert line == (
        f"| vgg4_2 | {series:.0f} | 1250 | {mixed:.0f} | 1000 | {series - mixed:.0f} | 250.0 | "
        f"{series / mixed:.2f}x | 1.25x |"
    )
    assert means.endswith(f"| {series / mixed:.2f}x | 1.25x |")
    batches = region(tmp_path, "megakernel/batches/ieee").splitlines()
    assert batches[2].startswith("| 1 | 1 | **0.90x** |")
    assert batches[3].startswith("| 8 | 1 | - |")
    assert "h200_paper_megakernel_gains_ieee.svg" in region(tmp_path, "megakernel/gains/ieee")
    documents.figures(tmp_path)["h200_paper_megakernel_gains_ieee.svg"](tmp_path / "gains.svg")
    assert "0.90 at batch 1 and 1.25 at batch 64" in (tmp_path / "gains.svg").read_text()
    (line,) = (line for line in region(tmp_path, "megakernel/stages").splitlines() if line.startswith("| vgg4_2 |"))
    assert line == "| vgg4_2 | 512->512 @28x28 | 59.2 | **0.40** | **0.75** | 118.34 | **0.43** |"


def test_what_narrow_layers_and_one_image_are_worth_is_said(tmp_path):
    wide, narrow = Layer("vgg4_2", 512, 28, 28, 512), Layer("res1", 64, 56, 56, 64)
    rows = [megakernel_row(wide, 64, "ieee", 100.0, 121.0), megakernel_row(narrow, 64, "ieee", 100.0, 100.0)]
    rows.append(megakernel_row(wide, 1, "ieee", 50.0, 60.0))
    rows[-1]["algorithms"]["winograd_f4"] = 25.0
    rows[0]["peers"] |= {"torch_nchw": 400.0, "torch_nhwc": 300.0}
    rows[0] |= {"auto": "winograd_f4", "us_with_packing": 130.0, "workspace_bytes": 1 << 20, "packed_bytes": 1 << 19}
    write(tmp_path, "papers/megakernel/layers", rows)
    said = region(tmp_path, "megakernel/said")
    assert "is worth 1.10 times over the same tasks in series on 2 layers (1.21 on the 1 wide ones)" in said
    assert (
        "2.00 times cuDNN's non-fused Winograd, at batch 1 1.20 times its series and 0.50 times `winograd_f4`" in said
    )
    # In series: 200 / 121 and 200 / 100.
    series = "1.82 times as fast as cuDNN's in `ieee`, slower on 0 of 2"
    assert region(tmp_path, "megakernel/said/series") == series
    first, second, means = region(tmp_path, "megakernel/layers/ieee").splitlines()[-3:]
    assert first.endswith(" | 130 | 1.0, 0.5 | 300 | 3.00x | 100 `winograd_f4` |")
    assert second.endswith(" | - | -, - | - | - | - |")
    assert means.endswith("|  |  |  | 3.00x |  |")
    assert "| 64 | 2 | 1.10x | 1.00x | 2.00x | 3.00x | 1 of 2 |" in region(tmp_path, "megakernel/batches/ieee")
    (line,) = (line for line in region(tmp_path, "megakernel/ceilings").splitlines() if line.startswith("| vgg4_2"))
    assert line.endswith(" | - | - |")  # no rows of fp32


def test_the_maps_of_the_sweep_are_drawn(tmp_path):
    layer = Layer("res1", 64, 56, 56, 64)
    row = megakernel_row(layer, 64, "fp32", 50.0, None) | {"part": "mapping", "variant": "planned"}
    row |= {"d_ig": 1568, "d_go": 74, "m": 8, "algorithms": {"winograd_f4": 44.0}}
    rows = [row, row | {"variant": "m=4", "m": 4, "us": 55.0}, row | {"variant": "d_go=16", "d_go": 16, "us": 40.0}]
    rows.append(row | {"variant": "d_ig=0", "d_ig": 0, "us": 60.0, "algorithms": {"winograd_f4": None}})
    write(tmp_path, "papers/megakernel/layers", rows)
    (line,) = region(tmp_path, "megakernel/best_maps").splitlines()[2:]
    assert line == "| res1 | `fp32` | 50.0 | d_go = 16 | 40.0 | 44.0 | 1.10x |"
    assert "50.0 (8)" in region(tmp_path, "megakernel/mapping/fp32")
    assert region(tmp_path, "megakernel/mapping/ieee") == "(not measured)"
    for name in ("distances", "m"):
        documents.figures(tmp_path)[f"h200_paper_megakernel_{name}_fp32.svg"](tmp_path / "map.svg")
        assert "D_" in (tmp_path / "map.svg").read_text() or name == "m"


def test_where_filters_are_transformed_is_drawn(tmp_path):
    row = megakernel_row(Layer("res1", 64, 56, 56, 64), 1, "ieee", 80.0, None) | {"part": "filters", "error": 2e-7}
    row["algorithms"] = dict(zip(FILTER_FORMS, (70.0, 100.0, 80.0), strict=True))
    write(tmp_path, "papers/megakernel/layers", [row])
    line, mean = region(tmp_path, "megakernel/filters").splitlines()[2:]
    assert line == "| res1 | 1 | 70.0 | 100 | 80.0 | 1.25x | 2.0e-07 |"
    assert mean == "| geometric mean |  |  |  |  | 1.25x |  |"


def test_everybody_on_resnets_layer_is_drawn(tmp_path):
    layer = Layer("res1", 64, 56, 56, 64)
    peers = {"triton_ieee": 400.0, "cutlass_3xtf32": 50.0, "cudnn_direct": None}
    errors = {"direct": {"l2": 1e-7}, "winograd_megakernel": {"l2": 2e-7}}
    row = cuconv_row(layer, 64, "ieee", {"direct": 900.0, "winograd_megakernel": 210.0}, peers, errors=errors)
    row |= {"peer_errors": {"triton_ieee": 3e-7}, "notes": {"cutlass_3xtf32": "no rival of class ieee: tensor cores"}}
    faster = row | {"layout": "nhwc", "algorithms": {"direct": 950.0, "winograd_megakernel": 200.0}}
    write(tmp_path, "papers/megakernel/resnet2", [row, faster])
    assert region(tmp_path, "megakernel/resnet2/ieee").splitlines()[4:] == [
        "| ours: `winograd_megakernel` | 200 | 1.00x | 2.0e-07 |",
        "| `triton_ieee` | 400 | 2.00x | 3.0e-07 |",
        "| ours: `direct` | 900 | 4.50x | 1.0e-07 |",
    ]
    assert region(tmp_path, "megakernel/resnet2/fp32") == "(not measured)"


def counted(layer, n, algorithm, variant="", **values):
    row = cuconv_row(layer, n, "ieee", {"direct": 1.0}, {"cudnn_gemm": 1.0}) | {"algorithm": algorithm}
    row |= {"variant": variant, "us": 100.0, "dram_read_bytes": 3e6, "dram_write_bytes": 1e6, "l2_bytes": 8e6}
    row |= {"l2_hit_percent": 50.0, "l1_hit_percent": 5.0, "instructions": 1e6, "warps_percent": 20.0, "kernels": 1}
    return row | values


def test_what_the_megakernels_rows_say_of_the_claims_is_drawn(tmp_path):
    narrow, wide = Layer("res1", 64, 56, 56, 64), Layer("res4", 512, 7, 7, 512)
    rows = [megakernel_row(narrow, 64, "ieee", 100.0, 120.0), megakernel_row(wide, 64, "ieee", 100.0, 110.0)]
    rows[0]["peers"] = {"cudnn_winograd_nonfused": 90.0}
    for layer, best in ((narrow, 4), (wide, 1)):
        its = {"part": "mapping", "d_ig": 0, "d_go": 0, "algorithms": {"winograd_f4": 60.0}}
        rows += [megakernel_row(layer, 64, "fp32", 50.0 + 10 * (m != best), None) | its | {"variant": f"m={m}", "m": m}
                 for m in (1, 4)]  # fmt: skip
    write(tmp_path, "papers/megakernel/layers", rows)
    said = region(tmp_path, "megakernel/said/cudnn")
    assert said == "faster than cuDNN's non-fused Winograd on 1 of 2 layers in `ieee` (the source: 12 of 13)"
    said = region(tmp_path, "megakernel/said/sizes")
    assert said.startswith("in `ieee` 1.20 at C + K of 128, 1.10 at C + K of 1 024; 1.10 at 256 tiles, 1.20 at 12 544")
    assert region(tmp_path, "megakernel/fastest").endswith("| `fp32` | M | 4, 1.20x | 1, 1.00x |")
    assert region(tmp_path, "megakernel/said/contest") == "in `fp32` 1.20 times on 64, 1.20 times on 512 channels"
    assert region(tmp_path, "megakernel/said/ranges") == "in `fp32` M 4 on 64 and 1 on 512 channels"
    small = counted(narrow, 64, "winograd_megakernel", "D_IG, D_GO 0, M 1", us=300.0, dram_read_bytes=1e6)
    rows = [counted(narrow, 64, "winograd_megakernel", "as planned"), small]
    rows += [counted(narrow, 64, "winograd_megakernel", "in series"), counted(narrow, 64, "winograd_f4", l2_bytes=6e6)]
    write(tmp_path, "papers/megakernel/counters", rows)
    said = region(tmp_path, "megakernel/said/moved")
    assert said == "in `ieee` 0.50 of the bytes in 3.0 times the time on res1"
    said = region(tmp_path, "megakernel/said/staged")
    assert said == "in `ieee` 1.00 of the bytes of memory and 0.75 of those of the L2 cache"


def test_what_the_counters_say_of_two_stages_is_drawn(results_folder):
    three, _ = TINY
    rows = [counted(three, 1, "two_stage", instructions=3e6), counted(three, 1, "torch")]
    write(results_folder, "papers/cuconv/counters", rows)
    said = region(results_folder, "cuconv/said/counters")
    assert said.startswith(
        "On 3x3 filters `two_stage` issues 3.0 times the instructions of PyTorch's kernel and moves 1.0"
    )
    assert region(results_folder, "cuconv/said/surveyed") == f"10.0 against 20.0 us on {three.layer}"


def test_what_is_wrong_with_old_rows_is_said_of_them_alone(results_folder):
    rows = [counted(TINY[0], 1, "two_stage")]
    write(results_folder, "papers/cuconv/counters", rows)
    assert region(results_folder, "cuconv/said/caches").startswith("The profiler started every kernel from cold caches")
    write(results_folder, "papers/cuconv/counters", [row | {"parts": []} for row in rows])
    assert region(results_folder, "cuconv/said/caches").startswith("The profiler starts every call from cold caches")
    assert region(results_folder, "cuconv/said/doubt") == ""
    path = results_folder / "h200/papers/cuconv/survey.json"
    results.write(path, {**results.read(path), "commit": "fef9e29d555c" + "0" * 28})
    assert region(results_folder, "cuconv/said/doubt").startswith("**cuConv's shares are too high.**")


def test_what_single_images_rows_say_is_drawn(tmp_path):
    layer = next(layer for layer in single_image.LAYERS if layer.r == 1)
    times = {"direct_tiled": 8.0, "im2col_gemm": 12.0, "direct": 8.0}
    row = cuconv_row(layer, 1, "ieee", times, {"cudnn_graph_nchw": 16.0})
    write(tmp_path, "papers/single_image/layers", [row | {"us": 8.0}])
    ideas = {line.split(" | ")[0]: line for line in region(tmp_path, "worth").splitlines()}
    assert ideas["| Our kernels, which fuse as cuDNN's do"].endswith("| 2.00x | 2.00x | 2.00x | 1 |")
    assert ideas["| Norm and ReLU inside, batch 1"].endswith("| (not measured) |  |  | 0 |")
    passes = row | {"layout": "nhwc", "peers": row["peers"] | {"torch_nhwc": 24.0}}
    write(tmp_path, "papers/single_image/layers", [row | {"us": 8.0}, passes])
    (line,) = (line for line in region(tmp_path, "worth").splitlines() if line.startswith("| Norm and ReLU inside"))
    assert line.endswith("| 1.50x | 1.50x | 1.50x | 1 |")
    ours = [{"kernel": "convolve<1>(A)", "us": 4.0}]
    theirs = [{"kernel": "gemm", "us": 5.0}, {"kernel": "im2col_gemm::finish_chunk<float>(A)", "us": 1.0}]
    row |= {"largest": 1e-6, "beyond": 0.0}
    rows = [row | {"algorithm": "direct_tiled", "kernels": ours}, row | {"algorithm": "im2col_gemm", "kernels": theirs}]
    write(tmp_path, "papers/single_image/kernels", rows)
    said = region(tmp_path, "single_image/said/pointwise")
    assert said.startswith("our 1x1 layers are 1.50 times as fast as `im2col_gemm`")
    assert said.endswith(f"kernels alone: 4.0 and 5.0 us on {layer.layer.removeprefix('1x1 ')}")
    assert "is 1.0e-06; in 2 of 2 cases" in region(tmp_path, "single_image/said/exact")
    module = {"network": layer.layer, "batch": 1, "class": "ieee", "swapped": 1, "total": 1, "peers": {}}
    module |= {"logits_error": 1e-6, "top1_agreement": 1.0, "best_peer": None, "best_peer_us": None}
    forms = {"eager": 100.0, "fused": 60.0, "fused_graph": 30.0}
    rows = [module | {"mode": mode, "us": us} for mode, us in forms.items()]
    write(tmp_path, "papers/single_image/blocks", rows)
    said = "fused, three calls are one, which takes 0.60 times as long; in a CUDA graph a module takes 30 us, its"
    assert region(tmp_path, "single_image/said/modules").startswith(said)
    network = {"network": "resnet18", "batch": 1, "mode": "eager", "us": 900.0, "swapped": 20, "total": 20}
    network |= {"logits_error": 1e-6, "top1_agreement": 1.0, "best_peer": "torch_eager", "best_peer_us": 450.0}
    rows = [network | {"class": name, "peers": {"torch_eager": us}} for name, us in (("ieee", 450.0), ("fp32", 1800.0))]
    write(tmp_path, "papers/single_image/networks", rows)
    assert region(tmp_path, "single_image/said/spread") == "0.5 and 1.8 ms of resnet18"
    said = region(tmp_path, "single_image/said/whole")
    assert said.startswith(
        "in `ieee` 0.50 times as fast (swapped alone 0.50), in `fp32` 0.50 times as fast (swapped alone 2.00)"
    )


def test_the_index_has_a_row_per_source_and_says_what_is_not_measured(results_folder, tmp_path):
    lines = region(tmp_path / "nothing", "index").splitlines()[2:]
    assert len(lines) == len(papers.NAMES)
    assert all(line.endswith("(not measured) | (not measured) |") for line in lines)
    cells = "fastest in 50.0 % of 4, there by 3.00x | Often best: 25.0 % against all rivals"
    assert f"[cuConv](docs/papers/cuconv.md) | {cells} |" in region(results_folder, "readme")
    (line,) = (line for line in region(results_folder, "index").splitlines() if "[cuConv]" in line)
    assert cells in line


def test_every_idea_has_its_worth_or_none(results_folder, tmp_path):
    empty = region(tmp_path / "nothing", "worth").splitlines()[2:]
    assert len(empty) > 15
    assert all(line.endswith("|  | (not measured) |  |  | 0 |") for line in empty)
    layer = textbook.LAYERS[0]
    times = {"direct": 4000.0, "direct_tiled": 1000.0, "im2col_gemm": 500.0, "ladder_unroll_restrict": 2000.0}
    write(results_folder, "papers/textbook/ladder", [cuconv_row(layer, 64, "ieee", times, {"cudnn_gemm": 400.0})])
    found = {line.split(" | ")[0]: line for line in region(results_folder, "worth").splitlines()}
    assert found["| Tiles in shared memory"].endswith("| 4.00x | 4.00x | 4.00x | 1 |")
    assert found["| A product of the unrolled input"].endswith("| **0.50x** | **0.50x** | **0.50x** | 1 |")
    assert found["| cuBLAS's product"].endswith("| 4.00x | 4.00x | 4.00x | 1 |")
    assert found["| Unrolling inside the product"].endswith("| (not measured) |  |  | 0 |")
    # 20/10, 20/25 and 20/5; the one that was not timed is in none.
    assert found["| Two stages, no transformation"].endswith("| 1.86x | **0.80x** | 4.00x | 3 |")


@pytest.mark.parametrize("source", papers.NAMES)
def test_every_region_is_empty_without_rows_and_unknown_ones_are_refused(tmp_path, source):
    for table, (needed, _) in SOURCES[source].TABLES.items():
        arguments = {"sizes": "/auto/ieee"}.get(
            table, "/ieee" if table in ("layers", "ladder", "batches", "gains", "resnet2") else ""
        )
        if needed is not None and (source, table) != ("single_image", "layers"):
            assert region(tmp_path, f"{source}/{table}{arguments}") == "(not measured)"
    for name in ("", *(f"/{name}" for name in SOURCES[source].SENTENCES)):
        assert region(tmp_path, f"{source}/said{name}") == "(not measured)"
    assert region(tmp_path, f"{source}/machine") == "(not measured)"
    with pytest.raises(ValueError, match="expected one of the names"):
        region(tmp_path, f"{source}/nothing")


def test_every_source_has_a_page_that_shows_all_of_its_tables():
    root = Path(fastconv.__file__).parent.parent
    for source in papers.NAMES:
        page = (root / "docs/papers" / f"{source.replace('_', '-')}.md").read_text()
        for table in SOURCES[source].TABLES:
            assert f"/paper/{source}/{table}" in page
        for name in SOURCES[source].SENTENCES:
            assert f"/paper/{source}/said/{name} -->" in page
