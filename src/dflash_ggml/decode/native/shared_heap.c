#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "shared_heap.h"

// The next entries of a list, with value `key`.
struct front {
    double key;
    int32_t list, at;
};

static int before(const struct front *a, const struct front *b) {
    return a->key != b->key ? a->key > b->key : a->list < b->list;
}

static void sink(struct front *fronts, int n, int at) {
    struct front moved = fronts[at];
    for (int down; (down = 2 * at + 1) < n; at = down) {
        if (down + 1 < n && before(&fronts[down + 1], &fronts[down])) down++;
        if (!before(&fronts[down], &moved)) break;
        fronts[at] = fronts[down];
    }
    fronts[at] = moved;
}

// Means of adjacent entries, pooled until they are descending. sums, sizes: of up to n pools.
static void pool(const double *gains, int n, double *keys, double *sums, int32_t *sizes) {
    int n_pools = 0;
    for (int i = 0; i < n; i++) {
        double sum = gains[i];
        int32_t size = 1;
        while (n_pools > 0 && sums[n_pools - 1] * size < sum * sizes[n_pools - 1]) {
            n_pools--;
            sum += sums[n_pools];
            size += sizes[n_pools];
        }
        sums[n_pools] = sum, sizes[n_pools++] = size;
    }
    for (int p = 0, i = 0; p < n_pools; p++) {
        for (int last = i + sizes[p]; i < last; i++) keys[i] = sums[p] / sizes[p];
    }
}

// The end, of those up to `most` entries, with the highest value per millisecond. sums: [most + 1].
static int best_end(int n_ends, const int32_t *ends, const double *ms, int most, const double *sums, double flat) {
    int last = 0, found = 0;
    double wider = INFINITY, best = -1;
    while (last + 1 < n_ends && ends[last] < most) last++;
    for (int i = last; i >= 0; i--) {
        if (ms[i] >= (1 - flat) * wider) continue; // not worth graphs of another width
        int entries = ends[i] < most ? ends[i] : most;
        wider = ms[i] > 1e-9 ? ms[i] : 1e-9;
        if (sums[entries] / wider >= best) best = sums[entries] / wider, found = entries;
    }
    return found;
}

int heap_shares(int n, const double *gains, const int32_t *firsts, int32_t *counts, int room, int n_ends,
                const int32_t *ends, const double *ms, double flat) {
    if (n < 1 || n_ends < 1 || firsts[0] != 0) return -2;
    for (int i = 0; i < n; i++) {
        if (firsts[i + 1] < firsts[i] || counts[i] < 0 || counts[i] > firsts[i + 1] - firsts[i]) return -2;
    }
    for (int i = 0; i < n_ends; i++) {
        if (ends[i] < (i ? ends[i - 1] : 0)) return -2;
    }
    size_t total = (size_t)firsts[n];
    double *doubles = malloc((3 * total + 1) * sizeof(double));
    int32_t *ints = malloc((2 * total + 1) * sizeof(int32_t));
    struct front *fronts = malloc((size_t)n * sizeof(struct front));
    int found = -1;
    if (doubles && ints && fronts) {
        double *keys = doubles, *sums = doubles + total; // sums: one more
        int32_t *sizes = ints, *order = ints + total;
        int n_fronts = 0, most = 0;
        double worth = 0;
        for (int i = 0; i < n; i++) {
            int first = firsts[i] + counts[i], last = firsts[i + 1];
            double in = 0;
            for (int at = firsts[i]; at < first; at++) in += gains[at];
            worth += in;
            pool(gains + first, last - first, keys + first, sums, sizes);
            if (first < last) fronts[n_fronts++] = (struct front){keys[first], i, first};
        }
        for (int at = n_fronts / 2; at-- > 0;) sink(fronts, n_fronts, at);
        sums[0] = worth;
        while (n_fronts > 0 && most < room) {
            int list = fronts[0].list, at = fronts[0].at;
            order[most] = list;
            sums[most + 1] = sums[most] + gains[at];
            most++;
            if (++at < firsts[list + 1]) {
                fronts[0] = (struct front){keys[at], list, at};
            } else {
                fronts[0] = fronts[--n_fronts];
            }
            if (n_fronts > 0) sink(fronts, n_fronts, 0);
        }
        found = best_end(n_ends, ends, ms, most, sums, flat);
        for (int i = 0; i < found; i++) counts[order[i]]++;
    }
    free(doubles);
    free(ints);
    free(fronts);
    return found;
}
