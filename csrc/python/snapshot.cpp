// Snapshots of the objects in dicts and lists: fastdp/graphs/guards.py compares a whole model, some ten thousand values,
// before every replay.
#include "snapshot.h"
#include "ref.h"

namespace {

PyObject *const REQUIRES_GRAD = interned("requires_grad"), *const DATA_PTR = interned("data_ptr"),
         *const STRIDE = interned("stride"), *const SHAPE = interned("shape"), *const DTYPE = interned("dtype"),
         *const HOOKS = interned("_backward_hooks"), *const POST_HOOKS = interned("_post_accumulate_grad_hooks"),
         *const NUMEL = interned("numel"), *const IS_CONTIGUOUS = interned("is_contiguous");

template <typename Function>
bool each(PyObject *owner, Function function) {
    if (PyDict_Check(owner)) {
        Py_ssize_t place = 0;
        PyObject *key, *value;
        while (PyDict_Next(owner, &place, &key, &value)) {
            if (!function(key) || !function(value)) return false;
        }
        return true;
    }
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(owner); ++place) {
        if (!function(PyList_GET_ITEM(owner, place))) return false;
    }
    return true;
}

// Whether dicts (keys and values in turn) and lists hold the very objects of these lists, in the same order. (Python
// keeps the lists, where its garbage collection sees them.)
bool objects_unchanged(const py::list &owners, const py::list &known) {
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(owners.ptr()); ++number) {
        PyObject *values = PyList_GET_ITEM(known.ptr(), number);
        Py_ssize_t place = 0;
        const bool equal = each(PyList_GET_ITEM(owners.ptr(), number), [&](PyObject *object) {
            return place < PyList_GET_SIZE(values) && PyList_GET_ITEM(values, place++) == object;
        });
        if (!equal || place != PyList_GET_SIZE(values)) return false;
    }
    return true;
}

bool equal(PyObject *found, PyObject *known) {
    const int same = PyObject_RichCompareBool(found, known, Py_EQ);
    if (same < 0) throw Raised{};
    return same != 0;
}

// Whether a tensor is as `known` says: (dict, name, _, tensor, (data_ptr, stride, shape, dtype), requires_grad).
bool is_as_it_was(PyObject *known) {
    PyObject *tensor = PyTuple_GET_ITEM(known, 3), *lies = PyTuple_GET_ITEM(known, 4);
    if (entry(PyTuple_GET_ITEM(known, 0), PyTuple_GET_ITEM(known, 1)) != tensor) return false;
    if (attribute(tensor, REQUIRES_GRAD).get() != PyTuple_GET_ITEM(known, 5)) return false;
    if (is(tensor, HOOKS) || is(tensor, POST_HOOKS)) return false;
    return equal(called(tensor, DATA_PTR).get(), PyTuple_GET_ITEM(lies, 0)) &&
           equal(called(tensor, STRIDE).get(), PyTuple_GET_ITEM(lies, 1)) &&
           equal(attribute(tensor, SHAPE).get(), PyTuple_GET_ITEM(lies, 2)) &&
           equal(attribute(tensor, DTYPE).get(), PyTuple_GET_ITEM(lies, 3));
}

// Whether tensors lie as lists of their addresses, numbers of elements, types and of whether they are contiguous say.
bool memory_unchanged(const py::list &tensors, const py::list &addresses, const py::list &counts, const py::list &types,
            const py::list &contiguous) {
    const auto known = [](const py::list &list, Py_ssize_t place) { return PyList_GET_ITEM(list.ptr(), place); };
    try {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
            PyObject *tensor = known(tensors, i);
            if (attribute(tensor, DTYPE).get() != known(types, i)) return false;
            if (called(tensor, IS_CONTIGUOUS).get() != known(contiguous, i)) return false;
            if (!equal(called(tensor, DATA_PTR).get(), known(addresses, i))) return false;
            if (!equal(called(tensor, NUMEL).get(), known(counts, i))) return false;
        }
        return true;
    } catch (const Raised &) {
        throw py::error_already_set();
    }
}

bool tensors_unchanged(const py::list &held) {
    try {
        for (const py::handle &known : held) {
            if (!is_as_it_was(known.ptr())) return false;
        }
        return true;
    } catch (const Raised &) {
        throw py::error_already_set();
    }
}

}  // namespace

void bind_snapshot(py::module_ &module) {
    module.def("objects_unchanged", &objects_unchanged, "whether dicts and lists hold the same objects");
    module.def("memory_unchanged", &memory_unchanged, "whether tensors have the addresses, sizes and types that are given");
    module.def("tensors_unchanged", &tensors_unchanged, "whether attributes hold the same tensors, in the same memory");
}
