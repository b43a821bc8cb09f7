// Growing draft trees; see tree.py for what they are. Also read by cffi: plain declarations only.

// The `budget` most probable paths of a block of rows, ids and log_probs [n_depths][n_ranks], as `tree.expand` says. Rows fall and
// hold no NaN. tokens, parents, depths, log_probs: [budget + 1], the root first. Returns the nodes with the root, or -1 where
// there is no memory.
int tree_of_rows(int32_t root, const int32_t *ids, const float *log_probs, int n_depths, int n_ranks, int budget,
                 int chain_seed, double most_cost, int32_t *tokens, int32_t *parents, int32_t *depths,
                 float *path_log_probs);
