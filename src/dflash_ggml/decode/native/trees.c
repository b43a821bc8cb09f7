#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "copy_rates.h"

#include "copies.h"

#include "trees.h"

#define DRAFT 1 // sources of a node
#define COPIES 2
// A log-probability rounded in float32 may exceed 0 by an ulp or two; anything larger was never normalised.
#define ROUNDING 1e-3f

// A draft's candidates at a place, without those of probability 0. ranks: their places in a row of pairs.
struct row {
    int n;
    int32_t first; // cursor of the first of those that were given
    int32_t *tokens, *ranks;
    double scores[];
};

// A node that may come next: the cost is the negative log-probability of its path. Ranks below 0 are votes.
struct entry {
    double cost;
    int32_t depth, parent, rank;
};

// A token that copies vote for. cursor: in the draft, -1 where it does not go on.
struct offer {
    uint64_t places;
    int32_t token, cell, cursor;
    uint8_t sources;
};

// What a node knows of its children. lost: what votes cost the draft's candidates, which leave out n_taken ranks.
struct node {
    double cost, lost;
    uint64_t places;
    const struct row *row;
    int32_t cursor, n_taken;
};

struct growth {
    int budget;
    int32_t *tokens, *parents, *depths, *cells; // those of the tree
    float *log_probs;
    double *rests;
    uint8_t *sources;
    const struct draft *draft;
    const struct copies *copies;
    const struct copy_rates *rates;
    double most_cost, trust, far;
    int n, n_places, n_rows, n_given, open, order, fresh; // open: the node whose children are not queued yet, or -1
    struct entry *heap;
    int n_heap;
    struct node *nodes;
    struct offer *offers;    // of node i from i * n_places on
    int32_t *taken;          // the same
    struct row **rows;       // all of them
    const struct row **known; // by cursor, of a draft that is not asked
};

// Cheaper first; ties go to the smaller depth, the older parent, the smaller rank. No two entries are equal.
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

// While the chain is grown entries only wait; see `run`.
static void queue(struct growth *g, double cost, int32_t parent, int32_t rank) {
    struct entry entry = {cost, g->depths[parent] + 1, parent, rank};
    if (g->order == BEST_FIRST) {
        lift(g->heap, g->n_heap, entry);
    } else {
        g->heap[g->n_heap] = entry;
    }
    g->n_heap++;
}

// ---- rows

int rows_fault(int n_depths, int n_ranks, const float *log_probs) {
    int falls = 1;
    for (int depth = 0; depth < n_depths; depth++) {
        const float *row = log_probs + (size_t)depth * n_ranks;
        for (int i = 0; i < n_ranks; i++) {
            if (!(row[i] <= ROUNDING)) return 1;
            if (i && row[i] > row[i - 1]) falls = 0;
        }
    }
    return falls ? 0 : 2;
}

int pairs_fault(size_t n, const float *pairs) {
    int found = 0;
    for (size_t i = 0; i < n; i++) found |= pairs[i] != pairs[i];
    return found;
}

static struct row *new_row(struct growth *g, int n) {
    size_t each = sizeof(double) + 2 * sizeof(int32_t);
    struct row *row = malloc(sizeof(struct row) + (n > 0 ? n : 1) * each);
    if (!row) return NULL;
    row->n = 0, row->first = 0;
    row->tokens = (int32_t *)(row->scores + n);
    row->ranks = row->tokens + n;
    return g->rows[g->n_rows++] = row;
}

int pairs_after(const struct draft *draft, int depth, int index, int32_t *tokens, int32_t *ranks, double *log_probs) {
    int k = draft->n_ranks, n = 0;
    const int32_t *ids = draft->ids + (size_t)depth * k;
    const float *scores = draft->log_probs + (size_t)depth * k;
    const float *pairs = draft->pairs + ((size_t)depth * k + index) * k;
    double mass = 0, best = -INFINITY, total = 0;
    for (int i = 0; i < k; i++) {
        double joint = (double)scores[i] + pairs[i];
        mass += exp((double)scores[i]);
        if (joint > best) best = joint;
    }
    for (int i = 0; i < k; i++) total += exp((double)scores[i] + pairs[i] - best);
    // of tokens outside the row nothing is known but that they take the rest; rounding must not make them less than none
    double shift = fmin(mass > 0 ? log(mass) : 0, 0) - log(total);
    for (int i = 0; i < k; i++) {
        double joint = (double)scores[i] + pairs[i] - best + shift;
        if (!(joint > -INFINITY)) continue;
        int at = n++;
        for (; at > 0 && log_probs[at - 1] < joint; at--) log_probs[at] = log_probs[at - 1], ranks[at] = ranks[at - 1];
        log_probs[at] = joint, ranks[at] = i;
    }
    for (int i = 0; i < n; i++) tokens[i] = ids[ranks[i]];
    return n;
}

// The row at a cursor of a draft that is not asked; NULL without memory.
static const struct row *row_at(struct growth *g, int32_t cursor) {
    if (g->known[cursor]) return g->known[cursor];
    const struct draft *draft = g->draft;
    int k = draft->n_ranks;
    struct row *row = new_row(g, k);
    if (!row) return NULL;
    if (draft->pairs) {
        row->n = pairs_after(draft, cursor / k, cursor % k, row->tokens, row->ranks, row->scores);
    } else {
        const float *scores = draft->log_probs + (size_t)cursor * k;
        memcpy(row->tokens, draft->ids + (size_t)cursor * k, k * sizeof(int32_t));
        while (row->n < k && scores[row->n] > -INFINITY) row->scores[row->n] = scores[row->n], row->n++;
    }
    return g->known[cursor] = row;
}

// The cursor of a child, at a rank of its parent's row or, where the row does not hold it, -1.
static int32_t below(const struct growth *g, int32_t parent, int rank) {
    const struct draft *draft = g->draft;
    int32_t depth = g->depths[parent] + 1;
    if (!draft || g->nodes[parent].cursor < 0) return -1;
    if (draft->asked) return rank < 0 ? -1 : g->nodes[parent].row->first + rank;
    if (depth >= draft->n_depths) return -1;
    if (!draft->pairs) return depth; // a plain row goes on below any token
    return rank < 0 ? -1 : depth * draft->n_ranks + g->nodes[parent].row->ranks[rank];
}

// ---- nodes

static int is_taken(const struct growth *g, int32_t parent, int rank) {
    const int32_t *taken = g->taken + (size_t)parent * g->n_places;
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
    struct vote votes[MOST_PLACES];
    int n = 0;
    if (g->copies && node->places && node->cost < g->far) n = copies_votes(g->copies, g->depths[parent], node->places, votes);
    struct offer *offers = g->offers + (size_t)parent * g->n_places;
    int32_t *taken = g->taken + (size_t)parent * g->n_places;
    double total = 0, said_of_votes = 0;
    for (int i = 0; i < n; i++) {
        offers[i] = (struct offer){votes[i].places, votes[i].token, votes[i].cell, -1, COPIES};
        if (row) {
            double said = 0;
            int rank = 0;
            while (rank < row->n && row->tokens[rank] != votes[i].token) rank++;
            if (rank < row->n) {
                said = exp(row->scores[rank]);
                said_of_votes += said;
                taken[node->n_taken++] = rank;
                offers[i].sources |= DRAFT;
            } else {
                rank = -1;
            }
            offers[i].cursor = below(g, parent, rank);
            offers[i].cell = copy_cell_beside(votes[i].cell, said);
        }
        total += copy_rate(g->rates, offers[i].cell);
    }
    double scale = total > copy_most ? copy_most / total : 1.0;
    double promised = n > 1 ? scale * total : fmin(total, copy_most);
    for (int i = 0; i < n; i++) {
        double rate = copy_rate(g->rates, offers[i].cell), cost;
        if (!row) { // nobody else has a word
            cost = node->cost + (n > 1 ? log(fmax(total / copy_most, 1.0)) : 0.0) - log(rate);
        } else {
            cost = node->cost - log(n > 1 ? scale * rate : promised);
        }
        queue(g, cost, parent, -1 - i);
    }
    if (!row) return;
    int rank = 0;
    while (is_taken(g, parent, rank)) rank++;
    if (n && rank < row->n) {
        double rest = 1 - promised;
        g->rests[parent] = rest;
        node->lost = log(fmax(1 - said_of_votes, 1e-6) / (rest * g->trust));
    }
    queue_draft(g, parent, rank);
}

static void add(struct growth *g, int32_t token, int32_t parent, double cost, int32_t cursor, uint64_t places, int cell,
                uint8_t sources) {
    int32_t at = g->n++;
    g->tokens[at] = token, g->parents[at] = parent, g->depths[at] = parent < 0 ? 0 : g->depths[parent] + 1;
    g->log_probs[at] = 0.0f - (float)cost; // the root's is 0, not -0
    if (g->copies) g->cells[at] = cell, g->sources[at] = sources, g->rests[at] = 0.0;
    g->nodes[at] = (struct node){cost, 0.0, places, NULL, cursor, 0};
    g->open = at;
}

// An entry becomes a node.
static void take(struct growth *g, struct entry best) {
    if (best.rank >= 0) {
        int32_t token = g->nodes[best.parent].row->tokens[best.rank];
        add(g, token, best.parent, best.cost, below(g, best.parent, best.rank), 0, -1, DRAFT);
    } else {
        struct offer offer = g->offers[(size_t)best.parent * g->n_places - 1 - best.rank];
        add(g, offer.token, best.parent, best.cost, offer.cursor, offer.places, offer.cell, offer.sources);
    }
}

// Takes the best child of the newest node, those from `fresh` on, out of the queue. 0 where it has none.
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
    if (!g->n_heap || !(g->heap[0].cost <= g->most_cost) || g->heap[0].cost == INFINITY) return 0;
    struct entry best = g->heap[0];
    if (--g->n_heap) sink(g->heap, g->n_heap, g->heap[g->n_heap]);
    if (best.rank >= 0) queue_draft(g, best.parent, best.rank + 1);
    take(g, best);
    return 1;
}

// Grows until the tree is done, -1; until a draft is asked, the cursor; or until there is no memory, -2.
static int run(struct growth *g) {
    while (g->n <= g->budget) {
        if (g->open >= 0) {
            struct node *node = &g->nodes[g->open];
            if (node->cursor >= 0 && !node->row) {
                if (g->draft->asked) return node->cursor;
                if (!(node->row = row_at(g, node->cursor))) return -2;
            }
            queue_children(g, g->open);
            g->open = -1;
        }
        if (g->order == BEST_FIRST) {
            if (!take_best(g)) return -1;
        } else if (!take_from_chain(g)) {
            if (g->order == SPINE) return -1;
            g->order = BEST_FIRST;
            for (int i = 1; i < g->n_heap; i++) lift(g->heap, i, g->heap[i]);
        }
    }
    return -1;
}

static void release(struct growth *g) {
    for (int i = 0; i < g->n_rows; i++) free(g->rows[i]);
    free(g->rows);
    free(g->heap);
    free(g->nodes);
    free(g->offers);
    free(g->taken);
    free(g->known);
}

static int prepare(struct growth *g, int32_t root, int budget, int32_t *ints, double *rests, uint8_t *sources,
                   const struct draft *draft, const struct copies *copies, const struct copy_rates *rates, int order,
                   double most_cost) {
    size_t width = (size_t)budget + 1, cursors = 0;
    *g = (struct growth){.budget = budget, .rests = rests, .sources = sources, .draft = draft, .copies = copies,
                         .rates = rates, .most_cost = most_cost, .order = order};
    g->tokens = ints, g->parents = ints + width, g->depths = ints + 2 * width;
    g->log_probs = (float *)(ints + 3 * width), g->cells = copies ? ints + 4 * width : NULL;
    g->n_places = copies ? copies->n_places : 0;
    g->trust = rates ? copy_trust(rates) : 1.0;
    g->far = -log(copy_least);
    if (draft && !draft->asked) cursors = (size_t)draft->n_depths * (draft->pairs ? draft->n_ranks : 1);
    // the children that wait of a node are its votes and one of the draft
    g->heap = malloc(width * (g->n_places + 1) * sizeof(struct entry));
    g->nodes = malloc(width * sizeof(struct node));
    g->offers = malloc((width * g->n_places + 1) * sizeof(struct offer));
    g->taken = malloc((width * g->n_places + 1) * sizeof(int32_t));
    g->rows = malloc((width < cursors || !cursors ? width : cursors) * sizeof(struct row *));
    g->known = calloc(cursors + 1, sizeof(struct row *));
    if (!g->heap || !g->nodes || !g->offers || !g->taken || !g->rows || !g->known) {
        release(g);
        return -1;
    }
    int has_row = draft && (draft->asked || draft->n_depths > 0);
    add(g, root, -1, 0.0, has_row ? 0 : -1, copies ? ~(uint64_t)0 : 0, -1, 0);
    return 0;
}

int tree_grow(int32_t root, int budget, int32_t *ints, double *rests, uint8_t *sources, const struct draft *draft,
              const struct copies *copies, const struct copy_rates *rates, int order, double most_cost) {
    struct growth g;
    if (prepare(&g, root, budget, ints, rests, sources, draft, copies, rates, order, most_cost) < 0) return -1;
    int done = run(&g);
    release(&g);
    return done == -1 ? g.n : -1;
}

static const struct draft ASKED = {.asked = 1};

struct growth *growth_new(int32_t root, int budget, int32_t *ints, double *rests, uint8_t *sources,
                          const struct copies *copies, const struct copy_rates *rates, int order, double most_cost) {
    struct growth *g = malloc(sizeof(struct growth));
    if (g && prepare(g, root, budget, ints, rests, sources, &ASKED, copies, rates, order, most_cost) < 0) {
        free(g);
        return NULL;
    }
    return g;
}

int growth_run(struct growth *g) {
    return run(g);
}

int growth_give(struct growth *g, int n, const int32_t *tokens, const double *log_probs) {
    if (g->open < 0 || g->nodes[g->open].row) return 0; // nothing was asked
    struct row *row = new_row(g, n);
    if (!row) return -1;
    row->first = g->n_given + 1; // the root's is 0
    g->n_given += n;
    for (; row->n < n && log_probs[row->n] > -INFINITY; row->n++) {
        row->tokens[row->n] = tokens[row->n], row->scores[row->n] = log_probs[row->n];
    }
    g->nodes[g->open].row = row;
    return 0;
}

int growth_end(const struct growth *g) {
    return g->n;
}

void growth_free(struct growth *g) {
    if (!g) return;
    release(g);
    free(g);
}

int tree_observers(int n, const int32_t *parents, int width, uint8_t *bits) {
    size_t row = ((size_t)width + 7) / 8;
    for (int node = 0; node < width; node++) bits[node * row + node / 8] |= 1 << node % 8;
    // children hand what they collected to their parents, last child first
    for (int node = n - 1; node >= 0; node--) {
        int32_t parent = parents[node];
        if (parent == -1) continue;
        if (parent < 0 || parent >= node) return node;
        for (size_t byte = 0; byte < row; byte++) bits[parent * row + byte] |= bits[node * row + byte];
    }
    return -1;
}
