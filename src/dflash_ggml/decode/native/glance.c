#include <math.h>
#include <stdint.h>

#include "lookup_rates.h"
#include "lookup.h"
#include "ngram_index.h"
#include "glance.h"

_Static_assert(GLANCE_MATCHES == 2 * NGRAM_HOPS, "room for the matches of two indices");

static int learned(const struct glance *glance, struct lookup_rates *rates, int32_t actual) {
    int32_t cells[GLANCE_MATCHES];
    uint8_t are_right[GLANCE_MATCHES];
    for (int i = 0; i < glance->n; i++) {
        cells[i] = glance->votes[i].cell;
        are_right[i] = glance->votes[i].token == actual;
    }
    return lookup_rates_learn(rates, glance->n, cells, are_right);
}

double lookup_glance(struct glance *glance, struct ngram_index *index, const struct ngram_index *past, struct lookup_rates *rates,
                     const int32_t *ids, int n, int32_t pending, int most, int learn) {
    if (n > 0 && ngram_index_extend(index, ids, n)) return -1;
    if (learn && glance->at + 1 == index->n && glance->n && learned(glance, rates, pending)) return -2;
    int32_t windows[GLANCE_MATCHES], ends[GLANCE_MATCHES], matched[GLANCE_MATCHES];
    if (most > GLANCE_MATCHES) most = GLANCE_MATCHES;
    struct lookup lookup = {.depth = 1, .windows = windows, .ends = ends, .matched = matched};
    lookup.n_matches = ngram_continuations(index, past, pending, 1, most, windows, ends, matched);
    glance->at = index->n;
    glance->n = lookup_votes(&lookup, 0, ~(uint64_t)0, glance->votes);
    double likeliest = 0;
    for (int i = 0; i < glance->n; i++) likeliest = fmax(likeliest, lookup_rate(rates, glance->votes[i].cell));
    return likeliest;
}
