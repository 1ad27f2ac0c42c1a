// Python's pending exception outlives torch_npu's report of a free.
//
// torch_npu reports each free to Python (npu_emulator/memory/allocator.py), also where an exception that is on its way out of a
// frame drops a tensor. The report imports a module; an import with a pending exception fails and loses that exception, and
// Python ends with a segmentation fault. So torch_npu's calls of PyImport_ImportModule come here: the exception is put aside, and
// comes back when the report, which holds the module to its end, drops it. The import also takes the builtins of the frame that
// runs, which may be empty; here it does not.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "emulator.h"

struct _object;

// Weak, as in scheduler.cpp.
extern "C" {
__attribute__((weak)) _object* PyImport_ImportModule(const char*);
__attribute__((weak)) _object* PyImport_AddModule(const char*);
__attribute__((weak)) _object* PyModule_GetDict(_object*);
__attribute__((weak)) _object* PyModule_New(const char*);
__attribute__((weak)) int PyDict_Update(_object*, _object*);
__attribute__((weak)) int PyDict_SetItemString(_object*, const char*, _object*);
__attribute__((weak)) _object* PyCapsule_New(void*, const char*, void (*)(_object*));
__attribute__((weak)) void* PyCapsule_GetPointer(_object*, const char*);
__attribute__((weak)) _object* PyErr_Occurred(void);
__attribute__((weak)) void PyErr_Fetch(_object**, _object**, _object**);
__attribute__((weak)) void PyErr_Restore(_object*, _object*, _object*);
__attribute__((weak)) void Py_DecRef(_object*);
__attribute__((weak)) void Py_IncRef(_object*);
}

namespace {

constexpr const char* kReports = "torch_npu.utils._npu_trace";
constexpr const char* kAside = "a pending exception";

struct Pending {
    _object *type, *value, *traceback;
};

void bring_back(_object* capsule) {
    auto* pending = static_cast<Pending*>(PyCapsule_GetPointer(capsule, kAside));
    PyErr_Restore(pending->type, pending->value, pending->traceback);
    delete pending;
}

// In place of PyImport_ImportModule in torch_npu.
_object* import_for_report(const char* name) {
    if (strcmp(name, kReports) != 0) return PyImport_ImportModule(name);
    if (PyErr_Occurred() == nullptr) {
        _object* module = PyImport_AddModule(name);  // borrowed; imported by those who asked for reports
        Py_IncRef(module);
        return module;
    }
    auto* pending = new Pending;
    PyErr_Fetch(&pending->type, &pending->value, &pending->traceback);
    _object* copy = PyModule_New(name);
    _object* aside = PyCapsule_New(pending, kAside, bring_back);
    PyDict_Update(PyModule_GetDict(copy), PyModule_GetDict(PyImport_AddModule(name)));
    PyDict_SetItemString(PyModule_GetDict(copy), kAside, aside);
    Py_DecRef(aside);
    return copy;
}

template <typename Entry>
Entry* at(const dl_phdr_info* object, ElfW(Addr) address) {
    return reinterpret_cast<Entry*>(address < object->dlpi_addr ? object->dlpi_addr + address : address);
}

int patch(dl_phdr_info* object, size_t, void*) {
    if (strstr(object->dlpi_name, "libtorch_npu.so") == nullptr) return 0;
    const ElfW(Dyn)* dynamic = nullptr;
    for (int number = 0; number < object->dlpi_phnum; ++number)
        if (object->dlpi_phdr[number].p_type == PT_DYNAMIC)
            dynamic = reinterpret_cast<const ElfW(Dyn)*>(object->dlpi_addr + object->dlpi_phdr[number].p_vaddr);
    std::map<ElfW(Sxword), ElfW(Addr)> tables;
    for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) tables[dynamic->d_tag] = dynamic->d_un.d_ptr;
    const auto* symbols = at<const ElfW(Sym)>(object, tables[DT_SYMTAB]);
    const auto* names = at<const char>(object, tables[DT_STRTAB]);
    const std::pair<ElfW(Addr), size_t> lists[] = {{tables[DT_JMPREL], tables[DT_PLTRELSZ]}, {tables[DT_RELA], tables[DT_RELASZ]}};
    for (const auto& [start, bytes] : lists) {
        const auto* entries = at<const ElfW(Rela)>(object, start);
        for (size_t number = 0; number < bytes / sizeof(ElfW(Rela)); ++number) {
            const ElfW(Sym)& symbol = symbols[ELF64_R_SYM(entries[number].r_info)];
            if (strcmp(names + symbol.st_name, "PyImport_ImportModule") != 0) continue;
            auto** slot = reinterpret_cast<void**>(object->dlpi_addr + entries[number].r_offset);
            const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
            mprotect(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / size * size), size, PROT_READ | PROT_WRITE);
            *slot = reinterpret_cast<void*>(import_for_report);
        }
    }
    return 0;
}

}  // namespace

// Called once, before the first report.
EMU_API void emu_guard_reports() { dl_iterate_phdr(patch, nullptr); }
