// Rates at which prompt lookup was right, by cell; see lookup.py.

#define N_VOTES 6 // kinds of votes
#define N_DRAFT 5 // without a draft, and four ranges of its probability
#define N_CELLS 210

extern const double lookup_most;  // most probability for votes
extern const double lookup_least; // least probability of a path to follow

// Of one sequence and, by `prior`, of earlier ones.
struct lookup_rates {
    double tried[N_CELLS], hits[N_CELLS];
    double own[N_CELLS];            // rates without the trend
    double trend;                   // of the sequence, in logits
    double draft_right, draft_promised; // of a draft's candidates where no vote was right; only without a prior
    struct lookup_rates *prior;
};

void lookup_rates_init(struct lookup_rates *rates, struct lookup_rates *prior);

// The cell of a vote after a match of so many tokens, also with the draft's probability `promised` of
// the token.
int lookup_cell(int matched, int vote);
int lookup_cell_with_draft(int cell, double promised);

// The current rate of a cell, NaN for an invalid one.
double lookup_rate(const struct lookup_rates *rates, int cell);

// The factor on a draft's probabilities where there are votes too, at most 1.
double lookup_trust(const struct lookup_rates *rates);

// Counts samples: cells, and whether the token was right. -1 without memory, -2 for an invalid cell:
// nothing is counted then.
int lookup_rates_learn(struct lookup_rates *rates, int n, const int32_t *cells, const uint8_t *are_right);

// Counts the votes at the visited nodes of a merged tree, and where none was right the draft's own children. parents,
// log_probs, cells, rests: [n]; kept: [n_kept] nodes, the root first, of which the
// walk came to the first n_visited. Returns as lookup_rates_learn does, -3 for an invalid node.
int lookup_rates_observe(struct lookup_rates *rates, int n, const int32_t *parents, const float *log_probs,
                       const int32_t *cells, const double *rests, double trust, const int32_t *kept, int n_kept,
                       int n_visited);
