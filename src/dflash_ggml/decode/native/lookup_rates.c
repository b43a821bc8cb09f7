#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "lookup_rates.h"

#define PRIOR 8.0         // weight of earlier sequences, in samples
#define OWN_WORD 5.0      // weight of the table below, in samples
#define KEPT 200.0        // samples of a cell after which old ones fade
#define TREND_FIRST -0.6  // of a sequence that has not repeated anything yet
#define TREND_RATE 0.5    // logits per unit of surprise
#define TREND_MOST 4.0
#define FIRST_TRUST 5.0   // weight of the draft, in samples
#define TRUST_KEPT 0.995  // of older samples
#define PER_LENGTH (N_VOTES * N_DRAFT)

const double lookup_most = 0.98;
const double lookup_least = 0.02;

#define N_LENGTHS 7
// first lengths of the buckets but for that of the shortest matches
static const int LENGTHS[N_LENGTHS - 1] = {3, 4, 6, 9, 16, 32};
static const double BY_LENGTH[N_LENGTHS] = {0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95};
// one match, two that agree, more; a majority, 25% or more, less
static const double BY_VOTE[N_VOTES] = {0.0, 0.4, 0.8, -0.3, -1.2, -2.2};
// a draft's probability of the token, below each bound and above, and what that adds in logits
static const double DRAFT_PROBS[N_DRAFT - 2] = {0.1, 0.5, 0.9};
static const double BY_DRAFT[N_DRAFT - 1] = {-0.8, 0.3, 1.3, 2.5};

_Static_assert(N_LENGTHS * PER_LENGTH == N_CELLS, "a cell for each length, kind of votes and range of the draft's probability");

static int is_cell(int cell) {
    return 0 <= cell && cell < N_CELLS;
}

// The rate of a cell before any sample.
static double first_rate(int cell) {
    double p = BY_LENGTH[cell / PER_LENGTH];
    double logit = log(p / (1 - p)) + BY_VOTE[cell % PER_LENGTH / N_DRAFT];
    if (cell % N_DRAFT) logit += BY_DRAFT[cell % N_DRAFT - 1];
    return 1 / (1 + exp(-logit));
}

void lookup_rates_init(struct lookup_rates *rates, struct lookup_rates *prior) {
    *rates = (struct lookup_rates){.prior = prior, .trend = prior ? TREND_FIRST : 0.0};
    rates->draft_right = rates->draft_promised = prior ? 0.0 : FIRST_TRUST;
    for (int cell = 0; cell < N_CELLS; cell++) rates->own[cell] = prior ? prior->own[cell] : first_rate(cell);
}

int lookup_cell(int matched, int vote) {
    int length = 0;
    while (length < N_LENGTHS - 1 && matched >= LENGTHS[length]) length++;
    return length * PER_LENGTH + vote * N_DRAFT;
}

int lookup_cell_with_draft(int cell, double promised) {
    int more = 0;
    while (more < N_DRAFT - 2 && promised >= DRAFT_PROBS[more]) more++;
    return cell + 1 + more;
}

double lookup_rate(const struct lookup_rates *rates, int cell) {
    if (!is_cell(cell)) return NAN;
    double lift = exp(rates->trend), lifted = rates->own[cell] * lift;
    return lifted / (1 - rates->own[cell] + lifted);
}

double lookup_trust(const struct lookup_rates *rates) {
    while (rates->prior) rates = rates->prior;
    return fmin(rates->draft_right / rates->draft_promised, 1.0);
}

// Counts one sample for the earlier sequences, then for this one; returns the new rate.
static double count(struct lookup_rates *rates, int cell, int is_right) {
    double before = rates->prior ? count(rates->prior, cell, is_right) : first_rate(cell);
    double worth = rates->prior ? PRIOR : OWN_WORD;
    double fading = rates->tried[cell] < KEPT ? 1.0 : KEPT / (KEPT + 1);
    rates->tried[cell] = fading * (rates->tried[cell] + 1);
    rates->hits[cell] = fading * (rates->hits[cell] + is_right);
    return rates->own[cell] = (rates->hits[cell] + worth * before) / (rates->tried[cell] + worth);
}

int lookup_rates_learn(struct lookup_rates *rates, int n, const int32_t *cells, const uint8_t *are_right) {
    double *expected = malloc((n > 0 ? n : 1) * sizeof(double)); // before any of them is counted
    if (!expected) return -1;
    for (int i = 0; i < n; i++) {
        if (!is_cell(cells[i])) {
            free(expected);
            return -2;
        }
        expected[i] = lookup_rate(rates, cells[i]);
    }
    for (int i = 0; i < n; i++) {
        rates->trend += TREND_RATE * ((are_right[i] != 0) - expected[i]);
        rates->trend = fmin(fmax(rates->trend, -TREND_MOST), TREND_MOST);
        count(rates, cells[i], are_right[i] != 0);
    }
    free(expected);
    return 0;
}

static void learn_trust(struct lookup_rates *rates, double promised, int is_right) {
    while (rates->prior) rates = rates->prior;
    rates->draft_promised = (rates->draft_promised + promised) * TRUST_KEPT;
    rates->draft_right = (rates->draft_right + is_right) * TRUST_KEPT;
}

// A node of the walk. promised: sum of the draft's own children.
struct visited {
    double promised;
    uint8_t is_visited, is_kept, counts, is_right;
};

int lookup_rates_observe(struct lookup_rates *rates, int n, const int32_t *parents, const float *log_probs,
                       const int32_t *cells, const double *rests, double trust, const int32_t *kept, int n_kept,
                       int n_visited) {
    if (n < 1) return -3;
    struct visited *nodes = calloc(n, sizeof(struct visited));
    int32_t *sampled = malloc(n * sizeof(int32_t));
    uint8_t *are_right = malloc(n);
    int done = nodes && sampled && are_right ? 0 : -1, samples = 0;
    for (int i = 0; i < n_kept && !done; i++) {
        if (kept[i] < 0 || kept[i] >= n) {
            done = -3;
            break;
        }
        nodes[kept[i]].is_kept = 1;
        if (i < n_visited) nodes[kept[i]].is_visited = 1, nodes[kept[i]].counts = rests[kept[i]] > 0;
    }
    for (int node = 1; node < n && !done; node++) {
        int32_t parent = parents[node];
        if (parent < 0 || parent >= node) {
            done = -3;
        } else if (nodes[parent].is_visited && cells[node] >= 0) {
            sampled[samples] = cells[node], are_right[samples++] = nodes[node].is_kept;
        }
    }
    if (!done) done = lookup_rates_learn(rates, samples, sampled, are_right);
    for (int node = 1; node < n && !done; node++) {
        struct visited *parent = &nodes[parents[node]];
        if (!parent->counts) continue;
        if (cells[node] < 0) {
            parent->promised += exp((double)log_probs[node] - log_probs[parents[node]]) / (rests[parents[node]] * trust);
            parent->is_right |= nodes[node].is_kept;
        } else if (nodes[node].is_kept) {
            parent->counts = 0; // a vote was right
        }
    }
    for (int i = 0; i < n_visited && i < n_kept && !done; i++) {
        struct visited *node = &nodes[kept[i]];
        if (node->counts && node->promised != 0) learn_trust(rates, node->promised, node->is_right);
    }
    free(nodes);
    free(sampled);
    free(are_right);
    return done;
}
