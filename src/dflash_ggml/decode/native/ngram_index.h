// Index of where the end of a token sequence has occurred before; see ngram_index.py.

#define NGRAM_LONGEST 48 // longest match in tokens
#define NGRAM_HOPS 6     // positions to check per hash, newest first
#define NGRAM_ENOUGH 64  // total matched tokens after which the search ends
#define NGRAM_ORDERS 2

// Tokens ids [n]. For each order, newest [slots] is the last position of a hash, and before [n + 1] the previous one of the same
// hash, 0 for none. Position p is before token p. The capacity is `capacity` tokens; slots are a power of two.
struct ngram_index {
    int32_t n, capacity, slots;
    int32_t *ids, *newest[NGRAM_ORDERS], *before[NGRAM_ORDERS];
};

// Appends n tokens. Returns 0, or -1 if they exceed the capacity or the number of slots.
int ngram_index_extend(struct ngram_index *index, const int32_t *ids, int n);

// Append one token, as ngram_index_extend.
int ngram_index_add(struct ngram_index *index, int32_t id);

// Keep the first n tokens.
void ngram_index_cut(struct ngram_index *index, int n);

// Earlier occurrences of the last tokens of tail [have], newest first: positions and lengths [NGRAM_HOPS]. Returns how many.
int ngram_index_find(const struct ngram_index *index, const int32_t *tail, int have, int32_t *positions, int32_t *lengths);

// What followed earlier occurrences of the end of `index` with `pending` appended, in it or in `past`: of the `most` longest
// matches windows [most][depth], of which ends [most] tokens are valid, and their lengths matched [most]. Returns how many; most is
// no more than 2 * NGRAM_HOPS. A window that reaches the end of the index repeats itself from there.
int ngram_continuations(const struct ngram_index *index, const struct ngram_index *past, int32_t pending, int depth, int most,
                       int32_t *windows, int32_t *ends, int32_t *matched);
