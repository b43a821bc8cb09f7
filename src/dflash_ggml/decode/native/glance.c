#include <math.h>
#include <stdint.h>

#include "copy_rates.h"
#include "copies.h"
#include "text_index.h"
#include "glance.h"

_Static_assert(GLANCE_PLACES == 2 * TEXT_HOPS, "a place for each that two texts may give");

static int learned(const struct glance *glance, struct copy_rates *rates, int32_t came) {
    int32_t cells[GLANCE_PLACES];
    uint8_t are_right[GLANCE_PLACES];
    for (int i = 0; i < glance->n; i++) {
        cells[i] = glance->votes[i].cell;
        are_right[i] = glance->votes[i].token == came;
    }
    return copy_rates_learn(rates, glance->n, cells, are_right);
}

double copies_glance(struct glance *glance, struct text_index *text, const struct text_index *past, struct copy_rates *rates,
                     const int32_t *ids, int n, int32_t pending, int most, int learn) {
    if (n > 0 && text_index_extend(text, ids, n)) return -1;
    if (learn && glance->at + 1 == text->n && glance->n && learned(glance, rates, pending)) return -2;
    int32_t windows[GLANCE_PLACES], ends[GLANCE_PLACES], matched[GLANCE_PLACES];
    if (most > GLANCE_PLACES) most = GLANCE_PLACES;
    struct copies copies = {.depth = 1, .windows = windows, .ends = ends, .matched = matched};
    copies.n_places = text_continuations(text, past, pending, 1, most, windows, ends, matched);
    glance->at = text->n;
    glance->n = copies_votes(&copies, 0, ~(uint64_t)0, glance->votes);
    double likeliest = 0;
    for (int i = 0; i < glance->n; i++) likeliest = fmax(likeliest, copy_rate(rates, glance->votes[i].cell));
    return likeliest;
}
