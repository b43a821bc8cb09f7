#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lookup_rates.h"
#include "lookup.h"
#include "drafts.h"
#include "trees.h"

#define DRAFT 1 // sources of a node
#define LOOKUP 2

// A node that may come next: the cost is the negative log-probability of its path. Ranks below 0 are votes.
struct entry {
    double cost;
    int32_t depth, parent, rank;
};

// A token that prompt lookup votes for. cursor: in the draft, -1 where it ends there.
struct offer {
    uint64_t matches;
    int32_t token, cell, cursor;
    uint8_t sources;
};

// State of a node's children. lost: cost added to the draft's candidates by votes, which have taken
// n_taken ranks.
struct node {
    double cost, lost;
    uint64_t matches;
    const struct row *row;
    int32_t cursor, n_taken;
};

struct growth {
    int budget;
    int32_t *tokens, *parents, *depths, *cells; // those of the tree
    float *log_probs;
    double *rests;
    uint8_t *sources;
    struct reading reading;
    const struct lookup *lookup;
    const struct lookup_rates *rates;
    double trust, far;
    int n, n_matches, open, order, fresh; // open: the node whose children are not queued yet, or -1
    struct entry *heap;
    int n_heap;
    struct node *nodes;
    struct offer *offers; // of node i from i * n_matches on
    int32_t *taken;       // the same
};

// Lower cost first; ties go to the smaller depth, the older parent, the smaller rank. No two entries
// are equal.
static int before(const struct entry *a, const struct entry *b) {
    if (a->cost != b->cost) return a->cost < b->cost;
    if (a->depth != b->depth) return a->depth < b->depth;
    if (a->parent != b->parent) return a->parent < b->parent;
    return a->rank < b->rank;
}

static void lift(struct entry *heap, int at, struct entry entry) {
    for (int up; at > 0; at = up) {
        up = (at - 1) / 2;
        if (!before(&entry, &heap[up])) break;
        heap[at] = heap[up];
    }
    heap[at] = entry;
}

static void sink(struct entry *heap, int n, struct entry entry) {
    int at = 0;
    for (int down; (down = 2 * at + 1) < n; at = down) {
        if (down + 1 < n && before(&heap[down + 1], &heap[down])) down++;
        if (!before(&heap[down], &entry)) break;
        heap[at] = heap[down];
    }
    heap[at] = entry;
}

// While the chain is grown, entries are only collected; see `run`.
static void queue(struct growth *g, double cost, int32_t parent, int32_t rank) {
    struct entry entry = {cost, g->depths[parent] + 1, parent, rank};
    if (g->order == BEST_FIRST) {
        lift(g->heap, g->n_heap, entry);
    } else {
        g->heap[g->n_heap] = entry;
    }
    g->n_heap++;
}

static int is_taken(const struct growth *g, int32_t parent, int rank) {
    const int32_t *taken = g->taken + (size_t)parent * g->n_matches;
    for (int i = 0; i < g->nodes[parent].n_taken; i++) {
        if (taken[i] == rank) return 1;
    }
    return 0;
}

// Queue a draft's candidate of a rank or, if votes have taken it, the next.
static void queue_draft(struct growth *g, int32_t parent, int rank) {
    const struct node *node = &g->nodes[parent];
    if (!node->row) return;
    while (is_taken(g, parent, rank)) rank++;
    if (rank < node->row->n) queue(g, node->cost + node->lost - node->row->scores[rank], parent, rank);
}

// Queue the children of a node whose row is known.
static void queue_children(struct growth *g, int32_t parent) {
    struct node *node = &g->nodes[parent];
    const struct row *row = node->row && node->row->n ? node->row : NULL;
    struct vote votes[MOST_MATCHES];
    int n = 0;
    if (g->lookup && node->matches && node->cost < g->far) {
        n = lookup_votes(g->lookup, g->depths[parent], node->matches, votes);
    }
    struct offer *offers = g->offers + (size_t)parent * g->n_matches;
    int32_t *taken = g->taken + (size_t)parent * g->n_matches;
    double total = 0, votes_in_draft = 0;
    for (int i = 0; i < n; i++) {
        offers[i] = (struct offer){votes[i].matches, votes[i].token, votes[i].cell, -1, LOOKUP};
        if (row) {
            double promised = 0;
            int rank = 0;
            while (rank < row->n && row->tokens[rank] != votes[i].token) rank++;
            if (rank < row->n) {
                promised = exp(row->scores[rank]);
                votes_in_draft += promised;
                taken[node->n_taken++] = rank;
                offers[i].sources |= DRAFT;
            } else {
                rank = -1;
            }
            offers[i].cursor = rank < 0 ? row->other : row->cursors[rank];
            offers[i].cell = lookup_cell_with_draft(votes[i].cell, promised);
        }
        total += lookup_rate(g->rates, offers[i].cell);
    }
    double scale = total > lookup_most ? lookup_most / total : 1.0;
    double share = n > 1 ? scale * total : fmin(total, lookup_most);
    for (int i = 0; i < n; i++) {
        double rate = lookup_rate(g->rates, offers[i].cell), cost;
        if (!row) { // no draft beside the votes
            cost = node->cost + (n > 1 ? log(fmax(total / lookup_most, 1.0)) : 0.0) - log(rate);
        } else {
            cost = node->cost - log(n > 1 ? scale * rate : share);
        }
        queue(g, cost, parent, -1 - i);
    }
    if (!row) return;
    int rank = 0;
    while (is_taken(g, parent, rank)) rank++;
    if (n && rank < row->n) {
        double rest = 1 - share;
        g->rests[parent] = rest;
        node->lost = log(fmax(1 - votes_in_draft, 1e-6) / (rest * g->trust));
    }
    queue_draft(g, parent, rank);
}

static void add(struct growth *g, int32_t token, int32_t parent, double cost, int32_t cursor, uint64_t matches, int cell,
                uint8_t sources) {
    int32_t at = g->n++;
    g->tokens[at] = token, g->parents[at] = parent, g->depths[at] = parent < 0 ? 0 : g->depths[parent] + 1;
    g->log_probs[at] = 0.0f - (float)cost; // the root's is 0, not -0
    if (g->lookup) g->cells[at] = cell, g->sources[at] = sources, g->rests[at] = 0.0;
    g->nodes[at] = (struct node){cost, 0.0, matches, NULL, cursor, 0};
    g->open = at;
}

// Adds an entry as node.
static void take(struct growth *g, struct entry best) {
    if (best.rank >= 0) {
        const struct row *row = g->nodes[best.parent].row;
        add(g, row->tokens[best.rank], best.parent, best.cost, row->cursors[best.rank], 0, -1, DRAFT);
    } else {
        struct offer offer = g->offers[(size_t)best.parent * g->n_matches - 1 - best.rank];
        add(g, offer.token, best.parent, best.cost, offer.cursor, offer.matches, offer.cell, offer.sources);
    }
}

// Removes the best child of the newest node (entries from `fresh` on) from the queue. 0 without children.
static int take_from_chain(struct growth *g) {
    int at = g->fresh;
    if (at == g->n_heap) return 0;
    for (int i = at + 1; i < g->n_heap; i++) {
        if (before(&g->heap[i], &g->heap[at])) at = i;
    }
    struct entry best = g->heap[at];
    g->heap[at] = g->heap[--g->n_heap];
    if (best.rank >= 0) queue_draft(g, best.parent, best.rank + 1);
    g->fresh = g->n_heap;
    take(g, best);
    return 1;
}

static int take_best(struct growth *g) {
    if (!g->n_heap || !(g->heap[0].cost < INFINITY)) return 0;
    struct entry best = g->heap[0];
    if (--g->n_heap) sink(g->heap, g->n_heap, g->heap[g->n_heap]);
    if (best.rank >= 0) queue_draft(g, best.parent, best.rank + 1);
    take(g, best);
    return 1;
}

// Grows until the tree is complete; -1 without memory.
static int run(struct growth *g) {
    while (g->n <= g->budget) {
        if (g->open >= 0) {
            struct node *node = &g->nodes[g->open];
            if (node->cursor >= 0 && !node->row) {
                if (!(node->row = reading_at(&g->reading, node->cursor))) return -1;
            }
            queue_children(g, g->open);
            g->open = -1;
        }
        if (g->order == BEST_FIRST) {
            if (!take_best(g)) return 0;
        } else if (!take_from_chain(g)) {
            if (g->order == SPINE) return 0;
            g->order = BEST_FIRST;
            for (int i = 1; i < g->n_heap; i++) lift(g->heap, i, g->heap[i]);
        }
    }
    return 0;
}

static void release(struct growth *g) {
    reading_close(&g->reading);
    free(g->heap);
    free(g->nodes);
    free(g->offers);
    free(g->taken);
}

static int prepare(struct growth *g, int32_t root, int budget, int32_t *ints, double *rests, uint8_t *sources,
                   const struct draft *draft, const struct lookup *lookup, const struct lookup_rates *rates, int order) {
    size_t width = (size_t)budget + 1;
    *g = (struct growth){.budget = budget, .rests = rests, .sources = sources, .lookup = lookup, .rates = rates,
                         .order = order};
    g->tokens = ints, g->parents = ints + width, g->depths = ints + 2 * width;
    g->log_probs = (float *)(ints + 3 * width), g->cells = lookup ? ints + 4 * width : NULL;
    g->n_matches = lookup ? lookup->n_matches : 0;
    g->trust = rates ? lookup_trust(rates) : 1.0;
    g->far = -log(lookup_least);
    // queued children of a node are its votes and one of the draft
    g->heap = malloc(width * (g->n_matches + 1) * sizeof(struct entry));
    g->nodes = malloc(width * sizeof(struct node));
    g->offers = malloc((width * g->n_matches + 1) * sizeof(struct offer));
    g->taken = malloc((width * g->n_matches + 1) * sizeof(int32_t));
    int32_t cursor = reading_open(&g->reading, draft);
    if (!g->heap || !g->nodes || !g->offers || !g->taken || cursor == -2) {
        release(g);
        return -1;
    }
    add(g, root, -1, 0.0, cursor, lookup ? ~(uint64_t)0 : 0, -1, 0);
    return 0;
}

int tree_grow(int32_t root, int budget, int32_t *ints, double *rests, uint8_t *sources, const struct draft *draft,
              const struct lookup *lookup, const struct lookup_rates *rates, int order) {
    struct growth g;
    if (prepare(&g, root, budget, ints, rests, sources, draft, lookup, rates, order) < 0) return -1;
    int done = run(&g);
    release(&g);
    return done < 0 ? -1 : g.n;
}

int tree_observers(int n, const int32_t *parents, int width, uint8_t *bits) {
    size_t row = ((size_t)width + 7) / 8;
    for (int node = 0; node < width; node++) bits[node * row + node / 8] |= 1 << node % 8;
    // children pass their bits to their parents, last child first
    for (int node = n - 1; node >= 0; node--) {
        int32_t parent = parents[node];
        if (parent == -1) continue;
        if (parent < 0 || parent >= node) return node;
        for (size_t byte = 0; byte < row; byte++) bits[parent * row + byte] |= bits[node * row + byte];
    }
    return -1;
}
