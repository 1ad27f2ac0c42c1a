// CANN's functions for kernels with fixed shapes: a recorder that describes each launched operator, and the choice among the
// installed kernels. Python knows the operators, so it writes the descriptions.
#include "emulator.h"

using namespace emu;

namespace {
void (*python_recorder)(const char*) = nullptr;
uint64_t selections = 0;
std::string selected_folder;
}  // namespace

EMU_API void emu_set_operator_recorder(void (*recorder)(const char*)) { python_recorder = recorder; }
EMU_API uint64_t emu_static_kernel_selections() { return selections; }
EMU_API const char* emu_static_kernel_folder() { return selected_folder.c_str(); }

EMU_API aclError aclopStartDumpArgs(uint32_t, const char* path) {
    if (python_recorder == nullptr || path == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "no folder to describe operators in", "pass the path of one that exists");
    python_recorder(path);
    return ACL_SUCCESS;
}
EMU_API aclError aclopStopDumpArgs(uint32_t) {
    if (python_recorder != nullptr) python_recorder(nullptr);
    return ACL_SUCCESS;
}

// The emulated device has one kernel for each operator, whatever is installed. A test can see the request.
EMU_API int aclnnReselectStaticKernel() {
    ++selections;
    selected_folder.clear();
    return 0;
}
EMU_API int aclnnReselectStaticKernelWithPath(const char* folder) {
    ++selections;
    selected_folder = folder == nullptr ? "" : folder;
    return 0;
}
