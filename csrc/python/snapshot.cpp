// Snapshots of the objects in dicts and lists: fastdp/graphs/guards.py compares a whole model, some ten thousand values,
// before every replay.
#include "snapshot.h"
#include "dlpack.h"

namespace {

PyObject *const REQUIRES_GRAD = interned("requires_grad"), *const DATA_PTR = interned("data_ptr"),
         *const STRIDE = interned("stride"), *const SHAPE = interned("shape"), *const DTYPE = interned("dtype"),
         *const HOOKS = interned("_backward_hooks"), *const POST_HOOKS = interned("_post_accumulate_grad_hooks");

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

// Where a tensor lies, and its type, shape and strides: bytes, or a tuple where torch has no faster way.
py::object mark_of(const py::object &tensor) {
    dlpack::Tensor now;
    if (dlpack::describe(tensor.ptr(), now)) {
        return py::reinterpret_steal<py::object>(dlpack::bytes_of(now, dlpack::ALL).release());
    }
    return py::make_tuple(tensor.attr("data_ptr")(), tensor.attr("stride")(), tensor.attr("shape"),
                          tensor.attr("dtype"));
}

// Whether `mark_of` is this still.
bool has_mark(PyObject *tensor, PyObject *mark) {
    if (PyTuple_Check(mark)) {
        return equal(called(tensor, DATA_PTR).get(), PyTuple_GET_ITEM(mark, 0)) &&
               equal(called(tensor, STRIDE).get(), PyTuple_GET_ITEM(mark, 1)) &&
               equal(attribute(tensor, SHAPE).get(), PyTuple_GET_ITEM(mark, 2)) &&
               equal(attribute(tensor, DTYPE).get(), PyTuple_GET_ITEM(mark, 3));
    }
    dlpack::Tensor now;
    return dlpack::describe(tensor, now) && dlpack::has_bytes(now, dlpack::ALL, mark);
}

// Whether a tensor is as `known` says: (dict, name, _, tensor, mark, requires_grad).
bool is_as_it_was(PyObject *known) {
    PyObject *tensor = PyTuple_GET_ITEM(known, 3);
    if (entry(PyTuple_GET_ITEM(known, 0), PyTuple_GET_ITEM(known, 1)) != tensor) return false;
    if (attribute(tensor, REQUIRES_GRAD).get() != PyTuple_GET_ITEM(known, 5)) return false;
    if (is(tensor, HOOKS) || is(tensor, POST_HOOKS)) return false;
    return has_mark(tensor, PyTuple_GET_ITEM(known, 4));
}

// Whether tensors have these marks.
bool memory_unchanged(const py::list &tensors, const py::list &marks) {
    try {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
            if (!has_mark(PyList_GET_ITEM(tensors.ptr(), i), PyList_GET_ITEM(marks.ptr(), i))) return false;
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
    module.def("mark_of", &mark_of, "where a tensor lies, its type, shape and strides");
    module.def("memory_unchanged", &memory_unchanged, "whether tensors have these marks");
    module.def("tensors_unchanged", &tensors_unchanged, "whether attributes hold the same tensors, in the same memory");
}
