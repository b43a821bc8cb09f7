// What model drafts offer; see candidates.py.

// Plain rows: ids and log_probs [n_depths][n_ranks], which fall and hold no NaN. With pairs
// [n_depths][n_ranks][n_ranks], else NULL. Or several of these side by side, parts [n_parts]. Or, asked,
// whatever is said when it is.
struct draft {
    int n_depths, n_ranks, n_parts, asked;
    const int32_t *ids;
    const float *log_probs, *pairs;
    const struct draft *const *parts;
};

// Whether rows hold NaN or values above 0, 1, or do not fall, 2; whether pairs hold NaN.
int rows_fault(int n_depths, int n_ranks, const float *log_probs);
int pairs_fault(size_t n, const float *pairs);

// The log-probability of all candidates of a depth together.
double row_mass(const struct draft *draft, int depth);

// The candidates of rows with pairs at a depth of this mass, behind the one of the depth before at `index`,
// best first: their number. tokens, ranks (indices in the row), log_probs: [n_ranks].
int pairs_after(const struct draft *draft, int depth, int index, double mass, int32_t *tokens, int32_t *ranks,
                double *log_probs);

// Candidates at a place, best first, without those of probability 0. cursors: behind each, -1 where the draft
// ends; other: behind a token that is none of them.
struct row {
    int n;
    int32_t other;
    int32_t *tokens, *cursors;
    struct row *next;
    double scores[];
};

// A draft as far as a tree has read it. known: rows by cursor; masses: of pairs, by depth, NaN where nobody
// asked. spots [n_spots][n_parts]: of several, the cursors of each behind a candidate, by its own; of one
// that is asked n_spots is how many candidates it gave.
struct reading {
    const struct draft *draft;
    struct row *rows;
    const struct row **known;
    double *masses;
    struct reading *parts;
    int32_t n_spots, room, *spots;
};

// The cursor of the root, -1 for nothing to read, -2 without memory, and then too it is to be closed.
int32_t reading_open(struct reading *reading, const struct draft *draft);
void reading_close(struct reading *reading);

// The row at a cursor that the root or a row gave; NULL without memory.
const struct row *reading_at(struct reading *reading, int32_t cursor);

// The next row of a draft that is asked: n candidates.
const struct row *reading_take(struct reading *reading, int n, const int32_t *tokens, const double *log_probs);
