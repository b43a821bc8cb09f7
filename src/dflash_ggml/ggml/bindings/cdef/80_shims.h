// Our own C shims (shims.c), and the callbacks that ggml may call without the GIL.

#define DFLASH_PATCHES ... // how many of patches/ were applied to this ggml

uint64_t dflash_graph_set_uid(struct ggml_cgraph *graph);
struct ggml_cgraph *dflash_graph_part(struct ggml_cgraph *graph, int first, int end);
void dflash_graph_part_free(struct ggml_cgraph *part);
void dflash_graph_optimize(ggml_backend_t backend, struct ggml_cgraph *graph);
ggml_backend_buffer_type_t dflash_cpu_buffer_type(int i);
const char *dflash_missing_cpu_feature(void);
const char *dflash_backends(void);
void dflash_log_install(int min_level);
void dflash_abort_install(void);

extern "Python+C" void dflash_log_message(int level, const char *text);
extern "Python+C" void dflash_abort_trace(void);
