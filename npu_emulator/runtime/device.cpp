// Devices, contexts, core limits, options, errors, profiler and log: everything without a queue.
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator.h"

namespace emu {
namespace {

thread_local int32_t device_index = 0;
thread_local bool device_chosen = false;  // by this thread; before that CANN has no context for the thread
thread_local std::string recent_error;
thread_local aclError recent_code;
thread_local aclError last_error = ACL_SUCCESS;
uint32_t device_count = 1;
std::string soc_name = "Ascend910B2";
char contexts[64];
// Every thread may set and read these. The mutex may be taken while the device's is held, never the other way round.
std::mutex settings_mutex;
std::map<std::pair<int32_t, int>, uint32_t> device_limits;
std::map<int, int64_t> system_options;
std::map<int, std::string> compile_options;
thread_local std::map<int, uint32_t> thread_limits;

// chips.py sets the chip's figures before torch_npu reads them.
uint32_t cube_cores = 24, vector_cores = 48;
uint64_t l2_bytes = uint64_t{192} << 20;
uint32_t default_cores(int type) { return type == ACL_RT_DEV_RES_VECTOR_CORE ? vector_cores : cube_cores; }

}  // namespace

int32_t current_device() { return device_index; }

namespace {

std::map<std::string, aclError>& measured() {
    static std::map<std::string, aclError> found;
    return found;
}

}  // namespace

void set_answer(const char* decision, aclError code) {
    if (decision == nullptr)
        measured().clear();
    else
        measured()[decision] = code;
}

aclError answered(const char* decision, aclError usual) {
    const auto found = measured().find(decision);
    return found == measured().end() ? usual : found->second;
}

aclError fail(aclError code, const std::string& cause, const std::string& advice) {
    if (code == ACL_SUCCESS) return code;  // a measured device permits it
    recent_error = "[emulated NPU] " + cause + "; " + advice;
    recent_code = last_error = code;
    return code;
}

double now_milliseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace emu

using namespace emu;

EMU_API void emu_set_devices(uint32_t count, const char* name) {
    device_count = count;
    soc_name = name;
}

EMU_API void emu_set_cores(uint32_t cube, uint32_t vector) {
    cube_cores = cube;
    vector_cores = vector;
}

EMU_API void emu_set_l2(uint64_t bytes) { l2_bytes = bytes; }

// torch_npu selects formats and operators by the exact name at its start; afterwards only people read it.
EMU_API void emu_name_says_emulated() { soc_name += " (emulated)"; }

EMU_API aclError aclInit(const char*) { return start_python(); }
EMU_API aclError aclFinalize() { return ACL_SUCCESS; }
EMU_API const char* aclrtGetSocName() { return soc_name.c_str(); }
EMU_API aclError aclrtGetDeviceCount(uint32_t* count) {
    const aclError started = start_python();
    if (started != ACL_SUCCESS) return started;
    *count = device_count;
    return ACL_SUCCESS;
}
// torch_npu marks a device as used, and empties its cache, only if it had to set the device because this returned 107002.
EMU_API aclError aclrtGetDevice(int32_t* device) {
    if (!device_chosen) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = device_index;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || static_cast<uint32_t>(device) >= device_count)
        return fail(ACL_ERROR_RT_INVALID_DEVICEID, "device " + std::to_string(device) + " does not exist: there are " +
                                                       std::to_string(device_count) + " emulated devices", "choose a smaller index, or raise NPU_EMULATOR_DEVICES");
    device_index = device;
    device_chosen = true;
    note_process();
    return ACL_SUCCESS;
}
EMU_API aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtGetCurrentContext(aclrtContext* context) {
    *context = &contexts[device_index];
    return ACL_SUCCESS;
}
EMU_API aclError aclrtSetCurrentContext(aclrtContext context) {
    const auto* address = static_cast<char*>(context);
    if (address < contexts || address >= contexts + device_count)
        return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetCurrentContext: this is no context of an emulated device", "pass one that aclrtGetCurrentContext gave");
    device_index = static_cast<int32_t>(address - contexts);
    device_chosen = true;  // a context belongs to a device, so this sets the device too
    return ACL_SUCCESS;
}
EMU_API aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    if (flags != nullptr) *flags = 0;
    if (active != nullptr) *active = 1;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
    *can = device != peer;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
    *logic = user;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
    if (attribute == ACL_DEV_ATTR_L2_CACHE_SIZE) {
        *value = static_cast<int64_t>(l2_bytes);
        return ACL_SUCCESS;
    }
    *value = default_cores(attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM ? ACL_RT_DEV_RES_VECTOR_CORE : ACL_RT_DEV_RES_CUBE_CORE);
    return ACL_SUCCESS;
}
EMU_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
    switch (info) {
        case ACL_DEVICE_INFO_AI_CORE_NUM: *value = default_cores(ACL_RT_DEV_RES_CUBE_CORE); return ACL_SUCCESS;
        case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = default_cores(ACL_RT_DEV_RES_VECTOR_CORE); return ACL_SUCCESS;
        case ACL_DEVICE_INFO_L2_SIZE: *value = static_cast<int64_t>(l2_bytes); return ACL_SUCCESS;
        default:
            return fail(ACL_ERROR_RT_PARAM_INVALID, "aclGetDeviceCapability: the emulated device knows its cores and its L2 size, not " +
                                                        std::to_string(info), "ask for one of these");
    }
}

static aclError limit_out_of_range(aclrtDevResLimitType type, uint32_t value) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a core limit must lie in 1.." + std::to_string(default_cores(type)) + ", got " + std::to_string(value),
                "choose one in that range, or give the device more cores (NPU_EMULATOR_CUBE_CORES, NPU_EMULATOR_VECTOR_CORES)");
}

EMU_API aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t* value) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    const auto found = device_limits.find({device, type});
    *value = found == device_limits.end() ? default_cores(type) : found->second;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t value) {
    if (value == 0 || value > default_cores(type))
        return limit_out_of_range(type, value);
    std::lock_guard<std::mutex> guard(settings_mutex);
    device_limits[{device, type}] = value;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtResetDeviceResLimit(int32_t device) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    for (auto item = device_limits.begin(); item != device_limits.end();)
        item = item->first.first == device ? device_limits.erase(item) : std::next(item);
    return ACL_SUCCESS;
}
static uint32_t limit_of(const Stream* stream, aclrtDevResLimitType type) {
    const auto found = stream->limits.find(type);
    if (found != stream->limits.end()) return found->second;
    uint32_t value = 0;
    aclrtGetDeviceResLimit(stream->device, type, &value);
    return value;
}
uint64_t emu::cores_of(const Stream* stream) {
    return static_cast<uint64_t>(limit_of(stream, ACL_RT_DEV_RES_CUBE_CORE)) << 32 | limit_of(stream, ACL_RT_DEV_RES_VECTOR_CORE);
}
EMU_API aclError aclrtGetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t* value) {
    Lock lock(state().mutex);
    *value = limit_of(resolve(handle), type);
    return ACL_SUCCESS;
}
EMU_API aclError aclrtSetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t value) {
    if (value == 0 || value > default_cores(type))
        return limit_out_of_range(type, value);
    Lock lock(state().mutex);
    resolve(handle)->limits[type] = value;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtResetStreamResLimit(aclrtStream handle) {
    Lock lock(state().mutex);
    resolve(handle)->limits.clear();
    return ACL_SUCCESS;
}
EMU_API aclError aclrtUseStreamResInCurrentThread(aclrtStream handle) {
    Lock lock(state().mutex);
    thread_limits = resolve(handle)->limits;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
    thread_limits.clear();
    return ACL_SUCCESS;
}
EMU_API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
    const auto found = thread_limits.find(type);
    if (found == thread_limits.end()) return aclrtGetDeviceResLimit(device_index, type, value);
    *value = found->second;
    return ACL_SUCCESS;
}

EMU_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    system_options[option] = value;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    *value = system_options[option];
    return ACL_SUCCESS;
}
EMU_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
EMU_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }
EMU_API aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    compile_options[option] = value == nullptr ? "" : value;
    return ACL_SUCCESS;
}
EMU_API size_t aclGetCompileoptSize(aclCompileOpt option) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    return compile_options[option].size() + 1;
}
EMU_API aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
    std::lock_guard<std::mutex> guard(settings_mutex);
    snprintf(value, length, "%s", compile_options[option].c_str());
    return ACL_SUCCESS;
}
EMU_API aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }
EMU_API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
EMU_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t, uint64_t* actual) {
    if (actual != nullptr) *actual = 0;
    return ACL_SUCCESS;
}
EMU_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }

EMU_API const char* aclGetRecentErrMsg() {
    static thread_local std::string given;
    given.swap(recent_error);
    recent_error.clear();
    // torch_npu calls this where it raises, on the thread of the failed call. Only here is the Python line known.
    const auto find_line = python_line.load();
    if (!given.empty() && find_line != nullptr) {
        char place[1024] = "";
        const Uninterrupted guard;
        find_line(place, sizeof place);
        given += std::string(". Python line: ") + place;
    }
    if (!given.empty()) given += "\nhelp: npugraph-ex help " + std::to_string(recent_code);
    return given.empty() ? nullptr : given.c_str();
}
EMU_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return last_error; }
EMU_API aclError aclrtGetLastError(aclrtLastErrLevel) {
    const aclError code = last_error;
    last_error = ACL_SUCCESS;
    return code;
}

// Log and profiler: they accept calls and write nothing.
EMU_API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
EMU_API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
EMU_API int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
EMU_API int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
EMU_API int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
EMU_API uint64_t MsprofGetHashId(const char* text, size_t length) { return std::hash<std::string>()(std::string(text, length)); }
EMU_API uint64_t MsprofSysCycleTime(void) { return static_cast<uint64_t>(now_milliseconds() * 1e6); }
EMU_API aclError aclmdlInitDump() { return ACL_SUCCESS; }
EMU_API aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
EMU_API aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }

// For the stubs of functions that torch_npu or an extension links against and the emulator does not have.
EMU_API aclError emu_missing(const char* name) {
    fprintf(stderr, "npu_emulator: a library called %s, which the emulated runtime does not have\n", name);
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, std::string(name) + " is not part of the emulated runtime", "do without it, or ask for it with the program that needs it");
}
