// Calibration of a draft's probabilities by acceptance; see calibration.py.

#define N_DEPTHS 8  // deeper ones count as the last
#define N_BUCKETS 8 // of the draft's probability
#define N_COUNTS 64

// Of one sequence and, by `prior`, of earlier ones. A probability p of a cell is corrected to base + slope * p.
struct calibration {
    double hits[N_COUNTS], tried[N_COUNTS], base[N_COUNTS], slope[N_COUNTS];
    double trend; // of the sequence, in logits
    struct calibration *prior;
};

void calibration_init(struct calibration *calibration, struct calibration *prior);

// Acceptance probability of each node of a tree [n]. cells, rests: of a merged tree, else NULL. -1
// without memory, -3 for an invalid parent or depth.
int calibration_paths(const struct calibration *calibration, int n, const int32_t *parents, const int32_t *depths,
                      const float *log_probs, const int32_t *cells, const double *rests, double trust,
                      double *probabilities);

// The same for n unmerged trees of `widths` nodes each; probabilities: concatenated. Without a
// calibration the draft's own probabilities.
int calibration_paths_each(int n, struct calibration *const *calibrations, const int32_t *widths,
                           const int32_t *const *parents, const int32_t *const *depths, const float *const *log_probs,
                           double *probabilities);

// Counts the draft's children of the visited nodes [n_visited] where no lookup vote was right. kept:
// [n_kept], these and possibly the last. Returns as calibration_paths does.
int calibration_observe(struct calibration *calibration, int n, const int32_t *parents, const int32_t *depths,
                        const float *log_probs, const int32_t *cells, const double *rests, double trust,
                        const int32_t *kept, int n_kept, int n_visited);
