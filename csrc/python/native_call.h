// A captured call by autograd's own node: made on detached parameters, with a hook on the node of its result.
//
// fastdp/grad_sample/captured_call.py (`Native`) says what the hook does, fastdp/engine/known_calls.py (`NativeCall`) what is known
// of such a call beside its signature.
#pragma once

#include "python_names.h"

#include <vector>

// How it is made; fields of the tuples `KnownCapture` and `NativeCall`.
struct NativeCall {
    PyObject *call, *operands, *data, *learned, *uses;
    PyObject *function;  // torch's
    bool as_it_is;       // whether the data has the form in which it is computed
    bool saves;          // whether uses need the data
    bool own;            // whether the captured call makes it itself (`run_native`)

    NativeCall(PyObject *capture, PyObject *native);
};

// The result, which waits for its gradient.
Ref native_call(const NativeCall &known, PyObject *forward_pass, PyObject *args, PyObject *kwargs);
