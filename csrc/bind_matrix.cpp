// Matrix products and convolutions of fastdp._C: like bindings.cpp on raw pointers passed as integers.
#include "fastdp.h"

#include <pybind11/pybind11.h>

#include <array>
#include <tuple>

namespace py = pybind11;

namespace {

template <typename T>
T *pointer(std::uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// (data, type, columns, batch stride, row stride, column stride)
using Matrix = std::tuple<std::uintptr_t, int, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

fastdp_matrix matrix(const Matrix &m) {
    return {pointer<const void>(std::get<0>(m)), std::get<1>(m), std::get<2>(m), std::get<3>(m), std::get<4>(m),
            std::get<5>(m)};
}

std::int64_t linear_gram(const Matrix &a, const Matrix &g, std::int64_t batch, std::int64_t positions, double rounding,
                         double tolerance, double smallest, std::uintptr_t norm_sq, std::uintptr_t doubt,
                         std::uintptr_t parts, std::uintptr_t scratch, int threads) {
    const fastdp_matrix first = matrix(a), second = matrix(g);
    const py::gil_scoped_release release;
    return fastdp_linear_gram(&first, &second, batch, positions, rounding, tolerance, smallest,
                              pointer<double>(norm_sq), pointer<std::uint8_t>(doubt), pointer<double>(parts),
                              pointer<void>(scratch), threads);
}

void linear_direct(const Matrix &a, const Matrix &g, std::int64_t batch, std::int64_t positions,
                   std::uintptr_t norm_sq, std::uintptr_t parts, std::uintptr_t scratch, int threads) {
    const fastdp_matrix first = matrix(a), second = matrix(g);
    const py::gil_scoped_release release;
    fastdp_linear_direct(&first, &second, batch, positions, pointer<double>(norm_sq), pointer<double>(parts),
                         pointer<void>(scratch), threads);
}

}  // namespace

void bind_matrix(py::module_ &module) {
    module.def("gram_scratch", &fastdp_gram_scratch, "bytes of scratch a thread");
    module.def("gram_parts", &fastdp_gram_parts, "doubles in `parts`");
    module.def("linear_gram", &linear_gram, "squared norms by the gram route; returns how many are in doubt");
    module.def("direct_scratch", &fastdp_direct_scratch, "bytes of scratch a thread");
    module.def("direct_parts", &fastdp_direct_parts, "doubles in `parts`");
    module.def("linear_direct", &linear_direct, "squared norms from the elements of the gradients");
}
