// Notes on the results of calls that are known. The calls were made: nothing is MISSED from here.
#pragma once

#include "seen_tensors.h"

// `layout.tag` and what `aliasing` notes of a result without notes that matter. described, place: see `SeenTensor`.
void tag(PyObject *tensor, PyObject *layout, PyObject *moment, SeenTensors &seen, PyObject *described,
         Py_ssize_t place);

// A result of a known call: data with this layout, or (None) a constant.
void note_result(PyObject *tensor, PyObject *layout, PyObject *moment, SeenTensors &seen, PyObject *described,
                 Py_ssize_t place);
