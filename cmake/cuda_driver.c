/* The CUDA driver calls that ggml makes, forwarded to libcuda, which is opened on the first of them.
 * So the module loads on a machine without a driver; there the calls answer CUDA_ERROR_STUB_LIBRARY. */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

static void * driver;

static void open_driver(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
}

static void * find(const char * name) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_driver);
    return driver ? dlsym(driver, name) : NULL;
}

/* cuda.h renames some calls to versioned ones by macro: TEXT sees the name after that */
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

#define FORWARD(name, parameters, arguments)                        \
    CUresult CUDAAPI name parameters {                              \
        typedef CUresult(CUDAAPI * call_t) parameters;              \
        const call_t call = (call_t) find(TEXT(name));              \
        return call != NULL ? call arguments : CUDA_ERROR_STUB_LIBRARY; \
    }

FORWARD(cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal))
FORWARD(cuDeviceGetAttribute, (int * value, CUdevice_attribute attribute, CUdevice device), (value, attribute, device))
FORWARD(cuMemGetAllocationGranularity,
        (size_t * size, const CUmemAllocationProp * prop, CUmemAllocationGranularity_flags option),
        (size, prop, option))
FORWARD(cuMemAddressReserve,
        (CUdeviceptr * ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags),
        (ptr, size, alignment, addr, flags))
FORWARD(cuMemAddressFree, (CUdeviceptr ptr, size_t size), (ptr, size))
FORWARD(cuMemCreate,
        (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp * prop, unsigned long long flags),
        (handle, size, prop, flags))
FORWARD(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle))
FORWARD(cuMemMap,
        (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
        (ptr, size, offset, handle, flags))
FORWARD(cuMemUnmap, (CUdeviceptr ptr, size_t size), (ptr, size))
FORWARD(cuMemSetAccess, (CUdeviceptr ptr, size_t size, const CUmemAccessDesc * desc, size_t count),
        (ptr, size, desc, count))

CUresult CUDAAPI cuGetErrorString(CUresult error, const char ** text) {
    typedef CUresult(CUDAAPI * call_t)(CUresult, const char **);
    const call_t call = (call_t) find(TEXT(cuGetErrorString));
    if (call != NULL) {
        return call(error, text);
    }
    *text = "the CUDA driver library libcuda.so.1 cannot be opened";
    return CUDA_SUCCESS;
}
