#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "copy_rates.h"
#include "copies.h"

#define MOST_WEIGHT 16

int copies_fault(const struct copies *copies) {
    if (copies->n_places < 0 || copies->n_places > MOST_PLACES || copies->depth < 0) return 1;
    for (int i = 0; i < copies->n_places; i++) {
        if (copies->ends[i] < 0 || copies->ends[i] > copies->depth || copies->matched[i] < 0) return 1;
    }
    return 0;
}

// A place's vote doubles with every token of its match.
static int64_t weight(int32_t matched) {
    return (int64_t)1 << (matched < MOST_WEIGHT ? matched : MOST_WEIGHT);
}

int copies_votes(const struct copies *copies, int depth, uint64_t places, struct vote *votes) {
    int32_t longest[MOST_PLACES];
    int64_t weights[MOST_PLACES], total = 0;
    int counts[MOST_PLACES], n = 0;
    for (int place = 0; place < copies->n_places; place++) {
        if (!(places >> place & 1) || depth < 0 || depth >= copies->ends[place]) continue;
        int32_t token = copies->windows[(size_t)place * copies->depth + depth], matched = copies->matched[place];
        int i = 0;
        while (i < n && votes[i].token != token) i++;
        if (i == n) {
            votes[n] = (struct vote){.token = token};
            longest[n] = 0, weights[n] = 0, counts[n] = 0;
            n++;
        }
        votes[i].places |= (uint64_t)1 << place;
        if (matched > longest[i]) longest[i] = matched;
        weights[i] += weight(matched), total += weight(matched);
        counts[i]++;
    }
    for (int i = 0; i < n; i++) {
        double share = (double)weights[i] / (double)total;
        int vote = n == 1 ? (counts[i] < 3 ? counts[i] : 3) - 1 : share >= 0.6 ? 3 : share >= 0.25 ? 4 : 5;
        votes[i].cell = copy_cell(longest[i] + depth, vote);
    }
    return n;
}

struct path {
    double likelihood;
    uint64_t places;
    int depth;
};

static int falling(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

int copies_gains(const struct copies *copies, const struct copy_rates *rates, int budget, double *gains) {
    struct vote votes[MOST_PLACES];
    size_t most = 1; // no more nodes than tokens
    for (int place = 0; place < copies->n_places; place++) most += copies->ends[place];
    double *kept = malloc(most * sizeof(double));
    struct path *open = malloc(most * sizeof(struct path));
    if (!kept || !open) {
        free(kept);
        free(open);
        return -1;
    }
    size_t n = 0, waiting = 1;
    open[0] = (struct path){1.0, ~(uint64_t)0, 0};
    while (waiting) {
        struct path path = open[--waiting];
        int found = copies_votes(copies, path.depth, path.places, votes);
        if (found > 1) {
            double total = 0;
            for (int i = 0; i < found; i++) total += copy_rate(rates, votes[i].cell);
            path.likelihood /= fmax(total / copy_most, 1.0);
        }
        for (int i = 0; i < found; i++) {
            double p = path.likelihood * copy_rate(rates, votes[i].cell);
            kept[n++] = p;
            if (p > copy_least) open[waiting++] = (struct path){p, votes[i].places, path.depth + 1};
        }
    }
    qsort(kept, n, sizeof(double), falling);
    gains[0] = 1.0;
    if (n > (size_t)budget) n = budget;
    for (size_t i = 0; i < n; i++) gains[i + 1] = gains[i] + kept[i];
    free(kept);
    free(open);
    return (int)n + 1;
}
