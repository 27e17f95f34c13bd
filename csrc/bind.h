// What the bindings share: pointers that come as integers, and the named tuples of fastdp/ops/updates.py.
#pragma once

#include "updates.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <utility>

namespace py = pybind11;

using Address = std::uintptr_t;
using Key = std::array<std::uint32_t, 8>;
// key, step, std, scale, keep_grads, earlier steps and their weights
using Draw = std::tuple<Key, std::uint64_t, double, double, bool, std::vector<std::uint64_t>, std::vector<double>>;

// The fields of updates.
std::tuple<double, double, double, double, bool, bool, bool> fields_of(const fastdp_sgd &);
std::tuple<double, double, double, double, double, std::int64_t, bool, bool> fields_of(const fastdp_adam &);

template <typename Update>
using Fields = decltype(fields_of(std::declval<Update>()));

template <typename Update>
Update update_of(const Fields<Update> &fields) {
    return std::apply([](auto... field) { return Update{field...}; }, fields);
}

template <typename T>
T *pointer(Address address) {
    return reinterpret_cast<T *>(address);
}

// How Python gives an argument of a C function: pointers as integers, all else as it is.
template <typename T>
struct Argument {
    using Python = T;
    static T of(T value) { return value; }
};

template <typename T>
struct Argument<T *> {
    using Python = Address;
    static T *of(Address address) { return pointer<T>(address); }
};

// Bound<f>::call is what Python calls: f without the interpreter's lock.
template <auto FUNCTION>
struct Bound;

template <typename Result, typename... Arguments, Result (*FUNCTION)(Arguments...)>
struct Bound<FUNCTION> {
    static Result call(typename Argument<Arguments>::Python... arguments) {
        const py::gil_scoped_release release;
        return FUNCTION(Argument<Arguments>::of(arguments)...);
    }
};

template <auto FUNCTION>
void bind(py::module_ &module, const char *name, const char *doc = "") {
    module.def(name, &Bound<FUNCTION>::call, doc);
}
