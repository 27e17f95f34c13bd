// What a step asks of all modules and parameters of a model: fastdp/engine/tracked_parameters.py, which says the same in Python.
#include "modules.h"
#include "dlpack.h"

#include <unordered_set>
#include <vector>

namespace {

PyObject *const MODULES = interned("_modules"), *const PARAMETERS = interned("_parameters"),
         *const BUFFERS = interned("_buffers"), *const REQUIRES_GRAD = interned("requires_grad"),
         *const NUMEL = interned("numel");

// The model and all modules within it, each once.
std::vector<Ref> all_modules(PyObject *model) {
    std::vector<Ref> found;
    std::unordered_set<PyObject *> met{model};
    found.push_back(Ref::of(model));
    for (std::size_t next = 0; next < found.size(); ++next) {
        const Ref held = notes_of(found[next].get());
        PyObject *modules = entry(held.get(), MODULES);
        Py_ssize_t place = 0;
        PyObject *name, *module;
        while (modules != nullptr && PyDict_Check(modules) && PyDict_Next(modules, &place, &name, &module)) {
            if (module != Py_None && met.insert(module).second) found.push_back(Ref::of(module));
        }
    }
    return found;
}

template <typename Function>
py::object guarded(Function function) {
    try {
        return function();
    } catch (const Raised &) {
        throw py::error_already_set();
    }
}

// (module, name) of a trained parameter that is not among `known` {(id(module), name)}, or None.
py::object unknown_parameter(const py::object &model, const py::set &known) {
    return guarded([&]() -> py::object {
        for (const Ref &module : all_modules(model.ptr())) {
            const Ref parameters = attribute(module.get(), PARAMETERS);
            Py_ssize_t place = 0;
            PyObject *name, *parameter;
            while (PyDict_Next(parameters.get(), &place, &name, &parameter)) {
                const Ref held = Ref::of(parameter), called = Ref::of(name);
                if (parameter == Py_None) continue;
                const Ref id = checked(PyLong_FromVoidPtr(module.get()));
                const Ref key = checked(PyTuple_Pack(2, id.get(), name));
                const int there = PySet_Contains(known.ptr(), key.get());
                if (there < 0) throw Raised{};
                if (!there && is(parameter, REQUIRES_GRAD)) {
                    return py::make_tuple(py::handle(module.get()), py::handle(name));
                }
            }
        }
        return py::none();
    });
}

std::int64_t count_of(PyObject *tensor) {
    dlpack::Tensor found;
    if (!dlpack::describe(tensor, found)) return number(called(tensor, NUMEL).get());
    std::int64_t count = 1;
    for (std::int32_t i = 0; i < found.dims; ++i) count *= found.shape[i];
    return count;
}

// Ids of all parameters and buffers.
py::object owned_by(const py::object &model) {
    return guarded([&]() -> py::object {
        py::set found;
        for (const Ref &module : all_modules(model.ptr())) {
            for (PyObject *kind : {PARAMETERS, BUFFERS}) {
                const Ref tensors = attribute(module.get(), kind);
                Py_ssize_t place = 0;
                PyObject *name, *tensor;
                while (PyDict_Next(tensors.get(), &place, &name, &tensor)) {
                    const Ref id = checked(PyLong_FromVoidPtr(tensor));
                    if (PySet_Add(found.ptr(), id.get()) < 0) throw Raised{};
                }
            }
        }
        return found;
    });
}

// Whether the parameters that stand in these places, [(module, name, ...)], are these, plain ones, trained or not as
// listed, of as many elements as listed.
py::object same_parameters(const py::list &slots, const py::list &parameters, const py::list &trained,
                           const py::list &counts, const py::handle &plain) {
    return guarded([&]() -> py::object {
        const Py_ssize_t size = PyList_GET_SIZE(slots.ptr());
        if (PyList_GET_SIZE(parameters.ptr()) != size) return py::bool_(false);
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject *slot = PyList_GET_ITEM(slots.ptr(), i);
            PyObject *held = entry(notes_of(PyTuple_GET_ITEM(slot, 0)).get(), PARAMETERS);
            PyObject *now = held == nullptr ? nullptr : entry(held, PyTuple_GET_ITEM(slot, 1));
            PyObject *then = PyList_GET_ITEM(parameters.ptr(), i);
            if ((now == nullptr ? Py_None : now) != then) return py::bool_(false);
            if (then == Py_None) continue;
            if (Py_TYPE(then) != (PyTypeObject *)plain.ptr()) return py::bool_(false);
            if (is(then, REQUIRES_GRAD) != (PyList_GET_ITEM(trained.ptr(), i) == Py_True)) return py::bool_(false);
            if (count_of(then) != number(PyList_GET_ITEM(counts.ptr(), i))) return py::bool_(false);
        }
        return py::bool_(true);
    });
}

}  // namespace

void bind_modules(py::module_ &module) {
    module.def("unknown_parameter", &unknown_parameter, "a trained parameter that is not known; see modules.cpp");
    module.def("owned_by", &owned_by, "ids of a model's parameters and buffers");
    module.def("same_parameters", &same_parameters, "whether a model's parameters are as they were");
}
