// Torch calls that a pass of capture knows already, made and tagged without Python in between.
//
// fastdp/engine/layout_cache.py defines what a call's signature is, and fastdp/layouts/layout.py (`tag_of`, `tag`),
// memory.py (`look`) and held.py (`hold`) what is asked and noted of a tensor. Here are the ordinary cases of these
// alone. Whatever is out of the ordinary is MISSED: then nothing was done, and the call goes through Python.
//
// A call that combines data with parameters is known by more (`known_calls.KnownCapture`): what its rule in Python found out
// from the shapes, types and layouts of the arguments, in this module's forward.
#include "known_calls.h"
#include "ref.h"

#include <string>
#include <vector>

namespace {

struct Missed {};  // out of the ordinary
// What the rules in Python are written with; borrowed from `vocabulary`, which lives as long as the process.
struct Words {
    PyObject *vocabulary = nullptr;
    PyObject *tensor, *parameter, *layout, *kinds, *moments, *telling, *holding, *missed;
    PyObject *tag, *drop_gone, *under_functorch, *grad_enabled;
    PyObject *LAYOUT, *MOMENT, *TAGGED_AT, *RELAID, *INPUT, *PRESUMED, *TOKEN, *HELD, *MADE, *LINK, *UNTRACKED, *PARTS,
        *GATHERED;
    PyObject *any_autocast, *autocast, *saving_hooks, *repeat;
    Py_ssize_t batch, dim, outer, inner, owner, mixed, order, is_row_index, alone, piece;
    PyObject *is_nested = interned("is_nested"), *requires_grad = interned("requires_grad"), *shape = interned("shape"),
             *dtype = interned("dtype"), *is_leaf = interned("is_leaf"), *base = interned("_base"),
             *is_view = interned("_is_view"), *untyped_storage = interned("untyped_storage"),
             *resizable = interned("resizable"), *version = interned("_version"), *current = interned("current"),
             *floating = interned("is_floating_point"), *number = interned("number"), *before = interned("before"),
             *token = interned("token"), *out = interned("out"), *start = interned("start"), *stop = interned("stop"),
             *step = interned("step"), *all_storages = interned("storages"), *prune = interned("prune"),
             *turn = interned("turn"), *device = interned("device"), *layout_of_data = interned("layout"), *numel = interned("numel"), *is_contiguous = interned("is_contiguous");
};
Words *words = nullptr;

PyObject *given(PyObject *vocabulary, const char *name) {
    PyObject *found = PyDict_GetItemString(vocabulary, name);
    if (found == nullptr) throw py::key_error(name);
    return found;
}

PyObject *field(PyObject *layout, Py_ssize_t place) { return PyTuple_GET_ITEM(layout, place); }
bool is_empty(PyObject *text) { return PyUnicode_GET_LENGTH(text) == 0; }
bool is_layout(PyObject *object) { return Py_TYPE(object) == (PyTypeObject *)words->layout; }
bool is_tensor(PyObject *object) { return PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)words->tensor); }

// Kinds of functions (`layout_cache.Kind`).
enum Kind : std::int64_t { ASKS = 0, REPEATS = 1, CHECKED = 2, DEPENDS = 3, WHERE = 4, ELEMENTWISE = 5, DRAWING = 6 };
constexpr std::int64_t KIND = 7, FOLLOWED = 8, GATHERING = 16, INDEXING = 32, COMBINING = 64,
                       RESHAPING = 128;

// `positions.made_in_sight`
bool was_made(PyObject *note) {
    if (note == nullptr) return false;
    const Ref now = attribute(words->moments, words->current);
    for (PyObject *name : {words->number, words->before}) {
        const int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(note, 1), attribute(now.get(), name).get(), Py_EQ);
        if (same < 0) throw Raised{};
        if (same) return !is_empty(PyTuple_GET_ITEM(note, 0));
    }
    return false;
}

// The tensor's memory; none of sparse ones.
Ref storage_of(PyObject *tensor) {
    Ref storage(PyObject_CallMethodNoArgs(tensor, words->untyped_storage));
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

// Whether memory that a constant lies in holds no data, and never did (`memory.look`).
bool is_nobodys(PyObject *tensor) {
    const Ref storage = storage_of(tensor);
    if (!storage) return false;
    PyObject *held = entry(notes_of(storage.get()).get(), words->HELD);
    return (held == nullptr || held == Py_None) && asks(storage.get(), words->resizable);
}

// The parts of a signature, collected in one pass over the arguments.
class Signature {
  public:
    // combined: of a call of data and parameters, of which more is told.
    Signature(std::int64_t batch, PyObject *tracked, std::int64_t kind, bool combined)
        : batch_(batch), tracked_(tracked), checked_((kind & KIND) == CHECKED && !combined),
          elementwise_((kind & KIND) == ELEMENTWISE || (kind & KIND) == DRAWING), of_data_((kind & KIND) == DRAWING), view_(kind & INDEXING),
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
                for (PyObject *name : {words->start, words->stop, words->step}) {
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
        if ((of_data_ || !made_.empty()) && data_.empty()) throw Missed{};  // what is made of it is noted
        for (const auto &made : made_) {  // (of other calls `positions.may_matter` was asked)
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
        if (type != (PyTypeObject *)words->tensor && type != (PyTypeObject *)words->parameter) throw Missed{};
        const Ref held_notes = notes_of(value);
        PyObject *notes = held_notes.get();
        const Ref needs_grad = attribute(value, words->requires_grad);
        if (is(value, words->is_nested)) throw Missed{};
        if (needs_grad.get() == Py_True) {
            Ref id = checked(PyLong_FromVoidPtr(value));
            PyObject *link = entry(notes, words->LINK);
            if (link != nullptr && link != Py_None) throw Missed{};
            if (entry(tracked_, id.get()) != nullptr) {
                if (!combined_) throw Missed{};
                describe_parameter(value, notes, std::move(id));
                return;
            }
        }
        if (gathering_ && entry(notes, words->GATHERED) != nullptr) throw Missed{};
        if (followed_ && entry(notes, words->PARTS) != nullptr) throw Missed{};
        const bool view = asks(value, words->is_view);
        const Ref base = view ? attribute(value, words->base) : Ref();
        const Ref base_notes = view ? notes_of(base.get()) : Ref();
        if (gathering_ && view && entry(base_notes.get(), words->GATHERED) != nullptr) throw Missed{};
        PyObject *layout = layout_of(notes, base_notes.get());
        check_memory(value, notes, base_notes.get(), layout);
        if (combined_ && layout == nullptr) {
            if (type != (PyTypeObject *)words->parameter || needs_grad.get() == Py_True) throw Missed{};
            describe_parameter(value, notes, checked(PyLong_FromVoidPtr(value)));  // frozen
            return;
        }
        Ref shape = attribute(value, words->shape);
        if (layout == nullptr) {
            describe_constant(value, notes, needs_grad.get() == Py_True, shape.get());
        } else {
            describe_data(value, layout, PyTuple_GET_SIZE(shape.get()));
        }
        add(std::move(shape));
        add(attribute(value, words->dtype));
        add(needs_grad.get());
        add(layout == nullptr ? Py_None : layout);
    }

    void describe_parameter(PyObject *value, PyObject *notes, Ref &&id) {
        if (entry(notes, words->LAYOUT) != nullptr || entry(notes, words->MADE) != nullptr) throw Missed{};
        add(std::move(id));
        for (PyObject *name : {words->requires_grad, words->shape, words->dtype, words->device}) {
            add(attribute(value, name));
        }
        add(called(value, words->is_contiguous));
    }

    // `tag_of`: borrowed, nullptr of a constant.
    PyObject *layout_of(PyObject *notes, PyObject *base_notes) {
        PyObject *layout = entry(notes, words->LAYOUT);
        if (layout != nullptr) {
            const Ref now = attribute(words->moments, words->current);
            if (!is_layout(layout) || entry(notes, words->MOMENT) != now.get()) throw Missed{};
            if (number(field(layout, words->batch)) != batch_) throw Missed{};
            if (!is_empty(field(layout, words->mixed))) throw Missed{};
        }
        if (base_notes == nullptr) return layout;
        PyObject *of_base = entry(base_notes, words->LAYOUT);
        if (layout == nullptr) {
            if (of_base != nullptr) throw Missed{};
            return nullptr;
        }
        if (entry(base_notes, words->RELAID) != nullptr) throw Missed{};
        if (of_base != nullptr && (!is_layout(of_base) || !is_empty(field(of_base, words->mixed)))) throw Missed{};
        return layout;
    }

    // `look`: the memory is as the layout says.
    void check_memory(PyObject *value, PyObject *notes, PyObject *base_notes, PyObject *layout) {
        if (layout == nullptr) {
            if (!is_nobodys(value)) throw Missed{};
            return;
        }
        const Ref storage = storage_of(value);
        if (!storage) throw Missed{};
        PyObject *held = entry(notes_of(storage.get()).get(), words->HELD);
        if (held == Py_None) held = nullptr;
        if (held == entry(notes, words->HELD)) return;
        if (base_notes == nullptr || held != entry(base_notes, words->HELD)) throw Missed{};
    }

    void describe_constant(PyObject *value, PyObject *notes, bool needs_grad, PyObject *shape) {
        if (needs_grad && !is(value, words->is_leaf)) throw Missed{};  // of unseen origin, perhaps
        const bool made = was_made(entry(notes, words->MADE));
        if (made) made_.emplace_back();
        const Py_ssize_t dims = PyTuple_GET_SIZE(shape);
        for (Py_ssize_t i = 0; i < dims; ++i) {
            const std::int64_t size = number(PyTuple_GET_ITEM(shape, i));
            // `positions.may_matter`
            if (made && !elementwise_ && size >= batch_ && size % batch_ == 0) throw Missed{};
            if (made) made_.back().push_back(size);
            constant_sizes_.push_back(size);
        }
    }

    void describe_data(PyObject *value, PyObject *layout, std::int64_t dims) {
        const std::int64_t outer = number(field(layout, words->outer)), inner = number(field(layout, words->inner));
        data_.push_back({number(field(layout, words->dim)) - dims, outer * batch_ * inner});
        if (field(layout, words->owner) != Py_None || field(layout, words->piece) != Py_None) throw Missed{};
        if (combined_) {
            if (field(layout, words->order) != Py_None || number(field(layout, words->alone)) >= 0) throw Missed{};
            add(attribute(value, words->device));
            add(called(value, words->is_contiguous));
        }
        if (!checked_) return;
        if (!asks(value, words->floating) && (truth(field(layout, words->is_row_index)) || !view_)) throw Missed{};
    }

    const std::int64_t batch_;
    PyObject *tracked_;
    const bool checked_, elementwise_, of_data_, view_, gathering_, followed_, combined_;
    struct Data {
        std::int64_t beside, rows;  // where the samples lie, counted from the last dimension
    };
    std::vector<PyObject *> parts_;
    std::vector<Data> data_;
    std::vector<std::vector<std::int64_t>> made_;  // shapes of constants that were made in sight
    std::vector<std::int64_t> constant_sizes_;
};

// `layout.tag` and `held.hold` of a result without notes that matter. (The call was made: nothing is MISSED from here.)
void tag(PyObject *tensor, PyObject *layout, PyObject *moment) {
    const Ref held_notes = notes_of(tensor);
    PyObject *notes = held_notes.get();
    const bool view = asks(tensor, words->is_view);
    const Ref storage = storage_of(tensor);
    bool ordinary = storage && entry(notes, words->INPUT) == nullptr && entry(notes, words->PRESUMED) == nullptr;
    Ref held;
    if (ordinary) {
        const Ref storage_notes = notes_of(storage.get());
        held = Ref::of(entry(storage_notes.get(), words->HELD));
        if (!held || held.get() == Py_None) {
            held = checked(PyList_New(2));
            PyList_SET_ITEM(held.get(), 0, Py_NewRef(layout));
            PyList_SET_ITEM(held.get(), 1, Py_NewRef(moment));
            put(storage_notes.get(), words->HELD, held.get());
            const Ref weak = checked(PyWeakref_NewRef(storage.get(), nullptr));
            const Ref storages = attribute(words->holding, words->all_storages);
            if (PyList_Append(storages.get(), weak.get()) < 0) throw Raised{};
            const Ref prune = attribute(words->holding, words->prune);
            if (PyList_GET_SIZE(storages.get()) > number(prune.get())) checked(PyObject_CallNoArgs(words->drop_gone));
        } else {
            PyObject *known = PyList_GET_ITEM(held.get(), 0), *whose = PyList_GET_ITEM(held.get(), 1);
            const bool same_moment = whose == moment || whose == Py_None;
            const bool same_layout =
                known == layout || (view && is_layout(known) && number(field(known, words->batch)) ==
                                                                    number(field(layout, words->batch)));
            ordinary = same_moment && same_layout;
        }
    }
    if (!ordinary) {
        checked(PyObject_CallFunctionObjArgs(words->tag, tensor, layout, nullptr));
        return;
    }
    put(notes, words->LAYOUT, layout);
    put(notes, words->MOMENT, moment);
    if (view) put(notes, words->TAGGED_AT, attribute(tensor, words->version).get());
    const Ref token = attribute(moment, words->token);
    if (token.get() != Py_None || entry(notes, words->TOKEN) != nullptr) put(notes, words->TOKEN, token.get());
    put(notes, words->HELD, held.get());
}

// A result of a known call: data with this layout, or (None) a constant.
void note_result(PyObject *tensor, PyObject *layout, PyObject *moment) {
    if (layout != Py_None) {
        tag(tensor, layout, moment);
    } else if (is(tensor, words->requires_grad) && !is(tensor, words->is_leaf)) {
        put(notes_of(tensor).get(), words->UNTRACKED, Py_True);
    }
}

void tensors_in(PyObject *nest, std::vector<PyObject *> &found) {
    if (is_tensor(nest)) {
        found.push_back(nest);
    } else if (PyTuple_Check(nest) || PyList_Check(nest)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(nest); ++i) {
            tensors_in(PySequence_Fast_GET_ITEM(nest, i), found);
        }
    } else if (PyDict_Check(nest)) {
        Py_ssize_t place = 0;
        PyObject *key, *value;
        while (PyDict_Next(nest, &place, &key, &value)) tensors_in(value, found);
    }
}

// The known calls of one pass. known: layouts of results by signature; captures: `KnownCapture` of calls with parameters; stack: the
// modules whose forwards run; asked: told of sizes that Python asks for.
class KnownCalls {
  public:
    KnownCalls(py::dict known, py::dict captures, std::int64_t batch, py::dict tracked, py::list stack, py::object asked)
        : known_(std::move(known)), captures_(std::move(captures)), tracked_(std::move(tracked)),
          batch_object_(py::int_(batch)), stack_(std::move(stack)), asked_(std::move(asked)), batch_(batch) {}

    // What the call gives, if it is known; MISSED otherwise, with nothing done.
    PyObject *call(PyObject *forward_pass, PyObject *function, PyObject *args, PyObject *kwargs) {
        try {
            if (checked(PyObject_CallNoArgs(words->under_functorch)).get() != Py_None) throw Missed{};
            PyObject *kind = entry(words->kinds, function);
            if (kind == nullptr) throw Missed{};
            const std::int64_t code = number(kind);
            if ((code & KIND) == ASKS) return asked(function, args, kwargs);
            if ((code & COMBINING) && takes_parameter(args, kwargs)) return combined(forward_pass, function, code, args, kwargs);
            if ((code & RESHAPING) && is_made_constant(args)) return reshaped(function, args, kwargs);
            const Ref layouts = known_layouts(function, code, args, kwargs);
            if (!layouts) throw Missed{};
            Ref out = checked(PyObject_Call(function, args, kwargs));
            note(out.get(), layouts.get());
            return out.release();
        } catch (const Missed &) {
            return Py_NewRef(words->missed);
        } catch (const Raised &) {
            return nullptr;
        } catch (const std::exception &problem) {
            PyErr_SetString(PyExc_RuntimeError, problem.what());
            return nullptr;
        }
    }

    // The call's signature, as `layout_cache.Memo.signature` gives it; None where it has none, MISSED where that is
    // left to Python. For tests.
    PyObject *signature(PyObject *function, PyObject *args, PyObject *kwargs) {
        try {
            PyObject *kind = entry(words->kinds, function);
            if (kind == nullptr) throw Missed{};
            const std::int64_t code = number(kind);
            if ((code & COMBINING) && takes_parameter(args, kwargs)) return capture_of(function, code, args, kwargs).release();
            return described(function, code, args, kwargs, false).release();
        } catch (const Missed &) {
            return Py_NewRef(words->missed);
        } catch (const Raised &) {
            throw py::error_already_set();
        }
    }

  private:
    PyObject *asked(PyObject *function, PyObject *args, PyObject *kwargs) {
        Ref out = checked(PyObject_Call(function, args, kwargs));
        if (batch_ > 1 && PyTuple_GET_SIZE(args) && PySet_Contains(words->telling, function) == 1) {
            PyObject *tensor = PyTuple_GET_ITEM(args, 0);
            if (is_tensor(tensor) && entry(notes_of(tensor).get(), words->LAYOUT) != nullptr) {
                checked(PyObject_CallFunctionObjArgs(asked_.ptr(), tensor, out.get(), batch_object_.ptr(), nullptr));
            }
        }
        return out.release();
    }

    // Whether the one tensor of a call is a constant that was made in sight.
    static bool is_made_constant(PyObject *args) {
        for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(args); ++i) {
            if (is_tensor(PyTuple_GET_ITEM(args, i))) return false;
        }
        PyObject *tensor = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : Py_None;
        if (Py_TYPE(tensor) != (PyTypeObject *)words->tensor) return false;
        const Ref notes = notes_of(tensor);
        if (entry(notes.get(), words->LAYOUT) != nullptr || !was_made(entry(notes.get(), words->MADE))) return false;
        if (is(tensor, words->requires_grad) || is(tensor, words->is_nested)) return false;
        if (asks(tensor, words->is_view)) {
            const Ref base = attribute(tensor, words->base);
            if (entry(notes_of(base.get()).get(), words->LAYOUT) != nullptr) return false;
        }
        return is_nobodys(tensor) && number(called(tensor, words->numel).get()) > 1;  // (one number is noted)
    }

    // The same constant in another shape was made as it was (`positions.note_made`).
    static PyObject *reshaped(PyObject *function, PyObject *args, PyObject *kwargs) {
        PyObject *made = PyTuple_GET_ITEM(entry(notes_of(PyTuple_GET_ITEM(args, 0)).get(), words->MADE), 0);
        const Ref now = attribute(words->moments, words->current);
        const Ref note = checked(PyTuple_Pack(2, made, attribute(now.get(), words->number).get()));
        Ref out = checked(PyObject_Call(function, args, kwargs));
        if (is_tensor(out.get())) put(notes_of(out.get()).get(), words->MADE, note.get());
        return out.release();
    }

    bool is_tracked(PyObject *value) {
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
        const Ref turn = attribute(words->holding, words->turn);
        const Py_ssize_t depth = PyList_GET_SIZE(stack_.ptr());
        if (number(turn.get()) > 0 || depth == 0) throw Missed{};
        if (checked(PyObject_CallOneArg(words->saving_hooks, Py_True)).get() != Py_None) throw Missed{};
        const Ref of_call = described(function, code, args, kwargs, true);
        const bool cast = truth(checked(PyObject_CallNoArgs(words->any_autocast)).get());
        const Ref casts = cast ? checked(PyObject_CallNoArgs(words->autocast)) : Ref::of(Py_None);
        return checked(PyTuple_Pack(3, PyList_GET_ITEM(stack_.ptr(), depth - 1), casts.get(), of_call.get()));
    }

    PyObject *combined(PyObject *forward_pass, PyObject *function, std::int64_t code, PyObject *args, PyObject *kwargs) {
        if (checked(PyObject_CallNoArgs(words->grad_enabled)).get() != Py_True) throw Missed{};
        const Ref capture = looked_up(captures_.ptr(), capture_of(function, code, args, kwargs));
        if (!capture) throw Missed{};
        Ref out = checked(
            PyObject_CallFunctionObjArgs(words->repeat, capture.get(), forward_pass, args, kwargs, nullptr));
        const Ref layout = attribute(PyTuple_GET_ITEM(capture.get(), 0), words->layout_of_data);
        tag(out.get(), layout.get(), attribute(words->moments, words->current).get());
        return out.release();
    }

    Ref described(PyObject *function, std::int64_t code, PyObject *args, PyObject *kwargs, bool combined) {
        const std::int64_t kind = code & KIND;
        const Py_ssize_t count = PyTuple_GET_SIZE(args);
        if (batch_ <= 1 || entry(kwargs, words->out) != nullptr) throw Missed{};
        if (!combined) {
            if (kind == ASKS || kind == DEPENDS || (kind == WHERE && count == 1)) throw Missed{};
            for (Py_ssize_t i = 0; i < count; ++i) {
                if (is_tracked(PyTuple_GET_ITEM(args, i))) throw Missed{};  // a parameter: captured
            }
        }
        Signature found(batch_, tracked_.ptr(), code, combined);
        found.add(function);
        found.add(batch_object_.ptr());
        found.add(checked(PyObject_CallNoArgs(words->grad_enabled)));
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

    Ref known_layouts(PyObject *function, std::int64_t code, PyObject *args, PyObject *kwargs) {
        return looked_up(known_.ptr(), described(function, code, args, kwargs, false));
    }

    static Ref looked_up(PyObject *answers, const Ref &signature) {
        PyObject *found = PyDict_GetItemWithError(answers, signature.get());
        if (found == nullptr && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw Raised{};
            PyErr_Clear();  // an argument without a hash
        }
        return Ref::of(found);
    }

    static void note(PyObject *out, PyObject *layouts) {
        const Ref moment = attribute(words->moments, words->current);
        if (is_tensor(out)) {
            if (PyTuple_GET_SIZE(layouts) != 1) throw py::value_error("a known call gave another number of tensors");
            note_result(out, PyTuple_GET_ITEM(layouts, 0), moment.get());
            return;
        }
        std::vector<PyObject *> tensors;
        tensors_in(out, tensors);
        if ((Py_ssize_t)tensors.size() != PyTuple_GET_SIZE(layouts)) {
            throw py::value_error("a known call gave another number of tensors");
        }
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            note_result(tensors[i], PyTuple_GET_ITEM(layouts, (Py_ssize_t)i), moment.get());
        }
    }

    py::dict known_, captures_, tracked_;
    py::object batch_object_;
    py::list stack_;
    py::object asked_;
    const std::int64_t batch_;
};

// call(forward_pass, function, args, kwargs) without pybind11 in between.
PyObject *call_known(PyObject *capsule, PyObject *const *args, Py_ssize_t count) {
    if (count != 4 || !PyTuple_Check(args[2]) || !PyDict_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "call(forward_pass, function, args, kwargs)");
        return nullptr;
    }
    auto *known = static_cast<KnownCalls *>(PyCapsule_GetPointer(capsule, nullptr));
    return known == nullptr ? nullptr : known->call(args[0], args[1], args[2], args[3]);
}

PyMethodDef known_call = {"call", (PyCFunction)(void (*)())call_known, METH_FASTCALL, nullptr};

py::object caller_of(const py::object &self) {
    PyObject *capsule = PyCapsule_New(self.cast<KnownCalls *>(), nullptr, [](PyObject *gone) {
        Py_DECREF((PyObject *)PyCapsule_GetContext(gone));
    });
    if (capsule == nullptr) throw py::error_already_set();
    PyCapsule_SetContext(capsule, Py_NewRef(self.ptr()));
    const py::object held = py::reinterpret_steal<py::object>(capsule);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&known_call, held.ptr()));
}

void set_vocabulary(const py::dict &vocabulary, const py::dict &places) {
    Words *found = new Words();
    PyObject *v = vocabulary.ptr();
    found->tensor = given(v, "Tensor"), found->parameter = given(v, "Parameter"), found->layout = given(v, "Layout");
    found->kinds = given(v, "kinds"), found->moments = given(v, "moments"), found->telling = given(v, "telling");
    found->holding = given(v, "holding"), found->missed = given(v, "MISSED"), found->tag = given(v, "tag");
    found->drop_gone = given(v, "drop_gone"), found->under_functorch = given(v, "under_functorch");
    found->grad_enabled = given(v, "grad_enabled"), found->any_autocast = given(v, "any_autocast");
    found->autocast = given(v, "autocast"), found->saving_hooks = given(v, "saving_hooks");
    found->repeat = given(v, "repeat");
    found->LAYOUT = given(v, "LAYOUT"), found->MOMENT = given(v, "MOMENT"), found->TAGGED_AT = given(v, "TAGGED_AT");
    found->RELAID = given(v, "RELAID"), found->INPUT = given(v, "INPUT"), found->PRESUMED = given(v, "PRESUMED");
    found->TOKEN = given(v, "TOKEN"), found->HELD = given(v, "HELD"), found->MADE = given(v, "MADE");
    found->LINK = given(v, "LINK"), found->UNTRACKED = given(v, "UNTRACKED"), found->PARTS = given(v, "PARTS");
    found->GATHERED = given(v, "GATHERED");
    const auto place = [&](const char *name) { return places[name].cast<Py_ssize_t>(); };
    found->batch = place("batch"), found->dim = place("dim"), found->outer = place("outer"), found->inner = place("inner");
    found->owner = place("owner"), found->mixed = place("mixed"), found->is_row_index = place("is_row_index");
    found->order = place("order"), found->alone = place("alone"), found->piece = place("piece");
    found->vocabulary = Py_NewRef(v);
    words = found;
}

}  // namespace

void bind_known_calls(py::module_ &module) {
    module.def("set_vocabulary", &set_vocabulary, "what `KnownCalls` is written with; see known_calls.cpp");
    py::class_<KnownCalls>(module, "KnownCalls", "the known calls of a pass; see fastdp/engine/known_calls.py")
        .def(py::init<py::dict, py::dict, std::int64_t, py::dict, py::list, py::object>())
        .def("caller", &caller_of, "call(forward_pass, function, args, kwargs) -> what the call gives, or MISSED")
        .def("signature", [](KnownCalls &self, py::handle function, const py::tuple &args, const py::dict &kwargs) {
            return py::reinterpret_steal<py::object>(self.signature(function.ptr(), args.ptr(), kwargs.ptr()));
        });
}
