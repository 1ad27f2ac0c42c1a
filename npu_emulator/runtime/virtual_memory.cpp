// Memory that is mapped at reserved addresses, with which torch_npu's allocator makes expandable segments.
//
// A reservation is a range of a device's addresses without memory. Physical memory counts against the device's memory from its
// allocation on; mapped, it is live at its addresses. Memory that is unmapped loses its contents.
#include <cstring>

#include "emulator.h"

namespace emu {
namespace {

struct Physical {
    int32_t device;
    size_t size;
};

// The arena with this address, or null; the caller has the lock.
Arena* arena_with(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    for (auto& [device, arena] : arenas)
        if (arena.base != nullptr && address >= arena.base && address < arena.base + arena.size) return &arena;
    return nullptr;
}

// Makes what is mapped at an offset memory that nothing may touch; the caller has the lock.
void unmap(Arena& arena, std::map<size_t, size_t>::iterator piece) {
    const auto [offset, length] = *piece;
    arena.live.erase(piece);
    discard(arena.base + offset, length);
    clear_unwritten(arena.base + offset, length);
    ++emu_frees;
}

}  // namespace
}  // namespace emu

EMU_API aclError aclrtReserveMemAddress(void** pointer, size_t size, size_t, void*, uint64_t) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena& arena = arena_for(current_device());
    const size_t offset = take(arena, round_up(size));
    if (offset == arena.size)
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtReserveMemAddress: no " + std::to_string(size) + " free addresses", "lower NPU_EMULATOR_MEMORY_GB, or lift the process's address-space limit");
    arena.reserved[offset] = round_up(size);
    *pointer = arena.base + offset;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtReleaseMemAddress(void* pointer) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena* arena = arena_with(pointer);
    const auto found = arena == nullptr ? std::map<size_t, size_t>::iterator{} : arena->reserved.find(static_cast<size_t>(static_cast<char*>(pointer) - arena->base));
    if (arena == nullptr || found == arena->reserved.end())
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReleaseMemAddress: this address was not reserved", "release what aclrtReserveMemAddress gave, once");
    const auto [offset, length] = *found;
    for (auto piece = arena->live.lower_bound(offset); piece != arena->live.end() && piece->first < offset + length;) unmap(*arena, piece++);
    arena->reserved.erase(found);
    give_back(*arena, offset, length);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* properties, uint64_t) {
    const auto device = static_cast<int32_t>(properties->location.id);
    {
        std::lock_guard<std::mutex> guard(arena_mutex);
        Arena& arena = arena_for(device);
        if (arena.used + size > arena_bytes)
            return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of emulated device memory: " + std::to_string(size) + " bytes wanted", "free tensors and graphs, or raise NPU_EMULATOR_MEMORY_GB");
        arena.used += size;
    }
    *handle = new Physical{device, size};
    charge_capture(size);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    const auto* physical = static_cast<Physical*>(handle);
    std::lock_guard<std::mutex> guard(arena_mutex);
    arena_for(physical->device).used -= physical->size;
    delete physical;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMapMem(void* pointer, size_t size, size_t, aclrtDrvMemHandle, uint64_t) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena* arena = arena_with(pointer);
    if (arena == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: this address was not reserved", "map memory once, inside a range that aclrtReserveMemAddress gave");
    const auto offset = static_cast<size_t>(static_cast<char*>(pointer) - arena->base);
    const auto after = arena->reserved.upper_bound(offset);
    const auto piece = arena->live.lower_bound(offset);
    if (after == arena->reserved.begin() || offset + size > std::prev(after)->first + std::prev(after)->second || (piece != arena->live.end() && piece->first < offset + size))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: these addresses were not reserved, or have memory already", "map memory once, inside a range that aclrtReserveMemAddress gave");
    arena->live[offset] = size;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtUnmapMem(void* pointer) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena* arena = arena_with(pointer);
    const auto piece = arena == nullptr ? std::map<size_t, size_t>::iterator{} : arena->live.find(static_cast<size_t>(static_cast<char*>(pointer) - arena->base));
    if (arena == nullptr || piece == arena->live.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: no memory is mapped at this address", "unmap what aclrtMapMem mapped, once");
    unmap(*arena, piece);
    return ACL_SUCCESS;
}
