// CUDA entry points: bound only by a build with GGML_CUDA=ON.

void ggml_backend_cuda_set_narrow_mul_mat(ggml_backend_t backend, bool enabled); // from patches/
