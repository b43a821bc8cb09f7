// Candidates of draft models; see candidates.py.

// Plain rows: ids and log_probs [n_depths][n_ranks], descending, without NaN. With pairs
// [n_depths][n_ranks][n_ranks], else NULL. Or several drafts, parts [n_parts].
struct draft {
    int n_depths, n_ranks, n_parts;
    const int32_t *ids;
    const float *log_probs, *pairs;
    const struct draft *const *parts;
};

// Checks: rows contain NaN or values above 0: 1, are not descending: 2; pairs contain NaN.
int rows_fault(int n_depths, int n_ranks, const float *log_probs);
int pairs_fault(size_t n, const float *pairs);

// The total log-probability of all candidates of a depth.
double row_mass(const struct draft *draft, int depth);

// The candidates of rows with pairs at a depth with this mass, after candidate `index` of the depth
// before, best first; returns their number. tokens, ranks (indices in the row), log_probs: [n_ranks].
int pairs_after(const struct draft *draft, int depth, int index, double mass, int32_t *tokens, int32_t *ranks,
                double *log_probs);

// Candidates below a node, best first, without those of probability 0. cursors: after each, -1 where
// the draft ends; other: after any other token.
struct row {
    int n;
    int32_t other;
    int32_t *tokens, *cursors;
    struct row *next;
    double scores[];
};

// The rows that a tree has read so far. known: rows by cursor; masses: of pairs, by depth, NaN if not
// computed. spots [n_spots][n_parts]: of several drafts, the cursors of each after a candidate.
struct reading {
    const struct draft *draft;
    struct row *rows;
    const struct row **known;
    double *masses;
    struct reading *parts;
    int32_t n_spots, room, *spots;
};

// The cursor of the root, -1 without candidates, -2 without memory (close it then too).
int32_t reading_open(struct reading *reading, const struct draft *draft);
void reading_close(struct reading *reading);

// The row at a cursor from the root or another row; NULL without memory.
const struct row *reading_at(struct reading *reading, int32_t cursor);
