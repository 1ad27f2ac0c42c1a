// CANN's functions for kernels with fixed shapes: a recorder that describes each launched operator, and the choice among the
// installed kernels. Python knows the operators, so it writes the descriptions.
#include "emulator.h"

using namespace emu;

namespace {
std::atomic<void (*)(const char*)> python_recorder{nullptr};
std::mutex selection_mutex;
uint64_t selections = 0;
std::string selected_folder;

int select(const char* folder) {
    std::lock_guard<std::mutex> guard(selection_mutex);
    ++selections;
    selected_folder = folder;
    return 0;
}
}  // namespace

EMU_API void emu_set_operator_recorder(void (*recorder)(const char*)) { python_recorder = recorder; }
EMU_API uint64_t emu_static_kernel_selections() {
    std::lock_guard<std::mutex> guard(selection_mutex);
    return selections;
}
// Valid for the calling thread until it asks again.
EMU_API const char* emu_static_kernel_folder() {
    static thread_local std::string given;
    std::lock_guard<std::mutex> guard(selection_mutex);
    given = selected_folder;
    return given.c_str();
}

EMU_API aclError aclopStartDumpArgs(uint32_t, const char* path) {
    const auto record = python_recorder.load();
    if (record == nullptr || path == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "no folder to describe operators in", "pass the path of one that exists");
    const Uninterrupted guard;
    record(path);
    return ACL_SUCCESS;
}
EMU_API aclError aclopStopDumpArgs(uint32_t) {
    const Uninterrupted guard;
    if (const auto record = python_recorder.load()) record(nullptr);
    return ACL_SUCCESS;
}

// The emulated device has one kernel for each operator, whatever is installed. A test can see the request.
EMU_API int aclnnReselectStaticKernel() { return select(""); }
EMU_API int aclnnReselectStaticKernelWithPath(const char* folder) { return select(folder == nullptr ? "" : folder); }
