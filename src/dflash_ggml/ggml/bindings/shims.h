/* Shims between the cffi module and ggml: things that have no plain exported function, and callbacks. */
#pragma once

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

/* gives a finished graph a fresh identity, so that CUDA replays it without comparing every node;
 * call it again after any change to the graph. Returns the new identity. */
uint64_t dflash_graph_set_uid(struct ggml_cgraph * graph);

/* nodes [first, end) of a finished graph as a graph of their own, with an identity; NULL without memory.
 * It points into the whole one and is freed before it. */
struct ggml_cgraph * dflash_graph_part(struct ggml_cgraph * graph, int first, int end);
void dflash_graph_part_free(struct ggml_cgraph * part);

/* puts the nodes of a graph without memory in the order that its backend prefers, as ggml's scheduler does. */
void dflash_graph_optimize(ggml_backend_t backend, struct ggml_cgraph * graph);

/* the CPU's memory as a type of its own, i = 0 or 1: graphs' memory of one type is shared by nodes that run one after another. */
ggml_backend_buffer_type_t dflash_cpu_buffer_type(int i);

/* sends log lines of at least min_level (enum ggml_log_level) to dflash_log_message; INT_MAX silences all. */
void dflash_log_install(int min_level);

/* prints the failed check and the Python stack of every thread before ggml ends the process. */
void dflash_abort_install(void);

/* name of an instruction set that ggml was compiled for and this CPU lacks, or NULL when all are there. */
const char * dflash_missing_cpu_feature(void);

/* the backends of this build, separated by spaces: "CPU CUDA" */
const char * dflash_backends(void);
