// Functions that torch_npu's wheels, 2.10 to 2.14, link against and the runtime does not have. Each fails with its own name.
// For a wheel that needs others, compilation.py makes them, if there is a compiler.
#include "emulator.h"

// The name in C++ differs from CANN's name in the library, because CANN's headers, which a test includes, declare these
// functions.
#define EMU_ABSENT(name)                                                                     \
    extern "C" __attribute__((visibility("default"))) int emu_absent_##name(...) __asm__(#name); \
    int emu_absent_##name(...) { return emu_missing(#name); }

EMU_ABSENT(_ZN3atb13CreateContextEPPNS_7ContextE)
EMU_ABSENT(_ZN3atb14DestroyContextEPNS_7ContextE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE)
EMU_ABSENT(_ZN3atb16DestroyOperationEPNS_9OperationE)
EMU_ABSENT(_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE)
EMU_ABSENT(aclCreateDataBuffer)
EMU_ABSENT(aclCreateTensorDesc)
EMU_ABSENT(aclDestroyDataBuffer)
EMU_ABSENT(aclDestroyTensorDesc)
EMU_ABSENT(aclGetTensorDescDimV2)
EMU_ABSENT(aclGetTensorDescFormat)
EMU_ABSENT(aclGetTensorDescNumDims)
EMU_ABSENT(aclGetTensorDescType)
EMU_ABSENT(aclSetTensorDescName)
EMU_ABSENT(aclSetTensorFormat)
EMU_ABSENT(aclSetTensorPlaceMent)
EMU_ABSENT(aclSetTensorShape)
EMU_ABSENT(aclopCompileAndExecute)
EMU_ABSENT(aclopCreateAttr)
EMU_ABSENT(aclopDestroyAttr)
EMU_ABSENT(aclopSetAttrBool)
EMU_ABSENT(aclopSetAttrDataType)
EMU_ABSENT(aclopSetAttrFloat)
EMU_ABSENT(aclopSetAttrInt)
EMU_ABSENT(aclopSetAttrListBool)
EMU_ABSENT(aclopSetAttrListFloat)
EMU_ABSENT(aclopSetAttrListInt)
EMU_ABSENT(aclopSetAttrListListInt)
EMU_ABSENT(aclopSetAttrString)
EMU_ABSENT(aclrtBinaryGetFunction)
EMU_ABSENT(aclrtDeviceGetBareTgid)
EMU_ABSENT(aclrtGetFunctionAddr)
EMU_ABSENT(rtDevBinaryRegister)
EMU_ABSENT(rtFunctionRegister)
EMU_ABSENT(rtGetC2cCtrlAddr)
EMU_ABSENT(rtKernelLaunch)

// And those of extensions, see extensions.cpp.
EMU_ABSENT(_ZN2fe13PlatFormInfos13GetLocalMemBwERKNS_12LocalMemTypeERm)
EMU_ABSENT(_ZN2fe13PlatFormInfos15GetLocalMemSizeERKNS_12LocalMemTypeERm)
EMU_ABSENT(_ZN2fe13PlatFormInfos20SetCoreNumByCoreTypeERKSs)
EMU_ABSENT(_ZN2fe13PlatFormInfos22GetPlatformResWithLockERKSsS2_RSs)
EMU_ABSENT(_ZN2fe19PlatformInfoManager24InitRuntimePlatformInfosERKSs)
EMU_ABSENT(_ZN2fe19PlatformInfoManager31GetRuntimePlatformInfosByDeviceERKjRNS_13PlatFormInfosEb)
EMU_ABSENT(_ZN2fe19PlatformInfoManager8InstanceEv)
EMU_ABSENT(_ZNK2fe13PlatFormInfos10GetCoreNumEv)
EMU_ABSENT(aclrtBinaryGetFunctionByEntry)
EMU_ABSENT(aclrtCreateContext)
EMU_ABSENT(aclrtCtxGetCurrentDefaultStream)
EMU_ABSENT(aclrtGetHardwareSyncAddr)
EMU_ABSENT(aclrtLaunchKernelWithHostArgs)
EMU_ABSENT(aclrtMemGetAllocationGranularity)
EMU_ABSENT(aclrtMemcpyBatchAsync)
EMU_ABSENT(rtFunctionGetMetaInfo)
EMU_ABSENT(rtFunctionGetMetaInfoSize)

#undef EMU_ABSENT
