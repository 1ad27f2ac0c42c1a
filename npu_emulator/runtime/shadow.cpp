// One byte of shadow for each byte of device memory: 1 means allocated and not written since. All of it is 0, and costs no
// pages, until a checker in Python (npu_emulator/memory) reserves it and marks the allocations of torch_npu's allocator.
#include <sys/mman.h>

#include <atomic>
#include <cstring>

#include "emulator.h"

EMU_API void emu_arena(int32_t device, uint64_t* base, uint64_t* size);

namespace emu {
namespace {

struct Shadow {
    std::atomic<char*> bytes{nullptr};
    const char* memory = nullptr;
    size_t size = 0;
};

Shadow shadows[16];

}  // namespace

namespace {

// The shadow of memory of a device; null for other memory, and where nobody checks.
char* shadow_of(const void* pointer, size_t bytes) {
    const auto* address = static_cast<const char*>(pointer);
    for (Shadow& shadow : shadows) {
        char* base = shadow.bytes.load(std::memory_order_acquire);
        if (base == nullptr || address < shadow.memory || address + bytes > shadow.memory + shadow.size) continue;
        return base + (address - shadow.memory);
    }
    return nullptr;
}

void set_shadow(const void* pointer, size_t bytes, int value) {
    if (char* marks = shadow_of(pointer, bytes); marks != nullptr) memset(marks, value, bytes);
}

}  // namespace

void clear_unwritten(const void* pointer, size_t bytes) { set_shadow(pointer, bytes, 0); }
void mark_unwritten(const void* pointer, size_t bytes) { set_shadow(pointer, bytes, 1); }

// A copy of unwritten bytes is unwritten.
void copy_unwritten(const void* destination, const void* source, size_t bytes) {
    char* const to = shadow_of(destination, bytes);
    const char* const from = shadow_of(source, bytes);
    if (to != nullptr && from != nullptr) memmove(to, from, bytes);
    else clear_unwritten(destination, bytes);
}

}  // namespace emu

using namespace emu;

// The address of a device's shadow, which is as long as the device's memory, with nothing marked; 0 if it could not be reserved.
EMU_API uint64_t emu_shadow(int32_t device) {
    static std::mutex reserving;
    std::lock_guard<std::mutex> guard(reserving);
    Shadow& shadow = shadows[device];
    if (char* known = shadow.bytes.load(); known != nullptr) {
        madvise(known, shadow.size, MADV_DONTNEED);  // what ran while nobody checked may have written what an earlier check marked
        return reinterpret_cast<uint64_t>(known);
    }
    uint64_t base = 0, size = 0;
    emu_arena(device, &base, &size);
    void* bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (size == 0 || bytes == MAP_FAILED) return 0;
    shadow.memory = reinterpret_cast<const char*>(base);
    shadow.size = size;
    shadow.bytes.store(static_cast<char*>(bytes), std::memory_order_release);
    return reinterpret_cast<uint64_t>(bytes);
}
