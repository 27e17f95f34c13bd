// Where a tensor lies, by the C functions that torch hands out for exchange (DLPack 1.2: one call, where Python's
// attributes take four, of which some make objects). torch has them from 2.10 on.
#pragma once

#include "ref.h"

#include <cstddef>
#include <cstring>

namespace dlpack {

// Of the standard, https://dmlc.github.io/dlpack/latest/c_api.html: only what is read here.
struct Tensor {
    void *data;
    struct {
        std::int32_t type, index;
    } device;
    std::int32_t dims;
    struct {
        std::uint8_t code, bits;
        std::uint16_t lanes;
    } dtype;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};

struct Exchange {
    struct {
        std::uint32_t major, minor;
    } version;
    Exchange *earlier;
    void *allocate, *export_, *import;
    int (*describe)(void *object, Tensor *found);
    void *stream;
};

// torch's; nullptr where it has none.
inline const Exchange *exchange(PyObject *kind) {
    static const Exchange *const found = [](PyObject *kind) {
        const Ref capsule(PyObject_GetAttrString(kind, "__dlpack_c_exchange_api__"));
        PyErr_Clear();
        const bool valid = capsule && PyCapsule_IsValid(capsule.get(), "dlpack_exchange_api");
        void *pointer = valid ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
        auto *api = static_cast<Exchange *>(pointer);
        return api != nullptr && api->version.major == 1 ? api : nullptr;
    }(kind);
    return found;
}

// What torch says of a tensor; false where it does not.
inline bool describe(PyObject *tensor, Tensor &found) {
    const Exchange *api = exchange((PyObject *)Py_TYPE(tensor));
    if (api == nullptr || api->describe == nullptr) return false;
    if (api->describe(tensor, &found) == 0) return true;
    PyErr_Clear();
    return false;
}

// What is compared: all, or all but the address.
constexpr std::size_t ALL = 0, FORM = offsetof(Tensor, device), FIXED = offsetof(Tensor, shape);

inline Ref bytes_of(const Tensor &tensor, std::size_t from) {
    const std::size_t fixed = FIXED - from, sizes = sizeof(std::int64_t) * (std::size_t)tensor.dims;
    Ref bytes = checked(PyBytes_FromStringAndSize(nullptr, (Py_ssize_t)(fixed + 2 * sizes)));
    char *to = PyBytes_AS_STRING(bytes.get());
    std::memcpy(to, (const char *)&tensor + from, fixed);
    std::memcpy(to + fixed, tensor.shape, sizes);
    std::memcpy(to + fixed + sizes, tensor.strides, sizes);
    return bytes;
}

inline bool has_bytes(const Tensor &tensor, std::size_t from, PyObject *bytes) {
    const std::size_t fixed = FIXED - from, sizes = sizeof(std::int64_t) * (std::size_t)tensor.dims;
    const char *known = PyBytes_AS_STRING(bytes);
    return (std::size_t)PyBytes_GET_SIZE(bytes) == fixed + 2 * sizes &&
           std::memcmp(known, (const char *)&tensor + from, fixed) == 0 &&
           std::memcmp(known + fixed, tensor.shape, sizes) == 0 &&
           std::memcmp(known + fixed + sizes, tensor.strides, sizes) == 0;
}

}  // namespace dlpack
