#include "native_call.h"
#include "arrivals.h"

namespace {

// Count the uses of its parameters: `uses`, pairs of a parameter's id and the elements that are used.
void count_uses(PyObject *forward_pass, PyObject *uses) {
    if (!is(forward_pass, names->count)) return;
    const Ref backward = attribute(forward_pass, names->backward);
    const Ref uses_of = attribute(backward.get(), names->uses_of);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(uses); ++i) {
        PyObject *use = PyList_GET_ITEM(uses, i), *id = PyTuple_GET_ITEM(use, 0);
        Ref spans = Ref::of(entry(uses_of.get(), id));
        if (!spans) {
            spans = checked(PyList_New(0));
            put(uses_of.get(), id, spans.get());
        }
        if (PyList_Append(spans.get(), PyTuple_GET_ITEM(use, 1)) < 0) throw Raised{};
    }
}

// The arguments of a call, those by name behind the others.
std::vector<PyObject *> arguments(PyObject *args, PyObject *kwargs) {
    std::vector<PyObject *> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) found.push_back(PyTuple_GET_ITEM(args, i));
    Py_ssize_t place = 0;
    PyObject *name, *value;
    while (PyDict_Next(kwargs, &place, &name, &value)) found.push_back(value);
    return found;
}

Ref called_with(PyObject *function, const std::vector<PyObject *> &given, PyObject *args, PyObject *kwargs) {
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    const Ref others = checked(PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(others.get(), i, Py_NewRef(given[(std::size_t)i]));
    if (PyDict_GET_SIZE(kwargs) == 0) return checked(PyObject_Call(function, others.get(), nullptr));
    const Ref named = checked(PyDict_New());
    Py_ssize_t place = 0, number = count;
    PyObject *name, *value;
    while (PyDict_Next(kwargs, &place, &name, &value)) put(named.get(), name, given[(std::size_t)number++]);
    return checked(PyObject_Call(function, others.get(), named.get()));
}

// Within it no mode sees what is asked of tensors: an engine around this one would take it for the user's.
class Unseen {
  public:
    Unseen() {
        if (number(checked(PyObject_CallNoArgs(names->modes)).get()) == 0) return;
        guard_ = checked(PyObject_CallNoArgs(names->disabled));
        called(guard_.get(), names->enter);
    }
    ~Unseen() {
        if (!guard_) return;
        const Ref done(PyObject_CallMethodObjArgs(guard_.get(), names->exit, Py_None, Py_None, Py_None, nullptr));
    }
    Unseen(const Unseen &) = delete;

  private:
    Ref guard_;
};

// `Native.wait_for`: of the result, or of that whose view it is, autograd's node calls the context with the gradient.
void wait_for(PyObject *context, PyObject *notes, PyObject *out, PyObject *x) {
    const Unseen unseen;
    const Ref made = Ref::of(entry(notes, names->made));
    const Py_ssize_t more = made ? PyTuple_GET_SIZE(made.get()) : 0;
    const Ref saved = checked(PyTuple_New(more + (x != nullptr)));
    if (x != nullptr) PyTuple_SET_ITEM(saved.get(), 0, Py_NewRef(x));
    for (Py_ssize_t i = 0; i < more; ++i) {
        PyTuple_SET_ITEM(saved.get(), i + (x != nullptr), Py_NewRef(PyTuple_GET_ITEM(made.get(), i)));
    }
    put(notes, names->saved, saved.get());
    put(notes, names->shape, attribute(out, names->shape).get());
    put(notes, names->saved_version, x == nullptr ? names->zero : attribute(x, names->version).get());
    const Ref whole = asks(out, names->is_view) ? attribute(out, names->base) : Ref::of(out);
    const Ref node = attribute(whole.get(), names->grad_fn);
    checked(PyObject_CallMethodOneArg(node.get(), names->register_prehook, arrival_hook(context).get()));
}

}  // namespace

NativeCall::NativeCall(PyObject *capture, PyObject *native)
    : call(PyTuple_GET_ITEM(capture, 0)), operands(PyTuple_GET_ITEM(capture, 1)), data(PyTuple_GET_ITEM(capture, 2)),
      learned(PyTuple_GET_ITEM(capture, 3)), uses(PyTuple_GET_ITEM(capture, 4)), function(PyTuple_GET_ITEM(native, 0)),
      as_it_is(truth(PyTuple_GET_ITEM(native, 1))), saves(truth(PyTuple_GET_ITEM(native, 2))),
      own(truth(PyTuple_GET_ITEM(native, 3))) {}

Ref native_call(const NativeCall &known, PyObject *forward_pass, PyObject *args, PyObject *kwargs) {
    count_uses(forward_pass, known.uses);
    std::vector<PyObject *> given = arguments(args, kwargs);
    const Py_ssize_t count = PyTuple_GET_SIZE(known.operands);
    const Ref operands = checked(PyTuple_New(count)), values = checked(PyList_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        const std::int64_t place = number(PyTuple_GET_ITEM(known.operands, i));
        PyObject *operand = place < 0 ? Py_None : given[(std::size_t)place];
        Ref value = operand == Py_None ? Ref::of(Py_None) : called(operand, names->detach);
        PyTuple_SET_ITEM(operands.get(), i, Py_NewRef(operand));
        if (place >= 0) given[(std::size_t)place] = value.get();
        PyList_SET_ITEM(values.get(), i, value.release());
    }
    const std::int64_t place = number(PyTuple_GET_ITEM(known.data, 0));
    Ref x = Ref::of(given[(std::size_t)place]);
    if (!known.as_it_is) x = checked(PyObject_CallMethodOneArg(known.call, names->as_computed, x.get()));
    given[(std::size_t)place] = x.get();

    PyTypeObject *type = (PyTypeObject *)names->native;
    const Ref context = checked(type->tp_alloc(type, 0));
    const Ref notes = notes_of(context.get());
    put(notes.get(), names->forward_pass, forward_pass);
    put(notes.get(), names->call, known.call);
    put(notes.get(), names->operands, operands.get());
    put(notes.get(), names->values, values.get());
    put(notes.get(), names->learned, known.learned);
    const Ref out = known.own ? checked(PyObject_CallMethodObjArgs(known.call, names->run_native, context.get(),
                                                                   x.get(), nullptr))
                              : called_with(known.function, given, args, kwargs);
    wait_for(context.get(), notes.get(), out.get(), known.saves ? x.get() : nullptr);
    return Ref::of(out.get());
}
