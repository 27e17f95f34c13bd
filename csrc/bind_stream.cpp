// The memory-bound kernels for Python: noise, noise with the optimizer's update.
// Pointers come as integers (tensor.data_ptr()); shapes, types and devices are checked by the callers in fastdp/ops.
#include "fastdp.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <tuple>
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
        [](std::int64_t words, std::int64_t normals) {
            fastdp_box_muller(pointer<const std::uint32_t>(words), pointer<double>(normals));
        },
        py::arg("words"), py::arg("normals"), "uint32 [16, 64] -> float64 [8, 64]");
    module.def("noise_into", &noise_into, py::arg("data"), py::arg("type"), py::arg("count"), py::arg("offset"),
               py::arg("key"), py::arg("step"), py::arg("std"), py::arg("scale"), py::arg("read"), py::arg("threads"),
               "data = ((read ? data : 0) + std * N(0, 1)) * scale, in place");
    module.def("sgd_step", &sgd_step, "noise and torch.optim.SGD's update; see fastdp.h");
    module.def("adam_step", &adam_step, "noise and torch.optim.Adam's or AdamW's update; see fastdp.h");
}
