// Torch calls that a pass of capture knows already, made and tagged without Python in between.
//
// fastdp/engine/call_cache.py defines what a call's signature is, and fastdp/batch_axis/layout.py (`tag_of`, `tag`),
// aliasing.py what is asked and noted of a tensor. Here are the ordinary cases of these
// alone. Whatever is out of the ordinary is MISSED: then nothing was done, and the call goes through Python.
//
// A call that combines data with parameters is known by more (`known_calls.KnownCapture`): what its rule in Python
// found out from the shapes, types and layouts of the arguments, in this module's forward.
#include "known_calls.h"
#include "native_call.h"
#include "signature.h"
#include "tagging.h"

#include <vector>

namespace {

void tensors_in(PyObject *nest, std::vector<PyObject *> &found) {
    if (is_tensor(nest)) {
        found.push_back(nest);
    } else if (PyTuple_Check(nest) || PyList_Check(nest)) {
        const Nest deeper;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(nest); ++i) {
            tensors_in(PySequence_Fast_GET_ITEM(nest, i), found);
        }
    } else if (PyDict_Check(nest)) {
        Py_ssize_t place = 0;
        PyObject *key, *value;
        while (PyDict_Next(nest, &place, &key, &value)) tensors_in(value, found);
    }
}

// The known calls of one pass. known: layouts of results by signature; captures: `KnownCapture` of calls with
// parameters; stack: the modules whose forwards run; sizes: told of sizes that Python asks for (`python_sizes.Sizes`).
class KnownCalls {
  public:
    KnownCalls(py::dict known, py::dict captures, std::int64_t batch, py::dict tracked, py::list stack,
               const py::object &sizes)
        : known_(std::move(known)), captures_(std::move(captures)), tracked_(std::move(tracked)),
          asked_before_(sizes.attr("asked_before")), batch_object_(py::int_(batch)), stack_(std::move(stack)),
          asked_(sizes.attr("asked")), codes_(sizes.attr("codes")), librarys_(sizes.attr("librarys")), batch_(batch) {}

    // What the call gives, if it is known; MISSED otherwise, with nothing done.
    PyObject *call(PyObject *forward_pass, PyObject *function, PyObject *args, PyObject *kwargs) {
        try {
            if (checked(PyObject_CallNoArgs(names->under_functorch)).get() != Py_None) throw Missed{};
            PyObject *kind = entry(names->kinds, function);
            if (kind == nullptr) throw Missed{};
            const std::int64_t code = number(kind);
            if ((code & KIND) == ASKS) return asked(function, args, kwargs);
            if ((code & COMBINING) && takes_parameter(args, kwargs)) {
                return combined(forward_pass, function, code, args, kwargs);
            }
            if ((code & RESHAPING) && is_made_constant(args)) return reshaped(function, args, kwargs);
            const Ref known = looked_up(known_.ptr(), described(function, code, args, kwargs, false));
            if (!known) throw Missed{};
            Ref out = checked(PyObject_Call(function, args, kwargs));
            note(out.get(), PyTuple_GET_ITEM(known.get(), 0), PyTuple_GET_ITEM(known.get(), 1));
            return out.release();
        } catch (const Missed &) {
            seen_.forget();
            return Py_NewRef(names->missed);
        } catch (const Raised &) {
            return nullptr;
        } catch (const std::exception &problem) {
            PyErr_SetString(PyExc_RuntimeError, problem.what());
            return nullptr;
        }
    }

    // The forward has ended.
    void clear() { seen_.clear(); }

    // The call's signature, as `layout_cache.Memo.signature` gives it; None where it has none, MISSED where that is
    // left to Python. For tests.
    PyObject *signature(PyObject *function, PyObject *args, PyObject *kwargs) {
        try {
            PyObject *kind = entry(names->kinds, function);
            if (kind == nullptr) throw Missed{};
            const std::int64_t code = number(kind);
            if ((code & COMBINING) && takes_parameter(args, kwargs)) {
                return capture_of(function, code, args, kwargs).release();
            }
            return described(function, code, args, kwargs, false).release();
        } catch (const Missed &) {
            return Py_NewRef(names->missed);
        } catch (const Raised &) {
            throw py::error_already_set();
        }
    }

  private:
    PyObject *asked(PyObject *function, PyObject *args, PyObject *kwargs) {
        Ref out = checked(PyObject_Call(function, args, kwargs));
        if (batch_ > 1 && PyTuple_GET_SIZE(args) && is_telling(function)) {
            PyObject *tensor = PyTuple_GET_ITEM(args, 0);
            if (is_tensor(tensor) && entry(notes_of(tensor).get(), names->LAYOUT) != nullptr) {
                PyObject *dim = PyTuple_GET_SIZE(args) > 1 ? PyTuple_GET_ITEM(args, 1) : nullptr;
                if (dim == nullptr && PyDict_Check(kwargs)) dim = PyDict_GetItemString(kwargs, "dim");
                if (!is_known_answer(tensor, out.get(), dim == nullptr ? Py_None : dim)) {
                    checked(PyObject_CallFunctionObjArgs(asked_.ptr(), tensor, out.get(), batch_object_.ptr(), dim, nullptr));
                }
            }
        }
        return out.release();
    }

    // Whether the same code, called by the same, has had this answer in this forward: `Sizes.asked` would note nothing.
    bool is_known_answer(PyObject *tensor, PyObject *found, PyObject *dim) {
        const Ref notes = notes_of(tensor);
        if (entry(notes.get(), names->COUNTED) != nullptr) return false;
        Ref frame((PyObject *)PyThreadState_GetFrame(PyThreadState_Get()));
        if (!frame) return false;
        const Ref layout = checked(PyLong_FromVoidPtr(entry(notes.get(), names->LAYOUT)));
        const Ref key = checked(PyTuple_Pack(6, id_of_code(frame).get(), attribute(frame.get(), names->f_lasti).get(),
                                             layout.get(), attribute(tensor, names->shape).get(), found, dim));
        PyObject *before = entry(asked_before_.ptr(), key.get());
        if (before == nullptr) return false;
        if (PyTuple_GET_ITEM(before, 1) == Py_False) return true;
        for (; frame; frame = Ref((PyObject *)PyFrame_GetBack((PyFrameObject *)frame.get()))) {
            const Ref code = id_of_code(frame);
            if (entry(codes_.ptr(), code.get()) == nullptr) return entry(librarys_.ptr(), code.get()) != nullptr;
        }
        return true;
    }

    static Ref id_of_code(const Ref &frame) {
        const Ref code((PyObject *)PyFrame_GetCode((PyFrameObject *)frame.get()));
        return checked(PyLong_FromVoidPtr(code.get()));
    }

    // Whether the one tensor of a call is a constant that was made in sight.
    static bool is_made_constant(PyObject *args) {
        for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(args); ++i) {
            if (is_tensor(PyTuple_GET_ITEM(args, i))) return false;
        }
        PyObject *tensor = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : Py_None;
        if (Py_TYPE(tensor) != (PyTypeObject *)names->tensor) return false;
        const Ref notes = notes_of(tensor);
        if (entry(notes.get(), names->LAYOUT) != nullptr || !was_made(entry(notes.get(), names->MADE))) return false;
        if (is(tensor, names->requires_grad) || is(tensor, names->is_nested)) return false;
        if (asks(tensor, names->is_view)) {
            const Ref base = attribute(tensor, names->base);
            if (entry(notes_of(base.get()).get(), names->LAYOUT) != nullptr) return false;
        }
        return is_nobodys(tensor) && number(called(tensor, names->numel).get()) > 1;  // (one number is noted)
    }

    // The same constant in another shape was made as it was (`batch_positions.note_made`).
    static PyObject *reshaped(PyObject *function, PyObject *args, PyObject *kwargs) {
        PyObject *made = PyTuple_GET_ITEM(entry(notes_of(PyTuple_GET_ITEM(args, 0)).get(), names->MADE), 0);
        const Ref now = attribute(names->moments, names->current);
        const Ref note = checked(PyTuple_Pack(2, made, attribute(now.get(), names->number).get()));
        Ref out = checked(PyObject_Call(function, args, kwargs));
        if (is_tensor(out.get())) put(notes_of(out.get()).get(), names->MADE, note.get());
        return out.release();
    }

    bool is_tracked(PyObject *value) {
        if (!is_tensor(value)) return false;
        const Ref id = checked(PyLong_FromVoidPtr(value));
        return entry(tracked_.ptr(), id.get()) != nullptr;
    }

    bool takes_parameter(PyObject *args, PyObject *kwargs) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
            if (is_tracked(PyTuple_GET_ITEM(args, i))) return true;
        }
        Py_ssize_t place = 0;
        PyObject *name, *value;
        while (PyDict_Next(kwargs, &place, &name, &value)) {
            if (is_tracked(value)) return true;
        }
        return false;
    }

    // The signature of a call of data and parameters, in the module whose forward runs.
    Ref capture_of(PyObject *function, std::int64_t code, PyObject *args, PyObject *kwargs) {
        const Py_ssize_t depth = PyList_GET_SIZE(stack_.ptr());
        if (depth == 0) throw Missed{};
        if (checked(PyObject_CallOneArg(names->saving_hooks, Py_True)).get() != Py_None) throw Missed{};
        const Ref of_call = described(function, code, args, kwargs, true);
        const bool cast = truth(checked(PyObject_CallNoArgs(names->any_autocast)).get());
        const Ref casts = cast ? checked(PyObject_CallNoArgs(names->autocast)) : Ref::of(Py_None);
        return checked(PyTuple_Pack(3, PyList_GET_ITEM(stack_.ptr(), depth - 1), casts.get(), of_call.get()));
    }

    PyObject *combined(PyObject *forward_pass, PyObject *function, std::int64_t code, PyObject *args,
                       PyObject *kwargs) {
        if (checked(PyObject_CallNoArgs(names->grad_enabled)).get() != Py_True) throw Missed{};
        const Ref capture = looked_up(captures_.ptr(), capture_of(function, code, args, kwargs));
        if (!capture) throw Missed{};
        PyObject *native = PyTuple_GET_ITEM(capture.get(), 5);
        Ref out = native != Py_None && takes_hooks(forward_pass)
                      ? native_call(NativeCall(capture.get(), native), forward_pass, args, kwargs)
                      : checked(PyObject_CallFunctionObjArgs(names->repeat, capture.get(), forward_pass, args, kwargs,
                                                             nullptr));
        const Ref layout = attribute(PyTuple_GET_ITEM(capture.get(), 0), names->layout_of_data);
        PyObject *described = PyTuple_GET_ITEM(capture.get(), 6);
        tag(out.get(), layout.get(), attribute(names->moments, names->current).get(), seen_, described, 0);
        return out.release();
    }

    // Whether calls may go by autograd's own nodes: no tangents run through them, and nothing runs them again.
    static bool takes_hooks(PyObject *forward_pass) {
        return is(forward_pass, names->by_nodes) && number(attribute(names->forward_ad, names->current_level).get()) < 0;
    }

    static bool is_telling(PyObject *function) {
        const int found = PySet_Contains(names->telling, function);
        if (found < 0) throw Raised{};
        return found != 0;
    }

    Ref described(PyObject *function, std::int64_t code, PyObject *args, PyObject *kwargs, bool combined) {
        const std::int64_t kind = code & KIND;
        const Py_ssize_t count = PyTuple_GET_SIZE(args);
        if (batch_ <= 1 || entry(kwargs, names->out) != nullptr) throw Missed{};
        if (!combined) {
            if (kind == ASKS || kind == DEPENDS || (kind == WHERE && count == 1)) throw Missed{};
            for (Py_ssize_t i = 0; i < count; ++i) {
                if (is_tracked(PyTuple_GET_ITEM(args, i))) throw Missed{};  // a parameter: captured
            }
        }
        Signature found(batch_, tracked_.ptr(), seen_, code, combined);
        found.add(function);
        found.add(batch_object_.ptr());
        found.add(checked(PyObject_CallNoArgs(names->grad_enabled)));
        const bool by_index = code & INDEXING;
        if (by_index && count < 2) throw Missed{};
        for (Py_ssize_t i = 0; i < (by_index ? 1 : count); ++i) found.describe(PyTuple_GET_ITEM(args, i));
        if (by_index) found.describe_index(PyTuple_GET_ITEM(args, 1));
        Py_ssize_t place = 0;
        PyObject *name, *value;
        while (PyDict_Next(kwargs, &place, &name, &value)) {
            found.add(name);
            found.describe(value);
        }
        return found.tuple();
    }

    static Ref looked_up(PyObject *answers, const Ref &signature) {
        PyObject *found = PyDict_GetItemWithError(answers, signature.get());
        if (found == nullptr && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw Raised{};
            PyErr_Clear();  // an argument without a hash
        }
        return Ref::of(found);
    }

    // layouts: of the results; described: of them, in the forwards before (`SeenTensor`).
    void note(PyObject *out, PyObject *layouts, PyObject *described) {
        const Ref moment = attribute(names->moments, names->current);
        if (is_tensor(out)) {
            if (PyTuple_GET_SIZE(layouts) != 1) throw py::value_error("a known call gave another number of tensors");
            note_result(out, PyTuple_GET_ITEM(layouts, 0), moment.get(), seen_, described, 0);
            return;
        }
        std::vector<PyObject *> tensors;
        tensors_in(out, tensors);
        if ((Py_ssize_t)tensors.size() != PyTuple_GET_SIZE(layouts)) {
            throw py::value_error("a known call gave another number of tensors");
        }
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            PyObject *layout = PyTuple_GET_ITEM(layouts, (Py_ssize_t)i);
            note_result(tensors[i], layout, moment.get(), seen_, described, 2 * (Py_ssize_t)i);
        }
    }

    py::dict known_, captures_, tracked_, asked_before_;
    py::object batch_object_;
    py::list stack_;
    py::object asked_;
    py::dict codes_, librarys_;
    SeenTensors seen_;
    const std::int64_t batch_;
};

// `__torch_function__` of a mode: known calls are made at once, unless data has left torch, or Dynamo's are seen.
PyObject *torch_function(PyObject *mode, PyObject *const *args, Py_ssize_t count) {
    try {
        if (count < 2) throw Missed{};
        const Ref notes = notes_of(mode);
        PyObject *forward_pass = entry(notes.get(), names->forward_pass), *capsule = entry(notes.get(), names->known_calls);
        if (forward_pass == nullptr || capsule == nullptr) throw Missed{};
        if (attribute(forward_pass, names->lowers).get() != Py_None) throw Missed{};
        if (attribute(forward_pass, names->watcher).get() != Py_None) throw Missed{};
        if (is(attribute(forward_pass, names->exposed).get(), names->anything)) throw Missed{};
        const bool named = count > 3 && args[3] != Py_None;
        const Ref given = count > 2 ? Ref::of(args[2]) : checked(PyTuple_New(0));
        const Ref kwargs = named ? Ref::of(args[3]) : checked(PyDict_New());
        if (!PyTuple_Check(given.get()) || !PyDict_Check(kwargs.get())) throw Missed{};
        auto *known = static_cast<KnownCalls *>(PyCapsule_GetPointer(capsule, nullptr));
        if (known == nullptr) throw Raised{};
        PyObject *out = known->call(forward_pass, args[0], given.get(), kwargs.get());
        if (out != names->missed) return out;
        Py_DECREF(out);
    } catch (const Missed &) {
    } catch (const Raised &) {
        return nullptr;
    }
    const Ref others(PyObject_GetAttr((PyObject *)Py_TYPE(mode), names->torch_function));
    if (!others) return nullptr;
    std::vector<PyObject *> all{mode};
    all.insert(all.end(), args, args + count);
    return PyObject_Vectorcall(others.get(), all.data(), all.size(), nullptr);
}

PyMethodDef function_of_mode = {"__torch_function__", (PyCFunction)(void (*)())torch_function, METH_FASTCALL, nullptr};

// Let these calls be made where the mode sees them.
void serve(const py::object &self, const py::object &mode) {
    PyObject *capsule = PyCapsule_New(self.cast<KnownCalls *>(), nullptr, [](PyObject *gone) {
        static_cast<KnownCalls *>(PyCapsule_GetPointer(gone, nullptr))->clear();
        Py_DECREF((PyObject *)PyCapsule_GetContext(gone));
    });
    if (capsule == nullptr) throw py::error_already_set();
    PyCapsule_SetContext(capsule, Py_NewRef(self.ptr()));
    mode.attr("_known_calls") = py::reinterpret_steal<py::object>(capsule);
    mode.attr("__torch_function__") =
        py::reinterpret_steal<py::object>(PyCFunction_New(&function_of_mode, mode.ptr()));
}

}  // namespace

void bind_known_calls(py::module_ &module) {
    module.def("set_vocabulary", &set_vocabulary, "what `KnownCalls` is written with; see known_calls.cpp");
    py::class_<KnownCalls>(module, "KnownCalls", "the known calls of a pass; see fastdp/engine/known_calls.py")
        .def(py::init<py::dict, py::dict, std::int64_t, py::dict, py::list, const py::object &>())
        .def("serve", &serve, "let the calls be made where a mode sees them, before its __torch_function__")
        .def("signature", [](KnownCalls &self, py::handle function, const py::tuple &args, const py::dict &kwargs) {
            return py::reinterpret_steal<py::object>(self.signature(function.ptr(), args.ptr(), kwargs.ptr()));
        });
}
