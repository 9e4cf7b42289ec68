/* A stand-in for the CUDA driver on a machine without one: enough for sglang-kernel's shared objects to load.
 * Every entry point reports that there is no device, so nothing can run on it by mistake. */

enum { CUDA_ERROR_NO_DEVICE = 100 };

#define ENTRY(name) \
    int name(void) { return CUDA_ERROR_NO_DEVICE; }

ENTRY(cuInit)
ENTRY(cuDriverGetVersion)
ENTRY(cuGetErrorString)
ENTRY(cuGetProcAddress_v2)
ENTRY(cuPointerGetAttribute)
ENTRY(cuStreamCreate)
ENTRY(cuCtxFromGreenCtx)
ENTRY(cuCtxPushCurrent_v2)
ENTRY(cuCtxPopCurrent_v2)
ENTRY(cuDeviceGetDevResource)
ENTRY(cuDevResourceGenerateDesc)
ENTRY(cuDevSmResourceSplitByCount)
ENTRY(cuGreenCtxCreate)
ENTRY(cuGreenCtxDestroy)
ENTRY(cuGreenCtxGetDevResource)
