// Our own C shims (shims.c) for macros, inline helpers and callbacks that may run without the GIL.

int64_t dflash_dequantize(enum ggml_type type, const void *src, float *dst, int64_t n);
ggml_backend_buffer_type_t *dflash_dev_extra_bufts(ggml_backend_dev_t device);
struct ggml_backend_feature *dflash_reg_features(ggml_backend_reg_t reg);
uint64_t dflash_graph_set_uid(struct ggml_cgraph *graph);
bool dflash_flag_abort(void *flag);
const char *dflash_missing_cpu_feature(void);
void dflash_log_install(int min_level);
void dflash_abort_install(void);

extern "Python+C" void dflash_log_message(int level, const char *text);
extern "Python+C" void dflash_abort_trace(void);
