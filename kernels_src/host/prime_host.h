/* SPDX-License-Identifier: Apache-2.0
 *
 * prime_host.h: the C ABI between Python (ctypes) and the CUDA driver.
 *
 * The library built from prime_host.c has no NEEDED entry: it looks up libcuda.so.1 with the dlopen
 * of the process that loads it, at the first call that needs the driver. Loading it on a machine
 * without a driver is fine.
 *
 * Frozen: a struct or a signature below never changes. A new need is a new struct or a new
 * function, and PK_HOST_ABI goes up by one. PK_HOST_LAYOUT is the hash of the struct layouts
 * (build_tools/structs.py computes it, a unit test compares); the Python side keeps the same
 * constant, so a library and a package of different builds never mix.
 *
 * Rules for the caller:
 *   - Every field is of fixed width; pointers and driver handles travel as uint64_t.
 *   - Every function is thread safe, keeps no state of its own but the driver's entry points, and
 * never prints.
 *   - A return value is 0, a CUresult (> 0), or one of the PK_E_ codes (< 0). Outputs are written
 * on 0 only.
 *   - No function makes a CUDA context except pk_host_use_device; "current context" below means
 * that of the thread.
 */
#ifndef PRIME_HOST_H
#define PRIME_HOST_H

#include <stdint.h>

#define PK_HOST_ABI 1u
#define PK_HOST_LAYOUT 0xd8b84622082320afull

#define PK_HOST_MAX_ARGS 16384u /* bytes of one kernel's argument struct */
#define PK_HOST_MAX_MAPS 64u    /* tensor maps of one launch */
#define PK_TENSOR_MAP_BYTES 128u
#define PK_TENSOR_MAP_ALIGN 64u

/* Own error codes. */
#define PK_E_NO_DRIVER (-1) /* libcuda.so.1 cannot be loaded */
#define PK_E_NO_SYMBOL \
    (-2) /* libcuda.so.1 lacks a function that is needed: the driver is too old */
#define PK_E_BAD_ARGUMENT (-3) /* null, misaligned or out of range: a bug of the caller */
#define PK_E_NO_DLOPEN (-4)    /* this process has no dlopen/dlsym (static executable) */
#define PK_E_BAD_IMAGE (-5)    /* the image is no ELF file, or is cut short */
#define PK_E_BAD_SIZE (-6)     /* the global in the library has another size than was asked for */

/* PkLaunch.flags */
#define PK_LAUNCH_COOPERATIVE 1u /* all CTAs co-resident, or the launch fails */
#define PK_LAUNCH_PDL \
    2u /* programmatic stream serialization: may start before its predecessor has ended */

/* One CUtensorMap to encode. Enumerations carry the driver's own values (CUtensorMapDataType and so
 * on). */
typedef struct PkTensorMap {
    uint64_t address;         /* device pointer, multiple of 16 */
    uint64_t dims[5];         /* elements, innermost first; only the first `rank` count */
    uint64_t strides[4];      /* bytes between neighbours in dims 1..rank-1, multiples of 16 */
    uint32_t box[5];          /* elements per dim that one copy moves */
    uint32_t elem_strides[5]; /* 1 unless rows are skipped */
    uint32_t dtype;      /* u8 0, u16 1, u32 2, i32 3, u64 4, i64 5, f16 6, f32 7, f64 8, bf16 9 */
    uint32_t rank;       /* 1..5 */
    uint32_t swizzle;    /* none 0, 32B 1, 64B 2, 128B 3 */
    uint32_t interleave; /* none 0, 16B 1, 32B 2 */
    uint32_t l2_promotion; /* none 0, 64B 1, 128B 2, 256B 3 */
    uint32_t oob_fill;     /* zeros 0, NaN 1 */
    uint32_t args_offset;  /* where the 128 bytes go inside the argument struct; multiple of 64 */
    uint32_t reserved;     /* 0 */
} PkTensorMap;

/* One kernel launch: the kernel takes one struct by value (`const __grid_constant__ Args args`). */
typedef struct PkLaunch {
    uint64_t kernel; /* from pk_host_kernel */
    uint64_t stream; /* CUstream, 0 for the legacy stream */
    uint64_t args;   /* host address of the argument struct; only read, copied to 64-byte aligned
                        storage */
    uint64_t maps;   /* host address of num_maps PkTensorMap */
    uint32_t args_bytes; /* <= PK_HOST_MAX_ARGS */
    uint32_t num_maps;   /* <= PK_HOST_MAX_MAPS */
    uint32_t grid[3];    /* CTAs */
    uint32_t block[3];   /* threads */
    uint32_t cluster[3]; /* CTAs; {0,0,0} or {1,1,1}: no cluster attribute */
    uint32_t smem_bytes; /* dynamic shared memory */
    uint32_t flags;      /* PK_LAUNCH_* */
    int32_t failed_map;  /* out: index of the tensor map that the driver refused, -1 otherwise */
} PkLaunch;

/* Facts of one device. */
typedef struct PkDevice {
    uint64_t total_bytes; /* device memory */
    uint8_t uuid[16];
    char name[128]; /* zero-terminated */
    int32_t ordinal;
    int32_t cc_major;
    int32_t cc_minor;
    int32_t sm_count;
    int32_t smem_optin_bytes; /* most dynamic + static shared memory of one CTA */
    int32_t l2_bytes;
    int32_t cluster_launch; /* 1: thread block clusters are supported */
    int32_t pci_domain;
    int32_t pci_bus;
    int32_t pci_device;
} PkDevice;

#ifdef __cplusplus
extern "C" {
#endif

/* Identity; usable without a driver. */
uint32_t pk_host_abi(void);
uint64_t pk_host_layout(void);

/* Loads libcuda.so.1 and resolves every entry point; makes no driver call. On failure `message`
 * (may be null) gets up to `capacity` - 1 bytes: the loader's text, or the name of the missing
 * function. A failure is not remembered. */
int32_t pk_host_open(char* message, uint32_t capacity);

/* Error texts: static strings, never null; usable without a driver. */
const char* pk_host_error_name(int32_t code);
const char* pk_host_error_text(int32_t code);

/* Needs no cuInit. 13000 for CUDA 13.0. */
int32_t pk_host_driver_version(int32_t* version);

/* Each of the following calls cuInit(0) first (idempotent). */
int32_t pk_host_device_count(int32_t* count);
int32_t pk_host_device(int32_t ordinal, PkDevice* out);
int32_t pk_host_device_attribute(
    int32_t ordinal, int32_t attribute, int32_t* value); /* CUdevice_attribute */

/* Current context and its device; *context == 0 and *ordinal == -1 when the thread has none. */
int32_t pk_host_current(uint64_t* context, int32_t* ordinal);
/* Retains the primary context of the device and makes it current. The only call that may create a
 * context. */
int32_t pk_host_use_device(int32_t ordinal);

/* Loads a cubin from memory (context free: one load serves all devices). `image` may be freed
 * afterwards. */
int32_t pk_host_load(const void* image, uint64_t bytes, uint64_t* library);
int32_t pk_host_unload(uint64_t library);
int32_t pk_host_kernel(uint64_t library, const char* name, uint64_t* kernel);

/* CUfunction_attribute values: MAX_THREADS_PER_BLOCK 0, SHARED_SIZE_BYTES 1 (static),
 * LOCAL_SIZE_BYTES 3, NUM_REGS 4, BINARY_VERSION 6, MAX_DYNAMIC_SHARED_SIZE_BYTES 8,
 * NON_PORTABLE_CLUSTER_SIZE_ALLOWED 14. */
int32_t pk_host_kernel_attribute(
    uint64_t kernel, int32_t attribute, int32_t ordinal, int32_t* value);
int32_t pk_host_set_kernel_attribute(
    uint64_t kernel, int32_t attribute, int32_t ordinal, int32_t value);

/* Copies a __device__/__constant__ global of exactly `bytes` bytes to `out`; needs a current
 * context, synchronous. PK_E_BAD_SIZE when the global has another size: *actual (may be null) then
 * holds it. */
int32_t pk_host_read_global(
    uint64_t library, const char* name, void* out, uint64_t bytes, uint64_t* actual);

/* Occupancy in the current context. Clusters: uses kernel, grid, block, cluster, smem_bytes of the
 * request. */
int32_t pk_host_max_active_clusters(const PkLaunch* request, int32_t* clusters);
int32_t pk_host_max_active_blocks(
    uint64_t kernel, uint32_t threads, uint32_t smem_bytes, int32_t* blocks_per_sm);

/* Encodes one map to 128 bytes at `out` (multiple of 64); args_offset is ignored. */
int32_t pk_host_encode_tensor_map(const PkTensorMap* map, void* out);
/* Encodes all maps into a copy of the arguments and launches, in this one call. Needs a current
 * context. */
int32_t pk_host_launch(PkLaunch* request);

#ifdef __cplusplus
}
#endif

#endif /* PRIME_HOST_H */
