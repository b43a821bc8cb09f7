// How often copies were right; see lookup.py.

#define N_VOTES 6 // kinds of votes
#define N_DRAFT 5 // no draft beside them, and four of what it says
#define N_CELLS 210

extern const double copy_most;  // of the probability that votes may take
extern const double copy_least; // likelihood of a copied path below which it is not followed

// Of one text and, by `prior`, of those before it.
struct copy_rates {
    double tried[N_CELLS], hits[N_CELLS];
    double own[N_CELLS];            // rates without the trend
    double trend;                   // of the text, in logits
    double draft_right, draft_said; // where no vote was right: of a draft's candidates; kept by the one without a prior
    struct copy_rates *prior;
};

void copy_rates_init(struct copy_rates *rates, struct copy_rates *prior);

// The cell of votes for a token behind a match, and of one of which a draft says that it comes with
// probability `said`.
int copy_cell(int matched, int vote);
int copy_cell_beside(int cell, double said);

// The rate of a cell now, NaN for one that is none.
double copy_rate(const struct copy_rates *rates, int cell);

// What a draft's word is worth where votes have one, at most 1.
double copy_trust(const struct copy_rates *rates);

// Counts samples: cells, and whether the copy was right. -1 without memory, -2 where a cell is none: nothing
// is counted then.
int copy_rates_learn(struct copy_rates *rates, int n, const int32_t *cells, const uint8_t *are_right);

// Counts the votes at the visited nodes of a merged tree, and what the draft's own children promised where
// none was right. parents, log_probs, cells, rests: [n]; kept: [n_kept] nodes, the root first, of which the
// walk came to the first n_visited. Returns as copy_rates_learn does, -3 where a node is none.
int copy_rates_observe(struct copy_rates *rates, int n, const int32_t *parents, const float *log_probs,
                       const int32_t *cells, const double *rests, double trust, const int32_t *kept, int n_kept,
                       int n_visited);
