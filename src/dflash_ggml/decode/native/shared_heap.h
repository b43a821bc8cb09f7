// One heap over the candidates of several trees; see shared_heap.py.

// Entries of n lists, list i at [firsts[i], firsts[i + 1]) of gains. counts: [n], how many of each are in anyhow; on return all that
// are. The rest as shared_heap.py says. Returns the entries beside those that were in, -1 without memory, -2 where a number lies
// outside of its range.
int heap_shares(int n, const double *gains, const int32_t *firsts, int32_t *counts, int room, int n_ends,
                const int32_t *ends, const double *ms, double flat);
