// Tells npu_emulator/rendezvous.py of a root info before torch_npu asks torch's store for it, or puts it there.
//
// torch_npu keeps the store of a group and uses it from its own threads, some of them after Python has ended, so the store must stay
// torch's own. A group's store is a PrefixStore; here `get`, `multiGet` and `set` are replaced in the class's table of virtual
// functions. Nothing is compiled against torch: the functions are found by name, and take and return what the C++ library defines.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

#include "communicator.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;

// A member function's object is its first argument.
Bytes (*torch_get)(void*, const std::string&) = nullptr;
std::vector<Bytes> (*torch_get_all)(void*, const Keys&) = nullptr;
void (*torch_set)(void*, const std::string&, const Bytes&) = nullptr;
void (*torch_throw)(const char*) = nullptr;  // that of the C++ library that torch uses; this one may have its own

thread_local void* last_store = nullptr;
thread_local bool watching = false;
thread_local std::string reason;

// torch_npu's keys of root infos begin with a number.
bool is_of_root_info(const std::string& key) { return !watching && !key.empty() && key[0] >= '0' && key[0] <= '9'; }

// What Python says of a wait for a key; false if it is over, or is none for a root info.
bool ask(void* store, const std::string& key, const char* root, char* whose, size_t capacity, uint64_t* numbers, bool& interrupted) {
    const auto tell = emu::python_store.load();
    if (tell == nullptr) return false;  // Python ends
    watching = true;
    const emu::Uninterrupted guard;
    const bool waits = tell(store, key.c_str(), root, whose, capacity, numbers) != 0;
    interrupted = emu::was_interrupted();
    watching = false;
    return waits;
}

// Waits until the key is there. Whether that is vain; `reason` then says why.
bool is_vain(void* store, const std::string& key) {
    if (!is_of_root_info(key)) return false;
    char whose[256];
    bool interrupted = false;
    std::string lost;
    std::optional<emu::Meeting> meeting;
    const double start = emu::now_milliseconds();
    for (useconds_t nap = 1000;; nap = std::min(2 * nap, useconds_t{20000})) {
        uint64_t ranks_root_process_file_born_seconds[6];
        if (!ask(store, key, nullptr, whose, sizeof whose, ranks_root_process_file_born_seconds, interrupted)) return false;
        const auto& [ranks, root, process, file, born, seconds] = ranks_root_process_file_born_seconds;
        if (!lost.empty()) break;  // the key has not come since
        if (!meeting) meeting.emplace(whose);
        const emu::Attendee who{static_cast<int32_t>(process), static_cast<int32_t>(file), born};
        lost = meeting->look({{static_cast<uint32_t>(root), who}}, {static_cast<uint32_t>(ranks)});
        if (lost.empty() && emu::now_milliseconds() - start > static_cast<double>(seconds) * 1000)
            lost = "rank " + std::to_string(root) + " did not come in " + std::to_string(seconds) + " s (the timeout of the store)";
        if (interrupted) lost = "Ctrl-C ended the wait for rank " + std::to_string(root);
        usleep(nap);
    }
    const int code = meeting->found_deadlock() ? ACL_ERROR_RT_FFTS_PLUS_TIMEOUT : ACL_ERROR_RT_SUSPECT_REMOTE_ERROR;
    reason = std::string("the communicator of ") + whose + " was not made (" + std::to_string(code) + "): " + lost + "\nhelp: npugraph-ex help " + std::to_string(code);
    return true;
}

// No object here has a destructor to run, so an exception of another C++ library passes.
Bytes watched_get(void* store, const std::string& key) {
    if (is_vain(store, key)) torch_throw(reason.c_str());
    return torch_get(store, key);
}

std::vector<Bytes> watched_get_all(void* store, const Keys& keys) {
    for (const std::string& key : keys)
        if (is_vain(store, key)) torch_throw(reason.c_str());
    return torch_get_all(store, keys);
}

void watched_set(void* store, const std::string& key, const Bytes& value) {
    if (is_of_root_info(key) && value.size() == sizeof(HcclRootInfo)) {
        const std::string root = emu::name_of_root(reinterpret_cast<const char*>(value.data()));
        bool interrupted = false;
        ask(store, key, root.c_str(), nullptr, 0, nullptr, interrupted);
    }
    torch_set(store, key, value);
    last_store = store;  // at last, because stores with prefixes lie in each other
}

// Puts a function into the table in place of torch's, which is kept in `before`. Whether it was there.
template <typename Function>
bool replace(void** table, void* old, Function* with, Function*& before) {
    for (void** slot = table; old != nullptr && slot < table + 64; ++slot) {
        if (*slot != old) continue;
        before = reinterpret_cast<Function*>(old);
        const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(slot) / page * page;
        if (mprotect(reinterpret_cast<void*>(at), page, PROT_READ | PROT_WRITE) != 0) return false;
        *slot = reinterpret_cast<void*>(with);
        return mprotect(reinterpret_cast<void*>(at), page, PROT_READ) == 0;
    }
    return false;
}

}  // namespace

// Called once, after `import torch`. Whether torch's stores are as expected.
EMU_API int emu_watch_stores() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return 0;
    const auto find = [&](const char* name) { return dlsym(torch, name); };
    auto** table = static_cast<void**>(find("_ZTVN4c10d11PrefixStoreE"));
    torch_throw = reinterpret_cast<void (*)(const char*)>(find("_ZSt21__throw_runtime_errorPKc"));
    void* one = find("_ZN4c10d11PrefixStore3getERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE");
    void* all = find("_ZN4c10d11PrefixStore8multiGetERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE");
    void* setter = find("_ZN4c10d11PrefixStore3setERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt6vectorIhSaIhEE");
    if (table == nullptr || torch_throw == nullptr) return 0;
    return replace(table, one, watched_get, torch_get) && replace(table, all, watched_get_all, torch_get_all) && replace(table, setter, watched_set, torch_set);
}

// The store whose `set` this thread called last.
EMU_API void* emu_last_store() { return std::exchange(last_store, nullptr); }
EMU_API void emu_set_store_watcher(int (*watcher)(void*, const char*, const char*, char*, uint64_t, uint64_t*)) { emu::python_store = watcher; }
