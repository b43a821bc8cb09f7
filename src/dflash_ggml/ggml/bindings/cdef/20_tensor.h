// Contexts, tensors, type queries, (de)quantisation and version facts.

const char *ggml_version(void);
const char *ggml_commit(void);
const char *ggml_status_to_string(enum ggml_status status);
void ggml_time_init(void);
int64_t ggml_time_us(void);

struct ggml_context *ggml_init(struct ggml_init_params params);
void ggml_reset(struct ggml_context *ctx);
void ggml_free(struct ggml_context *ctx);
size_t ggml_used_mem(const struct ggml_context *ctx);
bool ggml_get_no_alloc(struct ggml_context *ctx);
void ggml_set_no_alloc(struct ggml_context *ctx, bool no_alloc);
void *ggml_get_mem_buffer(const struct ggml_context *ctx);
size_t ggml_get_mem_size(const struct ggml_context *ctx);
size_t ggml_tensor_overhead(void);

struct ggml_tensor *ggml_new_tensor(struct ggml_context *ctx, enum ggml_type type, int n_dims,
    const int64_t *ne);
struct ggml_tensor *ggml_new_tensor_1d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0);
struct ggml_tensor *ggml_new_tensor_2d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0,
    int64_t ne1);
struct ggml_tensor *ggml_new_tensor_3d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0,
    int64_t ne1, int64_t ne2);
struct ggml_tensor *ggml_new_tensor_4d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0,
    int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor *ggml_dup_tensor(struct ggml_context *ctx, const struct ggml_tensor *src);
struct ggml_tensor *ggml_view_tensor(struct ggml_context *ctx, struct ggml_tensor *src);
struct ggml_tensor *ggml_get_first_tensor(const struct ggml_context *ctx);
struct ggml_tensor *ggml_get_next_tensor(const struct ggml_context *ctx, struct ggml_tensor *tensor);
struct ggml_tensor *ggml_get_tensor(struct ggml_context *ctx, const char *name);
const char *ggml_get_name(const struct ggml_tensor *tensor);
struct ggml_tensor *ggml_set_name(struct ggml_tensor *tensor, const char *name);
void ggml_set_input(struct ggml_tensor *tensor);
void ggml_set_output(struct ggml_tensor *tensor);
void *ggml_get_data(const struct ggml_tensor *tensor);

int64_t ggml_nelements(const struct ggml_tensor *tensor);
int64_t ggml_nrows(const struct ggml_tensor *tensor);
size_t ggml_nbytes(const struct ggml_tensor *tensor);
size_t ggml_nbytes_pad(const struct ggml_tensor *tensor);
size_t ggml_element_size(const struct ggml_tensor *tensor);
int ggml_n_dims(const struct ggml_tensor *tensor);
int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
size_t ggml_row_size(enum ggml_type type, int64_t ne);
const char *ggml_type_name(enum ggml_type type);
bool ggml_is_quantized(enum ggml_type type);
bool ggml_is_transposed(const struct ggml_tensor *tensor);
bool ggml_is_permuted(const struct ggml_tensor *tensor);
bool ggml_is_empty(const struct ggml_tensor *tensor);
bool ggml_is_view(const struct ggml_tensor *tensor);
bool ggml_is_scalar(const struct ggml_tensor *tensor);
bool ggml_is_vector(const struct ggml_tensor *tensor);
bool ggml_is_matrix(const struct ggml_tensor *tensor);
bool ggml_is_3d(const struct ggml_tensor *tensor);
bool ggml_is_contiguous(const struct ggml_tensor *tensor);
bool ggml_is_contiguous_1(const struct ggml_tensor *tensor);
bool ggml_is_contiguous_2(const struct ggml_tensor *tensor);
bool ggml_is_contiguously_allocated(const struct ggml_tensor *tensor);
bool ggml_is_contiguous_channels(const struct ggml_tensor *tensor);
bool ggml_is_contiguous_rows(const struct ggml_tensor *tensor);
bool ggml_are_same_shape(const struct ggml_tensor *t0, const struct ggml_tensor *t1);
bool ggml_are_same_stride(const struct ggml_tensor *t0, const struct ggml_tensor *t1);
bool ggml_can_repeat(const struct ggml_tensor *t0, const struct ggml_tensor *t1);

const char *ggml_op_name(enum ggml_op op);
const char *ggml_op_symbol(enum ggml_op op);
const char *ggml_unary_op_name(enum ggml_unary_op op);
const char *ggml_glu_op_name(enum ggml_glu_op op);
const char *ggml_op_desc(const struct ggml_tensor *t);
enum ggml_unary_op ggml_get_unary_op(const struct ggml_tensor *tensor);
enum ggml_glu_op ggml_get_glu_op(const struct ggml_tensor *tensor);

float ggml_fp16_to_fp32(ggml_fp16_t);
ggml_fp16_t ggml_fp32_to_fp16(float);
void ggml_fp16_to_fp32_row(const ggml_fp16_t *, float *, int64_t);
void ggml_fp32_to_fp16_row(const float *, ggml_fp16_t *, int64_t);
void ggml_quantize_init(enum ggml_type type);
void ggml_quantize_free(void);
bool ggml_quantize_requires_imatrix(enum ggml_type type);
size_t ggml_quantize_chunk(enum ggml_type type, const float *src, void *dst, int64_t start, int64_t nrows,
    int64_t n_per_row, const float *imatrix);
bool ggml_validate_row_data(enum ggml_type type, const void *data, size_t nbytes);
