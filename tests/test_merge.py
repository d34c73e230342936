"""Result files of several GPUs as one: every row once, and nothing of another machine or commit."""

import pytest
from test_benchmarks import HEAD
from test_papers import TINY
from typer.testing import CliRunner

from benchmarks import cli, merge
from benchmarks.harness import results
from benchmarks.papers.common import empty_row

SUITE, OTHER = "papers/cuconv/survey", "papers/textbook/ladder"
FILE = f"{SUITE}.json"


def row(n, layout="nchw", us=1.0, layer=0, **more):
    return empty_row(TINY[layer], n, "ieee", layout) | {"us": us} | more


def write(folder, rows, suite=SUITE, **head):
    results.write(folder / f"{suite}.json", {**HEAD, "suite": suite, "rows": rows, **head})
    return folder


def test_rows_of_several_cards_are_one_file(tmp_path):
    first = write(tmp_path / "c0", [row(1), row(1, "nhwc"), row(1, layer=1)], missing=["x: the suite's time was over"])
    second = write(tmp_path / "c1", [row(8, algorithm="direct")], date="2027-01-01T00:00:00Z", banned={"a": "hung"})
    write(second, [row(1)], OTHER)
    into = tmp_path / "all"
    documents = merge.merge([first, second], into)
    assert {suite: len(its["rows"]) for suite, its in documents.items()} == {SUITE: 4, OTHER: 1}
    found = results.read(into / FILE)
    assert [(each["layer"], each["n"], each["layout"]) for each in found["rows"]] == [
        (TINY[0].layer, 1, "nchw"), (TINY[0].layer, 1, "nhwc"), (TINY[1].layer, 1, "nchw"), (TINY[0].layer, 8, "nchw"),
    ]  # fmt: skip
    assert (found["date"], found["missing"], found["banned"]) == ("2027-01-01T00:00:00Z", [], {"a": "hung"})
    # Again, with more from one of them: what is there counts.
    write(second, [row(64)])
    results.write(second / f"{SUITE}.0.json", {**HEAD, "suite": SUITE, "rows": [row(128)]})
    assert len(merge.merge([second], into)[SUITE]["rows"]) == 6
    assert not (into / f"{SUITE}.0.json").exists()


def test_a_row_with_a_time_is_kept_and_the_last_of_two(tmp_path):
    rows = ([row(1, us=1.0), row(8, us=None), row(64, us=3.0)], [row(1, us=None), row(8, us=2.0), row(64, us=4.0)])
    folders = [write(tmp_path / str(index), its) for index, its in enumerate(rows)]
    found = merge.merge(folders, tmp_path / "all")[SUITE]["rows"]
    assert [each["us"] for each in found] == [1.0, 2.0, 4.0]


def test_a_row_that_lacks_nothing_is_kept_whichever_is_last(tmp_path):
    """Of several GPUs one has measured again what another still has a copy of."""
    late = row(1, us=1.0, failures={"peer": "not begun: the time is spent"})
    folders = [write(tmp_path / "a", [row(1, us=2.0, failures={})]), write(tmp_path / "b", [late])]
    for order in (folders, folders[::-1]):
        (kept,) = merge.merge(order, tmp_path / order[0].name / "all")[SUITE]["rows"]
        assert kept["us"] == 2.0


def test_what_failed_in_one_run_and_was_measured_in_another_did_not_fail(tmp_path):
    name = TINY[0].layer
    failed = [f"{name}, batch 1, ieee: no memory", f"{name}, batch 8, ieee: no memory", "net fp32: the process ended"]
    folders = [write(tmp_path / "a", [row(8, us=None)], failed=failed), write(tmp_path / "b", [row(1)])]
    assert merge.merge(folders, tmp_path / "all")[SUITE]["failed"] == failed[1:]


def test_rows_of_an_algorithm_that_was_asked_for_are_told_apart(tmp_path):
    launches = [row(1, us=None, algorithm=name, kernels=[]) for name in ("direct", "two_stage")]
    counters = [row(1, algorithm="winograd_megakernel", variant=name) for name in ("M 16", "in series")]
    network = {"network": "lenet5", "batch": 1, "class": "ieee", "us": 1.0, "peers": {}, "swapped": 1, "total": 1}
    network |= {"logits_error": 0.0, "top1_agreement": 1.0}
    networks = [network | {"mode": mode} for mode in ("direct", "two_stage")]
    soaks = [row(1, us=None, algorithm=name, launches=10) for name in ("direct", "two_stage")]
    for rows in (launches, counters, networks, soaks):
        folders = [write(tmp_path / "a", rows[:1]), write(tmp_path / "b", rows)]
        assert merge.joined([folder / FILE for folder in folders])["rows"] == rows


def test_rows_of_written_weights_are_told_apart(tmp_path):
    made = {"mode": "eager", "class": "fp32", "count": 1, "failures": 0, "old": 0, "error_over_bound": 0.5}
    rows = [made | {"write": name} for name in ("copy_", "data")]
    folders = [write(tmp_path / "a", rows[:1], "soak_weights"), write(tmp_path / "b", rows, "soak_weights")]
    assert merge.joined([folder / "soak_weights.json" for folder in folders])["rows"] == rows


def test_rows_of_an_older_commit_are_kept_where_nothing_is_newer(tmp_path):
    into = write(tmp_path / "all", [row(1), row(8), row(64, commit="first")], commit="second")
    new = write(tmp_path / "new", [row(1, us=2.0)])
    arguments = ["merge", "--into", str(into), str(new)]
    assert CliRunner().invoke(cli.app, arguments).exit_code != 0
    assert CliRunner().invoke(cli.app, [*arguments, "--keep-older"]).exit_code == 0
    found = results.read(into / FILE)
    assert found["commit"] == HEAD["commit"]
    kept = [(each["n"], each["us"], each.get("commit")) for each in found["rows"]]
    assert kept == [(1, 2.0, None), (8, 1.0, "second"), (64, 1.0, "first")]
    # Again, with one that was kept: it is of this commit now. Of the same commit a row with a time is kept.
    write(new, [row(8, us=3.0), row(1, us=None)])
    found = merge.merge([new], into, keep_older=True)[SUITE]["rows"]
    kept = [(each["n"], each["us"], each.get("commit")) for each in found]
    assert kept == [(1, 2.0, None), (8, 3.0, None), (64, 1.0, "first")]
    write(new, [row(1)], driver="another")
    with pytest.raises(ValueError, match=f"all/{FILE}: driver is '{HEAD['driver']}'; expected 'another'"):
        merge.merge([new], into, keep_older=True)


def test_an_older_row_with_all_rivals_is_kept_before_a_newer_one_without(tmp_path):
    late = "not begun: the time is spent"
    new = [row(1, failures={"peer": late}), row(8, us=None), row(64, failures={"energy": late, "tf32_peer": late})]
    new.append(row(128, us_q25=1.0, us_q75=1.6, sm_mhz=1980.0))  # somebody else had the GPU
    old = [row(n, us=2.0, failures={"peer": "RuntimeError: no memory"}) for n in (1, 8, 64, 128)]
    into = write(tmp_path / "all", old, commit="second")
    found = merge.merge([write(tmp_path / "new", new)], into, keep_older=True)[SUITE]["rows"]
    assert [(each["n"], each["us"], each.get("commit")) for each in found] == [
        (64, 1.0, None), (1, 2.0, "second"), (8, 2.0, "second"), (128, 2.0, "second")
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gpu", "commit", "driver"])
def test_files_of_another_machine_or_commit_are_refused(tmp_path, name):
    folders = [write(tmp_path / "a", [row(1)]), write(tmp_path / "b", [row(8)], **{name: "another"})]
    with pytest.raises(ValueError, match=rf"b/{FILE}: {name} is 'another'; expected '{HEAD[name]}'"):
        merge.merge(folders, tmp_path / "all")
    assert not (tmp_path / "all").exists()
    arguments = ["merge", "--into", str(tmp_path / "all"), *map(str, folders)]
    assert CliRunner().invoke(cli.app, arguments).exit_code != 0
    assert CliRunner().invoke(cli.app, arguments[:-1]).exit_code == 0
    with pytest.raises(ValueError, match="no result file in"):
        merge.merge([tmp_path], tmp_path / "none")
