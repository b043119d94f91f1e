/* A CUDA driver library that has no device: enough for SGLang's kernels to load on a CPU.
 *
 * The functions are those that the kernels of the supported releases import; each answers
 * CUDA_ERROR_NO_DEVICE.
 */
#define NO_DEVICE(name) \
    int name(void) { return 100; }

NO_DEVICE(cuInit)
NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuMemAddressFree)
NO_DEVICE(cuMemGetAddressRange_v2)
NO_DEVICE(cuMemRelease)
NO_DEVICE(cuMemRetainAllocationHandle)
NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap)
NO_DEVICE(cuPointerGetAttribute)

/* Tells this library from a driver. */
NO_DEVICE(crashkit_is_a_stub)
