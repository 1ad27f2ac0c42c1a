// Device memory that several processes of one machine share, for torch.multiprocessing: aclrtIpcMem*, and what virtual_memory.cpp
// needs for the same.
//
// An export moves the pages of one allocation to a file without a name (memfd), at the same addresses. The key says where the
// file is found, so nothing remains after a crash. Whoever has imported memory keeps it until the key is closed there, although
// its owner frees it.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "emulator.h"

namespace emu {
namespace {

constexpr size_t kMostProcesses = 512;

// Stands behind the memory in its file.
struct Export {
    std::atomic<uint64_t> number;  // of the export in its process, from 1; 0 when the owner has closed the key
    bool everybody;                // may import it, not the processes below alone
    uint64_t bytes;
    std::atomic<uint32_t> count;
    std::atomic<int32_t> processes[kMostProcesses];
};

struct Exported {
    std::string key;
    size_t bytes = 0;
    int file = -1;
    Export* header = nullptr;
};

struct Imported {
    char* address;
    size_t bytes;
    size_t uses;
};

std::map<const char*, Exported> exported;  // by address
std::map<std::string, Imported> imported;  // by key
uint64_t exports = 0;

void* mapped(void* where, size_t bytes, int flags, int file, size_t offset = 0) {
    return mmap(where, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file, static_cast<off_t>(offset));
}

// Makes addresses ordinary memory again, and zero.
void unshare(char* address, size_t bytes) { mapped(address, bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1); }

// A number, because the file's may be used again while others still have this memory.
std::string key_of(int32_t process, int32_t file, uint64_t number) {
    return "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file) + "#" + std::to_string(number);
}

// The arena with this address, or null; the caller has the lock.
Arena* arena_with(const void* pointer) {
    const auto* address = static_cast<const char*>(pointer);
    for (auto& [device, arena] : arenas)
        if (arena.base != nullptr && address >= arena.base && address < arena.base + arena.size) return &arena;
    return nullptr;
}

// The length of the live allocation that begins at an address, or 0; the caller has the lock.
size_t bytes_at(const void* pointer) {
    const Arena* arena = arena_with(pointer);
    if (arena == nullptr) return 0;
    const auto found = arena->live.find(static_cast<size_t>(static_cast<const char*>(pointer) - arena->base));
    return found == arena->live.end() ? 0 : found->second;
}

// What a task or a collective writes while pages move would be lost.
aclError wait_for_memory(const char* caller, Lock& lock) {
    State& s = state();
    if (s.busy && s.owner == std::this_thread::get_id())
        return fail(ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT, std::string(caller) + ": a kernel or host function may not share memory", "share it from the program");
    while (s.busy || s.away != 0) wait_for_change(lock);
    return ACL_SUCCESS;
}

// Moves the pages to a file; or makes one for memory that has no address yet. No task runs, and no other thread allocates.
aclError move_to_file(const char* caller, char* address, size_t bytes, Exported& made) {
    const size_t whole = bytes + to_multiple(sizeof(Export), page_size());
    made.file = memfd_create("npu_emulator", MFD_CLOEXEC);
    void* copy = made.file < 0 || ftruncate(made.file, static_cast<off_t>(whole)) != 0 ? MAP_FAILED : mapped(nullptr, whole, MAP_SHARED, made.file);
    if (copy != MAP_FAILED && address != nullptr) memcpy(copy, address, bytes);
    if (copy == MAP_FAILED || (address != nullptr && mapped(address, bytes, MAP_SHARED | MAP_FIXED, made.file) == MAP_FAILED)) {
        const std::string why = strerror(errno);
        if (copy != MAP_FAILED) munmap(copy, whole);
        if (made.file >= 0) close(std::exchange(made.file, -1));
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, std::string(caller) + ": no memory to share (" + why + ")", "free memory, or raise the limit of open files");
    }
    munmap(copy, bytes);
    made.bytes = bytes;
    made.header = new (static_cast<char*>(copy) + bytes) Export{};
    made.header->bytes = bytes;
    made.header->number = ++exports;
    made.key = key_of(getpid(), made.file, exports);
    return ACL_SUCCESS;
}

// Closes the key; the memory stays where it is.
void close_key(Exported& what) {
    what.header->number = 0;
    munmap(what.header, to_multiple(sizeof(Export), page_size()));
    what.header = nullptr;
    close(what.file);
}

bool may_import(const Export& header) {
    const auto* end = header.processes + header.count.load();
    return header.everybody || std::find(header.processes, end, getpid()) != end;
}

aclError permit(const char* caller, const Exported& what, const int32_t* processes, size_t count) {
    const size_t before = what.header->count;
    if (before + count > kMostProcesses)
        return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(caller) + ": at most " + std::to_string(kMostProcesses) + " processes may import one memory", "export it without validation of processes");
    std::copy(processes, processes + count, what.header->processes + before);
    what.header->count = static_cast<uint32_t>(before + count);
    return ACL_SUCCESS;
}

// Opens the memory of a key that another process has exported: its file and its bytes. The caller has the lock.
aclError open_export(const char* caller, const std::string& text, Exported& found) {
    const size_t place = std::min(text.rfind('#'), text.size());
    const int file = open(text.substr(0, place).c_str(), O_RDWR | O_CLOEXEC);
    const uint64_t number = strtoull(text.c_str() + std::min(place + 1, text.size()), nullptr, 10);
    const off_t whole = file < 0 ? 0 : lseek(file, 0, SEEK_END);
    const size_t tail = to_multiple(sizeof(Export), page_size());
    void* behind = static_cast<size_t>(whole) <= tail ? MAP_FAILED : mapped(nullptr, tail, MAP_SHARED, file, static_cast<size_t>(whole) - tail);
    const auto* header = static_cast<const Export*>(behind);
    aclError status = ACL_SUCCESS;
    if (behind == MAP_FAILED || number == 0 || header->number != number || header->bytes + tail != static_cast<size_t>(whole))
        status = fail(ACL_ERROR_RT_PARAM_INVALID, std::string(caller) + ": no process shares memory under the key " + text, "keep the process that exported the memory, and the memory, until all have imported it");
    else if (!may_import(*header))
        status = fail(ACL_ERROR_RT_PARAM_INVALID, std::string(caller) + ": the owner does not permit process " + std::to_string(getpid()), "let the owner name this process, or export the memory without validation of processes");
    else
        found = {text, header->bytes, file, nullptr};
    if (behind != MAP_FAILED) munmap(behind, tail);
    if (status != ACL_SUCCESS && file >= 0) close(file);
    return status;
}

// Maps the memory of a key at addresses of the current device; the caller has the lock.
aclError import_memory(const char* key, Imported& made) {
    Exported found;
    if (const aclError status = open_export("aclrtIpcMemImportByKey", key, found)) return status;
    const auto ended = [&](aclError status) {
        close(found.file);
        return status;
    };
    Arena& arena = arena_for(current_device());
    const size_t offset = take(arena, found.bytes);
    if (offset == arena.size)
        return ended(fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtIpcMemImportByKey: no " + std::to_string(found.bytes) + " free addresses", "lower NPU_EMULATOR_MEMORY_GB, or lift the process's address-space limit"));
    made = {arena.base + offset, found.bytes, 0};
    if (mapped(made.address, made.bytes, MAP_SHARED | MAP_FIXED, found.file) == MAP_FAILED) {
        unshare(made.address, made.bytes);
        give_back(arena, offset, made.bytes);
        return ended(fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtIpcMemImportByKey: the memory cannot be mapped (" + std::string(strerror(errno)) + ")", "free memory of the device first"));
    }
    arena.live[offset] = made.bytes;
    return ended(ACL_SUCCESS);
}

void end_import(const Imported& what) {
    Arena& arena = *arena_with(what.address);
    const auto offset = static_cast<size_t>(what.address - arena.base);
    arena.live.erase(offset);
    unshare(what.address, what.bytes);
    clear_unwritten(what.address, what.bytes);
    ++emu_frees;
    give_back(arena, offset, what.bytes);
}

}  // namespace

bool is_imported(const char* address) {
    return std::any_of(imported.begin(), imported.end(), [&](const auto& one) { return one.second.address == address; });
}

// The owner frees memory: nobody can import it any more, and what others write is theirs alone.
void end_export(char* address) {
    const auto found = exported.find(address);
    if (found == exported.end()) return;
    if (found->second.header != nullptr) close_key(found->second);
    unshare(address, found->second.bytes);
    exported.erase(found);
}

}  // namespace emu

EMU_API aclError aclrtIpcMemGetExportKey(void* pointer, size_t size, char* key, size_t length, uint64_t flags) {
    Lock lock(state().mutex);
    if (const aclError status = wait_for_memory("aclrtIpcMemGetExportKey", lock)) return status;
    std::lock_guard<std::mutex> guard(arena_mutex);
    auto* address = static_cast<char*>(pointer);
    const size_t bytes = bytes_at(pointer);
    if (bytes < kOwnPages || size > bytes)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: " + std::to_string(size) + " bytes there are no whole allocation of at least " + std::to_string(kOwnPages), "share memory from the start of what aclrtMalloc gave, of 2 MiB or more");
    auto found = exported.find(address);
    if (found != exported.end() && found->second.header == nullptr)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: the key of this memory was closed", "share other memory, or close the key when no process imports it any more");
    if (found == exported.end()) {
        Exported made;
        const aclError status = move_to_file("aclrtIpcMemGetExportKey", address, bytes, made);
        if (status != ACL_SUCCESS) return status;
        made.header->everybody = (flags & ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION) != 0;
        found = exported.emplace(address, std::move(made)).first;
    }
    if (found->second.key.size() >= length)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtIpcMemGetExportKey: a key has up to 64 characters and an end", "give room for 65");
    strncpy(key, found->second.key.c_str(), length);  // fills the rest with zeros: torch_npu compares all of it
    return ACL_SUCCESS;
}

EMU_API aclError aclrtIpcMemSetImportPid(const char* key, int32_t* processes, size_t count) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    for (auto& [address, one] : exported) {
        if (one.key == key && one.header != nullptr) return permit("aclrtIpcMemSetImportPid", one, processes, count);
    }
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("aclrtIpcMemSetImportPid: this process shares no memory under the key ") + key, "keep the process that exported the memory, and the memory, until all have imported it");
}

EMU_API aclError aclrtIpcMemImportByKey(void** pointer, const char* key, uint64_t) {
    std::lock_guard<std::mutex> guard(arena_mutex);
    auto found = imported.find(key);
    if (found == imported.end()) {
        Imported made;
        const aclError status = import_memory(key, made);
        if (status != ACL_SUCCESS) return status;
        found = imported.emplace(key, made).first;
    }
    ++found->second.uses;
    *pointer = found->second.address;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtIpcMemClose(const char* key) {
    std::unique_lock<std::mutex> guard(arena_mutex);
    for (auto& [address, one] : exported) {
        if (one.key != key || one.header == nullptr) continue;
        close_key(one);
        return ACL_SUCCESS;
    }
    auto found = imported.find(key);
    if (found == imported.end())
        return fail(ACL_ERROR_RT_PARAM_INVALID, std::string("aclrtIpcMemClose: this process has nothing under the key ") + key, "close a key once for each import");
    if (--found->second.uses != 0) return ACL_SUCCESS;
    const char* address = found->second.address;
    // As aclrtFree: queued work may still use the memory.
    guard.unlock();
    State& s = state();
    Lock lock(s.mutex);
    if (s.pending != 0 && !(s.busy && s.owner == std::this_thread::get_id())) wait_for_device(lock, device_of(address));
    lock.unlock();
    guard.lock();
    found = imported.find(key);
    if (found == imported.end() || found->second.uses != 0) return ACL_SUCCESS;  // another thread closed or imported it meanwhile
    end_import(found->second);
    imported.erase(found);
    return ACL_SUCCESS;
}
