// References to Python objects that are given back, and calls that throw where Python has set an exception.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace py = pybind11;

class Ref {
  public:
    Ref() = default;
    explicit Ref(PyObject *owned) : object_(owned) {}
    Ref(Ref &&other) noexcept : object_(other.release()) {}
    Ref(const Ref &) = delete;
    Ref &operator=(Ref &&other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }
    static Ref of(PyObject *borrowed) { return Ref(Py_XNewRef(borrowed)); }
    PyObject *get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }
    PyObject *release() {
        PyObject *object = object_;
        object_ = nullptr;
        return object;
    }

  private:
    PyObject *object_ = nullptr;
};

struct Raised {};  // a Python exception is set

inline Ref checked(PyObject *owned) {
    if (owned == nullptr) throw Raised{};
    return Ref(owned);
}

inline bool truth(PyObject *object) {
    const int found = PyObject_IsTrue(object);
    if (found < 0) throw Raised{};
    return found != 0;
}

inline Ref attribute(PyObject *object, PyObject *name) { return checked(PyObject_GetAttr(object, name)); }
inline bool is(PyObject *object, PyObject *name) { return truth(attribute(object, name).get()); }
inline Ref called(PyObject *object, PyObject *method) { return checked(PyObject_CallMethodNoArgs(object, method)); }
inline bool asks(PyObject *object, PyObject *method) { return truth(called(object, method).get()); }

// What an object's `__dict__` is, without looking for it in the type.
inline Ref notes_of(PyObject *object) { return checked(PyObject_GenericGetDict(object, nullptr)); }

// A borrowed entry; nullptr if there is none.
inline PyObject *entry(PyObject *dict, PyObject *key) {
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr && PyErr_Occurred()) throw Raised{};
    return found;
}

inline void put(PyObject *dict, PyObject *key, PyObject *value) {
    if (PyDict_SetItem(dict, key, value) < 0) throw Raised{};
}

inline std::int64_t number(PyObject *object) {
    const std::int64_t found = PyLong_AsLongLong(object);
    if (found == -1 && PyErr_Occurred()) throw Raised{};
    return found;
}

inline bool equal(PyObject *found, PyObject *known) {
    const int same = PyObject_RichCompareBool(found, known, Py_EQ);
    if (same < 0) throw Raised{};
    return same != 0;
}

// Around what calls itself for what lies in a list: one that holds itself raises RecursionError, as in Python.
class Nest {
  public:
    Nest() {
        if (Py_EnterRecursiveCall(" in the arguments of a torch call")) throw Raised{};
    }
    ~Nest() { Py_LeaveRecursiveCall(); }
    Nest(const Nest &) = delete;
};

inline PyObject *interned(const char *text) { return PyUnicode_InternFromString(text); }
