// Torch calls that a pass of capture knows already; see known_calls.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_known_calls(py::module_ &module);
