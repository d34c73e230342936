"""`fastconv bench all`: its commands exist, queues go on beside each other, and what a run leaves the next one does."""

import itertools
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
import typer
from test_benchmarks import HEAD, layer_row
from typer.core import TyperGroup
from typer.testing import CliRunner

from benchmarks import everything, papers
from benchmarks.cli import app
from benchmarks.harness import parts, results
from benchmarks.networks.forms import MODES
from benchmarks.networks.suite import contenders_of
from benchmarks.phases import PHASES, Phase, Queue, Step
from fastconv.models.layers import SETS

ROW = layer_row("res1", "fp32", 1.0, 2.0)
STEPS = [its for phase in PHASES.values() for queue in phase.queues for its in queue]
# In place of the benchmarks' command line: `other` is a file to wait for, `code` the exit code. Its row is named after
# it, and stands behind those that its file has.
STEP = """
import json, os, pathlib, sys, time
_, _, name, other, code, *options = sys.argv
path = pathlib.Path(options[options.index("--json") + 1])
parts = path.with_suffix("").parts
at = parts.index("papers") if "papers" in parts else -1
suite, folder = "/".join(parts[at:]), pathlib.Path(*parts[:at])
folder = folder.parent if folder.name.startswith("gpu") else folder
print(name, os.environ.get("CUDA_VISIBLE_DEVICES"), *options)
(folder / "threads").write_text(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
(folder / f"{name}.turns").write_text(os.environ.get("FASTCONV_BENCH_TURNS", ""))
(folder / name).touch()
end = time.monotonic() + 30
while other and not (folder / other).exists() and time.monotonic() < end:
    time.sleep(0.01)
head, row = {**json.loads(HEAD), "suite": suite}, {**json.loads(ROW), "layer": name}
held = json.loads(path.read_text()) if path.exists() else {**head, "rows": []}
rows = [*held["rows"], row] if held["commit"] == head["commit"] and "--resume" in options else [row]
if code in ("0", "3") and (not other or (folder / other).exists()):
    path.write_text(json.dumps({**head, "rows": rows, **({"missing": ["more"]} if name == "short" else {})}))
sys.exit(int(code))
"""


# The same, of a step that does not end; beside the result file is the number of the process that it started.
ENDLESS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
file.with_suffix(".new").write_text(str(child.pid))
os.replace(file.with_suffix(".new"), file.with_suffix(".pid"))
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    literals = f"HEAD, ROW = {json.dumps(HEAD)!r}, {json.dumps(ROW)!r}\n"
    monkeypatch.setattr(everything, "_STEP", literals + STEP)


def step(name: str, other: str = "", code: int = 0, suite: str = "", beside: tuple[str, ...] = ()) -> Step:
    return Step(suite or name, (name, other, str(code)), beside=beside)


def run(
    phases: list[tuple[Queue, ...] | Phase], folder: Path, budget_s: float = 600.0, gpus: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:  # fmt: skip
    said: list[str] = []
    known = [phase if isinstance(phase, Phase) else Phase(phase) for phase in phases]
    wrong = everything.run(known, folder, HEAD, budget_s, said.append, gpus)
    return wrong, [line.split(":")[0] for line in said]


def test_steps_are_chosen_by_words_of_their_commands() -> None:
    networks = PHASES["networks"]
    (queue,) = networks.only(["resnet50", "unet"]).queues
    assert [its.command[2] for its in queue] == ["resnet50", "unet"]
    (queue,) = networks.only(["bf16"]).queues
    assert 0 < len(queue) < len(networks.queues[0])  # of those whose classes are fewer
    assert networks.only([]) == networks
    assert networks.only(["resnet"]).queues == ()
    assert PHASES["alone"].only(["host"]) == Phase(((Step("host", ("host",)),),), quiet=True)


@pytest.mark.parametrize("steps", ["resnet", "resnet50,resnet"])
def test_unknown_words_are_refused(steps: str) -> None:
    result = CliRunner().invoke(app, ["all", "--phases", "networks", "--steps", steps])
    assert result.exit_code != 0
    assert "steps is 'resnet'" in result.output + str(result.exception)


def test_phases_without_such_steps_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[Phase] = []
    monkeypatch.setattr(everything, "run", lambda phases, *_: begun.extend(phases) or [])
    monkeypatch.setattr(everything, "device_named", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**9))
    monkeypatch.setattr("fastconv.environment.describe", lambda suite, device: HEAD)
    arguments = ["all", "--phases", "layers,networks,alone", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--steps", "resnet50"])
    assert result.exit_code == 0, result.output
    assert begun == [PHASES[name].only(["resnet50"]) for name in ("networks", "alone")]
    begun.clear()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert begun == [PHASES[name] for name in ("layers", "networks", "alone")]


def test_every_step_is_a_command_with_these_options(tmp_path: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for phase in PHASES.values():
        suites = [name for queue in phase.queues for name in {its.suite for its in queue}]
        assert len(suites) == len(set(suites))  # nobody else writes the file meanwhile
        for its in [its for queue in phase.queues for its in queue]:
            name, *arguments = its.arguments(tmp_path, 5.0)
            context = group.commands[name].make_context(name, arguments)
            assert (context.params["budget"], context.params["resume"]) == (5.0, True)
            if its.folder:
                assert Path(context.params["folder"]) == tmp_path
            else:
                path = tmp_path / f"{its.suite}.json"
                assert Path(context.params["json_path"]) == path  # a str in some of typer


def options(step: Step) -> dict[str, list[str]]:
    _, *arguments = step.command
    return {name: value.split(",") for name, value in zip(arguments[::2], arguments[1::2], strict=True)}


def test_every_rival_of_networks_is_timed_beside_ours() -> None:
    peers: set[str] = set()
    for its in STEPS:
        if its.command[0] == "networks":
            asked = options(its)
            assert asked.get("--suite", ["networks"]) == [its.suite]
            modes = asked.get("--modes", list(MODES))
            found = contenders_of(modes, asked["--peers"], ["nchw", "nhwc"], ["nhwc"])
            assert {contender.ours for contender in found} == {True, False}
            peers |= set(asked["--peers"])
    assert peers >= {"torch_eager", "torch_graph", "folded_graph", "cudnn_best_layers"}
    assert peers >= {f"{form}_{mode}" for form in ("compile", "frozen") for mode in ("reduce_overhead", "max_autotune")}


def test_what_others_time_beside_the_best_cudnn_layers_can_be_profiled() -> None:
    """The bound is of a form whose kernels can be told apart."""
    (queue,) = PHASES["networks_cudnn"].queues
    for its in queue:
        found = contenders_of([], options(its)["--peers"], ["nhwc"], ["nhwc"])
        assert any(contender.form.mode in (None, "default") and not contender.has_graph for contender in found)


@pytest.mark.parametrize("direction", ["input", "weight"])
def test_gradients_are_measured_in_every_class_once(direction: str) -> None:
    classes: dict[str, list[str]] = {}
    for its in [*PHASES["gradients"].queues[0], *PHASES["gradients_others"].queues[0]]:
        if its.suite.endswith(f"backward_{direction}"):
            classes.setdefault(its.suite, []).extend(options(its)["--classes"])
    assert len(classes) == 5
    assert all(sorted(its) == sorted(results.CLASSES) for its in classes.values())


def test_every_layer_set_is_measured() -> None:
    """But those that belong to a source's experiments."""
    measured = {set_name for its in STEPS if its.command[0] == "layers" for set_name in options(its)["--set"]}
    assert measured == {*SETS} - {"lenet5"}


def test_the_published_layers_are_measured_in_every_class_at_both_batches_once() -> None:
    steps = [options(its) for its in STEPS if its.suite == "layers"]
    found = [
        (n, cls, layout)
        for its in steps
        for n in its["--batch"]
        for cls in its["--classes"]
        for layout in its["--layouts"]
    ]
    assert sorted(found) == sorted(itertools.product(["64", "1"], results.CLASSES, ["nchw", "nhwc"]))


class _Asked(Exception):
    """For a file; the message is its suite."""


def test_a_step_of_a_source_is_the_part_that_writes_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def out(options: papers.Options, name: str) -> Path:
        raise _Asked(name)

    monkeypatch.setattr(papers.Options, "out", out)
    for step in [its for its in STEPS if its.folder]:
        _, source, _, part, *_ = step.command
        with pytest.raises(_Asked, match=f"^{step.suite}$"):
            papers.run(source, papers.Options(device="cuda", parts=[part]))


def test_queues_go_on_beside_each_other_and_steps_one_after_the_other(tmp_path: Path) -> None:
    phase = ((step("first", other="second"), step("third")), (step("second", other="first"),))
    wrong, said = run([phase, ((step("last", other="third"),),)], tmp_path)
    assert wrong == []
    assert said.index("third") > said.index("first")
    assert said[-1] == "last"
    assert "--resume" in shlex.split((tmp_path / "first.log").read_text())
    first, second = ((tmp_path / f"{name}.turns").read_text() for name in ("first", "second"))
    assert first == second != ""  # one lock: two queues never time at once


def test_several_gpus_share_the_steps_and_their_files_are_joined(tmp_path: Path) -> None:
    """Either waits for the other: both begin at once, though one queue has them."""
    queue = step("first", other="second", suite="layers"), step("second", other="first", suite="layers")
    wrong, said = run([(queue,)], tmp_path, gpus=("4", "GPU-5"))
    assert (wrong, said) == ([], ["layers", "layers"])
    logs = sorted(shlex.split((tmp_path / f"gpu{number}" / "layers.log").read_text())[:2] for number in range(2))
    assert {tuple(log) for log in logs} in (
        {("first", "4"), ("second", "GPU-5")},
        {("first", "GPU-5"), ("second", "4")},
    )
    assert {row["layer"] for row in results.read(tmp_path / "layers.json")["rows"]} == {"first", "second"}
    assert {(tmp_path / f"{name}.turns").read_text() for name in ("first", "second")} == {
        ""
    }  # no GPU waits for another


def test_processes_that_compile_beside_each_other_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything.os, "cpu_count", lambda: 64)
    for name in everything.THREADS:
        monkeypatch.delenv(name, raising=False)
    for gpus, threads in ((), "16"), (("0", "1"), "8"):
        run([((step(f"of{len(gpus)}"),),)], tmp_path, gpus=gpus)
        assert (tmp_path / "threads").read_text() == threads
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    run([((step("asked"),),)], tmp_path)
    assert (tmp_path / "threads").read_text() == "3"


def test_a_gpu_knows_what_the_others_have_measured(tmp_path: Path) -> None:
    results.write(tmp_path / "layers.json", {**HEAD, "suite": "layers", "rows": [ROW]})
    results.write(tmp_path / "gpu1" / "layers.json", {**HEAD, "suite": "layers", "commit": "another", "rows": [ROW]})
    for name in ("first", "second"):
        assert run([((step(name, suite="layers"),),)], tmp_path, gpus=("0", "1")) == ([], ["layers"])
    assert [row["layer"] for row in results.read(tmp_path / "layers.json")["rows"]] == ["res1", "first", "second"]


def test_a_quiet_phase_has_the_host_for_itself(tmp_path: Path) -> None:
    """Its steps run beside each other, of which either waits for the other, and beside nothing else."""
    quiet = Phase(((step("alone", other="too"), step("too", other="alone")),), quiet=True)
    phases: list[tuple[Queue, ...] | Phase] = [((step("before"),),), quiet, ((step("after"), step("behind")),)]
    wrong, said = run(phases, tmp_path, gpus=("0", "1"))
    assert (wrong, said[0]) == ([], "before")
    assert (sorted(said[1:3]), sorted(said[3:])) == (["alone", "too"], ["after", "behind"])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("all", ["5", "6", "9"]), ("2,0", ["9", "5"]), ("0,3", None), ("1", None), ("1,1", None), ("0,x", None)],
)
def test_gpus_are_named_by_their_numbers(
    asked: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,9")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "H100")
    if expected is not None:
        assert everything._visible(asked) == expected
        return
    with pytest.raises(ValueError, match=f"gpus is '{asked}'; expected several of 0, 1, 2"):
        everything._visible(asked)


def test_gpus_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ["H100", "H200"][number])
    with pytest.raises(ValueError, match="H100 and H200; expected GPUs of one kind"):
        everything._visible("all")


def test_what_went_wrong_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    wrong, said = run([((step("bad", code=3), step("short")), (step("good"),))], tmp_path)
    assert len(wrong) == 2
    assert wrong[0].startswith("bad: exit code 3")
    assert str(tmp_path / "bad.log") in wrong[0]
    assert wrong[1] == "short: 1 not measured, the time was over"
    assert sorted(said) == ["bad", "good", "short"]


def test_a_step_that_does_not_end_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "_STEP", ENDLESS)
    monkeypatch.setattr(everything, "SHORTEST_S", 0.0)
    monkeypatch.setattr(everything, "GRACE_S", 1.0)
    wrong, _ = run([((step("endless"),),)], tmp_path, budget_s=2.0)
    assert wrong == [f"endless: exit code none, it was ended long after its time; {tmp_path / 'endless.log'} says why"]
    assert ends(tmp_path / "endless.pid")


def ends(file: Path) -> bool:
    """Whether the process whose number is in the file ends soon."""
    status = Path(f"/proc/{file.read_text()}/stat")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_who_ends_the_run_ends_its_steps(tmp_path: Path) -> None:
    program = f"""
import json, pathlib, sys
from benchmarks import everything
everything._STEP = {ENDLESS!r}
phase = everything.Phase((tuple(everything.Step(name, (name,)) for name in ("endless", "next")),))
everything.run([phase], pathlib.Path({str(tmp_path)!r}), json.loads({json.dumps(HEAD)!r}), 600.0, print)
"""
    process = processes.Forked([sys.executable, "-c", program])
    try:
        begun, end = tmp_path / "endless.pid", time.monotonic() + 60
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert ends(begun)
        assert not (tmp_path / "next.log").exists()
    finally:
        process.kill()


def test_nothing_begins_when_the_time_is_spent(tmp_path: Path) -> None:
    wrong, said = run([((step("late"),),)], tmp_path, budget_s=everything.SHORTEST_S / 2)
    assert (wrong, said) == (["late: not begun, the time is spent"], [])


@pytest.mark.parametrize("gpus", [(), ("0", "1")])
def test_a_step_that_the_file_has_all_of_is_not_begun_again(tmp_path: Path, gpus: tuple[str, ...]) -> None:
    """Nor one in which something cannot run; but one that failed, or lacks something, is."""
    steps = (*map(step, ("once", "short")), step("bad", code=1), step("untimed", code=everything.UNTIMED))
    for _ in range(2):
        wrong, said = run([(steps,)], tmp_path, gpus=gpus)
        assert sorted(said) == ["bad", "once", "short", "untimed"]
        wrong = sorted(line.split(":")[0] for line in wrong if "exit code 3" not in line)
        assert wrong == ["bad", "short"]
    for name, count in (("once", 1), ("short", 2), ("bad", 2), ("untimed", 1)):
        assert sum(log.read_text().count("--json") for log in tmp_path.rglob(f"{name}.log")) == count
    document = results.read(tmp_path / "once.json")
    results.write(tmp_path / "once.json", {**document, "commit": "another"})
    run([(steps[:1],)], tmp_path, gpus=gpus)
    assert sum(log.read_text().count("--json") for log in tmp_path.rglob("once.log")) == 2


def test_a_step_that_ended_behind_the_time_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "SHORTEST_S", 0.0)
    monkeypatch.setattr(everything, "_STEP", "import time\ntime.sleep(1)\n" + everything._STEP)
    (line,), _ = run([((step("late"),),)], tmp_path, budget_s=0.5)
    assert line == "late: ended behind the time; what it passed over is left to the next run"
    assert "done" not in results.read(tmp_path / "late.json")


def test_a_gpu_has_the_files_beside_and_what_it_adds_to_them_is_joined(tmp_path: Path) -> None:
    """What a step reads of other suites: here `one` adds a row to the file of another."""
    added = """
beside = path.with_name("layers.json")
found = json.loads(beside.read_text())
beside.write_text(json.dumps({**found, "rows": [*found["rows"], {**json.loads(ROW), "layer": "added"}]}))
"""
    everything._STEP = everything._STEP.replace("if code in", f"{added}if code in")
    results.write(tmp_path / "layers.json", {**HEAD, "suite": "layers", "rows": [ROW]})
    assert run([((step("one", beside=("layers", "absent")),),)], tmp_path, gpus=("0", "1")) == ([], ["one"])
    assert [row["layer"] for row in results.read(tmp_path / "layers.json")["rows"]] == ["res1", "added"]
    assert not list(tmp_path.rglob("absent.json"))


def test_what_a_run_left_that_was_ended_from_outside_is_joined(tmp_path: Path) -> None:
    """Of a GPU that does not measure the suite again, too."""
    left = {**HEAD, "suite": "layers", "rows": [ROW]}
    results.write(tmp_path / "gpu1" / "layers.json", left)
    (tmp_path / "gpu1" / "broken.json").write_text("{")
    (line,), _ = run([((step("other"),),)], tmp_path, gpus=("0", "1"))
    assert "Expecting" in line
    assert results.read(tmp_path / "layers.json")["rows"] == [ROW]


@pytest.mark.parametrize("gpus", [(), ("0", "1")])
def test_files_of_the_sources_are_joined_and_resumed_where_they_lie(tmp_path: Path, gpus: tuple[str, ...]) -> None:
    suites = "papers/cuconv/survey", "papers/textbook/ladder"
    for suite in suites:
        results.write(tmp_path / f"gpu1/{suite}.json", {**HEAD, "suite": suite, "rows": [ROW]})
    steps = tuple(step(Path(suite).name, suite=suite) for suite in suites)
    for _ in range(2):
        wrong, said = run([(steps,)], tmp_path, gpus=gpus)
        assert (wrong, sorted(said)) == ([], [*suites])
        for its in steps:
            document = results.read(tmp_path / f"{its.suite}.json")
            assert [row["layer"] for row in document["rows"]] == ["res1", Path(its.suite).name]
            assert document["done"] == [its.name]
    logs = [log.read_text() for log in tmp_path.rglob("papers/*/*.log")]
    assert [log.count("--json") for log in logs] == [1, 1]  # the second run passes them over


def test_a_file_that_breaks_the_contract_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    results.write(tmp_path / "one.json", {**HEAD, "suite": "one", "rows": [{**ROW, "us": "soon"}]})
    (line,), said = run([((step("one"), step("two")),)], tmp_path, gpus=("0", "1"))
    assert line.startswith(f"one: {tmp_path / 'one.json'}: row 0: us is 'soon'")
    assert said == ["two"]


def test_the_file_of_all_has_what_its_parts_have_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PERIOD_S", 0.01)
    path, rows = tmp_path / "host.json", [ROW, ROW | {"layer": "1x1"}]

    def measure(part: int, out: str) -> results.Document:
        document = {**HEAD, "rows": [rows[part]], **({"missing": ["more"]} if part else {})}
        results.write(out, document)
        end = time.monotonic() + 30
        while len(results.read(path)["rows"]) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(results.read(path)["rows"]) == 2
        return document

    results.write(path, {**HEAD, "rows": []})
    document = parts.run(path, HEAD, ("layer", "class"), 2, measure)
    assert document["rows"] == results.read(path)["rows"]
    assert (len(document["rows"]), document["missing"]) == (2, ["more"])
    assert [file.name for file in tmp_path.iterdir()] == ["host.json"]


def test_parts_of_a_run_that_was_ended_are_found_by_the_next(tmp_path: Path) -> None:
    key, path = ("layer", "class"), tmp_path / "host.json"
    results.write(tmp_path / "host.1.json", {**HEAD, "rows": [ROW]})
    results.write(tmp_path / "host.0.json", {**HEAD, "commit": "another", "rows": [ROW | {"layer": "1x1"}]})
    document = parts.run(path, HEAD, key, 2, lambda part, out: json.loads(Path(out).read_text()))
    assert [row["layer"] for row in document["rows"]] == ["res1"]
    assert [file.name for file in tmp_path.iterdir()] == ["host.json"]
