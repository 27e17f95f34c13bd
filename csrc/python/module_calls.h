// Calls of modules within a captured forward, past torch's module hooks; see module_calls.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_module_calls(pybind11::module_ &module);
