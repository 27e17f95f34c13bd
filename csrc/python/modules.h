// What a step asks of all modules of a model; see modules.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_modules(pybind11::module_ &module);
