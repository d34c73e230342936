"""The task map of the Winograd megakernel: what docs/concepts/megakernel.md promises, over maps of every shape."""

from __future__ import annotations

import itertools
import random
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastconv import _C

FILTER, INPUT, GEMM, OUTPUT = range(4)
many = settings(max_examples=200)


@st.composite
def maps(draw, max_tiles=400, max_tasks=3000):
    """(arguments, map)"""
    small = st.integers(1, 40)
    arguments = {
        "tiles": draw(st.integers(1, max_tiles)),
        "c": draw(small),
        "k": draw(small),
        "group_tiles": draw(st.integers(1, 64)),
        "input": draw(st.tuples(st.integers(1, 33), st.integers(1, 40))),
        "gemm": draw(st.tuples(st.integers(3, 36), st.integers(4, 40))),
        "output": draw(st.tuples(st.integers(1, 33), st.integers(1, 40))),
        "filter": draw(st.none() | st.tuples(st.integers(4, 40), st.integers(4, 40))),
        "d_ig": draw(st.integers(0, 8) | st.integers(0, 500)),
        "d_go": draw(st.integers(0, 8) | st.integers(0, 500)),
        "m": draw(st.integers(1, 4) | st.integers(1, 64)),
        "bounded": draw(st.booleans()),
    }
    # Blocks grow until the map is small enough to be looked at task by task.
    while len(made := _C.TaskMap(**arguments)) > max_tasks:
        arguments["group_tiles"] *= 2
        for name in ("input", "gemm", "output"):
            arguments[name] = (2 * arguments[name][0], 2 * arguments[name][1])
    return arguments, made


def inputs_of(task_map, group):
    return task_map.last_s_i if group == task_map.groups - 1 else task_map.s_i


def outputs_of(task_map, group):
    return task_map.last_s_o if group == task_map.groups - 1 else task_map.s_o


@many
@given(maps())
def test_counts_are_the_papers(made):
    arguments, task_map = made
    t, c, k = arguments["group_tiles"], arguments["c"], arguments["k"]
    whole = min(t, arguments["tiles"])
    assert task_map.groups == ceil(arguments["tiles"] / t)
    last = arguments["tiles"] - (task_map.groups - 1) * t
    for tiles, found in ((whole, task_map.s_i), (last, task_map.last_s_i)):
        assert found == ceil(tiles / arguments["input"][0]) * ceil(c / arguments["input"][1])
    for tiles, found in ((whole, task_map.s_o), (last, task_map.last_s_o)):
        assert found == ceil(tiles / arguments["output"][0]) * ceil(k / arguments["output"][1])
    assert task_map.s_g == ceil(36 / arguments["gemm"][0]) * ceil(k / arguments["gemm"][1])
    filters = arguments["filter"]
    assert task_map.n_f == (ceil(k / filters[0]) * ceil(c / filters[1]) if filters else 0)


@many
@given(maps())
def test_every_task_once_and_the_same_without_a_table(made):
    _, task_map = made
    tasks = [tuple(row) for row in task_map.tasks().tolist()]
    expected = [(FILTER, 0, i) for i in range(task_map.n_f)]
    for group in range(task_map.groups):
        expected += [(INPUT, group, i) for i in range(inputs_of(task_map, group))]
        expected += [(GEMM, group, i) for i in range(task_map.s_g)]
        expected += [(OUTPUT, group, i) for i in range(outputs_of(task_map, group))]
    assert sorted(tasks) == sorted(expected)
    assert len(tasks) == len(task_map)
    assert [task_map.task_at(position) for position in range(len(tasks))] == tasks
    for position in (-1, len(tasks)):
        with pytest.raises(ValueError, match=f"position is {position}"):
            task_map.task_at(position)


@many
@given(maps())
def test_every_element_is_covered_once(made):
    arguments, task_map = made
    tiles, c, k, t = (arguments[name] for name in ("tiles", "c", "k", "group_tiles"))
    u, v, y = np.zeros((k, c), int), np.zeros((tiles, c), int), np.zeros((tiles, k), int)
    m = np.zeros((task_map.groups, 36, k), int)
    for (kind, group, _), extent in zip(task_map.tasks().tolist(), task_map.extents().tolist(), strict=True):
        first, rows, channel, channels, point, points = extent
        columns = slice(channel, channel + channels)
        if kind == FILTER:
            u[first : first + rows, columns] += 1
        elif kind == GEMM:
            assert (first, rows) == (0, min(t, tiles - group * t))  # all tiles of the group
            m[group, point : point + points, columns] += 1
        else:
            first += group * t
            (v if kind == INPUT else y)[first : first + rows, columns] += 1
    for covered in (v, m, y, *([u] if arguments["filter"] else [])):
        assert (covered == 1).all()


def last_positions(task_map):
    """Position of the last task of each (kind, group), and of the first."""
    first, last = {}, {}
    for position, (kind, group, _) in enumerate(task_map.tasks().tolist()):
        first.setdefault((kind, group), position)
        last[kind, group] = position
    return first, last


@many
@given(maps())
def test_children_keep_their_distance(made):
    """docs/concepts/megakernel.md, "Distances": D_IG and D_GO in the middle of the map, and what is left at its end."""
    arguments, task_map = made
    d_ig, d_go, m, delay = arguments["d_ig"], arguments["d_go"], task_map.m, task_map.delay
    s_i, s_g, groups = task_map.s_i, task_map.s_g, task_map.groups
    batches = ceil(groups / m)
    inputs = (groups - 1) * s_i + task_map.last_s_i
    first, last = last_positions(task_map)
    if arguments["filter"]:
        assert last[FILTER, 0] == task_map.n_f - 1
    for group in range(groups):
        batch = group // m
        others = max(0, inputs - (batch + 1) * m * s_i)  # ITrans tasks of later batches
        assert first[GEMM, group] - last[INPUT, group] > min(d_ig, others)

        after = min(batch + delay, batches)  # its OTrans tasks come with this batch, or after all
        between = sum(min(m, groups - b * m) * s_g for b in range(batch + 1, after))
        if batch + delay >= batches:
            between += sum(outputs_of(task_map, g) for g in range(max(0, batches - delay) * m, batch * m))
        assert first[OUTPUT, group] - last[GEMM, group] > between
        if batch + delay < batches and task_map.lead + (batch + delay) * m * s_i <= inputs:
            assert first[OUTPUT, group] - last[GEMM, group] > d_go

        # A place in V or M is taken again as far behind its last reader.
        if group >= task_map.v_groups:
            assert first[INPUT, group] - last[GEMM, group - task_map.v_groups] > d_ig
        if group >= task_map.m_groups:
            distance = first[GEMM, group] - last[OUTPUT, group - task_map.m_groups]
            assert distance > ceil(d_go / (m * (s_i + s_g))) * m * s_g
            assert distance > d_go or task_map.lead + batch * m * s_i > inputs


@many
@given(maps())
def test_m_tasks_in_a_row_share_a_filter_block(made):
    _, task_map = made
    order = [(group, block) for kind, group, block in task_map.tasks().tolist() if kind == GEMM]
    expected = []
    for batch in range(0, task_map.groups, task_map.m):
        for block in range(task_map.s_g):
            expected += [(group, block) for group in range(batch, min(batch + task_map.m, task_map.groups))]
    assert order == expected


@many
@given(maps())
def test_kinds_are_balanced(made):
    """While all kinds are at work, any run of slots has its share of ITrans and OTrans tasks, up to one task."""
    _, task_map = made
    m, s_i, s_g, s_o, delay = task_map.m, task_map.s_i, task_map.s_g, task_map.s_o, task_map.delay
    inputs = (task_map.groups - 1) * s_i + task_map.last_s_i
    steady = [
        batch
        for batch in range(task_map.groups // m)
        if batch >= delay and task_map.lead + (batch + 1) * m * s_i <= inputs
    ]
    counts = {}  # slot -> [ITrans tasks before its GEMM tasks, OTrans tasks up to its end]
    seen, slot = [0, 0], None
    for kind, group, block in task_map.tasks().tolist():
        if kind == GEMM and (group // m, block) != slot:
            slot = (group // m, block)
            counts[slot] = [seen[0], 0]
        seen[0] += kind == INPUT
        seen[1] += kind == OUTPUT
        if slot is not None:
            counts[slot][1] = seen[1]
    slots = [(batch, block) for batch in steady for block in range(s_g)]
    for a, b in itertools.combinations(slots[:: max(1, len(slots) // 20)], 2):
        distance = (b[0] - a[0]) * s_g + b[1] - a[1]
        for which, size in ((0, s_i), (1, s_o)):
            assert abs(counts[b][which] - counts[a][which] - distance * m * size / s_g) < 1 + 1e-9


@many
@given(maps())
def test_waits_are_for_lower_positions_and_complete(made):
    """A task's waits name all that it depends on; every task they wait for stands before it; targets are reached."""
    arguments, task_map = made
    raised = [0] * len(task_map.targets())
    tasks, waits, raises = task_map.tasks().tolist(), task_map.waits().tolist(), task_map.raises().tolist()
    for (kind, group, _), wanted, raise_ in zip(tasks, waits, raises, strict=True):
        named = {counter: value for counter, value in wanted if counter >= 0}
        assert all(raised[counter] >= value for counter, value in named.items())  # run alone, nobody ever waits
        place = {INPUT: 1 + 3 * group, GEMM: 2 + 3 * group, OUTPUT: 3 + 3 * group}
        expected = {}
        if kind == INPUT and group >= task_map.v_groups:  # V's readers of the group that had this place
            expected[2 + 3 * (group - task_map.v_groups)] = task_map.s_g
        if kind == GEMM:
            expected[place[INPUT]] = inputs_of(task_map, group)
            if arguments["filter"]:
                expected[0] = task_map.n_f
            if group >= task_map.m_groups:
                expected[3 + 3 * (group - task_map.m_groups)] = outputs_of(task_map, group - task_map.m_groups)
        if kind == OUTPUT:
            expected[place[GEMM]] = task_map.s_g
        assert named == expected
        assert raise_ == place.get(kind, 0)
        raised[raise_] += 1
    assert raised == task_map.targets()
    if not arguments["bounded"]:
        assert task_map.v_groups == task_map.m_groups == task_map.groups


class Deadlock(AssertionError):
    pass


def simulate(tasks, waits, raises, workers, pick):
    """Runs a map on workers that move one step at a time: take a position, pass the waits, finish. `pick` chooses who
    moves next among those who can, so it may delay anybody for as long as others can move. Returns the counters."""
    counters = [0] * (max(raises) + 1)
    position, taken = 0, 0
    holds: dict[int, tuple[int, bool]] = {}  # worker -> (position, whether its waits are over)

    def free(position):
        return all(counter < 0 or counters[counter] >= value for counter, value in waits[position])

    while taken < len(tasks) or holds:
        able = [worker for worker, (at, running) in holds.items() if running or free(at)]
        if taken < len(tasks) and len(holds) < workers:
            able.append(next(worker for worker in range(workers) if worker not in holds))
        if not able:
            raise Deadlock(f"{len(holds)} workers wait for one another")
        worker = pick(able, holds)
        if worker not in holds:
            holds[worker] = (taken, False)
            taken += 1
            continue
        position, running = holds[worker]
        if running:
            counters[raises[position]] += 1
            del holds[worker]
        else:
            holds[worker] = (position, True)
    return counters


def newest_first(able, holds):
    """Whoever holds the lowest position is served last: the one on whom all wait."""
    return max(able, key=lambda worker: holds.get(worker, (10**9, False))[0])


def oldest_first(able, holds):
    return min(able, key=lambda worker: holds.get(worker, (10**9, False))[0])


@many
@given(maps(max_tiles=120, max_tasks=250), st.integers(1, 200), st.integers(0, 2**32))
def test_no_deadlock_with_any_number_of_workers_and_any_delays(made, workers, seed):
    _, task_map = made
    tasks, waits, raises = task_map.tasks().tolist(), task_map.waits().tolist(), task_map.raises().tolist()
    generator = random.Random(seed)
    for pick in (newest_first, oldest_first, lambda able, holds: generator.choice(able)):
        assert simulate(tasks, waits, raises, workers, pick) == task_map.targets()


@many
@given(maps())
def test_the_roles_have_the_order_of_the_map(made):
    """The CUDA kernel's two tickets: GEMM tasks, and all others, each a part of the map in its order."""
    _, task_map = made
    tasks = task_map.tasks()
    is_gemm = tasks[:, 0] == GEMM
    assert (task_map.gemm_tasks() == tasks[is_gemm]).all()
    assert (task_map.stream_tasks() == tasks[~is_gemm]).all()
    assert len(task_map.gemm_tasks()) + len(task_map.stream_tasks()) == len(task_map)


def simulate_roles(task_map, blocks, held, pick):
    """Plays the CUDA kernel. A block has two roles, each of which takes its next tickets, up to `held` at a time,
    and goes through them in order: a task passes its waits only after those taken before it. It may finish later."""
    tasks, waits, raises = (table.tolist() for table in (task_map.tasks(), task_map.waits(), task_map.raises()))
    counters = [0] * (max(raises) + 1)
    orders = [[i for i, task in enumerate(tasks) if (task[0] == GEMM) == gemm] for gemm in (False, True)]
    taken, left = [0, 0], len(tasks)
    queues = [([], []) for _ in range(2 * blocks)]  # of a block's role: waiting (in order), running
    while left:
        able = []  # (position, worker, whether it runs)
        for worker, (waiting, running) in enumerate(queues):
            order, ticket = orders[worker % 2], taken[worker % 2]
            if ticket < len(order) and len(waiting) + len(running) < held:
                able.append((order[ticket] + 0.5, worker, None))
            able += [(position, worker, True) for position in running]
            if waiting and all(c < 0 or counters[c] >= value for c, value in waits[waiting[0]]):
                able.append((waiting[0], worker, False))
        if not able:
            raise Deadlock(f"{left} tasks are left")
        position, worker, running = pick(able)
        role = worker % 2
        if running is None:
            queues[worker][0].append(orders[role][taken[role]])
            taken[role] += 1
        elif running:
            counters[raises[position]] += 1
            queues[worker][1].remove(position)
            left -= 1
        else:
            queues[worker][1].append(queues[worker][0].pop(0))
    return counters


@settings(max_examples=60)
@given(maps(max_tiles=80, max_tasks=120), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_no_deadlock_with_a_ticket_per_role(made, blocks, held, seed):
    _, task_map = made
    generator = random.Random(seed)
    for pick in (max, min, generator.choice):
        assert simulate_roles(task_map, blocks, held, lambda able, pick=pick: pick(able)) == task_map.targets()


def test_the_simulation_notices_a_deadlock():
    """A child before its parent hangs one worker, and not two: the order of the map is what the proof stands on."""
    task_map = _C.TaskMap(4, 1, 1, 4, input=(4, 1), gemm=(36, 1), output=(4, 1))
    tasks, waits, raises = (table.tolist() for table in (task_map.tasks(), task_map.waits(), task_map.raises()))
    assert [kind for kind, _, _ in tasks] == [INPUT, GEMM, OUTPUT]
    for table in (tasks, waits, raises):
        table[0], table[1] = table[1], table[0]
    with pytest.raises(Deadlock):
        simulate(tasks, waits, raises, 1, oldest_first)
    assert simulate(tasks, waits, raises, 2, oldest_first) == task_map.targets()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": 0}, "tiles is 0; expected 1 to"),
        ({"k": -1}, "k is -1"),
        ({"group_tiles": 0}, "group_tiles is 0"),
        ({"input": (8, 0)}, "input_channels is 0"),
        ({"gemm": (0, 8)}, "gemm_points is 0"),
        ({"filter": (8, 0)}, "filter_filters is 8"),
        ({"d_ig": -1}, "d_ig is -1"),
        ({"d_go": -5}, "d_go is -5"),
        ({"m": 0}, "m is 0"),
        ({"tiles": 2**28, "group_tiles": 1}, "the number of tasks is"),
        ({"tiles": 2**20, "c": 2**12, "k": 2**12, "gemm": (1, 1), "input": (8, 1), "m": 2**9}, "number of tasks|m is"),
    ],
)
def test_impossible_maps_are_refused(change, message):
    arguments = {"tiles": 64, "c": 8, "k": 8, "group_tiles": 16, "input": (8, 8), "gemm": (6, 8), "output": (8, 8)}
    with pytest.raises(ValueError, match=message):
        _C.TaskMap(**{**arguments, **change})
