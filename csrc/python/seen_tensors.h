// Tensors with a layout that a pass has met, and what calls are known by of each of them.
//
// What fastdp knows of a tensor is noted in `__dict__`s: its own, its base's, its memory's. Python counts how often
// dicts change, no two states of any have one number: while the three numbers are those of then, all notes are. (Not
// for every object in 3.13: `counts_changes` tries it on tensors and their memory. Not at all from 3.14 on.)
#pragma once

#include "dlpack.h"
#include "python_names.h"

#include <array>

// The number of a dict's state; 0 where Python has none.
inline std::uint64_t state_of(PyObject *dict) {
#if PY_VERSION_HEX < 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    return 0;
#endif
}

// Whether an object's attributes are set and deleted in new states of its dict, each.
inline bool counts_changes(PyObject *object) {
    const Ref notes = notes_of(object), name = checked(PyUnicode_FromString("_fastdp_counted"));
    std::uint64_t before = state_of(notes.get());
    bool found = before != 0;
    for (PyObject *value : {Py_True, Py_False, (PyObject *)nullptr}) {
        if (PyObject_SetAttr(object, name.get(), value) < 0) throw Raised{};
        found = found && state_of(notes.get()) != before;
        before = state_of(notes.get());
    }
    return found;
}

// What a weak reference is to; none if that is gone.
inline Ref object_of(PyObject *weak) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = nullptr;
    if (PyWeakref_GetRef(weak, &found) < 0) throw Raised{};
    return Ref(found);
#else
    PyObject *found = PyWeakref_GET_OBJECT(weak);
    return found == Py_None ? Ref() : Ref::of(found);
#endif
}

struct SeenTensor {
    PyObject *tensor = nullptr;
    std::uint64_t state = 0, state_of_base = 0, state_of_storage = 0;
    Ref base_notes, storage, storage_notes;  // storage: weakly
    void *address = nullptr;
    PyObject *layout = nullptr, *moment = nullptr;  // which its notes hold
    // What was described of it: alone, and beside parameters. A list of `known_calls.Known` with two places for each
    // result of a call, and the first of these; else one of its own.
    Ref described;
    Py_ssize_t place = 0;
};

// Places in `known_calls.Described`.
enum { DESCRIBED_FORM, NEEDS_GRAD, DIMS, FLOATING, BYTES };

// Those met last: most results are soon taken by another call, and are gone then.
class SeenTensors {
  public:
    // What is known of a tensor still; nullptr if that is nothing.
    SeenTensor *find(PyObject *tensor, PyObject *moment, const dlpack::Tensor *now) {
        SeenTensor &seen = place_of(tensor);
        const bool same = seen.tensor == tensor && seen.state == state_of(notes_of(tensor).get()) &&
                          seen.moment == moment && seen.state_of_storage == state_of(seen.storage_notes.get()) &&
                          (!seen.base_notes || seen.state_of_base == state_of(seen.base_notes.get()));
        return same && lies_there(seen, now) ? &seen : nullptr;
    }

    // Note a tensor of which nothing out of the ordinary is noted. base_notes: of a view's base, else nullptr. now: as
    // DLPack tells of it, here and in `find`; nullptr if it does not.
    SeenTensor *add(PyObject *tensor, PyObject *notes, PyObject *base_notes, PyObject *storage, PyObject *layout,
                    PyObject *moment, const dlpack::Tensor *now) {
        if (!names->counting) return nullptr;
        SeenTensor &seen = place_of(tensor) = SeenTensor();
        seen.tensor = tensor, seen.address = now == nullptr ? nullptr : now->data;
        seen.storage = checked(PyWeakref_NewRef(storage, nullptr)), seen.storage_notes = notes_of(storage);
        seen.base_notes = Ref::of(base_notes);
        seen.state = state_of(notes), seen.state_of_storage = state_of(seen.storage_notes.get());
        seen.state_of_base = base_notes == nullptr ? 0 : state_of(base_notes);
        seen.layout = layout, seen.moment = moment;
        return &seen;
    }

    // A call in Python may do to tensors what no note tells of (`.data = ...`).
    void forget() {
        for (SeenTensor &seen : seen_) seen.tensor = nullptr;
    }

    // Hold nothing: Python's garbage collection does not see what is held here.
    void clear() {
        for (SeenTensor &seen : seen_) seen = SeenTensor();
    }

  private:
    // Whether the tensor lies in the memory whose notes these are: while that is there, no other has its addresses.
    static bool lies_there(const SeenTensor &seen, const dlpack::Tensor *now) {
        const Ref storage = object_of(seen.storage.get());
        if (now != nullptr) return storage && now->data == seen.address;
        return storage && storage_of(seen.tensor).get() == storage.get();
    }

    static constexpr std::size_t COUNT = 64;
    SeenTensor &place_of(PyObject *tensor) {
        return seen_[(reinterpret_cast<std::uintptr_t>(tensor) >> 4) * 0x9E3779B97F4A7C15u >> 58];
    }
    std::array<SeenTensor, COUNT> seen_;
};
