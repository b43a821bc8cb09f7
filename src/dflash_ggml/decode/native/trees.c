#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "trees.h"

// A node that may come next: the cost is the negative log-probability of its path.
struct entry {
    double cost;
    int32_t depth, parent, rank;
};

struct heap {
    struct entry *entries;
    int n;
};

// Cheaper first; ties go to the smaller depth, the older parent, the smaller rank. No two entries are equal.
static int before(const struct entry *a, const struct entry *b) {
    if (a->cost != b->cost) return a->cost < b->cost;
    if (a->depth != b->depth) return a->depth < b->depth;
    if (a->parent != b->parent) return a->parent < b->parent;
    return a->rank < b->rank;
}

static void push(struct heap *heap, struct entry entry) {
    int at = heap->n++;
    for (int up; at > 0; at = up) {
        up = (at - 1) / 2;
        if (!before(&entry, &heap->entries[up])) break;
        heap->entries[at] = heap->entries[up];
    }
    heap->entries[at] = entry;
}

// Puts an entry where the first was.
static void replace(struct heap *heap, struct entry entry) {
    int at = 0;
    for (int down; (down = 2 * at + 1) < heap->n; at = down) {
        if (down + 1 < heap->n && before(&heap->entries[down + 1], &heap->entries[down])) down++;
        if (!before(&heap->entries[down], &entry)) break;
        heap->entries[at] = heap->entries[down];
    }
    heap->entries[at] = entry;
}

static void pop(struct heap *heap) {
    if (--heap->n > 0) replace(heap, heap->entries[heap->n]);
}

int tree_of_rows(int32_t root, const int32_t *ids, const float *log_probs, int n_depths, int n_ranks, int budget,
                 int chain_seed, double most_cost, int32_t *tokens, int32_t *parents, int32_t *depths,
                 float *path_log_probs) {
    // every node takes the place of an entry and brings one more
    struct heap heap = {malloc(((size_t)budget + 2) * sizeof(struct entry)), 0};
    double *costs = malloc(((size_t)budget + 1) * sizeof(double));
    if (!heap.entries || !costs) {
        free(heap.entries);
        free(costs);
        return -1;
    }
    int n = 1;
    tokens[0] = root, parents[0] = -1, depths[0] = 0, costs[0] = 0;
    if (chain_seed) {
        for (; n <= n_depths && n <= budget; n++) {
            const float *scores = log_probs + (size_t)(n - 1) * n_ranks;
            if (scores[0] == -INFINITY) break;
            tokens[n] = ids[(size_t)(n - 1) * n_ranks], parents[n] = n - 1, depths[n] = n;
            costs[n] = costs[n - 1] - scores[0];
            if (n_ranks > 1) push(&heap, (struct entry){costs[n - 1] - scores[1], n, n - 1, 1});
        }
    } else if (n_depths > 0) {
        push(&heap, (struct entry){-(double)log_probs[0], 1, 0, 0});
    }
    while (n <= budget && heap.n > 0) {
        struct entry best = heap.entries[0];
        if (best.cost > most_cost || best.cost == INFINITY) break;
        const float *scores = log_probs + (size_t)(best.depth - 1) * n_ranks;
        tokens[n] = ids[(size_t)(best.depth - 1) * n_ranks + best.rank];
        parents[n] = best.parent, depths[n] = best.depth, costs[n] = best.cost;
        if (++best.rank < n_ranks) {
            best.cost = costs[best.parent] - scores[best.rank];
            replace(&heap, best);
        } else {
            pop(&heap);
        }
        if (best.depth < n_depths) {
            push(&heap, (struct entry){costs[n] - scores[n_ranks], best.depth + 1, n, 0});
        }
        n++;
    }
    for (int i = 0; i < n; i++) path_log_probs[i] = 0.0f - (float)costs[i]; // the root's is 0, not -0
    free(heap.entries);
    free(costs);
    return n;
}
