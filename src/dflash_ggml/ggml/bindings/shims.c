#include "shims.h"
#include "ggml-backend-impl.h" /* struct ggml_backend_buffer_type */
#include "ggml-impl.h" /* struct ggml_cgraph, for its identity */

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* defined by the generated cffi source: extern "Python" functions */
void dflash_log_message(int level, const char * text);
void dflash_abort_trace(void);

uint64_t dflash_graph_set_uid(struct ggml_cgraph * graph) {
    graph->uid = ggml_graph_next_uid();
    return graph->uid;
}

struct ggml_cgraph * dflash_graph_part(struct ggml_cgraph * graph, int first, int end) {
    struct ggml_cgraph * part = malloc(sizeof(*part));
    if (part != NULL) {
        *part = ggml_graph_view(graph, first, end); /* counts the uses of its nodes in the whole graph */
        dflash_graph_set_uid(part);
    }
    return part;
}

static void no_alloc_dep(void * user_data, struct ggml_tensor * tensor, struct ggml_tensor * until) {
    (void) user_data, (void) tensor, (void) until;
}

void dflash_graph_optimize(ggml_backend_t backend, struct ggml_cgraph * graph) {
    /* lifetimes beyond a node's last use only help fusions, which check overlaps by themselves */
    struct ggml_backend_graph_optimize_params params = { no_alloc_dep, NULL };
    if (backend->iface.graph_optimize != NULL) {
        backend->iface.graph_optimize(backend, graph, &params);
    }
}

void dflash_graph_part_free(struct ggml_cgraph * part) {
    free(part);
}

ggml_backend_buffer_type_t dflash_cpu_buffer_type(int i) {
    static struct ggml_backend_buffer_type types[2];
    types[i] = *ggml_backend_cpu_buffer_type();
    return &types[i];
}

static int g_min_level;

static void forward_log(enum ggml_log_level level, const char * text, void * user_data) {
    static _Thread_local enum ggml_log_level last = GGML_LOG_LEVEL_NONE;
    (void) user_data;
    if (level == GGML_LOG_LEVEL_CONT) {
        level = last; /* a continuation has the level of the line that it continues */
    } else {
        last = level;
    }
    if ((int) level >= g_min_level) { /* filtered here: a dropped line never waits for the GIL */
        dflash_log_message((int) level, text);
    }
}

void dflash_log_install(int min_level) {
    g_min_level = min_level;
    ggml_log_set(forward_log, NULL);
}

static void write_all(const char * text) {
    size_t left = strlen(text);
    while (left > 0) {
        ssize_t n = write(STDERR_FILENO, text, left);
        if (n <= 0) {
            return;
        }
        text += n;
        left -= (size_t) n;
    }
}

static void on_abort(const char * message) {
    /* plain write(2) first: it works whatever state the interpreter is in */
    write_all("\ndflash-ggml: ggml stopped the process: ");
    write_all(message);
    write_all("\nA check inside ggml failed; this is a bug, please report it with the lines below.\n");
    dflash_abort_trace();
}

void dflash_abort_install(void) {
    ggml_set_abort_callback(on_abort);
}

const char * dflash_backends(void) {
    return DFLASH_BACKENDS;
}

#if defined(__aarch64__) && defined(__linux__)
/* bits of the kernel's auxiliary vector, spelt out: older headers lack some names */
static bool arm_has(unsigned long hwcap, unsigned long hwcap2) {
    return (getauxval(AT_HWCAP) & hwcap) == hwcap && (getauxval(AT_HWCAP2) & hwcap2) == hwcap2;
}
#define ARM_FEATURE(hwcap, hwcap2, name) arm_has(hwcap, hwcap2)
#elif defined(__aarch64__) && defined(__APPLE__)
static bool arm_has(const char * name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}
#define ARM_FEATURE(hwcap, hwcap2, name) arm_has("hw.optional.arm." name)
#endif

const char * dflash_missing_cpu_feature(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    /* ggml's own queries answer what it was compiled for, not what the machine has */
    if (ggml_cpu_has_avx2() && !__builtin_cpu_supports("avx2")) {
        return "AVX2";
    }
    if (ggml_cpu_has_fma() && !__builtin_cpu_supports("fma")) {
        return "FMA";
    }
    if (ggml_cpu_has_bmi2() && !__builtin_cpu_supports("bmi2")) {
        return "BMI2";
    }
    if (ggml_cpu_has_avx512() && !__builtin_cpu_supports("avx512f")) {
        return "AVX-512";
    }
    if (ggml_cpu_has_avx512_vbmi() && !__builtin_cpu_supports("avx512vbmi")) {
        return "AVX-512 VBMI";
    }
    if (ggml_cpu_has_avx512_vnni() && !__builtin_cpu_supports("avx512vnni")) {
        return "AVX-512 VNNI";
    }
    if (ggml_cpu_has_avx512_bf16() && !__builtin_cpu_supports("avx512bf16")) {
        return "AVX-512 BF16";
    }
#elif defined(ARM_FEATURE)
    if (ggml_cpu_has_dotprod() && !ARM_FEATURE(1UL << 20, 0, "FEAT_DotProd")) {
        return "dot products (Armv8.2 dotprod)";
    }
    if (ggml_cpu_has_fp16_va() && !ARM_FEATURE(1UL << 10, 0, "FEAT_FP16")) {
        return "float16 arithmetic (Armv8.2 fp16)";
    }
    if (ggml_cpu_has_matmul_int8() && !ARM_FEATURE(0, 1UL << 13, "FEAT_I8MM")) {
        return "int8 matrix products (Armv8.6 i8mm)";
    }
    if (ggml_cpu_has_sve() && !ARM_FEATURE(1UL << 22, 0, "FEAT_SVE")) {
        return "SVE";
    }
    if (ggml_cpu_has_sme() && !ARM_FEATURE(0, 1UL << 23, "FEAT_SME")) {
        return "SME";
    }
#endif
    return NULL;
}
