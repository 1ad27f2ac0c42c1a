// CANN's C interface, as far as the runtime implements it: types, and constants with CANN's numbers. torch_npu's wheel
// contains CANN's own headers, whose licence forbids redistribution; with these declarations the runtime compiles anywhere.
// tests/emulator/test_headers.py compares numbers, layouts and signatures with the headers of the installed torch_npu.
//
// It includes nothing, so that the test can put it into a namespace beside CANN's.
#pragma once

typedef int32_t aclError;
typedef void* aclrtStream;
typedef void* aclrtEvent;
typedef void* aclrtContext;
typedef void* aclrtTaskGrp;
typedef void* aclmdlRI;
typedef void (*aclrtCallback)(void*);
typedef void (*aclrtHostFunc)(void*);

enum : aclError {
    ACL_SUCCESS = 0,
    ACL_ERROR_RT_PARAM_INVALID = 107000,
    ACL_ERROR_RT_INVALID_DEVICEID = 107001,
    ACL_ERROR_RT_CONTEXT_NULL = 107002,
    ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID = 107006,
    ACL_ERROR_RT_FILE_OPEN = 107009,
    ACL_ERROR_RT_CAPTURE_DEPENDENCY = 107024,
    ACL_ERROR_RT_STREAM_UNJOINED = 107025,
    ACL_ERROR_RT_MODEL_CAPTURED = 107026,
    ACL_ERROR_RT_STREAM_CAPTURED = 107027,
    ACL_ERROR_RT_EVENT_CAPTURED = 107028,
    ACL_ERROR_RT_STREAM_NOT_CAPTURED = 107029,
    ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT = 107030,
    ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT = 107031,
    ACL_ERROR_STREAM_CAPTURE_CONFLICT = 107032,
    ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED = 107036,
    ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD = 107038,
    ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
    ACL_ERROR_RT_MEMORY_ALLOCATION = 207001,
    ACL_ERROR_RT_NO_EVENT_RESOURCE = 207007,
    ACL_ERROR_RT_NO_STREAM_RESOURCE = 207008,
    ACL_ERROR_RT_EVENT_NOT_COMPLETE = 507006,
    ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT = 507009,
    ACL_ERROR_RT_MODEL_EXECUTE = 507011,
    ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046,
    ACL_ERROR_RT_FFTS_PLUS_TIMEOUT = 507048,
    ACL_ERROR_RT_SUSPECT_REMOTE_ERROR = 507057,
};

// Flags of events, and the comparisons of a wait for a word in memory.
enum : uint32_t { ACL_EVENT_SYNC = 1, ACL_EVENT_CAPTURE_STREAM_PROGRESS = 2, ACL_EVENT_TIME_LINE = 8, ACL_EVENT_EXTERNAL = 32 };
enum : uint32_t { ACL_STREAM_WAIT_VALUE_EQ = 1, ACL_STREAM_WAIT_VALUE_AND = 2, ACL_STREAM_WAIT_VALUE_NOR = 3 };

// Of memory that processes share.
enum : uint64_t { ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION = 1, ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION = 1 };

enum aclmdlRICaptureMode : uint32_t {
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL = 0,
    ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL = 1,
    ACL_MODEL_RI_CAPTURE_MODE_RELAXED = 2,
};
enum aclmdlRICaptureStatus : uint32_t {
    ACL_MODEL_RI_CAPTURE_STATUS_NONE = 0,
    ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE = 1,
    ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED = 2,
};
enum aclrtStreamStatus : uint32_t { ACL_STREAM_STATUS_COMPLETE = 0, ACL_STREAM_STATUS_NOT_READY = 1 };
enum aclrtEventRecordedStatus : uint32_t { ACL_EVENT_RECORDED_STATUS_NOT_READY = 0, ACL_EVENT_RECORDED_STATUS_COMPLETE = 1 };
enum aclrtEventWaitStatus : uint32_t { ACL_EVENT_WAIT_STATUS_COMPLETE = 0, ACL_EVENT_WAIT_STATUS_NOT_READY = 1 };
enum aclrtDevResLimitType : uint32_t { ACL_RT_DEV_RES_CUBE_CORE = 0, ACL_RT_DEV_RES_VECTOR_CORE = 1 };
enum aclrtDevAttr : uint32_t { ACL_DEV_ATTR_VECTOR_CORE_NUM = 201, ACL_DEV_ATTR_L2_CACHE_SIZE = 302 };
enum aclDeviceInfo : int32_t { ACL_DEVICE_INFO_AI_CORE_NUM = 0, ACL_DEVICE_INFO_VECTOR_CORE_NUM = 1, ACL_DEVICE_INFO_L2_SIZE = 2 };
enum aclrtMemAttr : uint32_t { ACL_HBM_MEM = 1 };
enum aclrtMemMallocPolicy : uint32_t { ACL_MEM_MALLOC_HUGE_FIRST = 0 };
enum aclrtMemcpyKind : uint32_t { ACL_MEMCPY_HOST_TO_DEVICE = 1, ACL_MEMCPY_DEVICE_TO_HOST = 2, ACL_MEMCPY_DEVICE_TO_DEVICE = 3 };

enum aclrtMemLocationType : uint32_t {
    ACL_MEM_LOCATION_TYPE_HOST = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE = 1,
    ACL_MEM_LOCATION_TYPE_UNREGISTERED = 2,
};
struct aclrtMemLocation {
    uint32_t id;
    aclrtMemLocationType type;
};
struct aclrtPtrAttributes {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
};

enum aclrtMemHandleType : uint32_t;
enum aclrtMemAllocationType : uint32_t;
struct aclrtPhysicalMemProp {
    aclrtMemHandleType handleType;
    aclrtMemAllocationType allocationType;
    aclrtMemAttr memAttr;
    aclrtMemLocation location;
    uint64_t reserve;
};
using aclrtDrvMemHandle = void*;

// Arguments that the runtime ignores or keeps as numbers.
enum aclLogLevel : uint32_t;
enum aclSysParamOpt : uint32_t;
enum aclCompileOpt : uint32_t;
enum aclOpCompileFlag : uint32_t;
enum aclrtFloatOverflowMode : uint32_t;
enum aclrtLastErrLevel : uint32_t;
enum aclrtCallbackBlockType : uint32_t;
enum aclrtHostRegisterType : uint32_t;
enum aclrtStreamAttr : uint32_t;
struct aclrtMallocConfig;
struct aclrtBinaryLoadOptions;
enum aclrtStreamState : uint32_t;
using aclrtBinHandle = void*;
using aclrtStreamStateCallback = void (*)(aclrtStream, aclrtStreamState, void*);
union aclrtStreamAttrValue;
