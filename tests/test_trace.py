"""Playing a task map through: what a run may and may not do, whatever the map, the workers and the costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import maps

from fastconv import _C, trace
from fastconv.instrumented import RECORD

costs = st.tuples(*[st.floats(0.1, 100.0)] * 4)


@given(maps(max_tiles=150, max_tasks=500), st.integers(1, 40), costs)
def test_a_run_obeys_counters_and_workers(made, workers, each):
    arguments, task_map = made
    for tasks in (trace.mapped(task_map), trace.staged(task_map)):
        run = trace.play(tasks, workers, each)
        assert (run.taken <= run.start).all()
        assert (run.start < run.end).all()
        np.testing.assert_allclose(run.end - run.start, np.array(each)[tasks.kind] * tasks.work)
        # A worker does one thing at a time, and nobody takes a task before its predecessors are taken.
        for number in range(workers):
            own = np.flatnonzero(run.worker == number)
            assert (run.taken[own[1:]] == run.end[own[:-1]]).all()
        assert (np.diff(run.taken) >= 0).all()
        # Parents end before children start: by the groups, not by the counters.
        for group in range(task_map.groups):
            of = [np.flatnonzero((tasks.kind == kind) & ((tasks.group == group) | (kind == 0))) for kind in range(4)]
            if arguments["filter"]:
                assert run.end[of[0]].max() <= run.start[of[2]].min()
            assert run.end[of[1]].max() <= run.start[of[2]].min()
            assert run.end[of[2]].max() <= run.start[of[3]].min()
        total = (run.end - run.start).sum()
        assert total / workers <= run.us * (1 + 1e-9)
        assert run.us <= total * (1 + 1e-9)
        assert run.busy + run.waiting <= 1 + 1e-9


def test_one_worker_never_waits():
    task_map = _C.TaskMap(100, 8, 8, 16, input=(4, 8), gemm=(6, 8), output=(4, 8), d_ig=4, d_go=4, m=2)
    run = trace.play(trace.mapped(task_map), 1, (1.0, 2.0, 3.0, 4.0))
    assert run.busy == pytest.approx(1.0)
    assert run.waiting == 0.0


def test_distances_spare_the_waiting():
    """What the map is for: without distances many workers wait for the tasks just before their own."""
    shape = {"tiles": 4096, "c": 64, "k": 64, "group_tiles": 32}
    blocks = {"input": (16, 64), "gemm": (6, 64), "output": (16, 64), "m": 2}
    near, far = (_C.TaskMap(**shape, **blocks, d_ig=d, d_go=d) for d in (0, 64))
    waiting = [trace.play(trace.mapped(task_map), 32, (1.0, 1.0, 1.0, 1.0)).waiting for task_map in (near, far)]
    assert waiting[1] < 0.02 < waiting[0]


def test_a_wait_for_later_tasks_is_an_error():
    tasks = trace.mapped(_C.TaskMap(4, 1, 1, 4, input=(4, 1), gemm=(36, 1), output=(4, 1)))
    turned = trace.Tasks(*(array[::-1] for array in vars(tasks).values()))
    with pytest.raises(ValueError, match="task 0 waits for counter 2, which later tasks raise"):
        trace.play(turned, 3, (1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(("workers", "each"), [(0, (1.0,) * 4), (1, (1.0,) * 3), (1, (1.0, 1.0, -1.0, 1.0))])
def test_impossible_plays_are_refused(workers, each):
    tasks = trace.mapped(_C.TaskMap(4, 1, 1, 4, input=(4, 1), gemm=(36, 1), output=(4, 1)))
    with pytest.raises(ValueError, match=r"workers is 0|costs is"):
        trace.play(tasks, workers, each)


def test_the_distribution_counts_running_tasks():
    task_map = _C.TaskMap(64, 8, 8, 16, input=(4, 8), gemm=(6, 8), output=(4, 8), d_ig=4, d_go=4, m=2)
    run = trace.play(trace.mapped(task_map), 5, (1.0, 2.0, 3.0, 4.0))
    times, counts = trace.distribution(run, samples=50)
    for time, found in zip(times, counts.T, strict=True):
        running = (run.start <= time) & (time < run.end)
        assert [int((running & (run.tasks.kind == kind)).sum()) for kind in range(4)] == found.tolist()


def some_records(task_map, blocks: int = 3) -> np.ndarray:
    """What a launch might record: two workers a block, each at its tasks in the order of its tickets."""
    tasks = trace.mapped(task_map)
    records = np.zeros((len(tasks.kind), len(RECORD)), np.int64)
    for gemm in (True, False):
        own = np.flatnonzero((tasks.kind == 2) == gemm)
        for ticket, position in enumerate(own):
            taken = 1000 * (ticket // blocks)
            times = taken, taken + 100, taken + 1000 + 32 * (ticket % 2)
            its = tasks.kind[position], tasks.group[position], tasks.index[position]
            records[position] = *times, *its, ticket, int(not gemm), ticket % blocks + 7, ticket % blocks
    return records


def test_records_become_a_run_whatever_their_order():
    task_map = _C.TaskMap(64, 8, 8, 16, input=(4, 8), gemm=(6, 8), output=(4, 8), d_ig=4, d_go=4, m=2)
    records = some_records(task_map) + np.array([10**15] * 3 + [0] * 7)
    run = trace.recorded(task_map, np.random.default_rng(0).permutation(records))
    assert (run.clock, run.workers, run.pools) == ("recorded", 6, ("products", "transforms"))
    assert run.taken.min() == 0.0
    assert ((run.worker % 2 == 0) == (run.tasks.kind == 2)).all()
    for number in range(run.workers):
        own = np.flatnonzero(run.worker == number)
        assert (run.taken[own[1:]] >= run.end[own[:-1]]).all()  # one at a time
        assert (run.taken[own] <= run.start[own]).all()
        assert (run.start[own] <= run.end[own]).all()
    events = trace.to_chrome({"a launch": run})["traceEvents"]
    assert {"SM 7, block 0, products", "SM 9, block 2, transforms"} <= {event["args"].get("name") for event in events}
    assert trace.resolution_ns(records) == 4  # 1000 and 32


def test_records_of_another_launch_are_refused():
    task_map = _C.TaskMap(64, 8, 8, 16, input=(4, 8), gemm=(6, 8), output=(4, 8), d_ig=4, d_go=4, m=2)
    twice, unfinished = some_records(task_map), some_records(task_map)
    twice[3] = twice[4]
    unfinished[5, 2] = 0
    for records in (twice, unfinished):
        with pytest.raises(ValueError, match="not those of one launch"):
            trace.recorded(task_map, records)


@pytest.mark.parametrize("teams", [1, 2])
def test_workers_that_do_every_kind(teams):
    task_map = _C.TaskMap(64, 8, 8, 16, input=(4, 8), gemm=(6, 8), output=(4, 8), d_ig=4, d_go=4, m=2)
    records = some_records(task_map, blocks=2)
    records[:, RECORD.index("ticket")] = np.arange(len(records))
    records[:, RECORD.index("worker")] = np.arange(len(records)) % teams
    run = trace.recorded(task_map, records)
    assert run.pools == (("workers",) if teams == 1 else ("team 0", "team 1"))
    assert (run.workers, run.processor.tolist()) == (2 * teams, sorted([7, 8] * teams))
    for number in range(run.workers):
        own = np.flatnonzero(run.worker == number)
        assert (run.taken[own[1:]] >= run.end[own[:-1]]).all()
    assert run.overlap == 0.0 if teams == 1 else run.overlap > 0.0
    assert sum(run.summary()["kinds"].values()) == pytest.approx(run.busy)
    assert set(run.summary()["task_us"]) == {"input", "gemm", "output"}


def test_overlap_and_shares_of_pools():
    """Block 0 multiplies from 0 to 4, and transforms from 2 to 6 and 7 to 8; block 1 has no products: 2 of 7 hide."""
    tasks = trace.mapped(_C.TaskMap(4, 1, 1, 4, input=(1, 1), gemm=(36, 1), output=(4, 1)))
    assert tasks.kind.tolist() == [1, 1, 1, 1, 2, 3]
    worker = np.array([1, 1, 3, 3, 0, 3], np.int32)
    start, end = np.array([2.0, 7.0, 0.0, 1.0, 0.0, 2.0]), np.array([6.0, 8.0, 1.0, 2.0, 4.0, 2.0])
    taken, processor = np.maximum(start - 1.0, 0.0), np.array([5, 5, 6, 6], np.int32)
    run = trace.Run(tasks, 4, worker, taken, start, end, ("products", "transforms"), "recorded", processor)
    assert run.overlap == pytest.approx(2 / 7)
    assert run.of_pool(0) == pytest.approx({"busy": 4 / 16, "waiting": 0.0})
    assert run.of_pool(1) == pytest.approx({"busy": 7 / 16, "waiting": 4 / 16})
    assert run.summary()["transforms"] == run.of_pool(1)
    assert trace.play(tasks, 1, (1.0,) * 4).overlap is None


def test_slices_of_the_trace_are_the_runs_times():
    task_map = _C.TaskMap(64, 8, 8, 16, input=(4, 8), gemm=(6, 8), output=(4, 8), d_ig=0, d_go=0, m=2)
    run = trace.play(trace.mapped(task_map), 20, (1.0, 2.0, 3.0, 4.0))
    slices = [event for event in trace.to_chrome({"run": run})["traceEvents"] if event["ph"] == "X"]
    tasks = [event for event in slices if event["cat"] != "wait"]
    assert [event["args"]["position"] for event in tasks] == list(range(len(run.worker)))
    for event, worker, start, end in zip(tasks, run.worker, run.start, run.end, strict=True):
        assert (event["tid"], event["ts"], event["dur"]) == pytest.approx((worker, start, end - start), abs=1e-3)
    waits = [event for event in slices if event["cat"] == "wait"]
    assert sum(event["dur"] for event in waits) == pytest.approx((run.start - run.taken).sum(), abs=1e-3 * len(waits))
    assert waits


def test_panels_of_one_group_have_one_scale_of_time():
    counts = np.ones((len(trace.KINDS), 2), np.int64)
    panels = [
        trace.Panel("", "recorded", np.array([0.0, us]), counts, group)
        for us, group in ((100.0, "a"), (80.0, "a"), (9.0, "b"))
    ]
    assert [axes.get_xlim() for axes in trace.draw(panels).axes] == [(0.0, 100.0), (0.0, 100.0), (0.0, 9.0)]
