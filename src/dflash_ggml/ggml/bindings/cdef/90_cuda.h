// CUDA entry points: bound only by a build with GGML_CUDA=ON.

// from patches/
void ggml_backend_cuda_set_narrow_mul_mat(ggml_backend_t backend, enum ggml_type type, int min_cols, int max_cols, bool enabled);
void ggml_backend_cuda_set_wide_mul_mat(ggml_backend_t backend, enum ggml_type type, bool enabled);
bool ggml_backend_cuda_connect_peers(ggml_backend_t backend, ggml_backend_t peer);
