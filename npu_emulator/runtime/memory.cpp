// Device memory: one reserved address range for each device, allocated first-fit.
//
// One range for each device, rather than malloc, for two reasons: a comparison tells the device of a pointer, and Python can
// view any device tensor as a slice of one big CPU tensor.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator.h"

// The number of frees: a check against the live allocations stays valid until this changes.
extern "C" {
__attribute__((visibility("default"))) std::atomic<uint64_t> emu_frees{0};
}

namespace emu {
namespace {

constexpr size_t kAlignment = 512;  // CANN's promise for aclrtMalloc
constexpr size_t kOwnPages = size_t{2} << 20;  // CANN maps memory from this size on in pages of this size
// Address space for each byte of memory: hardware maps pages and never fragments memory, and torch_npu's expandable segments
// reserve more than a device's memory for each stream. The little that does without those is the second choice.
constexpr size_t kRooms[] = {64, 2};

struct Arena {
    char* base = nullptr;
    size_t size = 0;
    size_t used = 0;
    std::map<size_t, size_t> free_ranges;  // offset -> length
    std::map<size_t, size_t> live;         // offset -> length
    std::map<size_t, size_t> reserved;     // offset -> length: addresses for mapped memory, whose pieces are live
};

std::mutex arena_mutex;
std::map<int32_t, Arena> arenas;
std::map<const char*, size_t> pinned;
size_t arena_bytes = size_t{64} << 30;

Arena& arena_for(int32_t device) {
    Arena& arena = arenas[device];
    if (arena.base == nullptr) {
        for (const size_t room : kRooms) {
            // Reserved, not committed: the kernel allocates pages at their first use.
            void* base = mmap(nullptr, room * arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (base == MAP_FAILED) continue;
            arena.base = static_cast<char*>(base);
            arena.size = room * arena_bytes;
            arena.free_ranges[0] = arena.size;
            break;
        }
    }
    return arena;
}

// A page has 4, 16 or 64 KiB (on aarch64 the kernel's build decides).
size_t page_size() {
    static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

size_t to_multiple(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Large memory has pages of its own, which can be moved to a file that other processes share (ipc_memory.cpp).
size_t alignment_of(size_t bytes) { return bytes >= kOwnPages ? page_size() : kAlignment; }

size_t round_up(size_t bytes) { return bytes == 0 ? kAlignment : to_multiple(bytes, alignment_of(bytes)); }

// Takes addresses from the first free range that is long enough; returns their offset, or the arena's size if there is none.
size_t take(Arena& arena, size_t want) {
    for (auto range = arena.free_ranges.begin(); range != arena.free_ranges.end(); ++range) {
        const auto [offset, length] = *range;
        const size_t start = to_multiple(offset, alignment_of(want)), end = offset + length;
        if (start + want > end) continue;
        arena.free_ranges.erase(range);
        if (start > offset) arena.free_ranges[offset] = start - offset;
        if (end > start + want) arena.free_ranges[start + want] = end - start - want;
        return start;
    }
    return arena.size;
}

void* allocate(int32_t device, size_t bytes) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena& arena = arena_for(device);
    const size_t want = round_up(bytes);
    if (arena.used + want > arena_bytes) return nullptr;
    const size_t offset = take(arena, want);
    if (offset == arena.size) return nullptr;
    arena.live[offset] = want;
    arena.used += want;
    return arena.base + offset;
}

// Returns whole pages to the kernel, so that freed device memory costs no host memory. With too small a page size this would
// also discard the end of a neighbour's memory.
void discard(char* start, size_t length) {
    const auto page = static_cast<uintptr_t>(page_size());
    const auto first = (reinterpret_cast<uintptr_t>(start) + page - 1) / page * page;
    const auto last = (reinterpret_cast<uintptr_t>(start) + length) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void give_back(Arena& arena, size_t offset, size_t length) {
    auto [range, inserted] = arena.free_ranges.emplace(offset, length);
    auto next = std::next(range);
    if (next != arena.free_ranges.end() && offset + length == next->first) {
        range->second += next->second;
        arena.free_ranges.erase(next);
    }
    if (range != arena.free_ranges.begin()) {
        auto before = std::prev(range);
        if (before->first + before->second == range->first) {
            before->second += range->second;
            arena.free_ranges.erase(range);
        }
    }
}

aclError release(void* pointer) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    for (auto& [device, arena] : arenas) {
        auto* address = static_cast<char*>(pointer);
        if (address < arena.base || address >= arena.base + arena.size) continue;
        auto found = arena.live.find(static_cast<size_t>(address - arena.base));
        if (found == arena.live.end()) break;
        const auto [offset, length] = *found;
        if (is_imported(address))
            return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: this memory belongs to another process", "close its key with aclrtIpcMemClose");
        end_export(address);
        arena.live.erase(found);
        arena.used -= length;
        discard(arena.base + offset, length);
        clear_unwritten(arena.base + offset, length);
        ++emu_frees;
        give_back(arena, offset, length);
        return ACL_SUCCESS;
    }
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: this address was not allocated on an emulated device, or was freed already", "free what aclrtMalloc gave, once");
}

}  // namespace

int32_t device_of(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> guard(arena_mutex);
    for (const auto& [device, arena] : arenas)
        if (arena.base != nullptr && address >= arena.base && address < arena.base + arena.size) return device;
    return -1;
}

// Whether memory is invalid: inside a device's address range, and not completely inside one live allocation.
bool is_outside_allocations(const void* pointer, size_t bytes) {
    const auto* address = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> guard(arena_mutex);
    for (const auto& [device, arena] : arenas) {
        if (arena.base == nullptr || address < arena.base || address >= arena.base + arena.size) continue;
        const auto offset = static_cast<size_t>(address - arena.base);
        const auto after = arena.live.upper_bound(offset);
        if (after == arena.live.begin()) return true;
        auto end = std::prev(after)->first + std::prev(after)->second;
        if (offset >= end) return true;
        // Neighbours in one reservation are one memory.
        const auto next = arena.reserved.upper_bound(offset);
        const bool mapped = next != arena.reserved.begin() && offset < std::prev(next)->first + std::prev(next)->second;
        for (auto piece = after; mapped && piece != arena.live.end() && piece->first == end; ++piece) end += piece->second;
        return offset + bytes > end;
    }
    return false;
}

std::string outside_allocations(const char* what, const void* pointer, size_t bytes) {
    char text[224];
    snprintf(text, sizeof text,
             "%s %zu bytes at %p, which no live allocation holds (freed, or past an end)",
             what, bytes, pointer);
    return text;
}

bool is_pinned_host(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> guard(arena_mutex);
    auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return false;
    const auto& [base, size] = *std::prev(after);
    return address < base + size;
}

}  // namespace emu

using namespace emu;

EMU_API int emu_is_outside_allocations(uint64_t address, uint64_t bytes) {
    return is_outside_allocations(reinterpret_cast<const void*>(address), bytes);
}

// The address of device memory for Python. `size` is 0 if the reservation failed.
EMU_API void emu_arena(int32_t device, uint64_t* base, uint64_t* size) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    Arena& arena = arena_for(device);
    *base = reinterpret_cast<uint64_t>(arena.base);
    *size = arena.size;
}

EMU_API void emu_set_memory(uint64_t bytes) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    arena_bytes = bytes / kAlignment * kAlignment;
}

// Permitted inside a capture, where torch_npu's allocator regularly allocates memory.
EMU_API aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
    *pointer = allocate(current_device(), size);
    if (*pointer == nullptr)
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    "out of emulated device memory: " + std::to_string(size) + " bytes wanted", "free tensors and graphs, or raise NPU_EMULATOR_MEMORY_GB");
    charge_capture(round_up(size));
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, size, policy);
}
EMU_API aclError aclrtFree(void* pointer) {
    State& s = state();
    Lock lock(s.mutex);
    // Waits for the device, as cudaFree does, because queued work may still use the memory.
    if (s.pending != 0 && !(s.busy && s.owner == std::this_thread::get_id())) wait_for_device(lock, device_of(pointer));
    lock.unlock();
    return release(pointer);
}
EMU_API aclError aclrtMallocHost(void** pointer, size_t size) {
    // Whole pages, as the driver gives them: torch_npu registers such memory from the next page's start on.
    *pointer = aligned_alloc(page_size(), to_multiple(size + 1, page_size()));
    if (*pointer == nullptr) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of host memory", "free pinned tensors, or pin fewer");
    std::lock_guard<std::mutex> guard(arena_mutex);
    pinned[static_cast<char*>(*pointer)] = size;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) { return aclrtMallocHost(pointer, size); }
EMU_API aclError aclrtFreeHost(void* pointer) {
    {
        std::lock_guard<std::mutex> guard(arena_mutex);
        pinned.erase(static_cast<char*>(pointer));
    }
    free(pointer);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtHostRegister(void* pointer, uint64_t size, aclrtHostRegisterType, void** device_pointer) {
    if (pointer == nullptr || size == 0)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegister: there is no memory at a null address or of 0 bytes", "register memory of the host");
    std::lock_guard<std::mutex> guard(arena_mutex);
    pinned[static_cast<char*>(pointer)] = size;
    if (device_pointer != nullptr) *device_pointer = pointer;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtHostRegisterV2(void* pointer, uint64_t size, uint32_t) {
    return aclrtHostRegister(pointer, size, aclrtHostRegisterType{}, nullptr);
}
EMU_API aclError aclrtHostUnregister(void* pointer) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    pinned.erase(static_cast<char*>(pointer));
    return ACL_SUCCESS;
}
EMU_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    const Arena& arena = arena_for(current_device());
    *total = arena.base == nullptr ? 0 : arena_bytes;
    *free_bytes = *total - arena.used;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
    memset(attributes, 0, sizeof *attributes);
    const int32_t device = device_of(pointer);
    if (device >= 0) {
        attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
        attributes->location.id = static_cast<uint32_t>(device);
    } else {
        attributes->location.type = is_pinned_host(pointer) ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    }
    return ACL_SUCCESS;
}

namespace {

aclError blocking(const char* name) {
    State& s = state();
    Lock lock(s.mutex);
    if (capture_forbids_here(lock)) {
        const aclError refused = only_others_capture(lock)
                                     ? refuse_in_capture("copy", name, "another thread captures and forbids it to all: give that capture capture_error_mode=\"thread_local\"")
                                     : refuse_in_capture("copy", name);
        if (refused != ACL_SUCCESS) return refused;
    }
    const aclError waited = wait_for_device(lock, current_device());
    return waited == ACL_SUCCESS ? take_failure(current_device(), lock) : waited;
}

// Memory at a null address is nobody's: the storage of a tensor that was resized to nothing has one.
aclError refuse_null(const char* name, const void* pointer, size_t bytes) {
    if (pointer != nullptr || bytes == 0) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(name) + ": " + std::to_string(bytes) + " bytes at a null address", "pass memory that is allocated");
}

// A synchronous copy reports a bad address immediately, with the code that an asynchronous copy would report later.
aclError somebodys(const char* what, const void* pointer, size_t bytes) {
    if (!is_outside_allocations(pointer, bytes)) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_MODEL_EXECUTE, outside_allocations(what, pointer, bytes), kKeepAllocated);
}

}  // namespace

EMU_API aclError aclrtMemcpy(void* destination, size_t, const void* source, size_t count, aclrtMemcpyKind) {
    aclError status = refuse_null("aclrtMemcpy", destination == nullptr ? destination : source, count);
    if (status == ACL_SUCCESS) status = blocking("aclrtMemcpy");
    if (status == ACL_SUCCESS) status = somebodys("aclrtMemcpy reads", source, count);
    if (status == ACL_SUCCESS) status = somebodys("aclrtMemcpy writes", destination, count);
    if (status != ACL_SUCCESS) return status;
    memmove(destination, source, count);
    copy_unwritten(destination, source, count);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMemset(void* pointer, size_t, int32_t value, size_t count) {
    aclError status = refuse_null("aclrtMemset", pointer, count);
    if (status == ACL_SUCCESS) status = blocking("aclrtMemset");
    if (status == ACL_SUCCESS) status = somebodys("aclrtMemset writes", pointer, count);
    if (status != ACL_SUCCESS) return status;
    memset(pointer, value, count);
    clear_unwritten(pointer, count);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtMemcpyAsync(void* destination, size_t, const void* source, size_t count, aclrtMemcpyKind, aclrtStream stream) {
    if (const aclError refused = refuse_null("aclrtMemcpyAsync", destination == nullptr ? destination : source, count); refused != ACL_SUCCESS) return refused;
    Task task;
    task.place = place_of_caller();
    State& s = state();
    Lock lock(s.mutex);
    task.kind = Kind::Copy;
    task.destination = destination;
    task.source = source;
    task.bytes = count;
    return submit(resolve(stream), std::move(task), lock);
}
EMU_API aclError aclrtMemsetAsync(void* pointer, size_t, int32_t value, size_t count, aclrtStream stream) {
    if (const aclError refused = refuse_null("aclrtMemsetAsync", pointer, count); refused != ACL_SUCCESS) return refused;
    Task task;
    task.place = place_of_caller();
    State& s = state();
    Lock lock(s.mutex);
    task.kind = Kind::Fill;
    task.destination = pointer;
    task.value = static_cast<uint64_t>(value);
    task.bytes = count;
    return submit(resolve(stream), std::move(task), lock);
}
