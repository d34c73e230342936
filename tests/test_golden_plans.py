"""The planner's answers are those of tests/golden/plans.json (tools/golden_plans.py rewrites it)."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import golden_plans  # noqa: E402


def test_plans_are_the_golden_ones():
    differences = golden_plans.compare()
    assert not differences, f"{len(differences)} answers changed; if meant, rewrite:\n" + "\n".join(differences[:20])


def test_the_file_covers_every_algorithm_class_device_and_pass():
    cases = list(golden_plans.read())
    assert {device for _, device, _, _ in cases} == set(golden_plans.devices())
    assert {row[11] for row, _, _, _ in cases} == set(golden_plans.CLASSES)
    assert {pass_ for _, _, pass_, _ in cases} == set(golden_plans.PASSES)
    assert {found["auto"] for _, _, pass_, found in cases if pass_ == "backward_input"} == {
        "torch",
        "phases",
        "together",
    }
    planned = {name for *_, found in cases for name, value in found.items() if isinstance(value, tuple)}
    assert planned >= {row["name"] for row in golden_plans._C.algorithms()} - {"null"}


@pytest.mark.parametrize("change", ["cost", "workspace", "configuration", "choice", "reason"])
def test_a_changed_answer_is_a_difference(tmp_path, change):
    golden = json.loads(golden_plans.GOLDEN.read_text())
    golden["backward_weight"] = golden["backward_input"] = []
    case = golden["forward"] = [next(case for case in golden["forward"] if "stride" in case)]
    plan = next(value for value in case[0] if isinstance(value, list))
    if change == "cost":
        plan[2] *= 1.02
    elif change == "workspace":
        plan[1] += 4
    elif change == "configuration":
        golden["configs"][plan[0]] += "!"
    elif change == "choice":
        case[0][2] = "nothing"
    else:
        case[0][case[0].index("stride")] = "dtype"
    path = tmp_path / "plans.json"
    path.write_text(json.dumps(golden))
    assert golden_plans.compare(path)
