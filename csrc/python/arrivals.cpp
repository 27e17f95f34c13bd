// Gradients that arrive at native calls (`captured_call.Native`), noted without Python as long as a backward is like
// the one before: the calls that are expected come one after the other, each with its gradient. Python takes them at
// the backward's end, or before another call arrives (fastdp/engine/repeated_backward.py). Whatever is out of the
// ordinary goes to `Native.__call__`.
#include "arrivals.h"
#include "python_names.h"

namespace {

std::int64_t version_of(PyObject *tensor) { return number(attribute(tensor, names->version).get()); }

std::int64_t versions_of(PyObject *saved, PyObject *gradient) {
    std::int64_t found = version_of(gradient);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(saved); ++i) found += version_of(PyTuple_GET_ITEM(saved, i));
    return found;
}

// Those of one backward, through one forward (which the backward holds). expected: the calls in the order of the
// backward before, None where Python looks at what arrives. What arrives is put into a list of Python's, where its
// garbage collection sees it: (context, what it saved, its gradient, their versions added up).
class Arrivals {
  public:
    Arrivals(const py::object &forward_pass, std::int64_t task, py::list expected, py::object current_task,
             Py_ssize_t place)
        : current_task_(std::move(current_task)), expected_(std::move(expected)), forward_pass_(forward_pass.ptr()),
          task_(task), place_(place) {}

    // Whether it was as expected, and is kept.
    bool take(PyObject *context, PyObject *notes, PyObject *gradients, PyObject *into) {
        if (entry(notes, names->forward_pass) != forward_pass_ || place_ >= PyList_GET_SIZE(expected_.ptr()) ||
            entry(notes, names->call) != PyList_GET_ITEM(expected_.ptr(), place_)) {
            return false;
        }
        PyObject *gradient = PyTuple_GET_ITEM(gradients, 0), *saved = entry(notes, names->saved);
        if (gradient == Py_None || saved == nullptr || entry(notes, names->kept) != nullptr ||
            checked(PyObject_CallNoArgs(names->grad_enabled)).get() != Py_False ||
            number(checked(PyObject_CallNoArgs(current_task_.ptr())).get()) != task_) {
            return false;
        }
        if (PyTuple_GET_SIZE(saved) &&
            !equal(attribute(PyTuple_GET_ITEM(saved, 0), names->version).get(), entry(notes, names->saved_version))) {
            return false;
        }
        PyObject *shape = entry(notes, names->shape);
        Ref whole = Ref::of(gradient);
        if (!equal(attribute(gradient, names->shape).get(), shape)) {
            whole = checked(PyObject_CallMethodOneArg(gradient, names->reshape, shape));
        }
        const Ref versions = checked(PyLong_FromLongLong(versions_of(saved, whole.get())));
        const Ref found = checked(PyTuple_Pack(4, context, saved, whole.get(), versions.get()));
        if (PyList_Append(into, found.get()) < 0) throw Raised{};
        const Ref nothing = checked(PyTuple_New(0));
        put(notes, names->saved, nothing.get());
        put(notes, names->made, nothing.get());
        ++place_;
        return true;
    }

    void go_on(Py_ssize_t place) { place_ = place; }

  private:
    py::object current_task_;
    py::list expected_;
    PyObject *forward_pass_;  // compared alone
    std::int64_t task_;
    Py_ssize_t place_;
};

// Of those that have arrived the place of the first one that was written to since; -1.
Py_ssize_t first_written(const py::list &arrived) {
    try {
        for (Py_ssize_t place = 0; place < PyList_GET_SIZE(arrived.ptr()); ++place) {
            PyObject *each = PyList_GET_ITEM(arrived.ptr(), place);
            const std::int64_t now = versions_of(PyTuple_GET_ITEM(each, 1), PyTuple_GET_ITEM(each, 2));
            if (now != number(PyTuple_GET_ITEM(each, 3))) return place;
        }
        return -1;
    } catch (const Raised &) {
        throw py::error_already_set();
    }
}

PyObject *arrived(PyObject *context, PyObject *gradients) {
    try {
        const Ref notes = notes_of(context);
        const Ref backward = attribute(entry(notes.get(), names->forward_pass), names->backward);
        const Ref tape = attribute(backward.get(), names->tape);
        const Ref arrivals = tape.get() == Py_None ? Ref::of(Py_None) : attribute(tape.get(), names->arrivals);
        if (arrivals.get() != Py_None) {
            const Ref into = attribute(tape.get(), names->arrived);
            if (py::cast<Arrivals &>(py::handle(arrivals.get())).take(context, notes.get(), gradients, into.get())) {
                Py_RETURN_NONE;
            }
        }
        return PyObject_CallOneArg(context, gradients);
    } catch (const Raised &) {
        return nullptr;
    }
}

PyMethodDef definition = {"arrived", (PyCFunction)(void (*)())arrived, METH_O, nullptr};

}  // namespace

Ref arrival_hook(PyObject *context) { return checked(PyCFunction_New(&definition, context)); }

void bind_arrivals(py::module_ &module) {
    py::class_<Arrivals>(module, "Arrivals", "gradients that arrive at native calls; see arrivals.cpp")
        .def(py::init<const py::object &, std::int64_t, py::list, py::object, Py_ssize_t>())
        .def("go_on", &Arrivals::go_on, "at a place among the calls that are expected");
    module.def("first_written", &first_written, "the place of the first arrival that was written to since");
}
