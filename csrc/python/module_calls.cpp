// Calls of modules within a captured forward. torch takes some microseconds to go through a module's hooks, and a large
// model has thousands of modules: where only fastdp's own two hooks are there, and would only note which module runs,
// this notes it and calls the forward.
#include "module_calls.h"
#include "ref.h"

namespace {

PyObject *const ACTIVE = interned("active"), *const ENTERED = interned("entered"), *const STACK = interned("stack"),
         *const FORWARD = interned("forward"), *const CALL_IMPL = interned("_call_impl"),
         *const BEFORE = interned("_forward_pre_hooks"), *const AFTER = interned("_forward_hooks"),
         *const COMPILED = interned("_compiled_call_impl"), *const F_LOCALS = interned("f_locals"), *const SELF = interned("self"),
         *const BACKWARD = interned("_backward_hooks"), *const BACKWARD_BEFORE = interned("_backward_pre_hooks");

// Places in fastdp.engine.module_hooks.InnerCall.
enum { MODULE, PATH, RUNNING, GRAD_ENABLED, SAVING_HOOKS, ENTER_NUMBER, LEAVE_NUMBER, EVERYWHERE };

PyObject *item(PyObject *call, int place) { return PyTuple_GET_ITEM(call, place); }

bool is_empty_dict(PyObject *dict) { return dict != nullptr && PyDict_Check(dict) && PyDict_GET_SIZE(dict) == 0; }

bool holds_only(PyObject *dict, PyObject *key) {
    return dict != nullptr && PyDict_Check(dict) && PyDict_GET_SIZE(dict) == 1 && entry(dict, key) != nullptr;
}

bool has_own_hooks_alone(PyObject *call) {
    const Ref held = notes_of(item(call, MODULE));
    if (!holds_only(entry(held.get(), BEFORE), item(call, ENTER_NUMBER))) return false;
    if (!holds_only(entry(held.get(), AFTER), item(call, LEAVE_NUMBER))) return false;
    if (!is_empty_dict(entry(held.get(), BACKWARD)) || !is_empty_dict(entry(held.get(), BACKWARD_BEFORE))) return false;
    PyObject *everywhere = item(call, EVERYWHERE);
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(everywhere); ++place) {
        if (!is_empty_dict(PyTuple_GET_ITEM(everywhere, place))) return false;
    }
    return true;
}

// Who was called, by the frame of torch's `_wrapped_call_impl`: a copy that took over the module's `__dict__` has this
// very call in it, too.
Ref callee(PyObject *call) {
    PyObject *module = item(call, MODULE);
    const Ref frame((PyObject *)PyThreadState_GetFrame(PyThreadState_Get()));
    if (!frame) return Ref::of(module);
    const Ref locals = attribute(frame.get(), F_LOCALS);
    Ref self(PyObject_GetItem(locals.get(), SELF));
    if (!self && !PyErr_ExceptionMatches(PyExc_KeyError)) throw Raised{};
    PyErr_Clear();
    if (!self || self.get() == module) return Ref::of(module);
    const Ref held(PyObject_GenericGetDict(self.get(), nullptr));
    if (!held) PyErr_Clear();  // no module
    PyObject *own = held ? entry(held.get(), COMPILED) : nullptr;
    const bool is_copy = own != nullptr && PyCFunction_Check(own) && PyCFunction_GET_SELF(own) == call;
    return is_copy ? std::move(self) : Ref::of(module);
}

void append(PyObject *list, PyObject *value) {
    if (PyList_Append(list, value) < 0) throw Raised{};
}

void drop_last(PyObject *list) {
    const Py_ssize_t size = PyList_GET_SIZE(list);
    if (size > 0 && PyList_SetSlice(list, size - 1, size, nullptr) < 0) throw Raised{};
}

// As `Forward.leave` does of an inner module, also if the forward has raised.
void leave(PyObject *running) {
    drop_last(attribute(running, ENTERED).get());
    const Ref active = attribute(running, ACTIVE);
    if (active.get() != Py_None) drop_last(attribute(active.get(), STACK).get());
}

PyObject *called_within(PyObject *call, PyObject *args, PyObject *kwargs) {
    PyObject *running = item(call, RUNNING);
    const Ref module = callee(call), function = attribute(module.get(), FORWARD);
    {
        const Ref active = attribute(running, ACTIVE);
        if (module.get() != item(call, MODULE) || active.get() == Py_None || !has_own_hooks_alone(call) ||
            checked(PyObject_CallNoArgs(item(call, GRAD_ENABLED))).get() != Py_True ||
            checked(PyObject_CallOneArg(item(call, SAVING_HOOKS), Py_True)).get() != Py_None) {
            return PyObject_Call(attribute(module.get(), CALL_IMPL).get(), args, kwargs);
        }
        append(attribute(running, ENTERED).get(), Py_None);
        append(attribute(active.get(), STACK).get(), item(call, PATH));
    }
    PyObject *out = PyObject_Call(function.get(), args, kwargs);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    try {
        leave(running);
    } catch (const Raised &) {
        Py_CLEAR(out);
        Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
        throw;
    }
    PyErr_Restore(type, value, traceback);
    return out;
}

PyObject *module_call(PyObject *call, PyObject *args, PyObject *kwargs) {
    try {
        return called_within(call, args, kwargs);
    } catch (const Raised &) {
        return nullptr;
    }
}

// Puts calls into modules' `__dict__`s where nothing else stands, or takes them out again.
void switch_calls(const py::list &dicts, const py::list &calls, bool on) {
    try {
        for (Py_ssize_t place = 0; place < PyList_GET_SIZE(calls.ptr()); ++place) {
            PyObject *dict = PyList_GET_ITEM(dicts.ptr(), place), *call = PyList_GET_ITEM(calls.ptr(), place);
            if (entry(dict, COMPILED) == (on ? Py_None : call)) put(dict, COMPILED, on ? call : Py_None);
        }
    } catch (const Raised &) {
        throw py::error_already_set();
    }
}

PyMethodDef definition = {"module_call", (PyCFunction)(void (*)())module_call, METH_VARARGS | METH_KEYWORDS, nullptr};

}  // namespace

void bind_module_calls(py::module_ &module) {
    module.def(
        "module_call",
        [](const py::tuple &call) {
            return py::reinterpret_steal<py::object>(PyCFunction_New(&definition, call.ptr()));
        },
        "calls a module as an InnerCall says (fastdp/engine/module_hooks.py)");
    module.def("switch_calls", &switch_calls, "put such calls into modules, or take them out");
}
