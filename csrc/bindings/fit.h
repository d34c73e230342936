// What `python -m benchmarks fit` asks of the planner: its fitted constants, and what algorithms cost with them.
#pragma once

#include <pybind11/pybind11.h>

void bind_fit(pybind11::module_& module);
