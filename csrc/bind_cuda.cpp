// The Python module fastdp._CUDA: the functions of fastdp_cuda.h on raw device pointers passed as integers.
// Shapes, types and devices are checked by the caller, fastdp/ops/cuda.py.
#include "bind.h"
#include "fastdp_cuda.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace {

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

// Points into the draw.
fastdp_cuda_draw drawn_by(const Draw &draw, Address counter) {
    const auto &[key, number, std, scale, keep, earlier, weights] = draw;
    fastdp_cuda_draw drawn = {{}, number, std, scale, keep, pointer<const std::int64_t>(counter),
                              static_cast<std::int64_t>(earlier.size()), earlier.data(), weights.data()};
    for (std::size_t k = 0; k < key.size(); ++k) drawn.key[k] = key[k];
    return drawn;
}

void noise(Address data, int type, std::int64_t count, std::int64_t offset, const Draw &draw, bool keep,
           Address workspace, int device, Address stream) {
    const fastdp_cuda_draw drawn = drawn_by(draw, 0);
    const py::gil_scoped_release release;
    check(fastdp_cuda_noise(pointer<void>(data), type, count, offset, &drawn, keep ? 1 : 0, pointer<void>(workspace),
                            device, pointer<void>(stream)));
}

template <typename Update, auto STEP>
void step(const py::buffer &buffer, Address workspace, int param_type, int state_type, const Draw &draw,
          Address counter, const Fields<Update> &fields, int device, Address stream) {
    std::vector<fastdp_cuda_entry> entries = entries_of(buffer);
    const fastdp_cuda_draw drawn = drawn_by(draw, counter);
    const Update update = update_of<Update>(fields);
    const py::gil_scoped_release release;
    check(STEP(entries.data(), static_cast<std::int64_t>(entries.size()), pointer<void>(workspace), param_type,
               state_type, &drawn, &update, device, pointer<void>(stream)));
}

// Bound, for functions that tell whether their kernels were launched.
template <auto FUNCTION>
struct Checked;

template <typename... Arguments, fastdp_cuda_status (*FUNCTION)(Arguments...)>
struct Checked<FUNCTION> {
    static void call(typename Argument<Arguments>::Python... arguments) { check(Bound<FUNCTION>::call(arguments...)); }
};

template <auto FUNCTION>
void checked(py::module_ &module, const char *name, const char *doc) {
    module.def(name, &Checked<FUNCTION>::call, doc);
}

}  // namespace

#ifndef FASTDP_CUDA_TARGETS
#define FASTDP_CUDA_TARGETS 80_90_100
#endif
#define FASTDP_TEXT(text) #text
#define FASTDP_EXPANDED(text) FASTDP_TEXT(text)

PYBIND11_MODULE(_CUDA, module) {
    module.doc() = "CUDA kernels of fastdp on raw pointers; arguments in the order of csrc/fastdp_cuda.h";
    module.attr("stream") = FASTDP_STREAM;
    module.attr("targets") = FASTDP_EXPANDED(FASTDP_CUDA_TARGETS);  // of which there is machine code, and PTX of the last
    module.def("noise", &noise, "data = ((keep ? data : 0) + std * N(0, 1)) * scale, in place");
    module.def("noisy_sgd", &step<fastdp_sgd, fastdp_cuda_noisy_sgd>, "noise and SGD for a table of parameters");
    module.def("noisy_adamw", &step<fastdp_adam, fastdp_cuda_noisy_adamw>, "noise and Adam or AdamW for such a table");
    module.def("workspace", &fastdp_cuda_workspace, "bytes of device memory for a step over so many parameters");
    checked<fastdp_cuda_clip_factors>(module, "clip_factors", "squared norms [uses][batch] -> float32 [batch]");
    checked<fastdp_cuda_embedding_norm_sq>(module, "embedding_norm_sq", "sorted ids and g -> float64 [batch]");
    module.def("embedding_partials", &fastdp_cuda_embedding_partials, "float64 a sample that norms need");
    checked<fastdp_cuda_embedding_clipped_sum>(module, "embedding_clipped_sum", "out[id] += factor * g, by sorted ids");
    module.def("embedding_chunks", &fastdp_cuda_embedding_chunks, "rows of heads that the clipped sum needs");
    checked<fastdp_cuda_chacha20>(module, "chacha20", "uint32 [16][count] -> [16][count]");
    checked<fastdp_cuda_box_muller>(module, "box_muller", "uint32 [16][count] -> [8][count] float32 or float64");
}
