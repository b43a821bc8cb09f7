/* Shims between the cffi module and ggml: things that have no plain exported function, and callbacks. */
#pragma once

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

/* dst[i] = float value of element i; n must be a multiple of the type's block size.
 * Returns n, or -1 when the type has no conversion to float or n is not a whole number of blocks. */
int64_t dflash_dequantize(enum ggml_type type, const void * src, float * dst, int64_t n);

/* NULL-terminated list of extra buffer types (repacked weights, AMX) of a device, or NULL. */
ggml_backend_buffer_type_t * dflash_dev_extra_bufts(ggml_backend_dev_t device);

/* list of features compiled into a backend, ended by a NULL name, or NULL. */
struct ggml_backend_feature * dflash_reg_features(ggml_backend_reg_t reg);

/* gives a finished graph a fresh identity, so that CUDA replays it without comparing every node;
 * call it again after any change to the graph. Returns the new identity. */
uint64_t dflash_graph_set_uid(struct ggml_cgraph * graph);

/* a ggml_abort_callback: flag points at an int; true once it is non-zero. Needs no GIL. */
bool dflash_flag_abort(void * flag);

/* sends log lines of at least min_level (enum ggml_log_level) to dflash_log_message; INT_MAX silences all. */
void dflash_log_install(int min_level);

/* prints the failed check and the Python stack of every thread before ggml ends the process. */
void dflash_abort_install(void);

/* name of an instruction set that ggml was compiled for and this CPU lacks, or NULL when all are there. */
const char * dflash_missing_cpu_feature(void);
