// A device that is not one: its memory is the host's, its functions run on the CPU, but PyTorch keeps its tensors apart
// from the CPU's and the two of it apart from each other, as it would a GPU's. It shows without a GPU where a tensor
// lies on a wrong device. It is as strict as a GPU about what else differs there: it draws from generators of its own,
// copies into pinned memory arrive late, streams are told apart, and nothing waits for it while a graph is captured.
#define AT_PER_OPERATOR_HEADERS  // all operators' headers take 15 s to compile
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, DEVICES> current_stream{};
thread_local bool on_cpu = false;  // within a function that runs there: its copies are none of the program's
std::atomic<bool> captures{false};
std::atomic<c10::StreamId> last_stream{0};
std::mutex guard_of_notes;
std::vector<std::pair<c10::StreamId, c10::StreamId>> waits;  // who waits for whom
std::array<at::Generator, DEVICES> generators{at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};

void refuse_capture(const char* what) {
    TORCH_CHECK(!captures, what, ": operation not permitted when stream is capturing");
}

struct OnCpu {
    bool before = std::exchange(on_cpu, true);
    ~OnCpu() { on_cpu = before; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device d) const override {
        const auto before = getDevice();
        current_device = d.index();
        return before;
    }
    c10::Device getDevice() const override { return {TYPE, current_device}; }
    void setDevice(c10::Device d) const override { current_device = d.index(); }
    void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
    c10::Stream getStream(c10::Device d) const override {
        return c10::Stream(c10::Stream::UNSAFE, d, current_stream[d.index()]);
    }
    c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
    c10::Stream getNewStream(c10::Device d, int) const override {
        return c10::Stream(c10::Stream::UNSAFE, d, ++last_stream);
    }
    c10::Stream exchangeStream(c10::Stream s) const override {
        const auto before = getStream(s.device());
        current_stream[s.device_index()] = s.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
        delete static_cast<c10::StreamId*>(*event);
        *event = new c10::StreamId(s.id());
    }
    void block(void* event, const c10::Stream& s) const override {
        const std::lock_guard<std::mutex> lock(guard_of_notes);
        if (event) waits.emplace_back(s.id(), *static_cast<c10::StreamId*>(event));
    }
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<c10::StreamId*>(event);
    }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
        return {data, data, &c10::free_cpu, {TYPE, current_device}};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

std::set<const void*> pinned;
struct Pinned final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = c10::alloc_cpu(bytes ? bytes : 1);
        std::memset(data, 0, bytes);
        const std::lock_guard<std::mutex> lock(guard_of_notes);
        pinned.insert(data);
        return {data, data, &free, c10::DeviceType::CPU};
    }
    static void free(void* data) {
        {
            const std::lock_guard<std::mutex> lock(guard_of_notes);
            pinned.erase(data);
        }
        c10::free_cpu(data);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free; }
    void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Pinned pinned_memory;

bool is_pinned(const void* data) {
    const std::lock_guard<std::mutex> lock(guard_of_notes);
    return pinned.count(data) > 0;
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isAvailable() const override { return true; }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
        return generators[index < 0 ? current_device : index];
    }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(device.value_or(c10::Device(TYPE, current_device)));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(device.value_or(c10::Device(TYPE, current_device)));
    return at::detail::empty_strided_generic(size, stride, &memory,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& t) {
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

// Copies into pinned memory that nobody has waited for.
std::vector<std::pair<at::Tensor, at::Tensor>> pending;
void arrive() {
    std::vector<std::pair<at::Tensor, at::Tensor>> now;
    {
        const std::lock_guard<std::mutex> lock(guard_of_notes);
        now.swap(pending);
    }
    for (auto& [from, to] : now) to.copy_(from);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    const bool crosses = from.is_cpu() != to.is_cpu();
    const bool late = crosses && non_blocking && is_pinned((to.is_cpu() ? to : from).storage().data());
    if (crosses && !late && !on_cpu) {
        refuse_capture("a copy that the host waits for");
        if (to.is_cpu()) arrive();
    }
    if (!to.numel()) return to;
    if (late && to.is_cpu()) {
        auto now = on_host(from).clone();
        const std::lock_guard<std::mutex> lock(guard_of_notes);
        pending.emplace_back(std::move(now), to);
    } else {
        on_host(to).copy_(on_host(from));
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    if (to.sizes() != from.sizes()) to.resize_(from.sizes());
    return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
    const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    auto* impl = self.unsafeGetTensorImpl();
    const auto bytes = (c10::multiply_integers(sizes) + impl->storage_offset()) * self.element_size();
    if (bytes > static_cast<int64_t>(self.storage().nbytes())) {
        const c10::DeviceGuard guard(self.device());
        auto fresh = memory.allocate(bytes);
        std::memcpy(fresh.get(), self.storage().data(), self.storage().nbytes());
        self.storage().set_data_ptr(std::move(fresh));
        self.storage().set_nbytes(bytes);
    }
    impl->set_sizes_contiguous(sizes);
    return self;
}

at::Tensor host(const at::Tensor& t) { return t.defined() ? t.to(at::kCPU) : t; }

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
    const OnCpu within;
    const auto b = bias.has_value() ? std::optional<at::Tensor>(host(*bias)) : std::nullopt;
    return at::convolution(host(x), host(weight), b, stride, padding, dilation, transposed, output_padding, groups)
        .to(x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
    const OnCpu within;
    const auto bias_size = std::vector<int64_t>{transposed ? weight.size(1) * groups : weight.size(0)};
    auto [a, b, c] = at::convolution_backward(host(grad), host(x), host(weight), c10::IntArrayRef(bias_size), stride,
                                              padding, dilation, transposed, output_padding, groups, wanted);
    const auto there = [&](const at::Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
    return {there(a), there(b), there(c)};
}

// Whoever is told that a stream uses a tensor: how often, of all tensors, by stream.
std::map<c10::StreamId, int64_t> recorded_streams;
void record_stream(at::Tensor& self, c10::Stream stream) {
    TORCH_CHECK(stream.device() == self.device(), "record_stream: a stream of another device");
    const std::lock_guard<std::mutex> lock(guard_of_notes);
    ++recorded_streams[stream.id()];
}

// What returns numbers of the device to the host, or results whose size these decide.
const std::set<std::string> WAITING{
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};

void by_cpu(const c10::OperatorHandle& function, torch::jit::Stack* stack) {
    const auto& schema = function.schema();
    if (WAITING.count(schema.name())) {
        refuse_capture(schema.name().c_str());
        arrive();
    }
    const auto& arguments = schema.arguments();
    const auto first = stack->size() - arguments.size();
    for (size_t k = 0; k < arguments.size(); ++k) {  // who names no generator draws from the device's
        auto& value = (*stack)[first + k];
        if (value.isNone() && arguments[k].type()->str() == "Generator?") {
            auto index = current_device;
            for (size_t j = 0; j < arguments.size(); ++j)
                if (const auto& v = (*stack)[first + j]; v.isTensor() && v.toTensor().is_privateuseone())
                    index = v.toTensor().device().index();
            value = generators[index];
        }
    }
    const OnCpu within;
    at::native::cpu_fallback(function, stack);
}

// (The CPU's names no generator, so that it would draw from the CPU's.)
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
    auto mask = at::ones_like(x, x.options().dtype(at::kBool));
    if (!train.value_or(true)) return {x.clone(), mask};
    mask.bernoulli_(1 - p);
    return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", TORCH_FN(empty));
    m.impl("empty_strided", TORCH_FN(empty_strided));
    m.impl("_copy_from", TORCH_FN(copy_from));
    m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
    m.impl("resize_", TORCH_FN(resize));
    m.impl("native_dropout", TORCH_FN(native_dropout));
    m.impl("convolution_overrideable", TORCH_FN(convolution));
    m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
    m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    m.impl("view", TORCH_FN(at::native::view));
    m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    m.impl("unfold", TORCH_FN(at::native::unfold));
    m.impl("record_stream", TORCH_FN(record_stream));
    m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    m.def("recorded_streams", [] { return recorded_streams; });
    m.def("take_waits", [] {
        const std::lock_guard<std::mutex> lock(guard_of_notes);
        return std::exchange(waits, {});
    });
    m.def("captures", [] { return captures.load(); });
    m.def("set_captures", [](bool on) { captures = on; });
    m.def("refuse_capture", &refuse_capture);
    m.def("arrive", &arrive);
    m.def("generator", [](int index) { return generators[index]; });
    m.def("stream", [](int index) { return current_stream[index]; });
    m.def("device_count", [] { return DEVICES; });
    m.def("current_device", [] { return static_cast<int>(current_device); });
    m.def("set_device", [](int index) { current_device = static_cast<c10::DeviceIndex>(index); });
}
