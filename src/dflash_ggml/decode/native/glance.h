// Probability of the best continuation, in one call: most plain steps of a small model need no more; see lookup.py.

#define GLANCE_MATCHES 12 // twice NGRAM_HOPS

// Votes for the token after the pending one, when the index had `at` tokens.
struct glance {
    int32_t at, n;
    struct vote votes[GLANCE_MATCHES];
};

// Appends n tokens to `index`, and finds where its end and `pending` occurred before, in it or in `past`, as
// ngram_continuations
// does with `most`. Returns the highest probability of a next token, 0 without a match. learn: the token before `pending`
// is the
// only new one and was decoded plainly, so that `pending` shows which of the last votes were right. Returns -1 without
// effect if the index is full; -2 without memory.
double lookup_glance(struct glance *glance, struct ngram_index *index, const struct ngram_index *past, struct lookup_rates *rates,
                     const int32_t *ids, int n, int32_t pending, int most, int learn);
