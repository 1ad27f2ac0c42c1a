// What compiled extensions of other packages call when they are loaded: they register their kernels, and ask whether to log.
//
// A binary for the device is accepted and never run: the emulated device has its own kernel for an operator, and a function
// of the binary is an error where it is looked for (absent.cpp).
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

#include "emulator.h"

using namespace emu;

EMU_API aclError aclrtBinaryLoadFromData(const void* data, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle* binary) {
    *binary = const_cast<void*>(data);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtBinaryUnLoad(aclrtBinHandle) { return ACL_SUCCESS; }
EMU_API aclError aclrtRegStreamStateCallback(const char*, aclrtStreamStateCallback, void*) { return ACL_SUCCESS; }

EMU_API int32_t CheckLogLevel(int32_t, int32_t) { return 0; }
EMU_API void DlogRecord(int32_t, int32_t, const char*, ...) {}
EMU_API int32_t mmGetTid() { return static_cast<int32_t>(syscall(SYS_gettid)); }
EMU_API uint64_t MsprofStr2Id(const char* text, size_t length) { return MsprofGetHashId(text, length); }
EMU_API int32_t strcpy_s(char* into, size_t size, const char* text) {
    if (into == nullptr || text == nullptr || std::strlen(text) >= size) return ERANGE;
    std::strcpy(into, text);
    return 0;
}
