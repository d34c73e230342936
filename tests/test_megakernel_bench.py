"""The suite `megakernel` and its soak: what the files hold and the documents show. Nothing here asserts a time."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from benchmarks.harness import ours, results
from benchmarks.reports import documents
from benchmarks.reports import megakernel as megakernel_report
from benchmarks.soaks import megakernel as megakernel_soak
from benchmarks.studies import megakernel
from fastconv import environment, instrumented, trace
from fastconv.models.layers import select

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HEAD = {"schema": environment.SCHEMA, "suite": "megakernel", "gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0"}
HEAD |= {"torch": "2.11.0", "cudnn": "9.1.0", "commit": "c" * 40, "date": "2026-01-01T00:00:00Z"}


def row_of(layer: str, part: str, variant: str = "", **fields):
    (item,) = select([layer])
    return megakernel._row(item, 64, "fp32", part, variant) | fields


def some_document() -> results.Document:
    rows = [
        row_of(
            layer, "layers", us=100.0, error=1e-7, max_error=1e-6, best_peer="cudnn_winograd_nonfused",
            best_peer_us=300.0, peer_error=2e-7, peers={"cudnn_winograd_nonfused": 300.0},
            algorithms={"winograd_megakernel": 100.0, "winograd_f4": staged, "winograd_megakernel_series": series},
        )
        for layer, staged, series in (("vgg4_2", 125.0, 144.0), ("vgg5", 80.0, None))
    ]  # fmt: skip
    planned = {"d_ig": 148, "d_go": 297, "m": 4}
    variants = {"planned": {}} | {f"d_ig={d}": {"d_ig": d} for d in (0, 132)} | {f"m={m}": {"m": m} for m in (1, 2)}
    for us, (variant, change) in enumerate(variants.items(), 50):
        rows.append(row_of("vgg5", "mapping", variant, us=float(us), algorithms={"winograd_f4": 40.0}, **planned))
        rows[-1] |= change
    rivals = {"winograd_megakernel": 30.0, "winograd_f4": 25.0, "direct": None}
    rows.append(row_of("res1", "rivals", us=25.0, algorithms=rivals, peers={"torch_nchw": 60.0}))
    shares = {"busy": 0.8, "waiting": 0.1}
    for variant in ("mapped", "series"):
        running = {kind: [0, 3, 0] for kind in trace.KINDS}
        rows.append(row_of("vgg4_2", "distribution", variant, us=90.0, clock="recorded", running=running))
        rows[-1] |= {
            "times_us": [0.0, 45.0, 90.0],
            "overlap": 0.5,
            "task_us": {"gemm": 12.0},
            "products": shares,
            "transforms": shares,
            **shares,
        }
    rows.append(row_of("res3", "layers", notes={"winograd_megakernel": "no such class"}))
    return {
        **HEAD,
        "rows": rows,
        "missing": [f"layers: {layer}, batch 64, ieee: no such class" for layer in ("res3", "res4")],
    }


def test_rows_keep_the_contract_and_replace_one_another(tmp_path):
    document = some_document()
    assert results.problems(document) == []
    results.write(tmp_path / "megakernel.json", document)
    again = results.merge(tmp_path / "megakernel.json", HEAD, megakernel.KEY)
    assert len(again["rows"]) == len(document["rows"])
    results.put(again, document["rows"][0] | {"us": 1.0}, megakernel.KEY)
    assert len(again["rows"]) == len(document["rows"])
    assert again["rows"][0]["us"] == 1.0


def test_a_row_without_a_time_is_for_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    results.write(tmp_path / "megakernel.json", some_document())
    arguments = 64, 1, 0.0, tmp_path / "megakernel.json", HEAD
    held = megakernel._Suite(*arguments, True, print).held
    assert ("layers", "vgg5", 64, "fp32") in held
    assert ("layers", "res3", 64, "fp32") not in held
    assert megakernel._Suite(*arguments, False, print).held == set()


def test_tables_show_what_the_file_holds():
    document = some_document()
    table = megakernel_report.layer_table(document, "fp32")
    best = "300 `cudnn_winograd_nonfused` | 3.00x"
    line = f"| vgg4_2 | 512->512 @28x28 | 100 | 144 | 1.44x | 125 | 1.25x | 300 | 3.00x | {best} | 1.0e-07 | 0.50 |"
    assert line in table
    assert "| vgg5 | 512->512 @14x14 | 100 | - | - | 80.0 | **0.80x** |" in table
    assert "| geometric mean | 2 layers |  |  | 1.44x |  | 1.00x |" in table
    assert "res3" not in table
    assert megakernel_report.missing(document).splitlines() == [
        "Measured: 2 of 22 in `fp32`; by default those with C and K of at least 128. "
        "Not measured: class `ieee`, `tf32`, `fp16`, `bf16`.",
        "",
        "- Missing: layers, batch 64, ieee: res3, res4: no such class.",
    ]
    nothing = megakernel_report.missing({**document, "rows": [], "missing": []})
    assert nothing.startswith("Measured: no layer;")
    mapping = megakernel_report.mapping_table(document, "fp32")
    assert "| vgg5 | **51.0** |" in mapping
    assert "50.0 (148)" in mapping
    rivals = megakernel_report.rivals_table(document, "fp32")
    assert re.search(r"winograd_f4` \| 25.0 \| 0.83x.*winograd_megakernel` \| 30.0 \| 1.00x.*2.00x", rivals, re.DOTALL)
    assert "direct" not in rivals
    assert (
        "| vgg4_2 | series | 90.0 | 80% | 10% | 80% | 10% | 80% | 10% | 50% | 12.0 |"
        in megakernel_report.tasks_table(document, "fp32")
    )


def test_regions_and_figures_from_a_file(tmp_path):
    results.write(tmp_path / "h200" / "megakernel.json", some_document())
    soaked = {"launches": 1000, "mismatches": 0, "seconds": 2.0, "error": 1e-7}
    rows = [row_of("res3", "soak", **soaked), row_of("res2", "soak", **soaked)]
    soak = {**HEAD, "suite": "soak_megakernel", "rows": rows, "missing": ["ieee: no such class"]}
    results.write(tmp_path / "h200" / "soak_megakernel.json", soak)
    for name in ("layers/fp32", "mapping/fp32", "rivals/fp32", "tasks/fp32", "missing"):
        assert documents.region(f"h200/megakernel/{name}", tmp_path)
    for name, figure in (("layers", "layers"), ("mapping", "distances"), ("rivals", "rivals"), ("tasks", "tasks")):
        section = documents.region(f"h200/megakernel/{name}", tmp_path)
        assert section.startswith("Class `fp32`:")
        assert f"(figures/h200_megakernel_{figure}_fp32.svg)" in section
        assert "ieee" not in section
    for name, words in (("layers", "2 of the 22 layers"), ("series/fp32", "1.44"), ("cudnn/fp32", "3.00")):
        assert documents.region(f"h200/said/megakernel/{name}", tmp_path) == words
    said = documents.region("h200/soak_megakernel", tmp_path)
    assert said.startswith("`fp32`: 2,000 launches of 2 layers in 4 s, 0 differ")
    assert said.endswith("Missing: ieee: no such class.")
    with pytest.raises(ValueError, match="expected one of the names"):
        documents.region("h200/megakernel/nothing", tmp_path)
    figures = documents.figures(tmp_path)
    parts = ("layers", "distances", "m", "rivals", "tasks")
    assert set(figures) == {f"h200_megakernel_{part}_fp32.svg" for part in parts} | {"h200_megakernel_channels.svg"}
    for figure, draw in figures.items():
        draw(tmp_path / "figures" / figure)
    assert "D_GO: tasks from a product" in (tmp_path / "figures" / "h200_megakernel_distances_fp32.svg").read_text()
    tasks = (tmp_path / "figures" / "h200_megakernel_tasks_fp32.svg").read_text()
    assert "recorded time" in tasks
    assert "Tasks over time, class fp32" in tasks


def test_soak_draws_what_the_kernel_serves():
    drawn = list(itertools.islice(megakernel_soak.random_layers(3), 300))
    assert drawn == list(itertools.islice(megakernel_soak.random_layers(3), 300))
    assert {layout for _, _, layout in drawn} == {"nhwc", "nchw"}
    assert all(min(layer.p, layer.q, n) > 0 for layer, n, _ in drawn)
    draw = random.Random(0)
    options = [megakernel_soak.random_options(draw, 132) for _ in range(1000)]
    assert {each.blocks for each in options} >= {0, 1, 2, 3}
    assert max(each.blocks for each in options) <= 132
    assert {each.m for each in options} == {None, 1, 2, 3}
    assert not any(each.series for each in options)


def test_instruments_are_those_of_the_gpu():
    x = torch.randn(1, 4, 8, 8)
    kernel = instrumented.Megakernel(x, torch.randn(4, 4, 3, 3))
    assert len(kernel.planned) > 0
    assert kernel.new_output(3).shape == (3, 1, 4, 8, 8)
    with pytest.raises((ValueError, RuntimeError), match="input is on the CPU"):
        kernel()


# ---- On a GPU


def some_kernel(layout: str = "nhwc", cls: str = "fp32") -> tuple[instrumented.Megakernel, torch.Tensor]:
    """A convolution of three groups, and what the ordinary operator makes of it."""
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    dtype, precision = ours.dtype_of(cls), ours.precision_of(cls)
    x = torch.randn(5, 70, 37, 30, device="cuda").to(dtype).contiguous(memory_format=order)
    x[3, 64:] *= 1e4  # half types: another scale than that of the other channels
    weight = torch.randn(140, 70, 3, 3, device="cuda", dtype=dtype) * 0.01
    try:
        kernel = instrumented.Megakernel(x, weight, precision=precision)
    except RuntimeError as error:
        pytest.skip(f"winograd_megakernel: {error}")
    import fastconv

    expected = fastconv.conv2d(x, weight, padding=1, algorithm="winograd_megakernel", precision=precision)
    return kernel, expected


@needs_cuda
@pytest.mark.parametrize("cls", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "options",
    [
        instrumented.Options(),
        instrumented.Options(d_ig=0, d_go=0, m=1),
        instrumented.Options(d_ig=500, d_go=3, m=2, blocks=3),
        instrumented.Options(blocks=1),
        instrumented.Options(delay=4095),
        instrumented.Options(series=True),
    ],
)
def test_no_map_grid_or_delay_changes_the_bits(options, layout, cls):
    kernel, expected = some_kernel(layout, cls)
    assert expected.isfinite().all()
    assert torch.equal(kernel(options), expected)


@needs_cuda
@pytest.mark.parametrize(
    "options", [{}, {"d_ig": 0, "d_go": 0, "m": 1}, {"blocks": 1}, {"delay": 4095}, {"series": True}]
)
def test_filter_tasks_make_what_is_packed_beforehand(options):
    kernel, expected = some_kernel(cls="ieee")
    wanted = instrumented.Options(filters=True, **options)
    assert torch.equal(kernel(wanted), expected)
    assert kernel.task_map(wanted).arguments()["filter"] == (64, 16)


@needs_cuda
def test_where_there_are_no_filter_tasks():
    for layout, cls, said in (("nhwc", "fp32", "class fp32; expected class ieee"), ("nchw", "ieee", "in nchw; filter")):
        kernel, _ = some_kernel(layout, cls)
        with pytest.raises((ValueError, RuntimeError), match=said):
            kernel(instrumented.Options(filters=True))


@needs_cuda
@pytest.mark.parametrize("cls", ["fp32", "ieee", "fp16"])
def test_a_launch_records_every_task_once(cls):
    kernel, expected = some_kernel(cls=cls)
    forms = [instrumented.Options(), instrumented.Options(d_ig=5, d_go=7, m=1, blocks=3)]
    for options in [*forms, *([instrumented.Options(filters=True)] if cls == "ieee" else [])]:
        records = kernel.new_records(options)
        y = kernel(options, records=records)
        assert torch.equal(y, expected)
        run = trace.recorded(kernel.task_map(options), records.cpu().numpy())
        assert (run.taken <= run.start).all()
        assert (run.start <= run.end).all()
        if options.blocks:
            assert run.workers <= len(run.pools) * options.blocks
        # Children begin behind their parents, by the groups; a clock step apart at most. A parent's end is noted once
        # its counter is raised, when a child may have begun already.
        step = trace.resolution_ns(records.cpu().numpy()) / 1e3
        for group in range(kernel.planned.groups):
            of = [(run.tasks.kind == kind) & (run.tasks.group == group) for kind in range(4)]
            last = [run.start[its].max(initial=0.0) for its in of]
            first = [run.start[its].min(initial=float("inf")) for its in of]
            assert first[2] >= last[1] - step
            assert first[3] >= last[2] - step


@needs_cuda
def test_a_map_takes_the_workspace_that_its_distances_ask_for():
    kernel, _ = some_kernel()
    each = (instrumented.Options(d_ig=0, d_go=0, m=1), instrumented.Options(), instrumented.Options(series=True))
    near, planned, series = map(kernel.workspace_bytes, each)
    assert 0 < near <= planned <= series


@needs_cuda
def test_wrong_arguments_are_refused():
    kernel, expected = some_kernel()
    refused = (ValueError, RuntimeError)
    with pytest.raises(refused, match="records has shape"):
        kernel(records=torch.zeros(3, 10, dtype=torch.int64, device="cuda"))
    with pytest.raises(refused, match="not both dense in NHWC"):
        kernel(output=expected.contiguous())
    with pytest.raises(refused, match="m is -1; expected 0"):
        kernel(instrumented.Options(m=-1))


@needs_cuda
def test_the_soak_counts_launches_and_sees_other_bits(tmp_path, monkeypatch):
    streams, each = megakernel_soak.STREAMS, megakernel_soak.PER_STREAM
    classes = ("fp32", "fp16")
    wanted = {"launches": 2 * streams * each, "shapes": streams, "classes": classes}
    document = megakernel_soak.run(**wanted, out=tmp_path / "soak.json")
    assert results.read(tmp_path / "soak.json")["rows"]
    assert [(row["launches"], row["mismatches"]) for row in document["rows"]] == [(each, 0)] * 2 * streams
    call = instrumented.Megakernel.__call__

    def other_bits(self, *arguments, **named):
        return call(self, *arguments, **named).neg_()

    monkeypatch.setattr(instrumented.Megakernel, "__call__", other_bits)
    document = megakernel_soak.run(**wanted, out=tmp_path / "soak.json")
    assert [row["mismatches"] for row in document["rows"]] == [each] * 2 * streams


@needs_cuda
def test_the_series_is_a_rival_that_computes_the_same(tmp_path):
    document = megakernel.run(["layers"], layers="res3", classes=["fp32"], batch=4, rounds=3, out=tmp_path / "m.json")
    (row,) = document["rows"]
    assert row["notes"].get(megakernel.SERIES) is None
    assert set(row["algorithms"]) == {megakernel.NAME, megakernel.STAGED, megakernel.SERIES, row["auto"]}
    assert all(us > 0 for us in row["algorithms"].values())
    assert row["us_with_packing"] > 0
    assert {"torch_nchw", "torch_nhwc", megakernel.RIVAL} <= set(row["peers"])
