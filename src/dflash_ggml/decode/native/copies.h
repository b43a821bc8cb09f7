// What stood behind the places where the end of a text stood before; see lookup.py.

#define MOST_PLACES 64 // a set of places is a word

// windows [n_places][depth]: ids behind each place, of which there are ends[i] <= depth; matched: tokens that
// stood before it.
struct copies {
    int n_places, depth;
    const int32_t *windows, *ends, *matched;
};

// Whether there are more than MOST_PLACES, ends beyond depth, or numbers below 0.
int copies_fault(const struct copies *copies);

// A next token, its cell while no draft was asked, and the places that say so.
struct vote {
    int32_t token, cell;
    uint64_t places;
};

// What these places say behind `depth` tokens that they have in common, each token once: their number, at
// most n_places.
int copies_votes(const struct copies *copies, int depth, uint64_t places, struct vote *votes);

// Expected tokens of a step by the nodes of a tree of copies alone, 1 for none, into gains [budget + 1]. How
// many, or -1 without memory.
int copies_gains(const struct copies *copies, const struct copy_rates *rates, int budget, double *gains);
