// The one operator of CANN that torch_npu's C++ calls by itself, beside the kernels that the emulator replaces: its
// ProcessGroupHCCL pads the rows that it gathers or scatters to 512 bytes (aclnnConstantPadNd). A memset and a copy do it.
#include <cstring>
#include <numeric>

#include "emulator.h"

using namespace emu;

namespace {

struct Tensor {
    std::vector<int64_t> sizes;
    uint64_t element = 0;
    char* data = nullptr;
    bool contiguous = true;

    uint64_t bytes() const { return std::accumulate(sizes.begin(), sizes.end(), element, [](uint64_t all, int64_t size) { return all * static_cast<uint64_t>(size); }); }
};

struct Padding {
    const Tensor from, into;
};

uint64_t element_of(int32_t type) {  // aclDataType
    switch (type) {
        case 1: case 6: case 7: case 27: return 2;
        case 0: case 3: case 8: return 4;
        case 9: case 10: case 11: case 16: return 8;
        case 17: return 16;
        default: return 1;
    }
}

}  // namespace

EMU_API void* aclCreateTensor(const int64_t* sizes, uint64_t count, int32_t type, const int64_t* strides, int64_t offset, int32_t, const int64_t*, uint64_t, void* data) {
    auto* made = new Tensor;
    made->sizes.assign(sizes, sizes + count);
    made->element = element_of(type);
    made->data = static_cast<char*>(data) + static_cast<uint64_t>(offset) * made->element;
    int64_t step = 1;
    for (uint64_t dimension = count; dimension-- > 0; step *= sizes[dimension])
        made->contiguous = made->contiguous && (sizes[dimension] == 1 || strides[dimension] == step);
    return made;
}
EMU_API int aclDestroyTensor(const void* tensor) {
    delete static_cast<const Tensor*>(tensor);
    return ACL_SUCCESS;
}
EMU_API void* aclCreateIntArray(const int64_t* values, uint64_t count) { return new std::vector<int64_t>(values, values + count); }
EMU_API int aclDestroyIntArray(const void* array) {
    delete static_cast<const std::vector<int64_t>*>(array);
    return ACL_SUCCESS;
}
EMU_API void* aclCreateScalar(void* value, int32_t type) {
    const auto* bytes = static_cast<const char*>(value);
    return new std::vector<char>(bytes, bytes + element_of(type));
}
EMU_API int aclDestroyScalar(const void* scalar) {
    delete static_cast<const std::vector<char>*>(scalar);
    return ACL_SUCCESS;
}

EMU_API int aclnnConstantPadNdGetWorkspaceSize(const void* self, const void* pad, const void* value, void* out, uint64_t* workspace, void** executor) {
    const auto& from = *static_cast<const Tensor*>(self);
    const auto& into = *static_cast<const Tensor*>(out);
    const auto& amounts = *static_cast<const std::vector<int64_t>*>(pad);
    const auto& with = *static_cast<const std::vector<char>*>(value);
    const bool at_end = from.sizes.size() == 2 && from.sizes[0] == 1 && amounts.size() == 2 && amounts[0] == 0 && amounts[1] >= 0;
    const bool zero = std::all_of(with.begin(), with.end(), [](char byte) { return byte == 0; });
    if (!at_end || !zero || !from.contiguous || !into.contiguous)
        return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclnnConstantPadNd appends zeros to one row, and does nothing else here", "pad with torch.nn.functional.pad instead");
    *workspace = 0;
    *executor = new Padding{from, into};
    return ACL_SUCCESS;
}
EMU_API int aclnnConstantPadNd(void*, uint64_t, void* executor, aclrtStream handle) {
    const std::unique_ptr<Padding> padding(static_cast<Padding*>(executor));
    Task zeros, row;
    zeros.place = row.place = place_of_caller();
    Lock lock(state().mutex);
    Stream* stream = resolve(handle);
    zeros.kind = Kind::Fill;
    row.kind = Kind::Copy;
    zeros.destination = row.destination = padding->into.data;
    zeros.bytes = padding->into.bytes();
    row.source = padding->from.data;
    row.bytes = padding->from.bytes();
    const aclError status = submit(stream, std::move(zeros), lock);
    return status == ACL_SUCCESS ? submit(stream, std::move(row), lock) : status;
}
