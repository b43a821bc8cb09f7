// Earlier occurrences of the end of a sequence (matches) and the tokens that followed them; see lookup.py.

#define MOST_MATCHES 64 // a set of matches is a 64-bit mask

// windows [n_matches][depth]: ids that followed each match, ends[i] <= depth of them; matched: length of each match in tokens.
struct lookup {
    int n_matches, depth;
    const int32_t *windows, *ends, *matched;
};

// Whether there are more than MOST_MATCHES, ends beyond depth, or numbers below 0.
int lookup_fault(const struct lookup *lookup);

// A next token, its cell without a draft, and the matches that it followed.
struct vote {
    int32_t token, cell;
    uint64_t matches;
};

// The tokens that followed these matches after `depth` common ones, each token once. Returns their number, at most
// n_matches.
int lookup_votes(const struct lookup *lookup, int depth, uint64_t matches, struct vote *votes);
