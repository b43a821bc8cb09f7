// Operations along a token tree, added to ggml by patches/. Shapes are documented in the patched ggml.h. The two
// commit operations work in place: their result is a view of the state.

struct ggml_tensor *ggml_ssm_conv_tree(struct ggml_context *ctx, struct ggml_tensor *state,
    struct ggml_tensor *x, struct ggml_tensor *c, struct ggml_tensor *parents);
struct ggml_tensor *ggml_ssm_conv_tree_commit(struct ggml_context *ctx, struct ggml_tensor *state,
    struct ggml_tensor *x, struct ggml_tensor *path);
struct ggml_tensor *ggml_gated_delta_net_tree_persist(struct ggml_context *ctx, struct ggml_tensor *q,
    struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *g, struct ggml_tensor *beta,
    struct ggml_tensor *state, struct ggml_tensor *parents);
struct ggml_tensor *ggml_gated_delta_net_tree_commit(struct ggml_context *ctx, struct ggml_tensor *state,
    struct ggml_tensor *factors, struct ggml_tensor *path);

// The same for trees of several sequences of different sizes, whose states are slots.
struct ggml_tensor *ggml_ssm_conv_forest(struct ggml_context *ctx, struct ggml_tensor *state,
    struct ggml_tensor *x, struct ggml_tensor *c, struct ggml_tensor *parents, struct ggml_tensor *seqs);
struct ggml_tensor *ggml_ssm_conv_forest_commit(struct ggml_context *ctx, struct ggml_tensor *state,
    struct ggml_tensor *x, struct ggml_tensor *path, struct ggml_tensor *seqs);
struct ggml_tensor *ggml_gated_delta_net_forest_persist(struct ggml_context *ctx, struct ggml_tensor *q,
    struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *g, struct ggml_tensor *beta,
    struct ggml_tensor *state, struct ggml_tensor *parents, struct ggml_tensor *seqs);
struct ggml_tensor *ggml_gated_delta_net_forest_commit(struct ggml_context *ctx, struct ggml_tensor *state,
    struct ggml_tensor *factors, struct ggml_tensor *path, struct ggml_tensor *seqs);

// Of a prompt: ggml_gated_delta_net with K = 1 that a backend may compute in chunks of tokens.
struct ggml_tensor *ggml_gated_delta_net_chunked(struct ggml_context *ctx, struct ggml_tensor *q,
    struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *g, struct ggml_tensor *beta,
    struct ggml_tensor *state);

// What the mask of ggml_flash_attn_ext hides from each sequence's columns need not be read.
void ggml_flash_attn_ext_add_seqs(struct ggml_tensor *a, struct ggml_tensor *seqs, struct ggml_tensor *spans);

// The k best of each row with their log-probabilities, best first: what a draft's logits are needed for.
struct ggml_tensor *ggml_top_k_log_probs(struct ggml_context *ctx, struct ggml_tensor *a, int k);

// Attention over a range of rows per column, and the same ranges as a mask: batches of a prompt.
struct ggml_tensor *ggml_flash_attn_ranges(struct ggml_context *ctx, struct ggml_tensor *q,
    struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *ranges, float scale);
struct ggml_tensor *ggml_range_mask(struct ggml_context *ctx, struct ggml_tensor *ranges, int64_t n_kv);
struct ggml_tensor *ggml_forest_mask(struct ggml_context *ctx, struct ggml_tensor *ranges, struct ggml_tensor *rows,
    struct ggml_tensor *parents, struct ggml_tensor *seqs, int64_t n_kv);

// The sum with another graph's tensor, that runs at the same time; mailbox: see the patched ggml.h.
#define GGML_ALL_REDUCE_HEADER ...
struct ggml_tensor *ggml_all_reduce(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *mailbox);
