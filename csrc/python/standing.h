// Whether what stands in dicts and lists is what stood there; see standing.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_standing(pybind11::module_ &module);
