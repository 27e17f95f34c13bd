// The Python module fastdp._C: the functions of fastdp.h on raw pointers passed as integers (tensor.data_ptr()).
// Shapes, types and devices are checked by the callers in fastdp/ops.
#include "fastdp.h"

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string_view>

namespace py = pybind11;

void bind_matrix(py::module_ &);  // bind_matrix.cpp

namespace {

template <typename T>
T *pointer(std::uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

const std::uint8_t *key_of(const py::bytes &key) {
    const std::string_view view = key;  // the argument keeps the bytes alive while the GIL is released
    if (view.size() != 32) throw std::invalid_argument("key must be 32 bytes");
    return reinterpret_cast<const std::uint8_t *>(view.data());
}

template <typename T>
using NoiseFunction = void (*)(T *, std::int64_t, std::int64_t, const std::uint8_t *, std::uint64_t, double, double,
                               int, int);

template <typename T, NoiseFunction<T> function>
void noise(std::uintptr_t data, std::int64_t count, std::int64_t offset, const py::bytes &key, std::uint64_t step,
           double std, double scale, bool keep, int threads) {
    const std::uint8_t *bytes = key_of(key);
    const py::gil_scoped_release release;
    function(pointer<T>(data), count, offset, bytes, step, std, scale, keep ? 1 : 0, threads);
}

template <typename T, NoiseFunction<T> function>
void define_noise(py::module_ &module, const char *name) {
    module.def(name, &noise<T, function>, py::arg("data"), py::arg("count"), py::arg("offset"), py::arg("key"),
               py::arg("step"), py::arg("std"), py::arg("scale"), py::arg("keep"), py::arg("threads"),
               "data = ((keep ? data : 0) + std * N(0, 1)) * scale, in place");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "Compiled functions of fastdp; see csrc/fastdp.h";
    bind_matrix(module);
    define_noise<float, fastdp_noise_f32>(module, "noise_f32");
    define_noise<double, fastdp_noise_f64>(module, "noise_f64");
    module.def(
        "chacha20_blocks",
        [](std::uintptr_t state, std::uintptr_t words) {
            fastdp_chacha20_blocks(pointer<const std::uint32_t>(state), pointer<std::uint32_t>(words));
        },
        py::arg("state"), py::arg("words"), "64 consecutive ChaCha20 blocks: uint32 [16] -> uint32 [16, 64]");
    module.def(
        "box_muller",
        [](std::uintptr_t words, std::uintptr_t normals) {
            fastdp_box_muller(pointer<const std::uint32_t>(words), pointer<double>(normals));
        },
        py::arg("words"), py::arg("normals"), "uint32 [16, 64] -> float64 [8, 64]");
}
