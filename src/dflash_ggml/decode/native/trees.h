// Growth of draft trees; see tree.py and lookup.py.

#define BEST_FIRST 0
#define CHAIN_SEED 1 // the chain of best children, then best first
#define SPINE 2      // that chain alone

// The most probable paths of a draft, of prompt lookup, or of both, each or NULL, up to a cost, a negative log-
// probability. Returns the nodes with the root, or -1 without memory. ints: [4][budget + 1], tokens, parents,
// depths and, as floats, log-probabilities; with prompt lookup also cells, and beside them rests and sources [budget +
// 1].
int tree_grow(int32_t root, int budget, int32_t *ints, double *rests, uint8_t *sources, const struct draft *draft,
              const struct lookup *lookup, const struct lookup_rates *rates, int order);

// Which nodes attend to each of `width` >= n nodes: bits [width][(width + 7) / 8] of zeros. Returns -1, or
// the last node with an invalid parent.
int tree_observers(int n, const int32_t *parents, int width, uint8_t *bits);
