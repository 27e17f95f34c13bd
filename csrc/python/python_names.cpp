#include "seen_tensors.h"

PythonNames *names = nullptr;

// `batch_positions.made_in_sight`
bool was_made(PyObject *note) {
    if (note == nullptr) return false;
    const Ref now = attribute(names->moments, names->current);
    for (PyObject *name : {names->number, names->before}) {
        const int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(note, 1), attribute(now.get(), name).get(), Py_EQ);
        if (same < 0) throw Raised{};
        if (same) return !is_empty(PyTuple_GET_ITEM(note, 0));
    }
    return false;
}

bool agrees_with_views(PyObject *base_notes) {
    if (entry(base_notes, names->RELAID) != nullptr) return false;
    PyObject *layout = entry(base_notes, names->LAYOUT);
    return layout == nullptr || (is_layout(layout) && is_empty(field(layout, names->mixed)));
}

// The tensor's memory; none of sparse ones.
Ref storage_of(PyObject *tensor) {
    Ref storage(PyObject_CallMethodNoArgs(tensor, names->untyped_storage));
    if (!storage) {
        for (PyObject *kind : {PyExc_NotImplementedError, PyExc_RuntimeError, PyExc_ValueError}) {
            if (PyErr_ExceptionMatches(kind)) {
                PyErr_Clear();
                return storage;
            }
        }
        throw Raised{};
    }
    return storage;
}

// Whether memory that a constant lies in holds no data, and never did (`aliasing.look`).
bool is_nobodys(PyObject *tensor) {
    const Ref storage = storage_of(tensor);
    if (!storage) return false;
    PyObject *held = entry(notes_of(storage.get()).get(), names->HELD);
    return (held == nullptr || held == Py_None) && asks(storage.get(), names->resizable);
}

void set_vocabulary(const py::dict &vocabulary, const py::dict &places) {
    PythonNames *found = new PythonNames();
    PyObject *v = vocabulary.ptr();
    found->tensor = given(v, "Tensor"), found->parameter = given(v, "Parameter"), found->layout = given(v, "Layout");
    found->kinds = given(v, "kinds"), found->moments = given(v, "moments"), found->telling = given(v, "telling");
    found->holding = given(v, "holding"), found->missed = given(v, "MISSED"), found->tag = given(v, "tag");
    found->drop_gone = given(v, "drop_gone"), found->under_functorch = given(v, "under_functorch");
    found->grad_enabled = given(v, "grad_enabled"), found->any_autocast = given(v, "any_autocast");
    found->autocast = given(v, "autocast"), found->saving_hooks = given(v, "saving_hooks");
    found->modes = given(v, "modes"), found->disabled = given(v, "disabled");
    found->repeat = given(v, "repeat"), found->native = given(v, "Native");
    found->forward_ad = given(v, "forward_ad"), found->forms = given(v, "forms"), found->form_of = given(v, "form_of");
    found->LAYOUT = given(v, "LAYOUT"), found->MOMENT = given(v, "MOMENT"), found->TAGGED_AT = given(v, "TAGGED_AT");
    found->RELAID = given(v, "RELAID"), found->INPUT = given(v, "INPUT"), found->PRESUMED = given(v, "PRESUMED");
    found->TOKEN = given(v, "TOKEN"), found->HELD = given(v, "HELD"), found->MADE = given(v, "MADE");
    found->LINK = given(v, "LINK"), found->UNTRACKED = given(v, "UNTRACKED"), found->PARTS = given(v, "PARTS");
    found->GATHERED = given(v, "GATHERED"), found->NUMBER = given(v, "NUMBER");
    found->NUMBER_OF = given(v, "NUMBER_OF"), found->COUNTED = given(v, "COUNTED");
    const auto place = [&](const char *name) { return places[name].cast<Py_ssize_t>(); };
    found->batch = place("batch"), found->dim = place("dim");
    found->outer = place("outer"), found->inner = place("inner");
    found->owner = place("owner"), found->mixed = place("mixed"), found->is_row_index = place("is_row_index");
    found->order = place("order"), found->alone = place("alone"), found->piece = place("piece");
    try {
        const Ref storage = called(given(v, "example"), found->untyped_storage);
        found->counting = counts_changes(given(v, "example")) && counts_changes(storage.get());
    } catch (const Raised &) {
        throw py::error_already_set();
    }
    found->vocabulary = Py_NewRef(v);
    names = found;
}
