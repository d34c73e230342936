"""The report: every table and sentence shows what the result files hold, and README claims nothing else."""

import re
from pathlib import Path

import pytest
from test_benchmarks import HEAD, layer_row

from benchmarks.harness import results
from benchmarks.layers import sets as layers
from benchmarks.reports import common, documents
from benchmarks.reports import layers as layer_tables
from benchmarks.reports import networks as network_report


@pytest.fixture
def project(tmp_path):
    rows = [
        layer_row("vgg1_1", "fp32", 100.0, 50.0),
        layer_row("vgg4_2", "fp32", 100.0, 400.0),
        layer_row("res1", "fp32", 200.0, 100.0),
        layer_row("res1", "fp16", None, 100.0, error=None),
        layer_row("res1", "fp32", 10.0, 30.0, n=1),
    ]
    results.write(tmp_path / "benchmarks/results/h200/layers.json", {**HEAD, "rows": rows})
    network = {"network": "resnet50", "batch": 64, "class": "fp32", "mode": "eager", "us": 9000.0, "swapped": 50}
    network |= {"peers": {"torch_eager": 18000.0, "compile_default": 20000.0, "cudnn_best_layers": 6000.0}, "total": 53}
    network |= {
        "top1_agreement": 1.0,
        "logits_error": 1e-6,
        "peer_error": 2e-6,
        "ours": 40,
        "peak_bytes": 3 << 20,
        "layers_us": 7000.0,
        "floor_us": 2500.0,
    }
    network |= {"peer_groups": {"torch_eager_nchw": {"convolution": 14000.0, "other": 4000.0}}}
    network |= {"failures": {"frozen_default_nchw": "not ready", "fastconv_compile_nchw": "ours"}}
    networks = {**HEAD, "suite": "networks", "rows": [network, network | {"mode": "compile", "us": 36000.0}]}
    results.write(tmp_path / "benchmarks/results/h200/networks.json", networks)
    return tmp_path


def check_said(folder, expected):
    for name, words in expected.items():
        assert documents.region(f"h200/said/{name}", folder) == words


def test_layer_table_shows_a_lost_layer_as_lost(project):
    document = results.read(project / "benchmarks/results/h200/layers.json")
    table = layer_tables.layer_table(document, "fp32", 64)
    lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines() if line.startswith("|")}
    assert "**0.50x**" in lines["vgg1_1"]
    assert "4.00x" in lines["vgg4_2"]
    assert "**" not in lines["vgg4_2"]
    # C >= 64 alone: sqrt(4 * 0.5), not the cube root with vgg1_1's 0.5.
    assert "1.41x" in lines["geometric mean"]
    assert "Slower than the best peer: vgg1_1 (0.50x, `winograd_f4`), res1 (0.50x, `winograd_f4`)." in table
    assert "TF32" not in table
    document["rows"].append(layer_row("vgg4_2", "tf32", 70.0, 80.0))
    both = layer_tables.layer_table(document, "fp32", 64).splitlines()
    assert both[0].endswith("| speedup over TF32 |")
    assert next(line for line in both if line.startswith("| vgg4_2")).endswith("| 225 | **0.80x** |")
    document["rows"].pop()
    document["rows"][0]["auto"] = "implicit_gemm"
    assert "`winograd_f4` (`auto`: `implicit_gemm`)" in layer_tables.layer_table(document, "fp32", 64)
    document["rows"][1]["error"] = 1e30
    wrong = layer_tables.layer_table(document, "fp32", 64)
    assert "Wrong: vgg4_2." in wrong
    assert "4.00x" not in wrong
    document["rows"][1]["error"] = 1e-6
    assert "Failed: res1." in layer_tables.layer_table(document, "fp16", 64)
    assert "| `fp32` | 64 | 1.41x | 1.00x | res1 **0.50x** | 2 of 3 |" in layer_tables.layer_summary(document)


def test_nchw_table_compares_with_nchw_alone():
    def nchw(name, us, **peers):
        return layer_row(name, "fp32", us, min(peers.values()), layout="nchw", peers=peers)

    rows = [
        nchw("vgg1_2", 10.0, torch_nchw=50.0, torch_nchw_all=40.0, torch_nhwc=5.0),
        nchw("res1", 10.0, torch_nchw=9.0, torch_nhwc=90.0),
        nchw("res2", 10.0, torch_nchw=9.8),
        layer_row("res3", "fp32", 1.0, 9.0, layout="nhwc"),
    ]
    table = layer_tables.nchw_table({**HEAD, "rows": rows})
    mean = (4.0 * 0.9 * 0.98) ** (1 / 3)
    assert table.splitlines()[2:] == [f"| `fp32` | 64 | {mean:.2f}x | 3 | res1 0.90 |"]


def test_layer_table_says_which_times_are_of_few_rounds_and_which_rivals_were_refused():
    note = {"cudnn_winograd_nonfused": "not timed: error 7.1e-05 is beyond the class (5e-05)"}
    rows = [
        layer_row("vgg1_2", "fp32", 1.0, 2.0, notes=note, few_rounds=["direct"]),
        layer_row("res1", "fp32", 1.0, 2.0, few_rounds=["torch_nhwc"]),
    ]
    table = layer_tables.layer_table({**HEAD, "rows": rows}, "fp32", 64)
    assert "Of fewer than 20 rounds: res1." in table
    assert "beyond the class: `cudnn_winograd_nonfused` on vgg1_2 (7.1e-05)." in table
    rows[0] |= {"peers": {"cudnn_winograd_nonfused": 41.6}}
    assert "on vgg1_2 (7.1e-05, 42 us)." in layer_tables.layer_table({**HEAD, "rows": rows}, "fp32", 64)


def test_report_fills_regions_draws_plots_and_is_deterministic(project):
    names = ["layers/summary", "layers/fp32/64", "layers/algorithms/fp32/64", "networks/fp32", "machine/layers"]
    regions = [f"<!-- results:h200/{name} -->\nold\n<!-- /results -->\n" for name in names]
    readme = project / "README.md"
    names = ("layers_fp32_n64", "layers_fp16_n64", "layers_fp32_n1", "networks_fp32")
    figures = "".join(f"![{name}](docs/figures/h200_{name}.svg)\n" for name in names)
    readme.write_text("before\n" + "between\n".join(regions) + figures + "after\n")
    (project / "docs/figures").mkdir(parents=True)
    (project / "docs/figures/shown_no_more.svg").touch()
    changed = documents.main(project)
    text = readme.read_text()
    assert readme in changed
    assert "\nold\n" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "NVIDIA H200, driver 580, CUDA 13.0, torch 2.11, cuDNN 9.19.0, commit 0123456789ab, 2026-01-02." in text
    line = "| resnet50 | 64 | eager | 50 of 53 | 40 of 53 | 9.00 | 18.00 | `torch_eager` | 2.00x | 1.0e-06 | "
    assert f"{line}2.0e-06 | 100.0% | - | 3 | - |" in text
    assert "**0.50x**" in text
    drawn = {path: path.read_bytes() for path in changed if path.suffix == ".svg"}
    assert {path.name for path in drawn} == {f"h200_{name}.svg" for name in names}
    assert set((project / "docs/figures").iterdir()) == set(drawn)
    assert readme not in documents.main(project)
    for path, content in drawn.items():
        assert path.read_bytes() == content, path
    assert documents.main(project, check=True) == []
    layers_figure = drawn[project / "docs/figures/h200_layers_fp32_n64.svg"]
    assert common.LOSS.encode() in layers_figure
    assert b"1.00 times as fast as the best peer, slower on 2 of 3 layers" in layers_figure
    assert (
        b"Class fp32: 2.00 to 2.00 times PyTorch at its best" in drawn[project / "docs/figures/h200_networks_fp32.svg"]
    )
    readme.write_text("![x](docs/figures/h200_layers_ieee_n64.svg)")
    with pytest.raises(ValueError, match="h200_layers_ieee_n64"):
        documents.main(project)


@pytest.mark.parametrize("name", ["h200/layers/fp64/64", "h200/nothing", "b100/layers/summary", "h200/sweep/fp32"])
def test_report_refuses_a_region_it_cannot_draw(project, name):
    with pytest.raises(ValueError, match=name):
        documents.fill(f"<!-- results:{name} --><!-- /results -->", project / "benchmarks/results")


def test_network_summary_tells_what_pytorch_does_and_what_cudnn_could(project):
    document = results.read(project / "benchmarks/results/h200/networks.json")
    table = network_report.summary(document, "fp32").splitlines()
    # Ours eager 9 ms, compiled 36; PyTorch eager 18, its other form 20; what nobody can run is no form of PyTorch.
    assert table[2] == (
        "| resnet50 | 64 | 2.50 | 18.00 | 18.00 | `torch_eager` | 6.00 | 9.00 | 36.00 | 2.00x | **0.67x** |"
    )
    assert "max-autotune" not in table[0]  # which nobody measured
    assert "| `fp32` |" in network_report.summary(document)
    peers_table = network_report.peers_table(document, "fp32")
    assert "| resnet50 | 64 | **18.00** | 20.00 | 6.00 |" in peers_table
    assert peers_table.endswith("- resnet50, `frozen_default_nchw`: not ready")


def rival_file(project, suite, **peers):
    """Of a run in which ours took 10 and 12 ms."""
    path = project / "benchmarks/results/h200"
    row = results.read(path / "networks.json")["rows"][0] | {"peers": peers, "failures": {}}
    rows = [row | {"mode": "compile", "us": 12000.0}, row | {"mode": "fused_graph", "us": 10000.0}]
    results.write(path / f"{suite}.json", {**HEAD, "suite": suite, "rows": rows})


def test_a_rival_with_a_run_of_its_own_is_compared_with_ours_of_that_run(project):
    folder = project / "benchmarks/results"
    assert documents.region("h200/networks/rivals", folder) == "(not measured)"
    rival_file(project, "networks_autotune", compile_max_autotune=None, frozen_max_autotune=15000.0)
    rival_file(project, "networks_cudnn", torch_eager=19000.0, cudnn_best_layers=5000.0)
    assert documents.region("h200/networks/rivals", folder).endswith("Not measured: frozen, in a graph by hand.")
    rival_file(project, "networks_graphs", frozen_reduce_overhead=18000.0, frozen_graph=17000.0)
    table = documents.region("h200/networks/summary/fp32", folder).splitlines()
    assert table[2].startswith("| resnet50 | 64 | 2.50 | 18.00 | 18.00 | `torch_eager` | 17.00 | 15.00 | 5.00 | 9.00 |")
    assert table[2].endswith("| 36.00 | 2.00x | 1.70x | 1.50x | **0.50x** |")
    drawn = documents.region("h200/networks/rivals", folder)
    assert drawn.splitlines()[2:] == [
        "| frozen, in a graph by hand | ResNet-50 | 64 | `fp32` | 10.00 | 17.00 | `frozen_graph` | 1.70x |",
        "| max-autotune | ResNet-50 | 64 | `fp32` | 10.00 | 15.00 | `frozen_max_autotune` | 1.50x |",
        "| best cuDNN layers | ResNet-50 | 64 | `fp32` | 10.00 | 5.00 | `cudnn_best_layers` | **0.50x** |",
    ]
    assert documents.region("h200/said/rival/networks_graphs/fp32", folder) == "ResNet-50 1.70"
    # README has the least of the ratios.
    assert "| ResNet-50, batch 64 | 1.50x | - | - | - |" in documents.region("h200/overview", folder)
    rival_file(project, "networks_autotune", compile_max_autotune=30000.0)
    assert "| ResNet-50, batch 64 | 2.00x | - | - | - |" in documents.region("h200/overview", folder)


def test_networks_by_class_and_fp32_over_tf32(project):
    """TF32's time is PyTorch's in class tf32, ours the one in class fp32."""
    path = project / "benchmarks/results/h200/networks.json"
    document = results.read(path)
    first = document["rows"][0]
    assert (first["network"], first["class"], first["batch"]) == ("resnet50", "fp32", 64)
    document["rows"].append(first | {"class": "tf32", "us": 8000.0, "peers": {"torch_eager": 12000.0}})
    results.write(path, document)
    ours = min(row["us"] for row in document["rows"] if (row["network"], row["class"]) == ("resnet50", "fp32"))
    ratio = f"{12000.0 / ours:.2f}x"
    table = documents.region("h200/networks/best", path.parents[1])
    assert table.splitlines()[0].endswith("| `fp32` over TF32 |")
    (line,) = (line for line in table.splitlines() if line.startswith("| ResNet-50 | 64 |"))
    assert "| 8.00, 12.00, 1.50x |" in line
    assert line.strip("| ").endswith(ratio.replace("0.", "**0.") + "**" if ours > 12000.0 else ratio)
    (line,) = (
        line
        for line in documents.region("h200/overview", path.parents[1]).splitlines()
        if "ResNet-50, batch 64" in line
    )
    assert ratio in line


def test_a_rival_without_a_time_says_why(project):
    path = project / "benchmarks/results/h200/networks_autotune.json"
    rival_file(project, "networks_autotune", compile_max_autotune=None)
    document = results.read(path)
    document["rows"][0]["failures"] = {"compile_max_autotune_nchw": "not ready within 600 s", "fastconv_x_nchw": "ours"}
    results.write(path, document)
    table = documents.region("h200/networks/rivals", path.parents[1])
    assert "- resnet50, `fp32`, `compile_max_autotune_nchw`: not ready within 600 s" in table.splitlines()
    assert "| 2.00x | **0.67x** |" in documents.region("h200/networks/summary", path.parents[1])


def test_rows_of_another_commit_are_loudly_named(project):
    row = layer_row("res1", "fp16", 2000.0, 1000.0)
    document = {**HEAD, "commit": "a" * 40, "rows": [row, row | {"layer": "res2"}]}
    assert "commit" not in layer_tables.layer_table(document, "fp16", 64)
    document["rows"][1] |= {"commit": "b" * 40}
    loud = "**Of several commits, not to be compared row by row: 1 rows of aaaaaaaaaaaa, 1 rows of bbbbbbbbbbbb.**"
    assert layer_tables.layer_table(document, "fp16", 64).endswith(loud)
    assert layer_tables.layer_summary(document).endswith(loud)
    document["rows"][0] |= {"commit": "b" * 40}
    assert layer_tables.layer_table(document, "fp16", 64).endswith("Of commit bbbbbbbbbbbb.")

    path = project / "benchmarks/results"
    assert documents.region("h200/commits", path) == "All of commit 0123456789ab."
    networks = {**results.read(path / "h200/networks.json"), "commit": "c" * 40}
    results.write(path / "h200/networks.json", networks)
    assert documents.region("h200/commits", path) == (
        "**Of several commits: 0123456789ab: layers; cccccccccccc: networks.**"
    )
    assert documents.region("h200/commits/short", path) == "**Of several commits**: docs/results.md says which."
    other = {**results.read(path / "h200/layers.json"), "suite": "layers_groups", "commit": "c" * 40}
    results.write(path / "h200/layers_groups.json", other)
    results.write(path / "h200/networks.json", networks | {"commit": results.read(path / "h200/layers.json")["commit"]})
    assert documents.region("h200/commits/short", path) == (
        "This table is of one commit, 0123456789ab. Others are of other commits: docs/results.md."
    )


def test_what_a_smaller_limit_on_the_error_costs(project):
    path = project / "benchmarks/results/h200/layers.json"
    assert documents.region("h200/layers/within", path.parents[1]) == "The file has no such rows."
    document = results.read(path)
    within = {"max_error": 1.5, "auto": "direct", "us": 200.0, "error": 1e-6}
    document["rows"] = [row | {"within": within} for row in document["rows"] if row["us"] == 100.0]
    results.write(path, document)
    table = documents.region("h200/layers/within", path.parents[1])
    assert table.startswith("`max_error` 1.5:")
    assert "| `fp32` | 64 | 2.00x | **0.71x** | vgg1_1 **0.25x** | 1 of 2 | 0.50 | 0.50 |" in table  # 50 and 400 to 200


def test_networks_say_which_times_are_of_few_rounds(project):
    document = results.read(project / "benchmarks/results/h200/networks.json")
    assert "rounds" not in network_report.summary(document)
    document["rows"][0] |= {"rounds": 3}
    document["rows"][1] |= {"rounds": 20}
    said = "Of fewer than 20 rounds, ours: resnet50, `fp32`, eager (3)."
    assert network_report.summary(document).endswith(said)
    assert network_report.table(document, "fp32").endswith(said)


def test_sets_table(project):
    folder = project / "benchmarks/results"
    rows = [layer_row("res1", "fp16", 100.0, us) for us in (200.0, 50.0)] + [layer_row("res1", "fp16", 1.0, 9.0, n=1)]
    results.write(folder / "h200/layers_stems.json", {**HEAD, "suite": "layers_stems", "rows": rows})
    slower = [layer_row("res1", "fp32", 200.0, 100.0)]
    document = {**HEAD, "suite": "layers_backward_weight", "commit": "d" * 40, "rows": slower}
    results.write(folder / "h200/layers_backward_weight.json", document)
    table = documents.region("h200/sets", folder)
    assert "| first layers, 5x5 and 7x7 | 64 | - | - | 1.00 (0.50 to 2.00, 1 of 6) | - |" in table
    assert "| weight gradient, 3x3 | 64 | **0.50 (0.50 to 0.50, 1 of 22)** | - | - | - |" in table
    assert table.endswith("**Of several commits: 0123456789ab: layers_stems; dddddddddddd: layers_backward_weight.**")


def test_regret_has_a_row_for_each_part(project):
    part = layer_row("res1", "fp16", None, None) | {"pass": "forward", "layout": "nhwc", "split": "judge"}
    part |= {"stride": 1, "padding": 1, "dilation": 1, "groups": 1, "best": "implicit_gemm"}
    rows = [part | {"us": us, "best_us": 10.0, "torch_us": torch_us} for us, torch_us in ((10.0, 10.0), (40.0, 20.0))]
    rows.append(part | {"class": "fp32", "us": 10.0, "best_us": 10.0, "torch_us": 80.0})
    results.write(project / "benchmarks/results/h200/regret.json", {**HEAD, "suite": "regret", "rows": rows})
    table = documents.region("h200/regret", project / "benchmarks/results").splitlines()
    assert table[2:] == [
        "| `fp32` | forward | nhwc | judge | 1 | 1.000 | 1.00 | 1.00 | 0.0 % |",
        "| `fp16` | forward | nhwc | judge | 2 | 2.000 | 3.85 | 4.00 | 50.0 % |",
    ]
    fit = {**HEAD, "suite": "regret", "rows": [rows[0] | {"split": "fit"}]}
    results.write(project / "benchmarks/results/h200/regret_fit.json", fit)
    assert documents.region("h200/regret/fit", project / "benchmarks/results").splitlines()[2:] == [
        "| `fp16` | forward | nhwc | fit | 1 | 1.000 | 1.00 | 1.00 | 0.0 % |",
    ]
    with pytest.raises(ValueError, match=r"regret_judge\.json does not exist"):
        documents.region("h200/regret/judge", project / "benchmarks/results")


def test_a_machine_without_a_gpu_is_named_with_threads_and_instruction_set():
    cpu = {**HEAD, "gpu": "AMD EPYC", "driver": "", "cuda": "", "cudnn": "", "threads": 2, "instruction_set": "avx2"}
    expected = "AMD EPYC, 2 threads, AVX2, torch 2.11, commit 0123456789ab, 2026-01-02."
    assert common.machine_line(cpu) == expected


def test_overview_has_a_row_for_each_set_and_network(project):
    table = documents.region("h200/overview", project / "benchmarks/results").splitlines()
    assert table[0] == "|  | `fp32` | `tf32` | `fp16` | `bf16` | `fp32` over TF32 |"
    assert table[2:] == [
        "| 3x3 layers, batch 64, 1 of 22 | 1.00x | - | - | - | - |",  # 4, 0.5 and 0.5
        "| ResNet-50, batch 64 | 2.00x | - | - | - | - |",
    ]


def test_times_at_batch_one_say_what_a_replay_costs_and_what_packing_does():
    row = layer_row("res1", "fp32", 10.0, 30.0, n=1, timer_us=4.5, us_with_packing=15.0)
    table = layer_tables.layer_table({**HEAD, "rows": [row]}, "fp32", 1)
    assert "| 15.0 | 2.00x |" in table
    assert "holds the replay of a CUDA graph: 4.5 us" in table
    assert "replay" not in layer_tables.layer_table({**HEAD, "rows": [row | {"n": 64}]}, "fp32", 64)
    on_cpu = layer_tables.layer_table({**HEAD, "rows": [row | {"floor_us": None}]}, "fp32", 1)
    assert "replay" not in on_cpu
    assert "4.5 us for one that does nothing" in on_cpu


def test_numbers_within_a_sentence(project):
    folder = project / "benchmarks/results"
    document = results.read(folder / "h200/layers.json")
    document["rows"].append(layer_row("vgg4_2", "tf32", 70.0, 80.0))
    document["rows"] = [row | {"timer_us": 4.0, "sm_mhz": 1980.0} for row in document["rows"]]
    document["rows"][0] |= {"sm_mhz": 1500.0, "few_rounds": ["torch_nhwc"]}
    networks = results.read(folder / "h200/networks.json")
    beyond = {"class": "fp16", "logits_error": float("nan"), "peer_error": float("nan")}  # the type's range
    networks["rows"].append(networks["rows"][0] | beyond)
    results.write(folder / "h200/networks.json", networks)
    results.write(folder / "h200/layers.json", document)
    expected = {
        "speedup/layers/fp32/64": "1.00",
        "range/layers/fp32/64": "0.50 to 4.00",
        "tf32/64": "0 of 1 layers are faster, 0.80 times in geometric mean",
        "clocks/layers": "1980 MHz in the median, below 97% of the highest (1980) in 1 of 6 rows",
        "replay/layers": "4.0 us",
        "worst_error/layers/fp32/64": "0.5",
        "error/layers/fp32/64": "1e-06",
        "bias/layers/fp32/64": "(not measured)",
        "logits/fp32": "0.50 to 0.50",
        "logits/fp16": "(not measured)",
        "few_rounds/layers": "1 of 6",
        "network/resnet50/fp32/compile": "0.50",
        "network/vgg16/fp32/compile": "(not measured)",
        "best_network/fp32": "2.00 to 2.00",
        "convolutions/fp32": "ResNet-50 7.0 ms instead of 14.0",
        "speedup/layers/bf16/64": "(not measured)",
        "commit/layers": "0123456789ab",
        "vgg16/fp32/64": "(not measured)",
        "torch_error/layers/fp32/64": "(not measured)",
    }
    for name, words in expected.items():
        text = f"We are <!-- results:h200/said/{name} -->old<!-- /results --> times faster."
        assert documents.fill(text, folder) == text.replace("old", words)
    with pytest.raises(ValueError, match="h200/said/nothing"):
        documents.region("h200/said/nothing", folder)


def test_vgg16_is_the_sum_of_its_layers_and_errors_are_over_pytorchs(project):
    folder = project / "benchmarks/results"
    names = ("vgg1_1", "vgg1_2", "vgg2_1", "vgg2_2", "vgg3_1", "vgg3_2", "vgg4_1", "vgg4_2", "vgg5")
    peers = {"torch_nchw": 5000.0, "torch_nhwc": 4000.0, "torch_nhwc_all": 1.0, "cudnn_fft": 3000.0}
    peers |= {"cudnn_winograd_nonfused": 2.0, "cutlass_3xtf32": 2000.0}  # the former is refused
    notes = {"cudnn_winograd_nonfused": "no rival: error 7.1e-05 is beyond the class (5e-05)"}
    changes = {"peers": peers, "notes": notes, "peer_errors": {"torch_nchw": 1e-7, "torch_nhwc": 4e-7}}
    changes |= {"algorithms": {"winograd_f4": 1000.0, "direct": 800.0, "null": 1.0}}
    changes |= {"errors": {"direct": {"l2": 2e-6}}}
    rows = [layer_row(name, "fp32", 1000.0, 2000.0, **changes) for name in names]
    results.write(folder / "h200/layers.json", {**HEAD, "rows": rows})
    expected = {
        "vgg16/fp32/64": "PyTorch 52.00 ms, the fastest of cuDNN's on each layer 39.00, the fastest of all rivals "
        "26.00, ours 13.00",
        "torch_error/layers/fp32/64": "2.5 times on vgg5",
        "peer_error/layers/fp32/64/torch_nhwc": "4e-07",
        "error_of/layers/fp32/64/direct": "5.0 to 5.0",
        "error_of/layers/fp32/64/winograd_f2": "(not measured)",
        "any_error/layers/fp32/64": "0.80",
    }
    check_said(folder, expected)


def test_sentences_of_training_and_of_the_host(project):
    folder = project / "benchmarks/results"
    step = {"network": "unet", "batch": 32, "class": "tf32", "mode": "eager", "us": 100.0, "groups": None}
    step |= dict.fromkeys(("kernels_us", "peer_kernels_us", "peak_bytes", "peer_peak_bytes", "loss_error"))
    step |= {"peers": {"torch_eager": 91.0}, "best_peer": "torch_eager", "best_peer_us": 91.0}
    rows = [step, step | {"network": "vgg16", "best_peer_us": 120.0}, step | {"class": "fp32", "best_peer_us": 150.0}]
    results.write(folder / "h200/training.json", {**HEAD, "suite": "training", "rows": rows})
    call = {"layer": "3x3", "class": "fp16", "form": "swapped", "call": "no_grad", "us": 46.6, "torch_us": 50.0}
    call |= {"empty_operator_us": 3.0}
    other = call | {"form": "frozen", "call": "compile"}  # is in no sentence
    results.write(folder / "h200/host.json", {**HEAD, "suite": "host", "rows": [call, other]})
    expected = {
        "training/tf32": "0.91 to 1.20",
        "training/tf32/losses": "U-Net 0.91",
        "training/fp32/losses": "none",
        "training/amp_fp16/losses": "(not measured)",
        "host/3x3/fp16": "no gradients 47 (50)",
        "host/1x1/fp16": "(not measured)",
    }
    check_said(folder, expected)


ROOT = Path(documents.__file__).parents[2]


def test_readme_and_docs_are_what_the_result_files_say():
    assert documents.main(ROOT, check=True) == []


# Facts of the hardware and definitions; everything else that is a number of ours or a rival's comes from a file.
FACTS = ("67 TFLOP/s",)


def claims(text):
    """Numbers with the unit of a measurement, outside of marked parts and code."""
    text = re.sub(r"```.*?```", "", documents.REGION.sub("", text), flags=re.DOTALL)
    for fact in FACTS:
        text = text.replace(fact, "")
    units = r"(?:x\b|%|(?:ms|us|MHz|[TG]B/s|TFLOP/s)\b|times\b|of \d+ (?:layers|networks))"
    return re.findall(rf"(?<![\w.])\d+(?:\.\d+)?(?: to \d+(?:\.\d+)?)? ?{units}", text)


def test_readme_makes_no_claim_that_no_row_backs():
    assert claims((ROOT / "README.md").read_text()) == []
    assert layers.BANDWIDTH == 4.5e12
    assert round(layers.FFMA_FLOPS / 1e12) == 67
    marked = "a <!-- results:h200/said/replay/layers -->5 us<!-- /results --> b"
    assert claims(f"{marked} is 1.34 times faster, 0.92x, 12 of 22 layers; `3x3` 64 and 5e-5 are no claims") == [
        "1.34 times", "0.92x", "12 of 22 layers",
    ]  # fmt: skip
