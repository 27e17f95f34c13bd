// Python objects and attribute names that the C++ call path uses, and small questions it asks of a tensor.
#pragma once

#include "ref.h"

struct Missed {};  // out of the ordinary: nothing was done, and the call goes through Python

// Classes, functions and interned attribute names of the Python side; borrowed from `vocabulary`, which lives as long as the process.
struct PythonNames {
    PyObject *vocabulary = nullptr;
    PyObject *tensor, *parameter, *layout, *kinds, *moments, *telling, *holding, *missed;
    PyObject *tag, *drop_gone, *under_functorch, *grad_enabled;
    PyObject *LAYOUT, *MOMENT, *TAGGED_AT, *RELAID, *INPUT, *PRESUMED, *TOKEN, *HELD, *MADE, *LINK, *UNTRACKED, *PARTS,
        *GATHERED, *NUMBER, *NUMBER_OF, *COUNTED;
    PyObject *any_autocast, *autocast, *modes, *disabled, *saving_hooks, *repeat, *native, *forward_ad, *forms, *form_of;
    bool counting = false;  // whether Python counts the changes of tensors' dicts (`counts_changes`)
    Py_ssize_t batch, dim, outer, inner, owner, mixed, order, is_row_index, alone, piece;
    PyObject *is_nested = interned("is_nested"), *requires_grad = interned("requires_grad"), *shape = interned("shape"),
             *dtype = interned("dtype"), *is_leaf = interned("is_leaf"), *base = interned("_base"),
             *is_view = interned("_is_view"), *untyped_storage = interned("untyped_storage"),
             *resizable = interned("resizable"), *version = interned("_version"), *current = interned("current"),
             *floating = interned("is_floating_point"), *number = interned("number"), *before = interned("before"),
             *token = interned("token"), *out = interned("out"), *start = interned("start"), *stop = interned("stop"),
             *step = interned("step"), *all_storages = interned("storages"), *prune = interned("prune"),
             *turn = interned("turn"), *device = interned("device"), *layout_of_data = interned("layout"),
             *numel = interned("numel"), *is_contiguous = interned("is_contiguous"), *count = interned("count"), *backward = interned("backward"),
             *uses_of = interned("uses_of"), *made = interned("made"), *saved = interned("saved"),
             *saved_version = interned("version"), *grad_fn = interned("grad_fn"),
             *register_prehook = interned("register_prehook"), *detach = interned("detach"),
             *as_computed = interned("as_computed"), *run_native = interned("run_native"),
             *forward_pass = interned("forward_pass"), *call = interned("call"), *operands = interned("operands"),
             *values = interned("values"), *learned = interned("learned"), *by_nodes = interned("by_nodes"),
             *current_level = interned("_current_level"), *lowers = interned("lowers"),
             *watcher = interned("watcher"), *exposed = interned("exposed"), *anything = interned("anything"),
             *known_calls = interned("_known_calls"), *torch_function = interned("__torch_function__"), *zero = PyLong_FromLong(0),
             *enter = interned("__enter__"), *exit = interned("__exit__"),
             *f_lasti = interned("f_lasti"), *kept = interned("_kept"), *arrivals = interned("arrivals"), *arrived = interned("arrived"),
             *tape = interned("_tape"), *reshape = interned("reshape");
};
extern PythonNames *names;

inline PyObject *given(PyObject *vocabulary, const char *name) {
    PyObject *found = PyDict_GetItemString(vocabulary, name);
    if (found == nullptr) throw py::key_error(name);
    return found;
}

inline PyObject *field(PyObject *layout, Py_ssize_t place) { return PyTuple_GET_ITEM(layout, place); }
inline bool is_empty(PyObject *text) { return PyUnicode_GET_LENGTH(text) == 0; }
inline bool is_layout(PyObject *object) { return Py_TYPE(object) == (PyTypeObject *)names->layout; }
inline bool is_tensor(PyObject *object) { return PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)names->tensor); }

// Kinds of functions (`layout_cache.Kind`).
enum Kind : std::int64_t { ASKS = 0, REPEATS = 1, CHECKED = 2, DEPENDS = 3, WHERE = 4, ELEMENTWISE = 5 };
constexpr std::int64_t KIND = 7, FOLLOWED = 8, GATHERING = 16, INDEXING = 32, COMBINING = 64, RESHAPING = 128;

// `batch_positions.made_in_sight`
bool was_made(PyObject *note);

// Whether what is noted of a base says of its views what they say themselves (`layout.tag_of`).
bool agrees_with_views(PyObject *base_notes);

// The tensor's memory; none of sparse ones.
Ref storage_of(PyObject *tensor);

// Whether memory that a constant lies in holds no data, and never did (`aliasing.look`).
bool is_nobodys(PyObject *tensor);

void set_vocabulary(const py::dict &vocabulary, const py::dict &places);
