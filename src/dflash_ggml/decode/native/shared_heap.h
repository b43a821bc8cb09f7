// One heap over the candidates of several trees; see shared_heap.py.

// Entries of n lists, list i at [firsts[i], firsts[i + 1]) of gains. counts: [n], entries of each that are always taken;
// on return all taken ones. The rest as in shared_heap.py. Returns the
// number of additional entries, -1 without memory, -2 for a number out of range.
int heap_shares(int n, const double *gains, const int32_t *firsts, int32_t *counts, int room, int n_ends,
                const int32_t *ends, const double *ms, double flat);
