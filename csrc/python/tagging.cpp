#include "tagging.h"

void tag(PyObject *tensor, PyObject *layout, PyObject *moment, SeenTensors &seen, PyObject *described,
         Py_ssize_t place) {
    const Ref held_notes = notes_of(tensor);
    PyObject *notes = held_notes.get();
    const bool view = asks(tensor, names->is_view), unnoted = PyDict_GET_SIZE(notes) == 0;
    const Ref storage = storage_of(tensor);
    const bool given =
        !unnoted && (entry(notes, names->INPUT) != nullptr || entry(notes, names->PRESUMED) != nullptr);
    bool ordinary = storage && !given;
    Ref held, storage_notes;
    if (ordinary) {
        storage_notes = notes_of(storage.get());
        held = Ref::of(entry(storage_notes.get(), names->HELD));
        if (!held || held.get() == Py_None) {
            held = checked(PyList_New(2));
            PyList_SET_ITEM(held.get(), 0, Py_NewRef(layout));
            PyList_SET_ITEM(held.get(), 1, Py_NewRef(moment));
            put(storage_notes.get(), names->HELD, held.get());
            const Ref weak = checked(PyWeakref_NewRef(storage.get(), nullptr));
            const Ref storages = attribute(names->holding, names->all_storages);
            if (PyList_Append(storages.get(), weak.get()) < 0) throw Raised{};
            const Ref prune = attribute(names->holding, names->prune);
            if (PyList_GET_SIZE(storages.get()) > number(prune.get())) checked(PyObject_CallNoArgs(names->drop_gone));
        } else {
            PyObject *known = PyList_GET_ITEM(held.get(), 0), *whose = PyList_GET_ITEM(held.get(), 1);
            const bool same_moment = whose == moment || whose == Py_None;
            const bool same_layout =
                known == layout || (view && is_layout(known) && number(field(known, names->batch)) ==
                                                                    number(field(layout, names->batch)));
            ordinary = same_moment && same_layout;
        }
    }
    if (!ordinary) {
        checked(PyObject_CallFunctionObjArgs(names->tag, tensor, layout, nullptr));
        return;
    }
    put(notes, names->LAYOUT, layout);
    put(notes, names->MOMENT, moment);
    if (view) put(notes, names->TAGGED_AT, attribute(tensor, names->version).get());
    const Ref token = attribute(moment, names->token);
    if (token.get() != Py_None || (!unnoted && entry(notes, names->TOKEN) != nullptr)) {
        put(notes, names->TOKEN, token.get());
    }
    put(notes, names->HELD, held.get());
    if (!unnoted || !is_empty(field(layout, names->mixed))) return;
    const Ref base = view ? attribute(tensor, names->base) : Ref(), base_notes = view ? notes_of(base.get()) : Ref();
    if (view && (!agrees_with_views(base_notes.get()) || entry(base_notes.get(), names->GATHERED) != nullptr)) return;
    dlpack::Tensor now;
    SeenTensor *known = seen.add(tensor, notes, base_notes.get(), storage.get(), layout, moment,
                                 dlpack::describe(tensor, now) ? &now : nullptr);
    if (known != nullptr) known->described = Ref::of(described), known->place = place;
}

void note_result(PyObject *tensor, PyObject *layout, PyObject *moment, SeenTensors &seen, PyObject *described,
                 Py_ssize_t place) {
    if (layout != Py_None) {
        tag(tensor, layout, moment, seen, described, place);
    } else if (is(tensor, names->requires_grad) && !is(tensor, names->is_leaf)) {
        put(notes_of(tensor).get(), names->UNTRACKED, Py_True);
    }
}
