// Matrix products and convolutions of fastdp._C: like bindings.cpp on raw pointers passed as integers.
#include "fastdp.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

void enlarge_by_data(const Matrix &a, const Matrix &g, std::int64_t batch, std::int64_t rows, double units,
                     double tolerance, std::uintptr_t norm_sq, std::uintptr_t bound, int threads) {
    const fastdp_matrix first = matrix(a), second = matrix(g);
    const py::gil_scoped_release release;
    fastdp_enlarge_by_data(&first, &second, batch, rows, units, tolerance, pointer<double>(norm_sq),
                           pointer<double>(bound), threads);
}

std::int64_t doubted_by_blocks(std::uintptr_t parts, std::int64_t batch, std::int64_t blocks, double units,
                               double tolerance, std::uintptr_t norm_sq, std::uintptr_t bound) {
    return fastdp_doubted_by_blocks(pointer<const double>(parts), batch, blocks, units, tolerance,
                                    pointer<const double>(norm_sq), pointer<double>(bound));
}

std::int64_t routed_jobs(std::uintptr_t starts, std::int64_t segments, std::int64_t longest, std::int64_t inputs,
                         std::int64_t outputs, std::uintptr_t first) {
    return fastdp_routed_jobs(pointer<const std::int64_t>(starts), segments, longest, inputs, outputs,
                              pointer<std::int64_t>(first));
}

std::int64_t routed_norm(const Matrix &a, const Matrix &g, std::uintptr_t starts, std::int64_t segments,
                         std::int64_t longest, std::uintptr_t first, double rounding, double tolerance,
                         double smallest, std::uintptr_t norm_sq, std::uintptr_t parts, std::uintptr_t scratch,
                         int threads) {
    const fastdp_matrix rows_a = matrix(a), rows_g = matrix(g);
    const py::gil_scoped_release release;
    return fastdp_routed_norm(&rows_a, &rows_g, pointer<const std::int64_t>(starts), segments, longest,
                              pointer<const std::int64_t>(first), rounding, tolerance, smallest,
                              pointer<double>(norm_sq), pointer<double>(parts), pointer<void>(scratch), threads);
}

void square_sum(std::uintptr_t rows, std::int64_t batch, std::int64_t n, std::int64_t stride, std::uintptr_t parts,
                std::uintptr_t out, int threads) {
    const py::gil_scoped_release release;
    fastdp_square_sum(pointer<const float>(rows), batch, n, stride, pointer<double>(parts), pointer<double>(out),
                      threads);
}

void weighted_sum(std::uintptr_t rows, std::uintptr_t c, std::int64_t batch, std::int64_t n, std::int64_t stride,
                  std::uintptr_t out, int threads) {
    const py::gil_scoped_release release;
    fastdp_weighted_sum(pointer<const float>(rows), pointer<const float>(c), batch, n, stride, pointer<float>(out),
                        threads);
}

using Images = std::tuple<std::uintptr_t, int, std::array<std::int64_t, 6>>;
using Three = std::array<std::int64_t, 3>;

fastdp_images images(const Images &t) {
    fastdp_images result{pointer<const void>(std::get<0>(t)), std::get<1>(t), {}};
    for (int d = 0; d < 6; ++d) result.strides[d] = std::get<2>(t)[d];
    return result;
}

// sizes: batch, images, groups, inputs and outputs of a group
fastdp_conv convolution(const Images &x, const Images &g, const std::array<std::int64_t, 5> &sizes, const Three &size,
                        const Three &kernel, const Three &positions, const Three &stride, const Three &padding,
                        const Three &dilation) {
    fastdp_conv conv{images(x), images(g), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], {}, {}, {}, {}, {}, {}};
    for (int d = 0; d < 3; ++d) {
        conv.size[d] = size[d], conv.kernel[d] = kernel[d], conv.positions[d] = positions[d];
        conv.stride[d] = stride[d], conv.padding[d] = padding[d], conv.dilation[d] = dilation[d];
    }
    return conv;
}

void conv_norm(const fastdp_conv &conv, std::uintptr_t norm_sq, std::uintptr_t parts, std::uintptr_t scratch,
               int threads) {
    const py::gil_scoped_release release;
    fastdp_conv_norm(&conv, pointer<double>(norm_sq), pointer<double>(parts), pointer<void>(scratch), threads);
}

void conv_per_sample(const fastdp_conv &conv, std::uintptr_t out, std::uintptr_t scratch, int threads) {
    const py::gil_scoped_release release;
    fastdp_conv_per_sample(&conv, pointer<float>(out), pointer<void>(scratch), threads);
}

std::int64_t conv_gram(const fastdp_conv &conv, double rounding, double tolerance, double smallest,
                       std::uintptr_t norm_sq, std::uintptr_t doubt, std::uintptr_t parts, std::uintptr_t scratch,
                       int threads) {
    const py::gil_scoped_release release;
    return fastdp_conv_gram(&conv, rounding, tolerance, smallest, pointer<double>(norm_sq),
                            pointer<std::uint8_t>(doubt), pointer<double>(parts), pointer<void>(scratch), threads);
}

}  // namespace

void bind_matrix(py::module_ &module) {
    module.def("square_parts", &fastdp_square_parts);
    module.def("square_sum", &square_sum);
    module.def("weighted_sum", &weighted_sum);
    module.def("gram_scratch", &fastdp_gram_scratch, "bytes of scratch a thread");
    module.def("gram_parts", &fastdp_gram_parts, "doubles in `parts`");
    module.def("linear_gram", &linear_gram, "squared norms by the gram route; returns how many are in doubt");
    module.def("direct_scratch", &fastdp_direct_scratch, "bytes of scratch a thread");
    module.def("direct_parts", &fastdp_direct_parts, "doubles in `parts`");
    module.def("linear_direct", &linear_direct, "squared norms from the elements of the gradients");
    module.def("enlarge_by_data", &enlarge_by_data, "norms enlarged by the rounding of sums over such data");
    module.def("doubted_by_blocks", &doubted_by_blocks, "how many norms may need that, by the parts of the gram route");
    module.def("routed_scratch", &fastdp_routed_scratch, "bytes of scratch a thread");
    module.def("routed_jobs", &routed_jobs, "fills `first`; returns how many times 4 doubles `parts` holds");
    module.def("routed_norm", &routed_norm, "squared norms of segments; returns how many were in doubt");
    py::class_<fastdp_conv>(module, "Conv", "fastdp_conv of csrc/fastdp.h")
        .def(py::init(&convolution))
        .def("scratch", &fastdp_conv_scratch, "bytes of scratch a thread, by route")
        .def("parts", &fastdp_conv_parts, "doubles of `parts`, by route")
        .def("norm", &conv_norm)
        .def("per_sample", &conv_per_sample)
        .def("gram", &conv_gram);
    module.attr("CONV_NORM") = int(FASTDP_CONV_NORM);
    module.attr("CONV_STORE") = int(FASTDP_CONV_STORE);
    module.attr("CONV_GRAM") = int(FASTDP_CONV_GRAM);
}
