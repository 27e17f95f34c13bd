// What a call is known by: fastdp/engine/call_cache.py, which says the same in Python.
#pragma once

#include "seen_tensors.h"

#include <vector>

// The parts of a signature, collected in one pass over the arguments.
class Signature {
  public:
    // combined: of a call of data and parameters, of which more is told.
    Signature(std::int64_t batch, PyObject *tracked, SeenTensors &seen, std::int64_t kind, bool combined)
        : batch_(batch), tracked_(tracked), seen_(seen), moment_(attribute(names->moments, names->current)),
          checked_((kind & KIND) == CHECKED && !combined),
          elementwise_((kind & KIND) == ELEMENTWISE), view_(kind & INDEXING),
          gathering_(kind & GATHERING), followed_((kind & FOLLOWED) || combined), combined_(combined) {
        parts_.reserve(32);
    }
    ~Signature() {
        for (PyObject *part : parts_) Py_DECREF(part);
    }

    void add(PyObject *part) { parts_.push_back(Py_NewRef(part)); }
    void add(Ref &&part) { parts_.push_back(part.release()); }

    void describe(PyObject *value) {
        if (is_tensor(value)) {
            describe_tensor(value);
        } else if (PyTuple_Check(value) || PyList_Check(value)) {
            const Nest nest;
            add((PyObject *)Py_TYPE(value));
            const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
            add(checked(PyLong_FromSsize_t(count)));
            for (Py_ssize_t i = 0; i < count; ++i) describe(PySequence_Fast_GET_ITEM(value, i));
        } else if (PyDict_Check(value)) {
            throw Missed{};
        } else {
            add((PyObject *)Py_TYPE(value));
            add(value);
        }
    }

    void describe_index(PyObject *index) {
        const bool several = PyTuple_Check(index);
        const Py_ssize_t count = several ? PyTuple_GET_SIZE(index) : 1;
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject *item = several ? PyTuple_GET_ITEM(index, i) : index;
            add((PyObject *)Py_TYPE(item));
            if (PySlice_Check(item)) {
                for (PyObject *name : {names->start, names->stop, names->step}) {
                    Ref bound = attribute(item, name);
                    if (bound.get() != Py_None && !PyLong_CheckExact(bound.get())) throw Missed{};
                    add(std::move(bound));
                }
            } else if (item == Py_None || item == Py_Ellipsis || PyLong_CheckExact(item)) {
                add(item);
            } else {
                throw Missed{};
            }
        }
        add(several ? Py_True : Py_False);
    }

    Ref tuple() {
        if (data_.empty()) throw Missed{};  // how constants are made of others is noted
        for (const auto &made : made_) {  // (of other calls `batch_positions.may_matter` was asked)
            for (const auto &data : data_) {
                if (!elementwise_) break;
                for (const std::int64_t dim : {(std::int64_t)0, (std::int64_t)made.size() + data.beside}) {
                    const bool there = 0 <= dim && dim < (std::int64_t)made.size();
                    if (there && made[(std::size_t)dim] == data.rows) throw Missed{};  // a number for each row, perhaps
                }
            }
        }
        for (std::int64_t size : constant_sizes_) {
            for (const auto &data : data_) {
                if (checked_ && (size == batch_ || size == data.rows)) throw Missed{};
            }
            if (checked_ && size == batch_) throw Missed{};
        }
        Ref found = checked(PyTuple_New((Py_ssize_t)parts_.size()));
        for (std::size_t i = 0; i < parts_.size(); ++i) PyTuple_SET_ITEM(found.get(), (Py_ssize_t)i, parts_[i]);
        parts_.clear();
        return found;
    }

  private:
    void describe_tensor(PyObject *value) {
        PyTypeObject *type = Py_TYPE(value);
        if (type != (PyTypeObject *)names->tensor && type != (PyTypeObject *)names->parameter) throw Missed{};
        const Ref needs_grad = attribute(value, names->requires_grad);
        dlpack::Tensor told;
        const dlpack::Tensor *now = dlpack::describe(value, told) ? &told : nullptr;
        if (SeenTensor *seen = seen_.find(value, moment_.get(), now)) {
            return describe_data(value, *seen, needs_grad, now);
        }
        const Ref held_notes = notes_of(value);
        PyObject *notes = held_notes.get();
        if (is(value, names->is_nested)) throw Missed{};
        if (needs_grad.get() == Py_True) {
            Ref id = checked(PyLong_FromVoidPtr(value));
            PyObject *link = entry(notes, names->LINK);
            if (link != nullptr && link != Py_None) throw Missed{};
            if (entry(tracked_, id.get()) != nullptr) {
                if (!combined_) throw Missed{};
                return describe_parameter(value, notes, std::move(id), now);
            }
        }
        const bool in_parts = entry(notes, names->PARTS) != nullptr;
        if (followed_ && in_parts) throw Missed{};
        const bool view = asks(value, names->is_view);
        const Ref base = view ? attribute(value, names->base) : Ref();
        const Ref base_notes = view ? notes_of(base.get()) : Ref();
        const bool gathered = entry(notes, names->GATHERED) != nullptr ||
                              (view && entry(base_notes.get(), names->GATHERED) != nullptr);
        if (gathering_ && gathered) throw Missed{};
        PyObject *layout = layout_of(notes, base_notes.get());
        if (layout != nullptr) {
            const Ref storage = memory_of_data(value, notes, base_notes.get());
            SeenTensor once, *seen = nullptr;
            if (!in_parts && !gathered) {
                seen = seen_.add(value, notes, base_notes.get(), storage.get(), layout, moment_.get(), now);
            }
            once.layout = layout;
            return describe_data(value, seen == nullptr ? once : *seen, needs_grad, now);
        }
        if (!is_nobodys(value)) throw Missed{};
        if (combined_) {
            if (type != (PyTypeObject *)names->parameter || needs_grad.get() == Py_True) throw Missed{};
            return describe_parameter(value, notes, checked(PyLong_FromVoidPtr(value)), now);  // frozen
        }
        const Ref shape = attribute(value, names->shape);
        describe_constant(value, notes, needs_grad.get() == Py_True, shape.get());
        const Ref dtype = attribute(value, names->dtype);
        add(form_of({shape.get(), dtype.get(), needs_grad.get(), Py_None}));
    }

    // `known_calls.form_of`
    static Ref form_of(std::initializer_list<PyObject *> parts) {
        const Ref key = checked(PyTuple_New((Py_ssize_t)parts.size()));
        Py_ssize_t place = 0;
        for (PyObject *part : parts) PyTuple_SET_ITEM(key.get(), place++, Py_NewRef(part));
        Ref found = Ref::of(entry(names->forms, key.get()));
        return found ? std::move(found) : checked(PyObject_CallOneArg(names->form_of, key.get()));
    }

    void describe_parameter(PyObject *value, PyObject *notes, Ref &&id, const dlpack::Tensor *now) {
        if (entry(notes, names->LAYOUT) != nullptr || entry(notes, names->MADE) != nullptr) throw Missed{};
        const bool filled = number(attribute(names->holding, names->turn).get()) > 0;  // memory of some constants
        if (filled && !is_nobodys(value)) throw Missed{};
        add(std::move(id));
        add(attribute(value, names->requires_grad));
        if (now != nullptr) return add(dlpack::bytes_of(*now, dlpack::FORM));
        for (PyObject *name : {names->shape, names->dtype, names->device}) add(attribute(value, name));
        add(called(value, names->is_contiguous));
    }

    // `tag_of`: borrowed, nullptr of a constant.
    PyObject *layout_of(PyObject *notes, PyObject *base_notes) {
        PyObject *layout = entry(notes, names->LAYOUT);
        if (layout != nullptr) {
            if (!is_layout(layout) || entry(notes, names->MOMENT) != moment_.get()) throw Missed{};
            if (number(field(layout, names->batch)) != batch_) throw Missed{};
            if (!is_empty(field(layout, names->mixed))) throw Missed{};
        }
        if (base_notes == nullptr) return layout;
        const bool constant = layout == nullptr;
        if (constant ? entry(base_notes, names->LAYOUT) != nullptr : !agrees_with_views(base_notes)) throw Missed{};
        return layout;
    }

    // `look`: the memory, which is as the layout says.
    static Ref memory_of_data(PyObject *value, PyObject *notes, PyObject *base_notes) {
        Ref storage = storage_of(value);
        if (!storage) throw Missed{};
        PyObject *held = entry(notes_of(storage.get()).get(), names->HELD);
        if (held == Py_None) held = nullptr;
        if (held != entry(notes, names->HELD) &&
            (base_notes == nullptr || held != entry(base_notes, names->HELD))) {
            throw Missed{};
        }
        return storage;
    }

    void describe_constant(PyObject *value, PyObject *notes, bool needs_grad, PyObject *shape) {
        if (needs_grad && !is(value, names->is_leaf)) throw Missed{};  // of unseen origin, perhaps
        if (entry(notes, names->NUMBER) != nullptr || entry(notes, names->NUMBER_OF) != nullptr) throw Missed{};
        const bool made = was_made(entry(notes, names->MADE));
        if (made) made_.emplace_back();
        const Py_ssize_t dims = PyTuple_GET_SIZE(shape);
        for (Py_ssize_t i = 0; i < dims; ++i) {
            const std::int64_t size = number(PyTuple_GET_ITEM(shape, i));
            // `batch_positions.may_matter`
            if (made && !elementwise_ && size >= batch_ && size % batch_ == 0) throw Missed{};
            if (made) made_.back().push_back(size);
            constant_sizes_.push_back(size);
        }
    }

    void describe_data(PyObject *value, SeenTensor &seen, const Ref &needs_grad, const dlpack::Tensor *now) {
        PyObject *layout = seen.layout;
        if (field(layout, names->owner) != Py_None || field(layout, names->piece) != Py_None) throw Missed{};
        const bool plain = field(layout, names->order) == Py_None && number(field(layout, names->alone)) < 0;
        if (combined_ && !plain) throw Missed{};
        const Ref described = described_of(value, seen, needs_grad, now);
        if (checked_ && PyTuple_GET_ITEM(described.get(), FLOATING) == Py_False &&
            (truth(field(layout, names->is_row_index)) || !view_)) {
            throw Missed{};
        }
        const std::int64_t outer = number(field(layout, names->outer)), inner = number(field(layout, names->inner));
        const std::int64_t dims = number(PyTuple_GET_ITEM(described.get(), DIMS));
        data_.push_back({number(field(layout, names->dim)) - dims, outer * batch_ * inner});
        add(PyTuple_GET_ITEM(described.get(), DESCRIBED_FORM));
    }

    // What the same call gave before, if it has this form still; else found anew.
    Ref described_of(PyObject *value, SeenTensor &seen, const Ref &needs_grad, const dlpack::Tensor *now) {
        if (!seen.described) seen.described = checked(PyList_New(2));
        const Py_ssize_t place = seen.place + combined_;
        PyObject *before = PyList_GET_ITEM(seen.described.get(), place);
        if (now != nullptr && before != nullptr && before != Py_None &&
            PyTuple_GET_ITEM(before, NEEDS_GRAD) == needs_grad.get() &&
            dlpack::has_bytes(*now, dlpack::FORM, PyTuple_GET_ITEM(before, BYTES))) {
            return Ref::of(before);
        }
        const Ref shape = attribute(value, names->shape), dtype = attribute(value, names->dtype);
        const Ref dims = checked(PyLong_FromSsize_t(PyTuple_GET_SIZE(shape.get())));
        const Ref bytes = now != nullptr ? dlpack::bytes_of(*now, dlpack::FORM) : Ref::of(Py_None);
        const Ref floating = called(value, names->floating);
        Ref form;
        if (combined_) {
            const Ref device = attribute(value, names->device), contiguous = called(value, names->is_contiguous);
            form = form_of({device.get(), contiguous.get(), shape.get(), dtype.get(), needs_grad.get(), seen.layout});
        } else {
            form = form_of({shape.get(), dtype.get(), needs_grad.get(), seen.layout});
        }
        Ref found = checked(PyTuple_Pack(5, form.get(), needs_grad.get(), dims.get(), floating.get(), bytes.get()));
        if (now != nullptr && PyList_SetItem(seen.described.get(), place, Py_NewRef(found.get())) < 0) throw Raised{};
        return found;
    }

    const std::int64_t batch_;
    PyObject *tracked_;
    SeenTensors &seen_;
    const Ref moment_;
    const bool checked_, elementwise_, view_, gathering_, followed_, combined_;
    struct Data {
        std::int64_t beside, rows;  // where the samples lie, counted from the last dimension
    };
    std::vector<PyObject *> parts_;
    std::vector<Data> data_;
    std::vector<std::vector<std::int64_t>> made_;  // shapes of constants that were made in sight
    std::vector<std::int64_t> constant_sizes_;
};
