"""What is drawn of the two ladders, LeNet-5's and the textbook's, from rows that are made up."""

from test_papers_report import cuconv_row, region, write

from benchmarks.harness import results
from benchmarks.papers import textbook
from benchmarks.reports import documents
from benchmarks.reports.papers import SOURCES
from fastconv.models.layers import Layer


def test_lenet5_is_drawn(tmp_path):
    first, second = (Layer(f"lenet{i}", 1, 6, 6, 4) for i in (1, 2))
    times = {"direct": 30.0, "fused_unroll": 10.0}
    rows = [cuconv_row(layer, 100, "ieee", times, {"torch_default_nchw": 15.0}) for layer in (first, second)]
    # One of the two layers at another batch is no sum of both.
    rows.append(cuconv_row(first, 1000, "ieee", {"direct": 300.0}, {"torch_default_nchw": 15.0}))
    rows[0] |= {"auto": "direct", "peers": {"torch_default_nchw": 15.0, "cudnn_gemm": 16.0}}
    rows[0] |= {"with_packing": {"fused_unroll": 12.0}, "bytes": {"fused_unroll": [1 << 20, 1 << 19]}}
    write(tmp_path, "papers/lenet5/layers", rows)
    lines = region(tmp_path, "lenet5/layers/ieee").splitlines()
    assert lines.pop() == (
        "| 1000 | lenet1 | 300 | - | 15.0 | `torch_default_nchw` | **0.05x** | - | -, - | - | - | 15.0 |"
    )
    assert lines[2].endswith(" | 1.50x | 12.0 | 1.00, 0.50 | 30.0 `direct` | 16.0 | 15.0 |")
    assert lines[0].startswith("| batch | layer | `direct` us | `fused_unroll` us | best peer us |")
    assert lines[-1] == "| 100 | both | 60.0 | 20.0 | 30.0 |  | 1.50x |  |  |  |  |  |"
    said = "the fastest first, `fused_unroll` 20.0 us, `direct` 60.0 us, the best rival 30.0 us."
    assert said in region(tmp_path, "lenet5/said")
    row = {"network": "lenet5_digits", "batch": 450, "class": "fp16", "mode": "direct", "us": 5.0, "swapped": 2}
    row |= {"peers": {"torch_eager": 6.0}, "best_peer": "torch_eager", "best_peer_us": 6.0, "total": 2}
    row |= {"logits_error": 1e-3, "peer_error": 1e-3, "top1_agreement": 0.99, "accuracy": 0.9, "torch_accuracy": 0.91}
    write(tmp_path, "papers/lenet5/network", [row | {"float64_accuracy": 0.92}])
    assert "| `fp16` | `direct` | 90.0 % | 91.0 % | 92.0 % | 99.0 % |" in region(tmp_path, "lenet5/network")
    half = row | {"mode": "ladder_half_fused", "accuracy": 0.9, "torch_accuracy": 0.95, "float64_accuracy": 0.92}
    write(tmp_path, "papers/lenet5/network", [row | {"float64_accuracy": 0.92}, half])
    said = region(tmp_path, "lenet5/said")
    assert said.endswith("FP16 arithmetic costs 5.0 % of the images (the source gains 0.02 %).")
    write(tmp_path, "papers/lenet5/network", [row | {"float64_accuracy": 0.92}])
    said = region(tmp_path, "lenet5/said")
    assert said.startswith("At batch 100 ")
    assert said.endswith("0 of 1 pairs of rung and class classify exactly as many test images rightly as PyTorch (not "
                         "`direct` in `fp16`).")  # fmt: skip


def test_the_steps_of_the_ladder_are_drawn(tmp_path):
    first, second = (Layer(f"lenet{i}", 1, 6, 6, 4) for i in (1, 2))
    times = {"direct": 30.0, "ladder_direct": 40.0, "ladder_direct_restrict": 50.0, "ladder_fused_restrict_size": 20.0}
    errors = {name: {"l2": 1e-7, "max": 1e-7, "bias": 0.0} for name in times}
    half = {"direct": 30.0, "ladder_half_fused_restrict_size": 5.0}
    rows = [
        cuconv_row(layer, 100, accuracy, its, {"torch_default_nchw": 15.0}, errors=errors)
        for layer in (first, second)
        for accuracy, its in (("ieee", times), ("fp16", half))
    ]
    write(
        tmp_path,
        "papers/lenet5/layers",
        [*rows, cuconv_row(first, 1000, "ieee", times, {"cudnn_gemm": 1.0}, errors=errors)],
    )
    image, _, *lines = region(tmp_path, "lenet5/ladder/ieee").splitlines()
    assert "h200_paper_lenet5_ladder_ieee.svg" in image
    assert len(lines) == 5
    assert lines[2] == "| `ladder_direct` | no | no | global | 16x16 pixels | 40.0 + 40.0 = 80.0 | 1.00x | 1.0e-07 |"
    assert (
        lines[4]
        == "| `ladder_fused_restrict_size` | yes | yes | global | 16x16 | 20.0 + 20.0 = 40.0 | 2.00x | 1.0e-07 |"
    )
    assert "| `ladder_half_fused_restrict_size` |" in region(tmp_path, "lenet5/ladder/fp16").splitlines()[4]
    steps = region(tmp_path, "lenet5/steps").splitlines()
    assert "| `ladder_direct`: `__restrict__` | **0.80x** |" in steps
    assert "| `ladder_fused`: both, then FP16 arithmetic | 4.00x |" in steps
    assert "| FP32: the fastest rung over `ladder_direct` | 2.00x `ladder_fused_restrict_size` |" in steps
    assert steps[-2] == "| FP16: the fastest rung over `ladder_direct` | 8.00x `ladder_half_fused_restrict_size` |"
    said = "the one worth most there is `ladder_fused`: both, then FP16 arithmetic, 4.00 times; 1 cost"
    assert f"of the ladder's 2 steps, tiles aside, {said}" in region(tmp_path, "lenet5/said")
    (line,) = (line for line in region(tmp_path, "index").splitlines() if "[LeNet-5]" in line)
    assert "| best rungs 2.00x over `ladder_direct`, FP16 8.00x |" in line


def test_the_fastest_rung_of_either_layer_is_combined(tmp_path):
    first, second = (Layer(f"lenet{i}", 1, 6, 6, 4) for i in (1, 2))
    wide = {"ladder_direct": 40.0, "ladder_fused_restrict_size": 20.0, "ladder_fused_4x64": 10.0}
    narrow = {"ladder_direct": 40.0, "ladder_fused_restrict_size": 10.0, "ladder_fused_4x64": 30.0}
    rows = [
        cuconv_row(layer, 100, "ieee", {"direct": 30.0, **its}, {"cudnn_gemm": 8.0})
        for layer, its in ((first, wide), (second, narrow))
    ]
    write(tmp_path, "papers/lenet5/layers", rows)
    last = region(tmp_path, "lenet5/steps").splitlines()[-1]
    assert last.endswith("| 4.00x `ladder_fused_4x64`, `ladder_fused_restrict_size` |")
    said = "the ladder's fastest rung for either layer takes 0.0 ms in FP32 against 0.0 ms of the best rival"
    assert said in region(tmp_path, "lenet5/said")
    document = results.read(tmp_path / "h200/papers/lenet5/layers.json")
    assert SOURCES["lenet5"].verdict(document, "ieee") == "ladder 1.25x behind, `direct` 3.75x behind rivals"
    document["rows"][0]["algorithms"]["direct_tiled"] = document["rows"][1]["algorithms"]["direct_tiled"] = 4.0
    assert SOURCES["lenet5"].verdict(document, "ieee").endswith("`direct_tiled` 2.00x ahead of rivals")
    assert "h200_paper_lenet5_tiles.svg" in region(tmp_path, "lenet5/sweep")
    for name, draw in documents.figures(tmp_path).items():
        draw(tmp_path / "out.svg")
        said = "4x64 for lenet1 in FP32" if "tiles" in name else "ladder_fused_restrict_size is its fastest rung"
        assert said in (tmp_path / "out.svg").read_text().replace("\n", " ")


def test_what_the_textbooks_rungs_launch_is_drawn(tmp_path):
    kernel = {"kernel": "void fastconv::studies::multiply<float>(Sizes)", "blocks": 8, "threads": 256, "registers": 40}
    kernel |= {"shared_bytes": 2048, "us": 3.0, "occupancy": 0.75, "launches": 2}
    other = kernel | {"kernel": "copy", "us": 1.0}
    row = cuconv_row(textbook.LAYERS[0], 64, "ieee", {"direct": 1.0}, {"cudnn_gemm": 1.0})
    row |= {"algorithm": "ladder_unroll_restrict", "kernels": [kernel, other]}
    write(tmp_path, "papers/textbook/kernels", [row, row | {"kernels": []}])
    (line,) = region(tmp_path, "textbook/kernels").splitlines()[2:]
    assert line.endswith("| `ladder_unroll_restrict` | `multiply` | 2 | 8 | 256 | 40 | 2048 | 75% | 3.0 | 1.0e-07 |")
