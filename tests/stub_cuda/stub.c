/* SPDX-License-Identifier: Apache-2.0
 *
 * stub.c: a libcuda.so.1 for machines without a GPU. It answers the calls that the host library makes, checks their
 * arguments the way the driver does, keeps a log, and runs nothing. Prototypes are written by hand.
 *
 * Build:  cc -shared -fPIC -Wl,-soname,libcuda.so.1 stub.c -o libcuda.so.1   (tests/stub_cuda/__init__.py does it)
 * Use:    load it first (ctypes.CDLL(path)); a later dlopen("libcuda.so.1") finds it by its SONAME. Or put its folder
 *         on LD_LIBRARY_PATH of a subprocess.
 *
 * The environment is read at every call, so a test may change it between calls:
 *   PK_STUB_DRIVER=13000        cuDriverGetVersion
 *   PK_STUB_CC=9.0              compute capability of every device
 *   PK_STUB_DEVICES=1           number of devices
 *   PK_STUB_SMS=132             SM count (a MIG slice has fewer)
 *   PK_STUB_NAME=...            device name
 *   PK_STUB_CONTEXT=1           0: no thread has a current context before it sets one
 *   PK_STUB_CLUSTERS=n          answer of cuOccupancyMaxActiveClusters (default: SMs / CTAs of a cluster)
 *   PK_STUB_REGS, PK_STUB_LOCAL NUM_REGS and LOCAL_SIZE_BYTES of every kernel (default 168, 0)
 *   PK_STUB_FAIL=cuX=200,cuY=1  these calls return that CUresult
 *   PK_STUB_ARGS_BYTES=n        bytes of the kernel's argument that a launch copies to its log record
 *   PK_STUB_LOG=path            every log line is also appended to this file
 * Build with -DPK_STUB_OLD for a driver without the cuLibrary functions and without cuGetProcAddress_v2.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       NO_BINARY_FOR_GPU = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, OUT_OF_RESOURCES = 701 };
enum { kSmemOptin = 232448, kMaxImages = 64, kMaxKernels = 256, kLogBytes = 1 << 22 };

typedef struct Image {
    unsigned char *bytes;
    size_t size;
} Image;

typedef struct Kernel {
    Image *image;
    char name[256];
    int attributes[16];
} Kernel;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Image images[kMaxImages];
static Kernel kernels[kMaxKernels];
static int num_images, num_kernels, initialised;
static char *log_text;
static size_t log_used;

static long number(const char *name, long fallback) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtol(text, NULL, 10) : fallback;
}

static void record(const char *format, ...) {
    va_list list;
    va_start(list, format);
    pthread_mutex_lock(&lock);
    if (log_text == NULL) {
        log_text = calloc(1, kLogBytes);
    }
    const size_t start = log_used;
    if (log_used + 65536 < kLogBytes) {
        log_used += (size_t)vsnprintf(log_text + log_used, 65000, format, list);
        log_text[log_used++] = '\n';
        log_text[log_used] = '\0';
    }
    const char *path = getenv("PK_STUB_LOG");
    if (path != NULL && *path != '\0') {
        FILE *file = fopen(path, "a");
        if (file != NULL) {
            fwrite(log_text + start, 1, log_used - start, file);
            fclose(file);
        }
    }
    pthread_mutex_unlock(&lock);
    va_end(list);
}

/* The log: one JSON object a line. */
const char *stub_log(void) { return log_text != NULL ? log_text : ""; }

void stub_reset(void) {
    pthread_mutex_lock(&lock);
    log_used = 0;
    if (log_text != NULL) {
        log_text[0] = '\0';
    }
    pthread_mutex_unlock(&lock);
}

/* The CUresult that PK_STUB_FAIL names for this call, or 0. */
static CUresult forced(const char *call) {
    const char *at = getenv("PK_STUB_FAIL");
    const size_t length = strlen(call);
    while (at != NULL && *at != '\0') {
        if (strncmp(at, call, length) == 0 && at[length] == '=') {
            return atoi(at + length + 1);
        }
        at = strchr(at, ',');
        at = at != NULL ? at + 1 : NULL;
    }
    return OK;
}

#define ENTER(call)                                                                                                    \
    do {                                                                                                               \
        const CUresult wanted = forced(call);                                                                          \
        if (wanted != OK) {                                                                                            \
            record("{\"call\": \"%s\", \"result\": %d}", call, wanted);                                                \
            return wanted;                                                                                             \
        }                                                                                                              \
    } while (0)

static int cc_major(void) {
    const char *text = getenv("PK_STUB_CC");
    return text != NULL && *text != '\0' ? atoi(text) : 9;
}

static int cc_minor(void) {
    const char *text = getenv("PK_STUB_CC");
    const char *dot = text != NULL ? strchr(text, '.') : NULL;
    return dot != NULL ? atoi(dot + 1) : 0;
}

/* ---- errors and devices ---- */

static const struct {
    int code;
    const char *name;
    const char *text;
} kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size"},
};

static CUresult describe(CUresult code, const char **out, int want_text) {
    for (size_t i = 0; i < sizeof(kErrors) / sizeof(kErrors[0]); ++i) {
        if (kErrors[i].code == code) {
            *out = want_text ? kErrors[i].text : kErrors[i].name;
            return OK;
        }
    }
    *out = NULL;
    return INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **out) { return describe(code, out, 0); }
CUresult cuGetErrorString(CUresult code, const char **out) { return describe(code, out, 1); }

CUresult cuInit(unsigned flags) {
    ENTER("cuInit");
    initialised = 1;
    return flags == 0 ? OK : INVALID_VALUE;
}

/* NVRTC looks for a loaded driver and calls this without checking that it is there. */
CUresult cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

CUresult cuDriverGetVersion(int *version) {
    ENTER("cuDriverGetVersion");
    *version = (int)number("PK_STUB_DRIVER", 13000);
    return OK;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    *count = (int)number("PK_STUB_DEVICES", 1);
    return initialised ? OK : NOT_INITIALIZED;
}

CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    if (!initialised) {
        return NOT_INITIALIZED;
    }
    *device = ordinal;
    return ordinal >= 0 && ordinal < number("PK_STUB_DEVICES", 1) ? OK : INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int length, int device) {
    ENTER("cuDeviceGetName");
    const char *text = getenv("PK_STUB_NAME");
    snprintf(name, (size_t)length, "%s", text != NULL && *text != '\0' ? text : "Stub H200");
    return device >= 0 ? OK : INVALID_DEVICE;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    ENTER("cuDeviceGetUuid");
    for (int i = 0; i < 16; ++i) {
        uuid[i] = (unsigned char)(16 * device + i);
    }
    return OK;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER("cuDeviceTotalMem");
    *bytes = (size_t)141 << 30;
    return device >= 0 ? OK : INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER("cuDeviceGetAttribute");
    switch (attribute) {
        case 16: *value = (int)number("PK_STUB_SMS", 132); break;
        case 33: *value = 16 + device; break;
        case 34: *value = 0; break;
        case 38: *value = 50 << 20; break;
        case 50: *value = 0; break;
        case 75: *value = cc_major(); break;
        case 76: *value = cc_minor(); break;
        case 97: *value = cc_major() >= 9 ? kSmemOptin : 101376; break;
        case 120: *value = cc_major() >= 9; break;
        default: *value = 1; break;
    }
    return OK;
}

static int context_cell;
static _Thread_local int made_current; /* by cuCtxSetCurrent, in this thread */

static int has_context(void) { return made_current || number("PK_STUB_CONTEXT", 1); }

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    record("{\"call\": \"cuDevicePrimaryCtxRetain\", \"device\": %d}", device);
    *context = &context_cell;
    return OK;
}

CUresult cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent");
    made_current = context == &context_cell;
    return made_current ? OK : INVALID_CONTEXT;
}

CUresult cuCtxGetCurrent(void **context) {
    ENTER("cuCtxGetCurrent");
    *context = has_context() ? &context_cell : NULL;
    return initialised ? OK : NOT_INITIALIZED;
}

CUresult cuCtxGetDevice(int *device) {
    ENTER("cuCtxGetDevice");
    *device = 0;
    return has_context() ? OK : INVALID_CONTEXT;
}

/* ---- launching ---- */

typedef struct Config {
    unsigned grid[3], block[3], smem;
    void *stream;
    struct {
        int id, pad;
        unsigned value[16];
    } *attrs;
    unsigned num_attrs;
} Config;

static int is_kernel(const void *kernel) {
    return (const Kernel *)kernel >= kernels && (const Kernel *)kernel < kernels + num_kernels;
}

static unsigned cluster_ctas(const Config *config) {
    for (unsigned i = 0; i < config->num_attrs; ++i) {
        if (config->attrs[i].id == 4) {
            return config->attrs[i].value[0] * config->attrs[i].value[1] * config->attrs[i].value[2];
        }
    }
    return 1;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, void *kernel, const Config *config) {
    ENTER("cuOccupancyMaxActiveClusters");
    const long fit = number("PK_STUB_SMS", 132) / (long)cluster_ctas(config);
    *clusters = (int)number("PK_STUB_CLUSTERS", fit);
    return is_kernel(kernel) ? OK : INVALID_HANDLE;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *kernel, int threads, size_t smem) {
    ENTER("cuOccupancyMaxActiveBlocksPerMultiprocessor");
    const long by_threads = threads > 0 ? 2048 / threads : 0;
    const long by_smem = (kSmemOptin + 1024) / ((long)smem + 1024);
    *blocks = (int)(by_threads < by_smem ? by_threads : by_smem);
    return is_kernel(kernel) ? OK : INVALID_HANDLE;
}

static const unsigned kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

/* What the driver refuses, as far as the host library's users meet it. */
static int map_is_legal(const uint64_t *dims, const uint64_t *strides, const uint32_t *box, int dtype, uint32_t rank,
                        int swizzle, uint64_t address) {
    if (dtype < 0 || dtype > 12 || rank < 1 || rank > 5 || address % 16 != 0 || swizzle < 0 || swizzle > 3) {
        return 0;
    }
    const uint64_t inner = (uint64_t)box[0] * kElementBytes[dtype];
    if (inner % 16 != 0 || (swizzle > 0 && inner > (uint64_t)16 << swizzle)) {
        return 0;
    }
    for (uint32_t i = 0; i < rank; ++i) {
        if (dims[i] == 0 || dims[i] > (uint64_t)1 << 32 || box[i] == 0 || box[i] > 256) {
            return 0;
        }
        if (i + 1 < rank && (strides[i] % 16 != 0 || strides[i] >= (uint64_t)1 << 40)) {
            return 0;
        }
    }
    return 1;
}

/* The stub's 128 bytes: readable by tests, unlike the driver's. */
typedef struct StubMap {
    char magic[8]; /* "STUBMAP" */
    uint64_t address;
    uint64_t dims[5];
    uint32_t strides[4];
    uint16_t box[5];
    uint8_t elem_strides[5];
    uint8_t dtype, rank, swizzle, interleave, l2_promotion, oob_fill;
    uint8_t rest[128 - 8 - 8 - 40 - 16 - 10 - 5 - 6];
} StubMap;
_Static_assert(sizeof(StubMap) == 128, "a tensor map has 128 bytes");

CUresult cuTensorMapEncodeTiled(void *out, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const uint32_t *box, const uint32_t *elem_strides,
                                int interleave, int swizzle, int l2_promotion, int oob_fill) {
    ENTER("cuTensorMapEncodeTiled");
    if ((uintptr_t)out % 64 != 0 || !map_is_legal(dims, strides, box, dtype, rank, swizzle, (uint64_t)(uintptr_t)address)) {
        record("{\"call\": \"cuTensorMapEncodeTiled\", \"result\": 1}");
        return INVALID_VALUE;
    }
    StubMap map = {.magic = "STUBMAP", .address = (uint64_t)(uintptr_t)address, .dtype = (uint8_t)dtype,
                   .rank = (uint8_t)rank, .swizzle = (uint8_t)swizzle, .interleave = (uint8_t)interleave,
                   .l2_promotion = (uint8_t)l2_promotion, .oob_fill = (uint8_t)oob_fill};
    for (uint32_t i = 0; i < rank; ++i) {
        map.dims[i] = dims[i];
        map.box[i] = (uint16_t)box[i];
        map.elem_strides[i] = (uint8_t)elem_strides[i];
        if (i + 1 < rank) {
            map.strides[i] = (uint32_t)strides[i];
        }
    }
    memcpy(out, &map, sizeof(map));
    record("{\"call\": \"cuTensorMapEncodeTiled\", \"rank\": %u, \"dtype\": %d, \"swizzle\": %d}", rank, dtype, swizzle);
    return OK;
}

static void hex(char *to, const unsigned char *from, long bytes) {
    for (long i = 0; i < bytes; ++i) {
        sprintf(to + 2 * i, "%02x", from[i]);
    }
    to[2 * bytes] = '\0';
}

CUresult cuLaunchKernelEx(const Config *config, void *kernel, void **parameters, void **extra) {
    static char args_hex[2 * 16384 + 1];
    char attrs[512] = "";
    ENTER("cuLaunchKernelEx");
    if (!is_kernel(kernel) || extra != NULL) {
        return INVALID_HANDLE;
    }
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    const Kernel *known = kernel;
    if ((int)config->smem > 49152 && (int)config->smem > known->attributes[8]) {
        return INVALID_VALUE;
    }
    for (unsigned i = 0; i < config->num_attrs; ++i) {
        const unsigned *v = config->attrs[i].value;
        char one[96];
        snprintf(one, sizeof(one), "%s[%d, %u, %u, %u]", i > 0 ? ", " : "", config->attrs[i].id, v[0], v[1], v[2]);
        strncat(attrs, one, sizeof(attrs) - strlen(attrs) - 1);
    }
    const long bytes = number("PK_STUB_ARGS_BYTES", 0);
    pthread_mutex_lock(&lock);
    hex(args_hex, parameters != NULL ? parameters[0] : NULL, parameters != NULL && bytes <= 16384 ? bytes : 0);
    pthread_mutex_unlock(&lock);
    record("{\"call\": \"cuLaunchKernelEx\", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], "
           "\"smem\": %u, \"stream\": %llu, \"attrs\": [%s], \"args_aligned\": %s, \"args\": \"%s\"}",
           known->name, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
           config->block[2], config->smem, (unsigned long long)(uintptr_t)config->stream, attrs,
           parameters != NULL && (uintptr_t)parameters[0] % 64 == 0 ? "true" : "false", args_hex);
    return OK;
}

/* ---- libraries ---- */

#ifndef PK_STUB_OLD

static size_t image_bytes(const Elf64_Ehdr *elf) { return elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize; }

/* 0, or the CUresult with which a driver refuses this cubin. */
static CUresult judge(const Elf64_Ehdr *elf) {
    enum { EM_CUDA_MACHINE = 190, ABI_NEW = 65, ABI_OLD = 51 };
    if (memcmp(elf->e_ident, ELFMAG, SELFMAG) != 0 || elf->e_machine != EM_CUDA_MACHINE) {
        return INVALID_IMAGE;
    }
    const int abi = elf->e_ident[EI_OSABI];
    if (abi != ABI_NEW && abi != ABI_OLD) {
        return INVALID_IMAGE;
    }
    /* The ELF format of toolkit 13 for sm_90 is newer than a 12.x driver; sm_100 has had it since 12.8. */
    const unsigned sm = abi == ABI_NEW ? (elf->e_flags >> 8) & 0xff : elf->e_flags & 0xff;
    if (abi == ABI_NEW && sm == 90 && number("PK_STUB_DRIVER", 13000) < 13000) {
        return INVALID_IMAGE;
    }
    return (int)sm == 10 * cc_major() + cc_minor() ? OK : NO_BINARY_FOR_GPU;
}

CUresult cuLibraryLoadData(void **library, const void *code, int *jit, void **jit_values, unsigned num_jit, int *options,
                           void **values, unsigned num_options) {
    ENTER("cuLibraryLoadData");
    (void)jit, (void)jit_values, (void)options, (void)values;
    if (code == NULL || num_jit != 0 || num_options != 0) {
        return INVALID_VALUE;
    }
    const CUresult verdict = judge(code);
    record("{\"call\": \"cuLibraryLoadData\", \"result\": %d}", verdict);
    if (verdict != OK) {
        return verdict;
    }
    pthread_mutex_lock(&lock);
    Image *image = num_images < kMaxImages ? &images[num_images++] : NULL;
    pthread_mutex_unlock(&lock);
    if (image == NULL) {
        return OUT_OF_RESOURCES;
    }
    image->size = image_bytes(code);
    image->bytes = malloc(image->size);
    memcpy(image->bytes, code, image->size);
    *library = image;
    return OK;
}

static int is_image(const void *library) {
    const Image *image = library;
    return image >= images && image < images + num_images && image->bytes != NULL;
}

CUresult cuLibraryUnload(void *library) {
    ENTER("cuLibraryUnload");
    if (!is_image(library)) {
        return INVALID_HANDLE;
    }
    record("{\"call\": \"cuLibraryUnload\"}");
    free(((Image *)library)->bytes);
    ((Image *)library)->bytes = NULL;
    return OK;
}

/* The symbol of that name and type in the image, or null. */
static const Elf64_Sym *find_symbol(const Image *image, const char *name, int type, const Elf64_Shdr **home) {
    const Elf64_Ehdr *elf = (const Elf64_Ehdr *)image->bytes;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image->bytes + elf->e_shoff);
    for (int s = 0; s < elf->e_shnum; ++s) {
        if (sections[s].sh_type != SHT_SYMTAB) {
            continue;
        }
        const Elf64_Sym *symbols = (const Elf64_Sym *)(image->bytes + sections[s].sh_offset);
        const char *names = (const char *)(image->bytes + sections[sections[s].sh_link].sh_offset);
        for (size_t i = 0; i < sections[s].sh_size / sizeof(Elf64_Sym); ++i) {
            if (ELF64_ST_TYPE(symbols[i].st_info) == type && strcmp(names + symbols[i].st_name, name) == 0) {
                *home = &sections[symbols[i].st_shndx];
                return &symbols[i];
            }
        }
    }
    return NULL;
}

CUresult cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    const Elf64_Shdr *home = NULL;
    ENTER("cuLibraryGetKernel");
    if (!is_image(library)) {
        return INVALID_HANDLE;
    }
    if (find_symbol(library, name, STT_FUNC, &home) == NULL) {
        return NOT_FOUND;
    }
    pthread_mutex_lock(&lock);
    Kernel *made = num_kernels < kMaxKernels ? &kernels[num_kernels++] : NULL;
    pthread_mutex_unlock(&lock);
    if (made == NULL) {
        return OUT_OF_RESOURCES;
    }
    made->image = library;
    snprintf(made->name, sizeof(made->name), "%s", name);
    *kernel = made;
    return OK;
}

CUresult cuLibraryGetGlobal(uint64_t *address, size_t *bytes, void *library, const char *name) {
    const Elf64_Shdr *home = NULL;
    ENTER("cuLibraryGetGlobal");
    if (!is_image(library)) {
        return INVALID_HANDLE;
    }
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    const Elf64_Sym *symbol = find_symbol(library, name, STT_OBJECT, &home);
    if (symbol == NULL || home->sh_type == SHT_NOBITS) {
        return NOT_FOUND;
    }
    *address = (uint64_t)(uintptr_t)(((Image *)library)->bytes + home->sh_offset + symbol->st_value);
    *bytes = symbol->st_size;
    return OK;
}

CUresult cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    ENTER("cuKernelGetAttribute");
    (void)device;
    if (!is_kernel(kernel) || attribute < 0 || attribute >= 16) {
        return INVALID_HANDLE;
    }
    switch (attribute) {
        case 0: *value = 1024; break;
        case 3: *value = (int)number("PK_STUB_LOCAL", 0); break;
        case 4: *value = (int)number("PK_STUB_REGS", 168); break;
        case 6: *value = 10 * cc_major() + cc_minor(); break;
        default: *value = ((Kernel *)kernel)->attributes[attribute]; break;
    }
    return OK;
}

CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    ENTER("cuKernelSetAttribute");
    if (!is_kernel(kernel) || attribute < 0 || attribute >= 16) {
        return INVALID_HANDLE;
    }
    if (attribute == 8 && value > kSmemOptin) {
        return INVALID_VALUE;
    }
    ((Kernel *)kernel)->attributes[attribute] = value;
    record("{\"call\": \"cuKernelSetAttribute\", \"attribute\": %d, \"value\": %d, \"device\": %d}", attribute, value,
           device);
    return OK;
}

CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status) {
    static const char *const kRenamed[][2] = {{"cuDeviceTotalMem", "cuDeviceTotalMem_v2"},
                                              {"cuDeviceGetUuid", "cuDeviceGetUuid_v2"},
                                              {"cuMemcpyDtoH", "cuMemcpyDtoH_v2"}};
    ENTER("cuGetProcAddress");
    (void)flags;
    for (size_t i = 0; i < sizeof(kRenamed) / sizeof(kRenamed[0]); ++i) {
        if (strcmp(name, kRenamed[i][0]) == 0) {
            name = kRenamed[i][1];
        }
    }
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *handle = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *address = version <= number("PK_STUB_DRIVER", 13000) && handle != NULL ? dlsym(handle, name) : NULL;
    if (status != NULL) {
        *status = *address != NULL ? 0 : 1;
    }
    return OK;
}

#endif /* PK_STUB_OLD */

CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    ENTER("cuMemcpyDtoH");
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return OK;
}
