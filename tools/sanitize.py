"""Every kernel under compute-sanitizer: the tests marked `sanitize`, each algorithm and tool in a process of its own.

usage: python tools/sanitize.py [--tools memcheck,...] [--only winograd_f4,...] [--jobs 8] [--timeout 600] [--logs DIR]

Prints a line per run and a table at the end. Exit status 1 if a tool reports anything that is not listed in KNOWN, if a
test fails, or if nothing could be run. memcheck and initcheck see every tensor as an allocation of its own, so that
reading past one is noticed; initcheck has to see all kernels (it must know what they wrote), the two about
synchronisation look at ours alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
OURS_ALONE = ("--kernel-name", "kernel_substring=fastconv")
OPTIONS: dict[str, tuple[str, ...]] = {"racecheck": OURS_ALONE, "synccheck": OURS_ALONE}
ENDS_KERNELS = ("synccheck",)  # a kernel that it reports does not run on; the test that launched it fails
REPORTED = 9  # our exit status for compute-sanitizer: the tests passed, the tool has something to say

# Reports that are known to be false: (tool, regular expression on the report) -> why. They are counted in the table.
KNOWN: dict[tuple[str, str], str] = {
    ("racecheck", r"winograd_staged::gemm::(load_stationary|load_work_tiles|multiply_work_tiles)<"): (
        "one lane arrives for its warp behind __syncwarp(), which racecheck does not follow: with all lanes arriving "
        "and nothing else changed it is silent (docs/log/46-sanitizers.md)"
    ),
    ("racecheck", r"winograd_fused::"): (
        "the same: 4 reports in a small program, none with all lanes arriving and nothing else changed"
    ),
    ("synccheck", r"winograd_fused::"): (
        "the named barrier of the two multiplying warpgroups is reached in two copies of their code, which the tool "
        "takes for divergence; the barrier counts threads (256), not places"
    ),
    ("racecheck", r"implicit_gemm::wgrad::pointwise::find_scales<"): (
        "one lane arrives for its warp behind __syncwarp(), as in the kernels above; not shown by a build of this one"
    ),
    ("racecheck", r"winograd_megakernel::"): (
        "one lane arrives for its warp behind __syncwarp(), as in the kernels above; not shown by a build of this one"
    ),
}


@dataclass(frozen=True)
class Run:
    """One tool on one group of tests."""

    tool: str
    group: str
    test: str
    keyword: str


@dataclass
class Outcome:
    """What came of a run: `status` is clean, known, aborted, errors, failed or timeout. aborted: the tool ended kernels
    at what is known to be false, so that it says nothing of the rest of them."""

    status: str
    seconds: float = 0.0
    passed: int = 0
    reports: list[str] = field(default_factory=list)  # not in KNOWN
    known: int = 0


def reports_of(output: str) -> list[str]:
    """The tool's reports, each with its lines: one begins where the text is not indented."""
    reports: list[list[str]] = []
    for line in output.splitlines():
        if not line.startswith("========= "):
            continue
        text = line[len("========= ") :]
        if not text.strip():  # between reports
            continue
        if text.startswith(" "):
            if reports:
                reports[-1].append(text.strip())
        else:
            reports.append([text.strip()])
    chatter = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application")
    return ["\n".join(report) for report in reports if not report[0].startswith(chatter)]


def judge(tool: str, code: int | None, output: str) -> Outcome:
    """`code`: the exit status; None: it ran out of time."""
    reports = reports_of(output)
    known = [any(name == tool and re.search(what, report) for name, what in KNOWN) for report in reports]
    found = re.search(r"(\d+) passed", output)
    outcome = Outcome("clean", passed=int(found.group(1)) if found else 0, known=sum(known))
    outcome.reports = [report for report, is_known in zip(reports, known, strict=True) if not is_known]
    failed = code not in (0, REPORTED) or re.search(r"\d+ failed", output) is not None
    if code is None:
        outcome.status = "timeout"
    elif tool in ENDS_KERNELS and failed and outcome.known and not outcome.reports:
        outcome.status = "aborted"
    elif failed:
        outcome.status = "failed"
    elif outcome.reports or (code == REPORTED and not outcome.known):
        outcome.status = "errors"
    elif outcome.passed == 0:
        outcome.status = "failed"  # a run that tests nothing shows nothing
    elif outcome.known:
        outcome.status = "known"
    return outcome


def sanitizer() -> str | None:
    """The program, on the path or in the CUDA Toolkit."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    found = (shutil.which(str(home / "bin" / "compute-sanitizer")) for home in homes)
    return shutil.which("compute-sanitizer") or next(filter(None, found), None)


def runs(tools: Sequence[str], only: Iterable[str]) -> list[Run]:
    """Every tool on every algorithm that has a CUDA kernel, on the weight gradient, and on what stands between
    convolutions, the longest runs first."""
    from fastconv import _C

    names = [row["name"] for row in _C.algorithms() if "cuda" in row["devices"] and row["family"] != "library"]
    groups = [
        (f"weight_gradient_{cls}", "tests/test_gradients.py", f"[cuda- and -{cls}]")
        for cls in ("fp32", "tf32", "fp16", "bf16")
    ]
    groups += [(name, "tests/test_algorithms.py", f"[{name}-") for name in names]
    groups += [(name, f"tests/test_{name}.py", "cuda and nhwc") for name in ("group_norm", "pooling", "upsampling")]
    chosen = set(only)
    if unknown := chosen - {group[0] for group in groups}:
        raise SystemExit(f"--only: {', '.join(sorted(unknown))}: expected some of {', '.join(g[0] for g in groups)}")
    return [Run(tool, *group) for tool in tools for group in groups if not chosen or group[0] in chosen]


def execute(run: Run, program: str, gpu: str, timeout: float, logs: Path | None) -> Outcome:
    """Runs it on one GPU and judges what it says; its whole output goes to a file in `logs`."""
    command = [program, "--tool", run.tool, *OPTIONS.get(run.tool, ()), "--error-exitcode", str(REPORTED)]
    command += ["--require-cuda-init=no", "--target-processes", "all", sys.executable, "-m", "pytest"]
    command += ["-m", "sanitize", "-p", "no:cacheprovider", "-k", run.keyword, run.test]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu)
    if run.tool in ("memcheck", "initcheck"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    code: int | None
    try:
        output, _ = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tests, too, not only the tool above them
        output, _ = process.communicate()
        code = None
    if logs is not None:
        (logs / f"{run.tool}_{run.group}.log").write_text(output)
    outcome = judge(run.tool, code, output)
    outcome.seconds = time.monotonic() - start
    return outcome


def describe(run: Run, outcome: Outcome) -> str:
    """A line, and what it is about where it is not clean."""
    text = f"{run.tool:10} {run.group:20} {outcome.status:8} {outcome.passed:4} tests {outcome.seconds:6.1f} s"
    if outcome.known:
        text += f"  {outcome.known} reports known to be false"
    for report in outcome.reports[:3]:
        text += "\n    " + "\n      ".join(report.splitlines()[:3])
    if len(outcome.reports) > 3:
        text += f"\n    and {len(outcome.reports) - 3} more"
    return text


def table(outcomes: dict[Run, Outcome]) -> str:
    """A row per group, a column per tool: clean or aborted (known reports), the number of others, failed, timeout."""
    tools = [tool for tool in TOOLS if any(run.tool == tool for run in outcomes)]
    cells = {(run.group, run.tool): outcome for run, outcome in outcomes.items()}
    lines = [f"{'':20}" + "".join(f"{tool:>14}" for tool in tools)]
    for group in dict.fromkeys(run.group for run in outcomes):
        texts = []
        for tool in tools:
            outcome = cells[group, tool]
            text = {"errors": f"{len(outcome.reports)} errors", "known": f"clean ({outcome.known})"}
            text["aborted"] = f"aborted ({outcome.known})"
            texts.append(text.get(outcome.status, outcome.status))
        lines.append(f"{group:20}" + "".join(f"{text:>14}" for text in texts))
    for (tool, what), why in KNOWN.items():
        lines.append(f"known to be false: {tool}, {what}: {why}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="algorithms, or weight_gradient_fp32, ...")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="runs at a time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--logs", type=Path, help="a folder for their whole output")
    options = parser.parse_args(arguments)
    program = sanitizer()
    if program is None:
        print("compute-sanitizer was not found (it comes with the CUDA Toolkit); nothing was checked")
        return 1
    import torch

    if not torch.cuda.is_available():
        print("PyTorch sees no GPU here; nothing was checked")
        return 1
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        raise SystemExit(f"--tools: {', '.join(sorted(unknown))}: expected some of {', '.join(TOOLS)}")
    todo = runs(tools, filter(None, options.only.split(",")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    outcomes: dict[Run, Outcome] = {}

    def one(run: Run) -> None:
        gpu = gpus[todo.index(run) % len(gpus)]
        outcomes[run] = execute(run, program, gpu, options.timeout, options.logs)
        print(describe(run, outcomes[run]), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, todo))
    print("\n" + table({run: outcomes[run] for run in todo}))
    bad = [run for run in todo if outcomes[run].status not in ("clean", "known", "aborted")]
    print(f"{len(todo)} runs, {len(bad)} with errors")
    return 1 if bad or not todo else 0


if __name__ == "__main__":
    raise SystemExit(main())
