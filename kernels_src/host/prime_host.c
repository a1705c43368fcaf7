/* SPDX-License-Identifier: Apache-2.0
 *
 * prime_host.c: implementation of prime_host.h.
 *
 * Linked with -nostdlib: dlopen and dlsym are weak undefined symbols that bind to those of the
 * process, so the library has no NEEDED entry, is tied to no libc version, and can be loaded where
 * there is no driver. The prototypes of the driver API are written out here; no CUDA header is
 * needed to build it.
 */
#include "prime_host.h"

#include <stddef.h>

#define PK_EXPORT __attribute__((visibility("default")))

#define PK_RTLD_NOW 2
#define PK_RTLD_LOCAL 0

extern void* dlopen(const char* file, int mode) __attribute__((weak));
extern void* dlsym(void* handle, const char* name) __attribute__((weak));
extern char* dlerror(void) __attribute__((weak));

/* ---- the part of the driver API that is used
 * ------------------------------------------------------------------- */

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUlib_st* CUlibrary;
typedef struct CUkern_st* CUkernel;
typedef struct CUstream_st* CUstream;

enum {
    CU_ATTR_COOPERATIVE = 2,
    CU_ATTR_CLUSTER_DIMENSION = 4,
    CU_ATTR_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    PK_MAX_LAUNCH_ATTRS = 3
};

enum {
    CU_DEV_L2_CACHE_SIZE = 38,
    CU_DEV_SM_COUNT = 16,
    CU_DEV_PCI_BUS = 33,
    CU_DEV_PCI_DEVICE = 34,
    CU_DEV_PCI_DOMAIN = 50,
    CU_DEV_CC_MAJOR = 75,
    CU_DEV_CC_MINOR = 76,
    CU_DEV_SMEM_OPTIN = 97,
    CU_DEV_CLUSTER_LAUNCH = 120
};

typedef struct CUlaunchAttribute {
    int id;
    int pad;
    union {
        char bytes[64];
        int number;
        struct {
            unsigned x, y, z;
        } cluster;
    } value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned smem_bytes;
    CUstream stream;
    CUlaunchAttribute* attrs;
    unsigned num_attrs;
} CUlaunchConfig;

_Static_assert(sizeof(CUlaunchAttribute) == 72, "layout of the driver's launch attribute");
_Static_assert(
    offsetof(CUlaunchConfig, stream) == 32 && sizeof(CUlaunchConfig) == 56,
    "layout of the launch config");
_Static_assert(
    sizeof(PkTensorMap) == 152 && sizeof(PkLaunch) == 88 && sizeof(PkDevice) == 192, "frozen ABI");
_Static_assert(sizeof(void*) == 8, "handles travel as 64-bit numbers");

/* One row an entry point: member, name asked from cuGetProcAddress, exported name, version of the
 * prototype. */
#define PK_DRIVER_API(X)                                                                        \
    X(GetErrorName, "cuGetErrorName", "cuGetErrorName", 6000, (CUresult, const char**))         \
    X(GetErrorString, "cuGetErrorString", "cuGetErrorString", 6000, (CUresult, const char**))   \
    X(Init, "cuInit", "cuInit", 2000, (unsigned))                                               \
    X(DriverGetVersion, "cuDriverGetVersion", "cuDriverGetVersion", 2020, (int*))               \
    X(DeviceGetCount, "cuDeviceGetCount", "cuDeviceGetCount", 2000, (int*))                     \
    X(DeviceGet, "cuDeviceGet", "cuDeviceGet", 2000, (CUdevice*, int))                          \
    X(DeviceGetName, "cuDeviceGetName", "cuDeviceGetName", 2000, (char*, int, CUdevice))        \
    X(DeviceGetAttribute, "cuDeviceGetAttribute", "cuDeviceGetAttribute", 2000,                 \
      (int*, int, CUdevice))                                                                    \
    X(DeviceTotalMem, "cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020, (size_t*, CUdevice))     \
    X(DeviceGetUuid, "cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040, (void*, CUdevice))         \
    X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000,     \
      (CUcontext*, CUdevice))                                                                   \
    X(CtxSetCurrent, "cuCtxSetCurrent", "cuCtxSetCurrent", 4000, (CUcontext))                   \
    X(CtxGetCurrent, "cuCtxGetCurrent", "cuCtxGetCurrent", 4000, (CUcontext*))                  \
    X(CtxGetDevice, "cuCtxGetDevice", "cuCtxGetDevice", 2000, (CUdevice*))                      \
    X(LibraryLoadData, "cuLibraryLoadData", "cuLibraryLoadData", 12000,                         \
      (CUlibrary*, const void*, int*, void**, unsigned, int*, void**, unsigned))                \
    X(LibraryUnload, "cuLibraryUnload", "cuLibraryUnload", 12000, (CUlibrary))                  \
    X(LibraryGetKernel, "cuLibraryGetKernel", "cuLibraryGetKernel", 12000,                      \
      (CUkernel*, CUlibrary, const char*))                                                      \
    X(LibraryGetGlobal, "cuLibraryGetGlobal", "cuLibraryGetGlobal", 12000,                      \
      (CUdeviceptr*, size_t*, CUlibrary, const char*))                                          \
    X(KernelGetAttribute, "cuKernelGetAttribute", "cuKernelGetAttribute", 12000,                \
      (int*, int, CUkernel, CUdevice))                                                          \
    X(KernelSetAttribute, "cuKernelSetAttribute", "cuKernelSetAttribute", 12000,                \
      (int, int, CUkernel, CUdevice))                                                           \
    X(MemcpyDtoH, "cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3020, (void*, CUdeviceptr, size_t))        \
    X(MaxActiveClusters, "cuOccupancyMaxActiveClusters", "cuOccupancyMaxActiveClusters", 11070, \
      (int*, CUkernel, const CUlaunchConfig*))                                                  \
    X(MaxActiveBlocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                           \
      "cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, (int*, CUkernel, int, size_t))       \
    X(TensorMapEncodeTiled, "cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled", 12000,          \
      (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,          \
       const uint32_t*, int, int, int, int))                                                    \
    X(LaunchKernelEx, "cuLaunchKernelEx", "cuLaunchKernelEx", 11060,                            \
      (const CUlaunchConfig*, CUkernel, void**, void**))

typedef struct Driver {
#define PK_MEMBER(member, asked, exported, version, parameters) CUresult(*member) parameters;
    PK_DRIVER_API(PK_MEMBER)
#undef PK_MEMBER
} Driver;

typedef struct Entry {
    const char* asked;
    const char* exported;
    int version;
} Entry;

static const Entry kEntries[] = {
#define PK_ENTRY(member, asked, exported, version, parameters) {asked, exported, version},
    PK_DRIVER_API(PK_ENTRY)
#undef PK_ENTRY
};

enum { kNumEntries = sizeof(kEntries) / sizeof(kEntries[0]) };
_Static_assert(sizeof(Driver) == kNumEntries * sizeof(void*), "one pointer an entry");

typedef CUresult (*GetProcAddress)(const char*, void**, int, uint64_t, int*);

/* Threads that race here write the same values; `driver_ready` is released after them. */
static Driver driver_table;
static int driver_ready;

/* ---- the few C library functions that the compiler may call
 * ---------------------------------------------------- */

void* memcpy(void* restrict to, const void* restrict from, size_t bytes) {
    unsigned char* t = to;
    const unsigned char* f = from;
    while (bytes >= 8) {
        uint64_t word;
        __builtin_memcpy(&word, f, 8);
        __builtin_memcpy(t, &word, 8);
        t += 8;
        f += 8;
        bytes -= 8;
    }
    while (bytes > 0) {
        *t++ = *f++;
        --bytes;
    }
    return to;
}

void* memset(void* to, int value, size_t bytes) {
    unsigned char* t = to;
    while (bytes > 0) {
        *t++ = (unsigned char)value;
        --bytes;
    }
    return to;
}

static void copy_text(char* to, uint32_t capacity, const char* from) {
    uint32_t i = 0;
    if (to == NULL || capacity == 0) {
        return;
    }
    while (from != NULL && from[i] != '\0' && i + 1 < capacity) {
        to[i] = from[i];
        ++i;
    }
    to[i] = '\0';
}

/* ---- loading the driver
 * ---------------------------------------------------------------------------------------- */

static void* resolve(void* handle, GetProcAddress get_proc_address, const Entry* entry) {
    void* address = NULL;
    if (get_proc_address != NULL) {
        int status = 0;
        if (get_proc_address(entry->asked, &address, entry->version, /*flags=*/0, &status) == 0 &&
            address != NULL) {
            return address;
        }
    }
    return dlsym(handle, entry->exported);
}

PK_EXPORT int32_t pk_host_open(char* message, uint32_t capacity) {
    copy_text(message, capacity, "");
    if (__atomic_load_n(&driver_ready, __ATOMIC_ACQUIRE)) {
        return 0;
    }
    if (dlopen == NULL || dlsym == NULL) {
        copy_text(message, capacity, "this process has no dlopen");
        return PK_E_NO_DLOPEN;
    }
    void* handle = dlopen("libcuda.so.1", PK_RTLD_NOW | PK_RTLD_LOCAL);
    if (handle == NULL) {
        copy_text(message, capacity, dlerror != NULL ? dlerror() : "");
        return PK_E_NO_DRIVER;
    }
    void* found[kNumEntries];
    GetProcAddress get_proc_address = (GetProcAddress)dlsym(handle, "cuGetProcAddress_v2");
    for (int i = 0; i < kNumEntries; ++i) {
        found[i] = resolve(handle, get_proc_address, &kEntries[i]);
        if (found[i] == NULL) {
            copy_text(message, capacity, kEntries[i].exported);
            return PK_E_NO_SYMBOL;
        }
    }
    memcpy(&driver_table, found, sizeof(found));
    __atomic_store_n(&driver_ready, 1, __ATOMIC_RELEASE);
    return 0;
}

static int32_t open_and_init(void) {
    const int32_t status = pk_host_open(NULL, 0);
    return status != 0 ? status : driver_table.Init(0);
}

/* ---- identity and texts
 * ---------------------------------------------------------------------------------------- */

PK_EXPORT uint32_t pk_host_abi(void) {
    return PK_HOST_ABI;
}

PK_EXPORT uint64_t pk_host_layout(void) {
    return PK_HOST_LAYOUT;
}

typedef struct OwnError {
    int32_t code;
    const char* name;
    const char* text;
} OwnError;

static const OwnError kOwnErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {PK_E_NO_DRIVER, "PK_E_NO_DRIVER", "the NVIDIA driver library libcuda.so.1 cannot be loaded"},
    {PK_E_NO_SYMBOL, "PK_E_NO_SYMBOL",
     "the NVIDIA driver library lacks a function that is needed (driver too old)"},
    {PK_E_BAD_ARGUMENT, "PK_E_BAD_ARGUMENT", "an argument is null, misaligned or out of range"},
    {PK_E_NO_DLOPEN, "PK_E_NO_DLOPEN", "this process has no dynamic loader (static executable)"},
    {PK_E_BAD_IMAGE, "PK_E_BAD_IMAGE", "the kernel image is no ELF file, or is cut short"},
    {PK_E_BAD_SIZE, "PK_E_BAD_SIZE", "the global in the kernel image has another size"},
};

static const OwnError* own_error(int32_t code) {
    for (size_t i = 0; i < sizeof(kOwnErrors) / sizeof(kOwnErrors[0]); ++i) {
        if (kOwnErrors[i].code == code) {
            return &kOwnErrors[i];
        }
    }
    return NULL;
}

PK_EXPORT const char* pk_host_error_name(int32_t code) {
    const OwnError* own = own_error(code);
    const char* name = NULL;
    if (own != NULL) {
        return own->name;
    }
    if (code > 0 && pk_host_open(NULL, 0) == 0 && driver_table.GetErrorName(code, &name) == 0 &&
        name != NULL) {
        return name;
    }
    return "CUDA_ERROR_UNRECOGNIZED";
}

PK_EXPORT const char* pk_host_error_text(int32_t code) {
    const OwnError* own = own_error(code);
    const char* text = NULL;
    if (own != NULL) {
        return own->text;
    }
    if (code > 0 && pk_host_open(NULL, 0) == 0 && driver_table.GetErrorString(code, &text) == 0 &&
        text != NULL) {
        return text;
    }
    return "unrecognized error code";
}

/* ---- devices
 * ---------------------------------------------------------------------------------------------------
 */

PK_EXPORT int32_t pk_host_driver_version(int32_t* version) {
    if (version == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = pk_host_open(NULL, 0);
    return status != 0 ? status : driver_table.DriverGetVersion(version);
}

PK_EXPORT int32_t pk_host_device_count(int32_t* count) {
    if (count == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = open_and_init();
    return status != 0 ? status : driver_table.DeviceGetCount(count);
}

static int32_t device_of(int32_t ordinal, CUdevice* device) {
    const int32_t status = open_and_init();
    return status != 0 ? status : driver_table.DeviceGet(device, ordinal);
}

PK_EXPORT int32_t pk_host_device_attribute(int32_t ordinal, int32_t attribute, int32_t* value) {
    CUdevice device;
    if (value == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = device_of(ordinal, &device);
    return status != 0 ? status : driver_table.DeviceGetAttribute(value, attribute, device);
}

PK_EXPORT int32_t pk_host_device(int32_t ordinal, PkDevice* out) {
    if (out == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    CUdevice device;
    PkDevice facts;
    size_t total = 0;
    memset(&facts, 0, sizeof(facts));
    facts.ordinal = ordinal;
    int32_t status = device_of(ordinal, &device);
    if (status == 0) {
        status = driver_table.DeviceGetName(facts.name, (int)sizeof(facts.name) - 1, device);
    }
    if (status == 0) {
        status = driver_table.DeviceGetUuid(facts.uuid, device);
    }
    if (status == 0) {
        status = driver_table.DeviceTotalMem(&total, device);
    }
    const struct {
        int attribute;
        int32_t* value;
    } wanted[] = {
        {CU_DEV_CC_MAJOR, &facts.cc_major},      {CU_DEV_CC_MINOR, &facts.cc_minor},
        {CU_DEV_SM_COUNT, &facts.sm_count},      {CU_DEV_SMEM_OPTIN, &facts.smem_optin_bytes},
        {CU_DEV_L2_CACHE_SIZE, &facts.l2_bytes}, {CU_DEV_CLUSTER_LAUNCH, &facts.cluster_launch},
        {CU_DEV_PCI_DOMAIN, &facts.pci_domain},  {CU_DEV_PCI_BUS, &facts.pci_bus},
        {CU_DEV_PCI_DEVICE, &facts.pci_device},
    };
    for (size_t i = 0; status == 0 && i < sizeof(wanted) / sizeof(wanted[0]); ++i) {
        status = driver_table.DeviceGetAttribute(wanted[i].value, wanted[i].attribute, device);
    }
    if (status == 0) {
        facts.total_bytes = total;
        *out = facts;
    }
    return status;
}

PK_EXPORT int32_t pk_host_current(uint64_t* context, int32_t* ordinal) {
    if (context == NULL || ordinal == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    CUcontext current = NULL;
    CUdevice device = -1;
    int32_t status = open_and_init();
    if (status == 0) {
        status = driver_table.CtxGetCurrent(&current);
    }
    if (status == 0 && current != NULL) {
        status = driver_table.CtxGetDevice(&device); /* a CUdevice is its ordinal */
    }
    if (status == 0) {
        *context = (uint64_t)(uintptr_t)current;
        *ordinal = device;
    }
    return status;
}

PK_EXPORT int32_t pk_host_use_device(int32_t ordinal) {
    CUdevice device;
    CUcontext context = NULL;
    int32_t status = device_of(ordinal, &device);
    if (status == 0) {
        status = driver_table.DevicePrimaryCtxRetain(&context, device);
    }
    return status != 0 ? status : driver_table.CtxSetCurrent(context);
}

/* ---- kernel images
 * --------------------------------------------------------------------------------------------- */

static uint64_t little_endian(const unsigned char* at, int bytes) {
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; --i) {
        value = (value << 8) | at[i];
    }
    return value;
}

/* cuLibraryLoadData takes no length: a truncated image would be read past its end. The section
 * table is the last part of a cubin, so an image that holds it whole is whole. */
static int32_t check_image(const unsigned char* image, uint64_t bytes) {
    enum { kHeader = 64, kShoff = 40, kShentsize = 58, kShnum = 60 };
    if (bytes < kHeader || image[0] != 0x7f || image[1] != 'E' || image[2] != 'L' ||
        image[3] != 'F') {
        return PK_E_BAD_IMAGE;
    }
    const uint64_t table = little_endian(image + kShoff, 8);
    const uint64_t table_bytes =
        little_endian(image + kShentsize, 2) * little_endian(image + kShnum, 2);
    return (table > bytes || table_bytes > bytes - table) ? PK_E_BAD_IMAGE : 0;
}

PK_EXPORT int32_t pk_host_load(const void* image, uint64_t bytes, uint64_t* library) {
    CUlibrary loaded = NULL;
    if (image == NULL || library == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    int32_t status = check_image(image, bytes);
    if (status == 0) {
        status = open_and_init();
    }
    if (status == 0) {
        status = driver_table.LibraryLoadData(&loaded, image, NULL, NULL, 0, NULL, NULL, 0);
    }
    if (status == 0) {
        *library = (uint64_t)(uintptr_t)loaded;
    }
    return status;
}

PK_EXPORT int32_t pk_host_unload(uint64_t library) {
    if (library == 0) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = open_and_init();
    return status != 0 ? status : driver_table.LibraryUnload((CUlibrary)(uintptr_t)library);
}

PK_EXPORT int32_t pk_host_kernel(uint64_t library, const char* name, uint64_t* kernel) {
    CUkernel found = NULL;
    if (library == 0 || name == NULL || kernel == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    int32_t status = open_and_init();
    if (status == 0) {
        status = driver_table.LibraryGetKernel(&found, (CUlibrary)(uintptr_t)library, name);
    }
    if (status == 0) {
        *kernel = (uint64_t)(uintptr_t)found;
    }
    return status;
}

PK_EXPORT int32_t
pk_host_kernel_attribute(uint64_t kernel, int32_t attribute, int32_t ordinal, int32_t* value) {
    CUdevice device;
    if (kernel == 0 || value == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = device_of(ordinal, &device);
    return status != 0 ? status
                       : driver_table.KernelGetAttribute(
                             value, attribute, (CUkernel)(uintptr_t)kernel, device);
}

PK_EXPORT int32_t
pk_host_set_kernel_attribute(uint64_t kernel, int32_t attribute, int32_t ordinal, int32_t value) {
    CUdevice device;
    if (kernel == 0) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = device_of(ordinal, &device);
    return status != 0 ? status
                       : driver_table.KernelSetAttribute(
                             attribute, value, (CUkernel)(uintptr_t)kernel, device);
}

PK_EXPORT int32_t pk_host_read_global(
    uint64_t library, const char* name, void* out, uint64_t bytes, uint64_t* actual) {
    CUdeviceptr address = 0;
    size_t size = 0;
    if (library == 0 || name == NULL || out == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    int32_t status = open_and_init();
    if (status == 0) {
        status =
            driver_table.LibraryGetGlobal(&address, &size, (CUlibrary)(uintptr_t)library, name);
    }
    if (status != 0) {
        return status;
    }
    if (actual != NULL) {
        *actual = size;
    }
    return size != bytes ? PK_E_BAD_SIZE : driver_table.MemcpyDtoH(out, address, bytes);
}

/* ---- launching
 * -------------------------------------------------------------------------------------------------
 */

static CUlaunchAttribute* add_number(
    CUlaunchConfig* config, CUlaunchAttribute* attr, int id, int number) {
    attr->id = id;
    attr->value.number = number;
    ++config->num_attrs;
    return attr + 1;
}

/* `attrs` lives in the caller's frame: two threads may launch at once. */
static void make_config(const PkLaunch* request, CUlaunchConfig* config, CUlaunchAttribute* attrs) {
    CUlaunchAttribute* next = attrs;
    memset(config, 0, sizeof(*config));
    memset(attrs, 0, PK_MAX_LAUNCH_ATTRS * sizeof(*attrs));
    for (int i = 0; i < 3; ++i) {
        config->grid[i] = request->grid[i];
        config->block[i] = request->block[i];
    }
    config->smem_bytes = request->smem_bytes;
    config->stream = (CUstream)(uintptr_t)request->stream;
    config->attrs = attrs;
    if (request->cluster[0] * request->cluster[1] * request->cluster[2] > 1) {
        next->value.cluster.x = request->cluster[0];
        next->value.cluster.y = request->cluster[1];
        next->value.cluster.z = request->cluster[2];
        next->id = CU_ATTR_CLUSTER_DIMENSION;
        ++next;
        ++config->num_attrs;
    }
    if (request->flags & PK_LAUNCH_COOPERATIVE) {
        next = add_number(config, next, CU_ATTR_COOPERATIVE, 1);
    }
    if (request->flags & PK_LAUNCH_PDL) {
        add_number(config, next, CU_ATTR_PROGRAMMATIC_STREAM_SERIALIZATION, 1);
    }
}

PK_EXPORT int32_t pk_host_max_active_clusters(const PkLaunch* request, int32_t* clusters) {
    CUlaunchConfig config;
    CUlaunchAttribute attrs[PK_MAX_LAUNCH_ATTRS];
    if (request == NULL || clusters == NULL || request->kernel == 0) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = open_and_init();
    if (status != 0) {
        return status;
    }
    make_config(request, &config, attrs);
    return driver_table.MaxActiveClusters(clusters, (CUkernel)(uintptr_t)request->kernel, &config);
}

PK_EXPORT int32_t pk_host_max_active_blocks(
    uint64_t kernel, uint32_t threads, uint32_t smem_bytes, int32_t* blocks_per_sm) {
    if (kernel == 0 || blocks_per_sm == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = open_and_init();
    return status != 0 ? status
                       : driver_table.MaxActiveBlocks(
                             blocks_per_sm, (CUkernel)(uintptr_t)kernel, (int)threads, smem_bytes);
}

static int32_t encode(const PkTensorMap* map, void* out) {
    return driver_table.TensorMapEncodeTiled(
        out, (int)map->dtype, map->rank, (void*)(uintptr_t)map->address, map->dims, map->strides,
        map->box, map->elem_strides, (int)map->interleave, (int)map->swizzle,
        (int)map->l2_promotion, (int)map->oob_fill);
}

PK_EXPORT int32_t pk_host_encode_tensor_map(const PkTensorMap* map, void* out) {
    if (map == NULL || out == NULL || (uintptr_t)out % PK_TENSOR_MAP_ALIGN != 0 || map->rank < 1 ||
        map->rank > 5) {
        return PK_E_BAD_ARGUMENT;
    }
    const int32_t status = pk_host_open(NULL, 0);
    return status != 0 ? status : encode(map, out);
}

static int32_t check_request(const PkLaunch* request) {
    if (request->kernel == 0 || request->args_bytes > PK_HOST_MAX_ARGS ||
        request->num_maps > PK_HOST_MAX_MAPS) {
        return PK_E_BAD_ARGUMENT;
    }
    if ((request->args_bytes > 0 && request->args == 0) ||
        (request->num_maps > 0 && request->maps == 0)) {
        return PK_E_BAD_ARGUMENT;
    }
    const PkTensorMap* maps = (const PkTensorMap*)(uintptr_t)request->maps;
    for (uint32_t i = 0; i < request->num_maps; ++i) {
        const uint64_t end = (uint64_t)maps[i].args_offset + PK_TENSOR_MAP_BYTES;
        if (maps[i].args_offset % PK_TENSOR_MAP_ALIGN != 0 || end > request->args_bytes ||
            maps[i].rank < 1 || maps[i].rank > 5) {
            return PK_E_BAD_ARGUMENT;
        }
    }
    return 0;
}

PK_EXPORT int32_t pk_host_launch(PkLaunch* request) {
    _Alignas(PK_TENSOR_MAP_ALIGN) unsigned char args[PK_HOST_MAX_ARGS];
    CUlaunchConfig config;
    CUlaunchAttribute attrs[PK_MAX_LAUNCH_ATTRS];
    void* parameters[1] = {args};
    if (request == NULL) {
        return PK_E_BAD_ARGUMENT;
    }
    request->failed_map = -1;
    int32_t status = check_request(request);
    if (status == 0) {
        status = pk_host_open(NULL, 0); /* a kernel handle exists, so cuInit has been called */
    }
    if (status != 0) {
        return status;
    }
    memcpy(args, (const void*)(uintptr_t)request->args, request->args_bytes);
    const PkTensorMap* maps = (const PkTensorMap*)(uintptr_t)request->maps;
    for (uint32_t i = 0; i < request->num_maps; ++i) {
        status = encode(&maps[i], args + maps[i].args_offset);
        if (status != 0) {
            request->failed_map = (int32_t)i;
            return status;
        }
    }
    make_config(request, &config, attrs);
    return driver_table.LaunchKernelEx(
        &config, (CUkernel)(uintptr_t)request->kernel, request->args_bytes > 0 ? parameters : NULL,
        NULL);
}
