// The memory-bound kernels for Python: noise, noise with the optimizer's update, look-ups, affine norms.
// Pointers come as integers (tensor.data_ptr()); shapes, types and devices are checked by the callers in fastdp/ops.
#include "fastdp.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <vector>

namespace py = pybind11;

namespace {

using Key = std::array<std::uint32_t, 8>;
// addresses of parameter, sum, first and second state (0: none); count, offset; the four types
using Tensor = std::array<std::int64_t, 10>;

template <typename T>
T *pointer(std::int64_t address) {
    return reinterpret_cast<T *>(static_cast<std::uintptr_t>(address));
}

fastdp_noise noise_of(const Key &key, std::uint64_t step, double std, double scale, bool read, bool keep,
                      int threads) {
    return {key.data(), step, std, scale, read, keep, threads};
}

std::vector<fastdp_tensor> tensors_of(const std::vector<Tensor> &list) {
    std::vector<fastdp_tensor> out;
    out.reserve(list.size());
    for (const Tensor &x : list) {
        out.push_back({pointer<void>(x[0]), pointer<void>(x[1]), pointer<void>(x[2]), pointer<void>(x[3]), x[4], x[5],
                       (std::int32_t)x[6], (std::int32_t)x[7], (std::int32_t)x[8], (std::int32_t)x[9]});
    }
    return out;
}

void noise_into(std::int64_t data, int type, std::int64_t count, std::int64_t offset, const Key &key,
                std::uint64_t step, double std, double scale, bool read, int threads) {
    const py::gil_scoped_release release;
    const fastdp_noise noise = noise_of(key, step, std, scale, read, true, threads);
    fastdp_noise_into(pointer<void>(data), type, count, offset, &noise);
}

void sgd_step(const std::vector<Tensor> &list, const Key &key, std::uint64_t step, double std, double scale, double lr,
              double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first,
              bool keep, int threads) {
    const py::gil_scoped_release release;
    const std::vector<fastdp_tensor> tensors = tensors_of(list);
    std::vector<std::int64_t> tiles(tensors.size() + 1);
    const fastdp_noise noise = noise_of(key, step, std, scale, true, keep, threads);
    const fastdp_sgd options = {lr, momentum, dampening, weight_decay, nesterov, maximize, first};
    fastdp_sgd_step(tensors.data(), (std::int64_t)tensors.size(), tiles.data(), &noise, &options);
}

void adam_step(const std::vector<Tensor> &list, const Key &key, std::uint64_t step, double std, double scale, double lr,
               double beta1, double beta2, double eps, double weight_decay, double t, bool decoupled, bool maximize,
               bool keep, int threads) {
    const py::gil_scoped_release release;
    const std::vector<fastdp_tensor> tensors = tensors_of(list);
    std::vector<std::int64_t> tiles(tensors.size() + 1);
    const fastdp_noise noise = noise_of(key, step, std, scale, true, keep, threads);
    const fastdp_adam options = {lr, beta1, beta2, eps, weight_decay, t, decoupled, maximize};
    fastdp_adam_step(tensors.data(), (std::int64_t)tensors.size(), tiles.data(), &noise, &options);
}

void embedding_norm_sq(std::int64_t ids, std::int64_t g, int type, std::int64_t batch, std::int64_t k, std::int64_t d,
                       std::optional<std::int64_t> padding, std::int64_t out, int threads) {
    const py::gil_scoped_release release;
    std::vector<std::int64_t> order((std::size_t)(batch * k));
    std::vector<double> parts((std::size_t)(batch * ((d + FASTDP_COLUMNS - 1) / FASTDP_COLUMNS)));
    fastdp_embedding_norm_sq(pointer<const std::int64_t>(ids), pointer<const void>(g), type, batch, k, d,
                             padding.has_value(), padding.value_or(0), order.data(), parts.data(),
                             pointer<double>(out), threads);
}

// The index of the first id outside the table, then nothing is done; -1 where all is well.
std::int64_t embedding_clipped_sum(std::int64_t ids, std::int64_t g, int type, std::int64_t c, std::int64_t batch,
                                   std::int64_t k, std::int64_t d, std::int64_t rows,
                                   std::optional<std::int64_t> padding, std::int64_t out, int out_type, bool add,
                                   int threads) {
    const py::gil_scoped_release release;
    const std::int64_t *positions = pointer<const std::int64_t>(ids);
    const std::int64_t outside = fastdp_first_outside(positions, batch * k, rows);
    if (outside >= 0) return outside;
    fastdp_embedding_clipped_sum(positions, pointer<const void>(g), type, pointer<const void>(c), batch, k, d, rows,
                                 padding.has_value(), padding.value_or(0), pointer<void>(out), out_type, add, threads);
    return -1;
}

void norm_affine(std::int64_t x, std::int64_t g, int type, std::int64_t mean, std::int64_t rstd, std::int64_t batch,
                 std::int64_t t, std::int64_t d, std::int64_t weight, std::int64_t bias, int threads) {
    const py::gil_scoped_release release;
    fastdp_norm_affine(pointer<const void>(x), pointer<const void>(g), type, pointer<const void>(mean),
                       pointer<const void>(rstd), batch, t, d, pointer<void>(weight), pointer<void>(bias), threads);
}

void group_affine(std::int64_t x, std::int64_t g, int type, std::int64_t mean, std::int64_t rstd, std::int64_t batch,
                  std::int64_t channels, std::int64_t s, std::int64_t groups, std::int64_t weight, std::int64_t bias,
                  int threads) {
    const py::gil_scoped_release release;
    fastdp_group_affine(pointer<const void>(x), pointer<const void>(g), type, pointer<const void>(mean),
                        pointer<const void>(rstd), batch, channels, s, groups, pointer<void>(weight),
                        pointer<void>(bias), threads);
}

}  // namespace

void bind_stream(py::module_ &module) {
    module.def("instruction_set", &fastdp_instruction_set, py::arg("at_most") = -1,
               "0 plain, 1 AVX2 with FMA, 2 AVX-512: the one in use, after limiting it to at_most");
    module.def(
        "chacha20_blocks",
        [](std::int64_t state, std::int64_t words) {
            fastdp_chacha20_blocks(pointer<const std::uint32_t>(state), pointer<std::uint32_t>(words));
        },
        py::arg("state"), py::arg("words"), "64 consecutive ChaCha20 blocks: uint32 [16] -> uint32 [16, 64]");
    module.def(
        "box_muller",
        [](std::int64_t words, std::int64_t normals, int type) {
            fastdp_box_muller(pointer<const std::uint32_t>(words), pointer<void>(normals), type);
        },
        py::arg("words"), py::arg("normals"), py::arg("type"), "uint32 [16, 64] -> float32 or float64 [8, 64]");
    module.def("noise_into", &noise_into, py::arg("data"), py::arg("type"), py::arg("count"), py::arg("offset"),
               py::arg("key"), py::arg("step"), py::arg("std"), py::arg("scale"), py::arg("read"), py::arg("threads"),
               "data = ((read ? data : 0) + std * N(0, 1)) * scale, in place");
    module.def("sgd_step", &sgd_step, "noise and torch.optim.SGD's update; see fastdp.h");
    module.def("adam_step", &adam_step, "noise and torch.optim.Adam's or AdamW's update; see fastdp.h");
    module.def("embedding_norm_sq", &embedding_norm_sq, "squared norms of table gradients; see fastdp.h");
    module.def("embedding_clipped_sum", &embedding_clipped_sum, "clipped sum of table gradients; see fastdp.h");
    module.def("norm_affine", &norm_affine, "gradients of layer norm's affine parameters; see fastdp.h");
    module.def("group_affine", &group_affine, "gradients of group norm's affine parameters; see fastdp.h");
}
