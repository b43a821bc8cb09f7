#include <stdint.h>
#include <string.h>

#include "ngram_index.h"

#define PRIME 1500450271u

static const int orders[NGRAM_ORDERS] = {6, 2}; // the shorter is tried where the longer finds nothing

// Hash of the tokens up to `end`: their concatenation as one number, the newest on top, modulo a prime.
static uint32_t slot(const struct ngram_index *index, const int32_t *end, int order) {
    uint64_t rest = 0;
    for (int i = 1; i <= order; i++) rest = (rest << 32 | (uint32_t)end[-i]) % PRIME;
    return (uint32_t)rest & (uint32_t)(index->slots - 1);
}

int ngram_index_extend(struct ngram_index *index, const int32_t *ids, int n) {
    if (n < 0 || n > index->capacity - index->n || n > index->slots - index->n) return -1;
    memcpy(index->ids + index->n, ids, (size_t)n * sizeof(int32_t));
    for (int o = 0; o < NGRAM_ORDERS; o++) {
        int32_t *newest = index->newest[o], *before = index->before[o];
        for (int end = index->n + 1; end <= index->n + n; end++) {
            before[end] = 0;
            if (end >= orders[o]) {
                uint32_t at = slot(index, index->ids + end, orders[o]);
                before[end] = newest[at];
                newest[at] = end;
            }
        }
    }
    index->n += n;
    return 0;
}

int ngram_index_add(struct ngram_index *index, int32_t id) {
    return ngram_index_extend(index, &id, 1);
}

void ngram_index_cut(struct ngram_index *index, int n) {
    for (; index->n > n && index->n > 0; index->n--) {
        for (int o = 0; o < NGRAM_ORDERS; o++) {
            if (index->n >= orders[o]) {
                index->newest[o][slot(index, index->ids + index->n, orders[o])] = index->before[o][index->n];
            }
        }
    }
}

int ngram_index_find(const struct ngram_index *index, const int32_t *tail, int have, int32_t *positions, int32_t *lengths) {
    const int32_t *end = tail + have;
    int found = 0, matched = 0;
    for (int o = 0; o < NGRAM_ORDERS && !found; o++) {
        if (have < orders[o]) continue;
        int32_t position = index->newest[o][slot(index, end, orders[o])];
        for (int hop = 0; position > 0 && position <= index->n && hop < NGRAM_HOPS && matched < NGRAM_ENOUGH; hop++) {
            int length = 0, most = have < position ? have : position;
            if (most > NGRAM_LONGEST) most = NGRAM_LONGEST;
            while (length < most && index->ids[position - 1 - length] == end[-1 - length]) length++;
            if (length >= orders[o]) {
                positions[found] = position, lengths[found++] = length;
                matched += length;
            }
            position = index->before[o][position];
        }
    }
    return found;
}

int ngram_continuations(const struct ngram_index *index, const struct ngram_index *past, int32_t pending, int depth, int most,
                       int32_t *windows, int32_t *ends, int32_t *matched) {
    int32_t tail[NGRAM_LONGEST], positions[2 * NGRAM_HOPS], lengths[2 * NGRAM_HOPS];
    int have = index->n < NGRAM_LONGEST - 1 ? index->n : NGRAM_LONGEST - 1, n = 0;
    memcpy(tail, index->ids + index->n - have, (size_t)have * sizeof(int32_t));
    tail[have++] = pending;
    int own = ngram_index_find(index, tail, have, positions, lengths);
    int all = own + ngram_index_find(past, tail, have, positions + own, lengths + own);
    int order[2 * NGRAM_HOPS];
    for (int i = 0; i < all; i++) {
        int at = i;
        // if there are too many, keep the longest, at ties the newest
        for (; all > most && at > 0 && lengths[order[at - 1]] < lengths[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; i < all && i < most; i++) {
        int is_own = order[i] < own;
        const struct ngram_index *from = is_own ? index : past;
        int32_t position = positions[order[i]], *window = windows + (size_t)n * depth;
        int left = from->n - position, end = left < 0 ? 0 : left < depth ? left : depth;
        memcpy(window, from->ids + position, (size_t)end * sizeof(int32_t));
        if (is_own && end < depth) {
            int period = end + 1;
            window[end] = pending;
            for (end++; end < depth; end++) window[end] = window[end - period];
        }
        if (end) ends[n] = end, matched[n++] = lengths[order[i]];
    }
    return n;
}
