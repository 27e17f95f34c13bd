// Gradients that arrive at native calls in a backward that is like the one before; see arrivals.cpp.
#pragma once

#include "ref.h"

// What a node of autograd calls with its gradients for a native call's context (`captured_call.Native`).
Ref arrival_hook(PyObject *context);

void bind_arrivals(py::module_ &module);
