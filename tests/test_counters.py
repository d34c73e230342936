"""Hardware counters: what is read from Nsight Compute's table, and what is said where there is none."""

import pytest
import torch

from benchmarks.harness import runs
from benchmarks.reports.papers import counters as report
from benchmarks.studies import counters
from fastconv import environment

NAMES = [metric for metric, _ in counters.METRICS.values()]


def table(*kernels: tuple[str, float]) -> str:
    """As ncu prints it: a word of its own, the header, the units, a row per kernel."""
    header = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *NAMES))
    units = ",".join('""' for _ in range(2 + len(NAMES)))
    rows = [
        ",".join(f'"{value}"' for value in (i, name, *[us * 1000] * len(NAMES))) for i, (name, us) in enumerate(kernels)
    ]
    return "\n".join(["==PROF== Connected", 'variants ["a", "b"]', header, units, *rows])


def test_the_kernels_of_a_call_stand_behind_its_marker():
    marker = (f"void {counters.MARKER}(long)", 1)
    calls = counters.parse(table(marker, ("transform", 2), ("multiply", 6), marker, ("one", 3)))
    assert [[kernel["Kernel Name"] for kernel in call] for call in calls] == [["transform", "multiply"], ["one"]]
    found = counters.joined(calls[0])
    assert found["kernels"] == 2
    assert found["us"] == 8
    assert [(part["kernel"], part["us"]) for part in found["parts"]] == [("transform", 2), ("multiply", 6)]
    assert found["dram_read_bytes"] == 8000
    assert found["l2_hit_percent"] == (2 * 2000 + 6 * 6000) / 8  # a rate: the mean, weighted by time


@pytest.mark.parametrize("output", ["", "==ERROR== ERR_NVGPUCTRPERM - no permission"])
def test_no_table_is_an_error_that_says_what_ncu_said(output):
    with pytest.raises(counters.NoCounters, match=r"gave no table: .*(nothing|ERR_NVGPUCTRPERM)"):
        counters.parse(output)


def test_the_table_says_why_there_are_no_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "program", lambda: (_ for _ in ()).throw(counters.NoCounters("ncu was not found")))
    head = environment.describe("c", "cpu")
    monkeypatch.setattr(counters.environment, "describe", lambda suite, device: head)
    document = counters.run("res3", 1, ["ieee"], ["two_stage"], out=tmp_path / "c.json", suite="c", report=print)
    assert report.table(document, "h200") == "ncu was not found"


def test_counters_are_read_once_and_whom_the_driver_refuses_is_refused_once(tmp_path, monkeypatch):
    head, asked, limits = environment.describe("c", "cpu"), [], []
    monkeypatch.setattr(counters.environment, "describe", lambda suite, device: head)
    refused = {"two_stage"}

    def measure(jobs, limit_s):
        asked.extend((job["layer"]["layer"], job["algorithm"]) for job in jobs)
        limits.append(limit_s)
        if refused & {job["algorithm"] for job in jobs}:
            raise counters.NoCounters(f"ncu gave no table: ==ERROR== {counters.FORBIDDEN}")
        return [{"": dict.fromkeys(counters.METRICS, 1.0)} for _ in jobs]

    monkeypatch.setattr(counters, "measure", measure)
    monkeypatch.setattr(counters, "JOBS", 1)

    def run(**more):
        asked.clear()
        options = {"out": tmp_path / "c.json", "suite": "c", "report": lambda line: None, **more}
        return counters.run("res3,res4", 1, ["ieee"], ["torch", "two_stage"], **options)

    assert run(budget_s=-1.0)["rows"] == []
    assert len(run()["rows"]) == 4
    assert asked == [("res3", "torch"), ("res3", "two_stage")]
    refused.clear()
    document = run(resume=True, layout="nhwc")
    assert asked == [("res3", "two_stage"), ("res4", "torch"), ("res4", "two_stage")]
    assert [row["us"] for row in document["rows"]] == [1.0] * 4
    run(resume=True)
    assert asked == []
    assert set(limits) == {counters.LIMIT_S + counters.JOB_S}
    run(budget_s=20.0)
    assert 0 < limits[-1] <= 20.0 + runs.OVERTIME_S  # nobody waits for ncu long behind the time


def test_a_process_has_several_layers_and_says_whose_calls_they_are(tmp_path, monkeypatch):
    marker = (f"void {counters.MARKER}(long)", 1)
    output = table(marker, ("one", 3), marker, ("other", 4)).replace('["a", "b"]', '[[""], "no room", [""]]')
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(counters, "program", lambda: str(program))
    head = environment.describe("c", "cpu")
    monkeypatch.setattr(counters.environment, "describe", lambda suite, device: head)
    options = {"out": tmp_path / "c.json", "suite": "c", "report": lambda line: None}
    rows = counters.run("res2,res3,res4", 1, ["ieee"], ["two_stage"], **options)["rows"]
    assert [(row["layer"], row["us"]) for row in rows] == [("res2", 3), ("res3", None), ("res4", 4)]
    assert rows[1]["notes"] == {"two_stage": "no room"}
    program.write_text(program.read_text().replace('"no room", ', ""))
    program.write_text(program.read_text().replace('[[""], [""]]', '[[""], ["", ""]]'))
    rows = counters.run("res1", 1, ["ieee"], ["two_stage"], **options)["rows"]
    (row,) = (row for row in rows if row["layer"] == "res1")
    assert row["notes"]["two_stage"].startswith("ncu saw 2 calls")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counters_of_a_call(tmp_path):
    from fastconv.models.layers import select

    (layer,) = select("res3")
    try:
        job = {"layer": layer.fields(), "n": 1, "class": "ieee", "algorithm": "two_stage", "layout": "nhwc"}
        (found,) = counters.measure([job])
    except counters.NoCounters as error:
        pytest.skip(f"counters: {error}")
    assert found[""]["kernels"] == 2
    assert found[""]["dram_read_bytes"] >= 0.5 * 4 * layer.k * layer.c * 9
