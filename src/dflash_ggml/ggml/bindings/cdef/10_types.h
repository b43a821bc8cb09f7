// Types, enums and constants of the tensor library. Enum values and struct layouts marked "..." are filled in by
// the C compiler from the vendored headers, so a changed value can never be bound wrongly.

#define GGML_MAX_NAME ...
#define GGML_MAX_N_THREADS ...
#define GGML_ROPE_TYPE_NEOX ...

enum ggml_status {
    GGML_STATUS_ALLOC_FAILED, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS, GGML_STATUS_ABORTED,
    ...
};

enum ggml_type {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
    GGML_TYPE_Q8_0, GGML_TYPE_Q8_1, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
    GGML_TYPE_Q6_K, GGML_TYPE_Q8_K, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ1_S,
    GGML_TYPE_IQ4_NL, GGML_TYPE_IQ3_S, GGML_TYPE_IQ2_S, GGML_TYPE_IQ4_XS, GGML_TYPE_I8, GGML_TYPE_I16,
    GGML_TYPE_I32, GGML_TYPE_I64, GGML_TYPE_F64, GGML_TYPE_IQ1_M, GGML_TYPE_BF16, GGML_TYPE_TQ1_0,
    GGML_TYPE_TQ2_0, GGML_TYPE_MXFP4, GGML_TYPE_NVFP4, GGML_TYPE_Q1_0, GGML_TYPE_Q2_0, GGML_TYPE_COUNT,
    ...
};

enum ggml_prec {
    GGML_PREC_UNDEFINED, GGML_PREC_DEFAULT, GGML_PREC_F32, GGML_PREC_BF16, GGML_PREC_F16, GGML_PREC_Q8,
    GGML_PREC_Q4,
    ...
};

enum ggml_op_hint {
    GGML_HINT_NONE, GGML_HINT_SRC0_IS_HADAMARD,
    ...
};

enum ggml_sort_order {
    GGML_SORT_ORDER_ASC, GGML_SORT_ORDER_DESC,
    ...
};

enum ggml_log_level {
    GGML_LOG_LEVEL_NONE, GGML_LOG_LEVEL_DEBUG, GGML_LOG_LEVEL_INFO, GGML_LOG_LEVEL_WARN,
    GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_CONT,
    ...
};

typedef struct ggml_backend_buffer_type *ggml_backend_buffer_type_t;
typedef struct ggml_backend_buffer *ggml_backend_buffer_t;
typedef struct ggml_backend *ggml_backend_t;
typedef struct ggml_backend_device *ggml_backend_dev_t;
typedef struct ggml_backend_event *ggml_backend_event_t;
typedef struct ggml_backend_reg *ggml_backend_reg_t;
typedef struct ggml_gallocr *ggml_gallocr_t;
typedef struct ggml_threadpool *ggml_threadpool_t;

struct ggml_context;
struct ggml_cgraph;

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

struct ggml_tensor {
    enum ggml_type type;
    struct ggml_backend_buffer *buffer;
    int64_t ne[4];
    size_t nb[4];
    struct ggml_tensor *src[...];
    struct ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    ...;
};

struct ggml_threadpool_params {
    int n_threads;
    uint32_t poll;
    ...;
};
