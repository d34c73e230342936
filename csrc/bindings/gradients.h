// The choices of gradients as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

void bind_gradients(pybind11::module_& module);
