// The Python module fastdp._C: the functions of fastdp.h on raw pointers passed as integers (tensor.data_ptr()).
// Shapes, types and devices are checked by the callers in fastdp/ops. Most functions take one line here; those that
// allocate scratch, or take structures, have a wrapper.
#include "bind.h"
#include "fastdp.h"
#include "python/arrivals.h"
#include "python/known_calls.h"
#include "python/module_calls.h"
#include "python/modules.h"
#include "python/snapshot.h"

#include <optional>
#include <vector>

namespace {

// (data, type, columns, batch stride, row stride, column stride)
using Matrix = std::tuple<Address, int, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

struct HeldMatrix {
    fastdp_matrix matrix;
    operator const fastdp_matrix *() const { return &matrix; }
};

using Images = std::tuple<Address, int, std::array<std::int64_t, 6>>;
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

// addresses of parameter, sum, first and second state (0: none); count, offset; the four types
using Tensor = std::array<std::int64_t, 10>;

std::vector<fastdp_tensor> tensors_of(const std::vector<Tensor> &list) {
    std::vector<fastdp_tensor> out;
    out.reserve(list.size());
    for (const Tensor &x : list) {
        out.push_back({pointer<void>(x[0]), pointer<void>(x[1]), pointer<void>(x[2]), pointer<void>(x[3]), x[4], x[5],
                       (std::int32_t)x[6], (std::int32_t)x[7], (std::int32_t)x[8], (std::int32_t)x[9]});
    }
    return out;
}

fastdp_noise noise_of(const Draw &draw, bool read, int threads) {
    const auto &[key, step, std, scale, keep, earlier, weights] = draw;
    return {key.data(), step, std, scale, read, keep, threads, (std::int32_t)earlier.size(), earlier.data(), weights.data()};
}

void noise_into(std::int64_t data, int type, std::int64_t count, std::int64_t offset, const Draw &draw, bool read,
                int threads) {
    const py::gil_scoped_release release;
    const fastdp_noise noise = noise_of(draw, read, threads);
    fastdp_noise_into(pointer<void>(data), type, count, offset, &noise);
}

template <typename Update, auto STEP>
void step(const std::vector<Tensor> &list, const Draw &draw, const Fields<Update> &fields, int threads) {
    const py::gil_scoped_release release;
    const std::vector<fastdp_tensor> tensors = tensors_of(list);
    std::vector<std::int64_t> tiles(tensors.size() + 1);
    const fastdp_noise noise = noise_of(draw, true, threads);
    const Update update = update_of<Update>(fields);
    STEP(tensors.data(), (std::int64_t)tensors.size(), tiles.data(), &noise, &update);
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

}  // namespace

template <>
struct Argument<const fastdp_matrix *> {
    using Python = Matrix;
    static HeldMatrix of(const Matrix &m) {
        return {{pointer<const void>(std::get<0>(m)), std::get<1>(m), std::get<2>(m), std::get<3>(m), std::get<4>(m),
                 std::get<5>(m)}};
    }
};

template <>
struct Argument<const fastdp_conv *> {
    using Python = const fastdp_conv &;
    static const fastdp_conv *of(const fastdp_conv &conv) { return &conv; }
};

PYBIND11_MODULE(_C, module) {
    module.doc() = "Compiled functions of fastdp; see csrc/fastdp.h";
    module.attr("stream") = FASTDP_STREAM;
    module.def("instruction_set", &fastdp_instruction_set, py::arg("at_most") = -1,
               "0 plain, 1 AVX2 with FMA, 2 AVX-512: the one in use, after limiting it to at_most");
    module.def("chacha20_blocks", &Bound<fastdp_chacha20_blocks>::call, py::arg("state"), py::arg("words"),
               "64 consecutive ChaCha20 blocks: uint32 [16] -> uint32 [16, 64]");
    module.def("box_muller", &Bound<fastdp_box_muller>::call, py::arg("words"), py::arg("normals"), py::arg("type"),
               "uint32 [16, 64] -> float32 or float64 [8, 64]");
    module.def("noise_into", &noise_into, py::arg("data"), py::arg("type"), py::arg("count"), py::arg("offset"),
               py::arg("draw"), py::arg("read"), py::arg("threads"),
               "data = ((read ? data : 0) + std * N(0, 1)) * scale, in place");
    module.def("sgd_step", &step<fastdp_sgd, fastdp_sgd_step>, "noise and torch.optim.SGD's update; see fastdp.h");
    module.def("adam_step", &step<fastdp_adam, fastdp_adam_step>, "noise and Adam's or AdamW's update; see fastdp.h");
    module.def("embedding_norm_sq", &embedding_norm_sq, "squared norms of table gradients; see fastdp.h");
    module.def("embedding_clipped_sum", &embedding_clipped_sum, "clipped sum of table gradients; see fastdp.h");
    bind<fastdp_norm_affine>(module, "norm_affine", "gradients of layer norm's affine parameters; see fastdp.h");
    bind<fastdp_group_affine>(module, "group_affine", "gradients of group norm's affine parameters; see fastdp.h");
    bind<fastdp_pack_columns>(module, "pack_columns", "a matrix as slivers of columns; see fastdp.h");
    bind<fastdp_packed_product>(module, "packed_product");
    bind<fastdp_lstm_step>(module, "lstm_step", "a step of an LSTM beside its product; see fastdp.h");
    bind<fastdp_lstm_step_back>(module, "lstm_step_back");
    bind<fastdp_gru_step>(module, "gru_step", "a step of a GRU beside its product; see fastdp.h");
    bind<fastdp_gru_step_back>(module, "gru_step_back");
    bind<fastdp_square_parts>(module, "square_parts");
    bind<fastdp_square_sum>(module, "square_sum");
    bind<fastdp_weighted_sum>(module, "weighted_sum");
    bind<fastdp_gram_scratch>(module, "gram_scratch", "bytes of scratch a thread");
    bind<fastdp_gram_parts>(module, "gram_parts", "doubles in `parts`");
    bind<fastdp_linear_gram>(module, "linear_gram", "squared norms by the gram route; returns how many are in doubt");
    bind<fastdp_direct_scratch>(module, "direct_scratch", "bytes of scratch a thread");
    bind<fastdp_direct_parts>(module, "direct_parts", "doubles in `parts`");
    bind<fastdp_linear_direct>(module, "linear_direct", "squared norms from the elements of the gradients");
    bind<fastdp_linear_sum>(module, "linear_sum", "clipped sums; see fastdp.h");
    bind<fastdp_enlarge_by_data>(module, "enlarge_by_data", "norms enlarged by the rounding of sums over such data");
    bind<fastdp_doubted_by_blocks>(module, "doubted_by_blocks", "how many may need that, by the gram route's parts");
    bind<fastdp_routed_scratch>(module, "routed_scratch", "bytes of scratch a thread");
    bind<fastdp_routed_jobs>(module, "routed_jobs", "fills `first`; returns how many times 4 doubles `parts` holds");
    bind<fastdp_routed_norm>(module, "routed_norm", "squared norms of segments; returns how many were in doubt");
    bind_arrivals(module);
    bind_known_calls(module);
    bind_module_calls(module);
    bind_modules(module);
    bind_snapshot(module);
    py::class_<fastdp_conv>(module, "Conv", "fastdp_conv of csrc/fastdp.h")
        .def(py::init(&convolution))
        .def("scratch", &fastdp_conv_scratch, "bytes of scratch a thread, by route")
        .def("parts", &fastdp_conv_parts, "doubles of `parts`, by route")
        .def("norm", &Bound<fastdp_conv_norm>::call)
        .def("per_sample", &Bound<fastdp_conv_per_sample>::call)
        .def("gram", &Bound<fastdp_conv_gram>::call);
    module.attr("CONV_NORM") = int(FASTDP_CONV_NORM);
    module.attr("CONV_STORE") = int(FASTDP_CONV_STORE);
    module.attr("CONV_GRAM") = int(FASTDP_CONV_GRAM);
}
