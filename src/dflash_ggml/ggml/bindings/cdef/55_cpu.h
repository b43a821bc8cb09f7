// The CPU backend: threads and the reference switch.

struct ggml_threadpool_params ggml_threadpool_params_default(int n_threads);
struct ggml_threadpool *ggml_threadpool_new(struct ggml_threadpool_params *params);
void ggml_threadpool_free(struct ggml_threadpool *threadpool);
ggml_backend_t ggml_backend_cpu_init(void);
void ggml_backend_cpu_set_n_threads(ggml_backend_t backend_cpu, int n_threads);
void ggml_backend_cpu_set_threadpool(ggml_backend_t backend_cpu, ggml_threadpool_t threadpool);
void ggml_backend_cpu_set_use_ref(ggml_backend_t backend_cpu, bool use_ref);
