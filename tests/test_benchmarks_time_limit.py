"""Limits on the time of a block: what they raise, and what they leave."""

import contextlib
import time

import pytest
import torch
import torch._dynamo.config

from benchmarks.harness import runs


def test_time_limit():
    def work():
        with contextlib.suppress(Exception):  # as a compiler may
            time.sleep(30)
        time.sleep(30)

    with pytest.raises(TimeoutError, match="not ready within 0 s"), runs.time_limit(0.01):
        work()
    late = runs.deadline_of(0.01 - runs.OVERTIME_S)
    for seconds in (30.0, None):
        with pytest.raises(TimeoutError, match=f"not ready: {runs.SPENT}"), runs.time_limit(seconds, late):
            work()
    with runs.time_limit(0.01, runs.deadline_of(600.0)):
        pass
    time.sleep(0.02)  # the alarm of a block that ended in time is off


def test_what_is_interrupted_leaves_pytorch_s_switches_as_they_were():
    """Cleaning up may be interrupted, too: every later size of a model would be compiled."""
    config = torch._dynamo.config
    before = config.automatic_dynamic_shapes

    def compile_for_long():
        config.automatic_dynamic_shapes = not before
        time.sleep(30)

    with pytest.raises(TimeoutError), runs.time_limit(0.01):
        compile_for_long()
    assert config.automatic_dynamic_shapes == before
