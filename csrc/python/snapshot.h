// Whether dicts, lists and tensors still hold what they held; see snapshot.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_snapshot(pybind11::module_ &module);
