// A look at what the end of a text foretells, in one call: most plain steps of a small model need no more; see glance.py.

#define GLANCE_PLACES 12 // twice TEXT_HOPS

// What the places said of the token behind the pending one, when the text had `at` tokens.
struct glance {
    int32_t at, n;
    struct vote votes[GLANCE_PLACES];
};

// Puts n tokens behind `text`, and looks where its end and `pending` stood before, in it or in `past`, as text_continuations does
// with `most`. Returns how likely the likeliest next token of those is, 0 where there is none. learn: the token before `pending`
// is the only new one and was written plainly, so that `pending` tells which of the last votes were right. Returns -1 where the text
// has no room, and nothing was done; -2 without memory.
double copies_glance(struct glance *glance, struct text_index *text, const struct text_index *past, struct copy_rates *rates,
                     const int32_t *ids, int n, int32_t pending, int most, int learn);
