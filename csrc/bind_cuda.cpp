// The Python module fastdp._CUDA: the functions of fastdp_cuda.h on raw device pointers passed as integers.
// Shapes, types and devices are checked by the caller, fastdp/ops/cuda.py.
#include "fastdp_cuda.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using Key = std::array<std::uint32_t, 8>;

template <typename T>
T *at(Address address) {
    return reinterpret_cast<T *>(address);
}

// Raises RuntimeError where a kernel could not be launched.
void check(const fastdp_cuda_status &status) {
    if (status.kernel == nullptr) return;
    throw std::runtime_error("CUDA kernel " + std::string(status.kernel) + " was not launched: " + status.reason);
}

// Rows of six int64: param, sum, state1, state2, count, offset.
std::vector<fastdp_cuda_entry> entries_of(const py::buffer &buffer) {
    const py::buffer_info info = buffer.request();
    if (info.itemsize != 8 || info.ndim != 1 || info.size % 6 != 0 || info.strides[0] != 8)
        throw std::invalid_argument("entries must be int64, six a parameter");
    const std::int64_t *row = static_cast<const std::int64_t *>(info.ptr);
    std::vector<fastdp_cuda_entry> entries(static_cast<std::size_t>(info.size / 6));
    for (fastdp_cuda_entry &entry : entries) {
        entry = {reinterpret_cast<void *>(row[0]), reinterpret_cast<void *>(row[1]),
                 reinterpret_cast<void *>(row[2]), reinterpret_cast<void *>(row[3]), row[4], row[5], 0};
        row += 6;
    }
    return entries;
}

fastdp_cuda_draw draw_of(const Key &key, std::uint64_t step, double std, double scale, bool keep_sums,
                         Address counter) {
    fastdp_cuda_draw draw = {{}, step, std, scale, keep_sums ? 1 : 0, at<const std::int64_t>(counter)};
    for (std::size_t k = 0; k < key.size(); ++k) draw.key[k] = key[k];
    return draw;
}

void noise(Address data, int type, std::int64_t count, std::int64_t offset, const Key &key, std::uint64_t step,
           double std, double scale, bool keep, int device, Address stream) {
    const py::gil_scoped_release release;
    check(fastdp_cuda_noise(at<void>(data), type, count, offset, key.data(), step, std, scale, keep ? 1 : 0, device,
                            at<void>(stream)));
}

void noisy_sgd(const py::buffer &buffer, Address workspace, int param_type, int state_type, const Key &key,
               std::uint64_t step, double std, double scale, bool keep_sums, Address counter, double lr,
               double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first,
               int device, Address stream) {
    std::vector<fastdp_cuda_entry> entries = entries_of(buffer);
    const fastdp_cuda_draw draw = draw_of(key, step, std, scale, keep_sums, counter);
    const fastdp_cuda_sgd rule = {lr, momentum, dampening, weight_decay, nesterov, maximize, first};
    const py::gil_scoped_release release;
    check(fastdp_cuda_noisy_sgd(entries.data(), static_cast<std::int64_t>(entries.size()), at<void>(workspace),
                                param_type, state_type, &draw, &rule, device, at<void>(stream)));
}

void noisy_adamw(const py::buffer &buffer, Address workspace, int param_type, int state_type, const Key &key,
                 std::uint64_t step, double std, double scale, bool keep_sums, Address counter, double lr,
                 double beta1, double beta2, double eps, double weight_decay, std::int64_t t, bool decoupled,
                 bool maximize, int device, Address stream) {
    std::vector<fastdp_cuda_entry> entries = entries_of(buffer);
    const fastdp_cuda_draw draw = draw_of(key, step, std, scale, keep_sums, counter);
    const fastdp_cuda_adamw rule = {lr, beta1, beta2, eps, weight_decay, t, decoupled, maximize};
    const py::gil_scoped_release release;
    check(fastdp_cuda_noisy_adamw(entries.data(), static_cast<std::int64_t>(entries.size()), at<void>(workspace),
                                  param_type, state_type, &draw, &rule, device, at<void>(stream)));
}

void clip_factors(Address norm_sq, int type, std::int64_t uses, std::int64_t batch, double max_grad_norm, int kind,
                  double gamma, double margin, Address factors, int device, Address stream) {
    const py::gil_scoped_release release;
    check(fastdp_cuda_clip_factors(at<void>(norm_sq), type, uses, batch, max_grad_norm, kind, gamma, margin,
                                   at<float>(factors), device, at<void>(stream)));
}

void embedding_norm_sq(Address ids, Address order, Address g, int type, std::int64_t batch, std::int64_t k,
                       std::int64_t d, std::int64_t stride_batch, std::int64_t stride_k, std::int64_t padding,
                       Address partial, Address norm_sq, int device, Address stream) {
    const py::gil_scoped_release release;
    check(fastdp_cuda_embedding_norm_sq(at<const std::int64_t>(ids), at<const std::int64_t>(order), at<void>(g), type,
                                        batch, k, d, stride_batch, stride_k, padding, at<double>(partial),
                                        at<double>(norm_sq), device, at<void>(stream)));
}

void embedding_clipped_sum(Address ids, Address order, Address g, int type, Address factors, std::int64_t batch,
                           std::int64_t k, std::int64_t d, std::int64_t stride_batch, std::int64_t stride_k,
                           std::int64_t rows, std::int64_t padding, Address out, Address heads, int device,
                           Address stream) {
    const py::gil_scoped_release release;
    check(fastdp_cuda_embedding_clipped_sum(at<const std::int64_t>(ids), at<const std::int64_t>(order), at<void>(g),
                                            type, at<const float>(factors), batch, k, d, stride_batch, stride_k, rows,
                                            padding, at<void>(out), at<void>(heads), device, at<void>(stream)));
}

void chacha20(Address states, Address words, std::int64_t count, int device, Address stream) {
    check(fastdp_cuda_chacha20(at<const std::uint32_t>(states), at<std::uint32_t>(words), count, device,
                               at<void>(stream)));
}

void box_muller(Address words, Address normals, int type, std::int64_t count, int device, Address stream) {
    check(fastdp_cuda_box_muller(at<const std::uint32_t>(words), at<void>(normals), type, count, device,
                                 at<void>(stream)));
}

}  // namespace

PYBIND11_MODULE(_CUDA, module) {
    module.doc() = "CUDA kernels of fastdp on raw pointers; arguments in the order of csrc/fastdp_cuda.h";
    module.def("noise", &noise, "data = ((keep ? data : 0) + std * N(0, 1)) * scale, in place");
    module.def("noisy_sgd", &noisy_sgd, "noise and SGD for a table of parameters");
    module.def("noisy_adamw", &noisy_adamw, "noise and AdamW or Adam for a table of parameters");
    module.def("workspace", &fastdp_cuda_workspace, "bytes of device memory for a step over so many parameters");
    module.def("clip_factors", &clip_factors, "squared norms [uses][batch] -> float32 [batch]");
    module.def("embedding_norm_sq", &embedding_norm_sq, "sorted ids and g -> float64 [batch]");
    module.def("embedding_partials", &fastdp_cuda_embedding_partials, "float64 a sample that norms need");
    module.def("embedding_clipped_sum", &embedding_clipped_sum, "out[id] += factor * g, by sorted ids");
    module.def("embedding_chunks", &fastdp_cuda_embedding_chunks, "rows of heads that the clipped sum needs");
    module.def("chacha20", &chacha20, "uint32 [16][count] -> [16][count]");
    module.def("box_muller", &box_muller, "uint32 [16][count] -> [8][count] float32 or float64");
}
