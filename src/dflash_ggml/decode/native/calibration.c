#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "calibration.h"

#define PRIOR 8.0      // weight of earlier sequences, in samples
#define OWN_WORD 16.0  // weight of the draft's own probability without earlier sequences, in samples
#define KEPT 400.0     // samples of a cell after which old ones fade
#define TREND_RATE 0.05 // logits per unit of surprise
#define TREND_MOST 5.0
#define SURE (1 - 1e-6)

_Static_assert(N_DEPTHS * N_BUCKETS == N_COUNTS, "a cell for each depth and bucket");

// The cell of a depth and a log-probability: 1 to 0.84, 0.71, 0.59, 0.5, then halves.
static int cell_of(int depth, double log_prob) {
    double halvings = -log_prob * (1 / log(2));
    double bucket = halvings < 1 ? 4 * halvings : 3 + halvings;
    // the last one is that of -infinity and NaN too
    int at = bucket < N_BUCKETS - 1 ? (bucket > 0 ? (int)bucket : 0) : N_BUCKETS - 1;
    return ((depth < N_DEPTHS ? depth : N_DEPTHS) - 1) * N_BUCKETS + at;
}

// The factor of a probability for a trend, given as exp(trend).
static double moved(double probability, double lift) {
    return probability < SURE ? lift / (1 - probability + probability * lift) : 1.0;
}

// The prior counts as additional samples.
static void correct(struct calibration *c, int cell) {
    double before = c->prior ? c->prior->base[cell] : 0.0, slope = c->prior ? c->prior->slope[cell] : 1.0;
    double prior = c->prior ? PRIOR : OWN_WORD;
    double weight = prior / (c->tried[cell] + prior);
    c->base[cell] = c->hits[cell] / (c->tried[cell] + prior) + weight * before;
    c->slope[cell] = weight * slope;
}

void calibration_init(struct calibration *c, struct calibration *prior) {
    *c = (struct calibration){.prior = prior};
    for (int cell = 0; cell < N_COUNTS; cell++) correct(c, cell);
}

static void count(struct calibration *c, int cell, int is_right) {
    if (c->prior) count(c->prior, cell, is_right);
    double fading = c->tried[cell] < KEPT ? 1.0 : KEPT / (KEPT + 1);
    c->tried[cell] = fading * (c->tried[cell] + 1);
    c->hits[cell] = fading * (c->hits[cell] + is_right);
    correct(c, cell);
}

static int is_tree(int n, const int32_t *parents, const int32_t *depths) {
    if (n < 1) return 0;
    for (int node = 1; node < n; node++) {
        if (parents[node] < 0 || parents[node] >= node || depths[node] < 1) return 0;
    }
    return 1;
}

int calibration_paths(const struct calibration *c, int n, const int32_t *parents, const int32_t *depths,
                      const float *log_probs, const int32_t *cells, const double *rests, double trust,
                      double *probabilities) {
    if (!is_tree(n, parents, depths)) return -3;
    double *sums = calloc(n, sizeof(double)), lift = exp(c->trend);
    if (!sums) return -1;
    probabilities[0] = 1.0;
    for (int node = 1; node < n; node++) {
        int32_t parent = parents[node];
        double log_prob = (double)log_probs[node] - log_probs[parent], promised = exp(log_prob);
        probabilities[node] = promised;
        if (cells) {
            if (cells[node] >= 0) continue; // votes are calibrated already
            if (rests[parent] > 0) promised /= rests[parent] * trust;
            log_prob = log(fmax(fmin(promised, 1.0), 1e-30));
            promised = exp(log_prob);
        }
        int cell = cell_of(depths[node], log_prob);
        sums[parent] += probabilities[node] = c->base[cell] + c->slope[cell] * promised;
    }
    // at most one child of a node is right: they share the correction
    for (int node = 1; node < n; node++) {
        int32_t parent = parents[node];
        double total = sums[parent], path = probabilities[parent];
        if (!cells) {
            probabilities[node] *= total < SURE ? path * lift / (1 - total + total * lift) : path;
            continue;
        }
        if (cells[node] < 0) probabilities[node] *= (rests[parent] > 0 ? rests[parent] : 1.0) * moved(total, lift);
        probabilities[node] *= path;
    }
    free(sums);
    return 0;
}

int calibration_paths_each(int n, struct calibration *const *calibrations, const int32_t *widths,
                           const int32_t *const *parents, const int32_t *const *depths, const float *const *log_probs,
                           double *probabilities) {
    for (int i = 0; i < n; probabilities += widths[i++]) {
        if (calibrations[i]) {
            int done = calibration_paths(calibrations[i], widths[i], parents[i], depths[i], log_probs[i], NULL, NULL, 1.0,
                                         probabilities);
            if (done < 0) return done;
        } else {
            for (int node = 0; node < widths[i]; node++) probabilities[node] = exp(log_probs[i][node]);
        }
    }
    return 0;
}

// Statistics of a visited node. expected: total probability of its children, of which `right` were accepted.
struct visited {
    double expected, right;
    uint8_t counts, is_kept;
};

int calibration_observe(struct calibration *c, int n, const int32_t *parents, const int32_t *depths,
                        const float *log_probs, const int32_t *cells, const double *rests, double trust,
                        const int32_t *kept, int n_kept, int n_visited) {
    if (!is_tree(n, parents, depths)) return -3;
    for (int i = 0; i < n_kept; i++) {
        if (kept[i] < 0 || kept[i] >= n) return -3;
    }
    struct visited *nodes = calloc(n, sizeof(struct visited));
    if (!nodes) return -1;
    for (int i = 0; i < n_kept; i++) {
        nodes[kept[i]].is_kept = 1;
        if (i < n_visited) nodes[kept[i]].counts = 1;
        if (i < n_kept - 1) nodes[kept[i]].right = 1.0;
    }
    for (int i = 1; i < n_kept && cells; i++) { // where lookup was right, nothing is known about the draft
        if (kept[i] > 0 && cells[kept[i]] >= 0) nodes[parents[kept[i]]].counts = 0;
    }
    for (int node = 1; node < n; node++) {
        int32_t parent = parents[node];
        if (!nodes[parent].counts || (cells && cells[node] >= 0)) continue;
        double log_prob = (double)log_probs[node] - log_probs[parent];
        if (cells && rests[parent] > 0) log_prob = fmin(log_prob - log(rests[parent] * trust), 0.0);
        int cell = cell_of(depths[node], log_prob);
        nodes[parent].expected += c->base[cell] + c->slope[cell] * exp(log_prob);
        count(c, cell, nodes[node].is_kept);
    }
    for (int i = 0; i < n_visited && i < n_kept; i++) {
        struct visited *node = &nodes[kept[i]];
        if (!node->counts || node->expected == 0) continue;
        double p = node->expected;
        double surprise = node->right - fmin(p * moved(p, exp(c->trend)), 1.0);
        c->trend = fmin(fmax(c->trend + TREND_RATE * surprise, -TREND_MOST), TREND_MOST);
    }
    free(nodes);
    return 0;
}
