#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "copy_rates.h"

#define PRIOR 8.0         // samples that other texts are worth for a new one
#define OWN_WORD 5.0      // samples that the table below is worth
#define KEPT 200.0        // samples of a cell after which old ones fade
#define TREND_FIRST -0.6  // of a text that has not been seen to copy
#define TREND_RATE 0.5    // logits per unit of surprise
#define TREND_MOST 4.0
#define FIRST_TRUST 5.0   // samples that a draft's own word is worth
#define TRUST_KEPT 0.995  // of older samples
#define PER_LENGTH (N_VOTES * N_DRAFT)

const double copy_most = 0.98;
const double copy_least = 0.02;

#define N_LENGTHS 7
// first lengths of the buckets but for that of the shortest matches
static const int LENGTHS[N_LENGTHS - 1] = {3, 4, 6, 9, 16, 32};
static const double BY_LENGTH[N_LENGTHS] = {0.25, 0.4, 0.5, 0.65, 0.8, 0.9, 0.95};
// one place alone, two that agree, more; a majority, a good part, less
static const double BY_VOTE[N_VOTES] = {0.0, 0.4, 0.8, -0.3, -1.2, -2.2};
// what a draft says of a token, below each and above, and what that adds in logits
static const double SAID[N_DRAFT - 2] = {0.1, 0.5, 0.9};
static const double BY_SAID[N_DRAFT - 1] = {-0.8, 0.3, 1.3, 2.5};

_Static_assert(N_LENGTHS * PER_LENGTH == N_CELLS, "a cell for each length, kind of votes and what a draft says");

static int is_cell(int cell) {
    return 0 <= cell && cell < N_CELLS;
}

// The rate of a cell before any sample.
static double first_rate(int cell) {
    double p = BY_LENGTH[cell / PER_LENGTH];
    double logit = log(p / (1 - p)) + BY_VOTE[cell % PER_LENGTH / N_DRAFT];
    if (cell % N_DRAFT) logit += BY_SAID[cell % N_DRAFT - 1];
    return 1 / (1 + exp(-logit));
}

void copy_rates_init(struct copy_rates *rates, struct copy_rates *prior) {
    *rates = (struct copy_rates){.prior = prior, .trend = prior ? TREND_FIRST : 0.0};
    rates->draft_right = rates->draft_said = prior ? 0.0 : FIRST_TRUST;
    for (int cell = 0; cell < N_CELLS; cell++) rates->own[cell] = prior ? prior->own[cell] : first_rate(cell);
}

int copy_cell(int matched, int vote) {
    int length = 0;
    while (length < N_LENGTHS - 1 && matched >= LENGTHS[length]) length++;
    return length * PER_LENGTH + vote * N_DRAFT;
}

int copy_cell_beside(int cell, double said) {
    int more = 0;
    while (more < N_DRAFT - 2 && said >= SAID[more]) more++;
    return cell + 1 + more;
}

double copy_rate(const struct copy_rates *rates, int cell) {
    if (!is_cell(cell)) return NAN;
    double lift = exp(rates->trend), lifted = rates->own[cell] * lift;
    return lifted / (1 - rates->own[cell] + lifted);
}

double copy_trust(const struct copy_rates *rates) {
    while (rates->prior) rates = rates->prior;
    return fmin(rates->draft_right / rates->draft_said, 1.0);
}

// Counts one sample for those before a text, then for the text; the rate that comes of it.
static double count(struct copy_rates *rates, int cell, int is_right) {
    double before = rates->prior ? count(rates->prior, cell, is_right) : first_rate(cell);
    double worth = rates->prior ? PRIOR : OWN_WORD;
    double fading = rates->tried[cell] < KEPT ? 1.0 : KEPT / (KEPT + 1);
    rates->tried[cell] = fading * (rates->tried[cell] + 1);
    rates->hits[cell] = fading * (rates->hits[cell] + is_right);
    return rates->own[cell] = (rates->hits[cell] + worth * before) / (rates->tried[cell] + worth);
}

int copy_rates_learn(struct copy_rates *rates, int n, const int32_t *cells, const uint8_t *are_right) {
    double *expected = malloc((n > 0 ? n : 1) * sizeof(double)); // before any of them is counted
    if (!expected) return -1;
    for (int i = 0; i < n; i++) {
        if (!is_cell(cells[i])) {
            free(expected);
            return -2;
        }
        expected[i] = copy_rate(rates, cells[i]);
    }
    for (int i = 0; i < n; i++) {
        rates->trend += TREND_RATE * ((are_right[i] != 0) - expected[i]);
        rates->trend = fmin(fmax(rates->trend, -TREND_MOST), TREND_MOST);
        count(rates, cells[i], are_right[i] != 0);
    }
    free(expected);
    return 0;
}

static void learn_trust(struct copy_rates *rates, double said, int is_right) {
    while (rates->prior) rates = rates->prior;
    rates->draft_said = (rates->draft_said + said) * TRUST_KEPT;
    rates->draft_right = (rates->draft_right + is_right) * TRUST_KEPT;
}

// What is known of a node of the walk. said: by the draft's own children.
struct visited {
    double said;
    uint8_t is_visited, is_kept, counts, is_right;
};

int copy_rates_observe(struct copy_rates *rates, int n, const int32_t *parents, const float *log_probs,
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
    if (!done) done = copy_rates_learn(rates, samples, sampled, are_right);
    for (int node = 1; node < n && !done; node++) {
        struct visited *parent = &nodes[parents[node]];
        if (!parent->counts) continue;
        if (cells[node] < 0) {
            parent->said += exp((double)log_probs[node] - log_probs[parents[node]]) / (rests[parents[node]] * trust);
            parent->is_right |= nodes[node].is_kept;
        } else if (nodes[node].is_kept) {
            parent->counts = 0; // a vote was right
        }
    }
    for (int i = 0; i < n_visited && i < n_kept && !done; i++) {
        struct visited *node = &nodes[kept[i]];
        if (node->counts && node->said != 0) learn_trust(rates, node->said, node->is_right);
    }
    free(nodes);
    free(sampled);
    free(are_right);
    return done;
}
