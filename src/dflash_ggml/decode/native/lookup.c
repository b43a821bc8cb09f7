#include <stddef.h>
#include <stdint.h>

#include "lookup_rates.h"
#include "lookup.h"

#define MOST_WEIGHT 16

int lookup_fault(const struct lookup *lookup) {
    if (lookup->n_matches < 0 || lookup->n_matches > MOST_MATCHES || lookup->depth < 0) return 1;
    for (int i = 0; i < lookup->n_matches; i++) {
        if (lookup->ends[i] < 0 || lookup->ends[i] > lookup->depth || lookup->matched[i] < 0) return 1;
    }
    return 0;
}

// The weight of a match doubles with every token of its length.
static int64_t weight(int32_t matched) {
    return (int64_t)1 << (matched < MOST_WEIGHT ? matched : MOST_WEIGHT);
}

int lookup_votes(const struct lookup *lookup, int depth, uint64_t matches, struct vote *votes) {
    int32_t longest[MOST_MATCHES];
    int64_t weights[MOST_MATCHES], total = 0;
    int counts[MOST_MATCHES], n = 0;
    for (int match = 0; match < lookup->n_matches; match++) {
        if (!(matches >> match & 1) || depth < 0 || depth >= lookup->ends[match]) continue;
        int32_t token = lookup->windows[(size_t)match * lookup->depth + depth], matched = lookup->matched[match];
        int i = 0;
        while (i < n && votes[i].token != token) i++;
        if (i == n) {
            votes[n] = (struct vote){.token = token};
            longest[n] = 0, weights[n] = 0, counts[n] = 0;
            n++;
        }
        votes[i].matches |= (uint64_t)1 << match;
        if (matched > longest[i]) longest[i] = matched;
        weights[i] += weight(matched), total += weight(matched);
        counts[i]++;
    }
    for (int i = 0; i < n; i++) {
        double share = (double)weights[i] / (double)total;
        int vote = n == 1 ? (counts[i] < 3 ? counts[i] : 3) - 1 : share >= 0.6 ? 3 : share >= 0.25 ? 4 : 5;
        votes[i].cell = lookup_cell(longest[i] + depth, vote);
    }
    return n;
}
