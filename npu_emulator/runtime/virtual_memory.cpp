// Memory that is mapped at reserved addresses, with which torch_npu's allocator makes expandable segments.
//
// A reservation is a range of a device's addresses without memory. Physical memory counts against the device's memory from its
// allocation on; mapped, it is live at its addresses. Memory that is unmapped loses its contents, unless it is shared.
//
// Shared, it lies in a file (ipc_memory.cpp), and its handle for other processes is a number that says where that is found.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "emulator.h"

namespace emu {
namespace {

struct Physical {
    int32_t device;
    size_t size;
    bool imported = false;    // it counts against the memory of the process that shares it
    char* address = nullptr;  // where it is mapped
    Exported shared = {};     // without a header in a process that imported it
};

std::map<const char*, Physical*> mapped_pieces;  // by address

// Makes what is mapped at an offset memory that nothing may touch; the caller has the lock.
void unmap(Arena& arena, std::map<size_t, size_t>::iterator piece) {
    const auto [offset, length] = *piece;
    char* address = arena.base + offset;
    arena.live.erase(piece);
    const auto found = mapped_pieces.find(address);
    if (found != mapped_pieces.end() && found->second->shared.file >= 0) unshare(address, length);
    else discard(address, length);
    if (found != mapped_pieces.end()) {
        found->second->address = nullptr;
        mapped_pieces.erase(found);
    }
    clear_unwritten(address, length);
    ++emu_frees;
}

// A process, a file of it and the number of the export there in 64 bits, and the key that these are for ipc_memory.cpp.
constexpr uint32_t kFileBits = 20, kNumberBits = 22;
uint64_t shareable(const Physical& physical) {
    return static_cast<uint64_t>(getpid()) << (kFileBits + kNumberBits) | static_cast<uint64_t>(physical.shared.file) << kNumberBits | physical.shared.header->number.load();
}
std::string key_of(uint64_t shareable) {
    const auto bits = [](uint64_t word, uint32_t count) { return word & ((uint64_t{1} << count) - 1); };
    return key_of(static_cast<int32_t>(shareable >> (kFileBits + kNumberBits)), static_cast<int32_t>(bits(shareable >> kNumberBits, kFileBits)), bits(shareable, kNumberBits));
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
    auto* physical = static_cast<Physical*>(handle);
    std::lock_guard<std::mutex> guard(arena_mutex);
    if (physical->address != nullptr)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreePhysical: this memory is mapped", "unmap it first with aclrtUnmapMem");
    if (!physical->imported) arena_for(physical->device).used -= physical->size;
    if (physical->shared.header != nullptr) close_key(physical->shared);
    else if (physical->shared.file >= 0) close(physical->shared.file);
    delete physical;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMapMem(void* pointer, size_t size, size_t, aclrtDrvMemHandle handle, uint64_t) {
    auto* physical = static_cast<Physical*>(handle);
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena* arena = arena_with(pointer);
    if (arena == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: this address was not reserved", "map memory once, inside a range that aclrtReserveMemAddress gave");
    const auto offset = static_cast<size_t>(static_cast<char*>(pointer) - arena->base);
    const auto after = arena->reserved.upper_bound(offset);
    const auto piece = arena->live.lower_bound(offset);
    if (after == arena->reserved.begin() || offset + size > std::prev(after)->first + std::prev(after)->second || (piece != arena->live.end() && piece->first < offset + size))
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: these addresses were not reserved, or have memory already", "map memory once, inside a range that aclrtReserveMemAddress gave");
    if (physical->address != nullptr || size > physical->size)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: this memory is mapped already, or smaller than " + std::to_string(size) + " bytes", "map memory at one place, and no more than aclrtMallocPhysical gave");
    if (physical->shared.file >= 0 && mapped(pointer, size, MAP_SHARED | MAP_FIXED, physical->shared.file) == MAP_FAILED) {
        unshare(static_cast<char*>(pointer), size);
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMapMem: the memory cannot be mapped (" + std::string(strerror(errno)) + ")", "free memory of the device first");
    }
    physical->address = static_cast<char*>(pointer);
    mapped_pieces[physical->address] = physical;
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
EMU_API aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType, uint64_t flags, uint64_t* number) {
    Lock lock(state().mutex);
    if (const aclError status = wait_for_memory("aclrtMemExportToShareableHandle", lock)) return status;
    std::lock_guard<std::mutex> guard(arena_mutex);
    auto& physical = *static_cast<Physical*>(handle);
    if (physical.imported)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemExportToShareableHandle: this memory belongs to another process", "let its owner share it");
    if (physical.shared.file < 0) {
        if (const aclError status = move_to_file("aclrtMemExportToShareableHandle", physical.address, physical.size, physical.shared)) return status;
        physical.shared.header->everybody = (flags & ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0;
    }
    *number = shareable(physical);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMemSetPidToShareableHandle(uint64_t number, int32_t* processes, size_t count) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    for (auto& [address, physical] : mapped_pieces)
        if (physical->shared.header != nullptr && shareable(*physical) == number) return permit("aclrtMemSetPidToShareableHandle", physical->shared, processes, count);
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemSetPidToShareableHandle: this process has mapped no memory that it shares under " + std::to_string(number), "name what aclrtMemExportToShareableHandle gave");
}
// The memory may be mapped here from now on, even if its owner frees it.
EMU_API aclError aclrtMemImportFromShareableHandle(uint64_t number, int32_t device, aclrtDrvMemHandle* handle) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    auto physical = std::make_unique<Physical>(Physical{device, 0, true});
    if (const aclError status = open_export("aclrtMemImportFromShareableHandle", key_of(number), physical->shared)) return status;
    physical->size = physical->shared.bytes;
    *handle = physical.release();
    return ACL_SUCCESS;
}
