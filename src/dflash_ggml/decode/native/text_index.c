#include <stdint.h>
#include <string.h>

#include "text_index.h"

#define PRIME 1500450271u

static const int orders[TEXT_ORDERS] = {6, 2}; // the shorter is asked where the longer finds nothing

// What a prime leaves of the tokens up to `end`, side by side as one number, the newest on top.
static uint32_t slot(const struct text_index *index, const int32_t *end, int order) {
    uint64_t rest = 0;
    for (int i = 1; i <= order; i++) rest = (rest << 32 | (uint32_t)end[-i]) % PRIME;
    return (uint32_t)rest & (uint32_t)(index->slots - 1);
}

int text_index_extend(struct text_index *index, const int32_t *ids, int n) {
    if (n < 0 || n > index->capacity - index->n || n > index->slots - index->n) return -1;
    memcpy(index->ids + index->n, ids, (size_t)n * sizeof(int32_t));
    for (int o = 0; o < TEXT_ORDERS; o++) {
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

int text_index_add(struct text_index *index, int32_t id) {
    return text_index_extend(index, &id, 1);
}

void text_index_cut(struct text_index *index, int n) {
    for (; index->n > n && index->n > 0; index->n--) {
        for (int o = 0; o < TEXT_ORDERS; o++) {
            if (index->n >= orders[o]) {
                index->newest[o][slot(index, index->ids + index->n, orders[o])] = index->before[o][index->n];
            }
        }
    }
}

int text_index_find(const struct text_index *index, const int32_t *tail, int have, int32_t *places, int32_t *lengths) {
    const int32_t *end = tail + have;
    int found = 0, matched = 0;
    for (int o = 0; o < TEXT_ORDERS && !found; o++) {
        if (have < orders[o]) continue;
        int32_t place = index->newest[o][slot(index, end, orders[o])];
        for (int hop = 0; place > 0 && place <= index->n && hop < TEXT_HOPS && matched < TEXT_ENOUGH; hop++) {
            int length = 0, most = have < place ? have : place;
            if (most > TEXT_LONGEST) most = TEXT_LONGEST;
            while (length < most && index->ids[place - 1 - length] == end[-1 - length]) length++;
            if (length >= orders[o]) {
                places[found] = place, lengths[found++] = length;
                matched += length;
            }
            place = index->before[o][place];
        }
    }
    return found;
}

int text_continuations(const struct text_index *text, const struct text_index *past, int32_t pending, int depth, int most,
                       int32_t *windows, int32_t *ends, int32_t *matched) {
    int32_t tail[TEXT_LONGEST], places[2 * TEXT_HOPS], lengths[2 * TEXT_HOPS];
    int have = text->n < TEXT_LONGEST - 1 ? text->n : TEXT_LONGEST - 1, n = 0;
    memcpy(tail, text->ids + text->n - have, (size_t)have * sizeof(int32_t));
    tail[have++] = pending;
    int own = text_index_find(text, tail, have, places, lengths);
    int all = own + text_index_find(past, tail, have, places + own, lengths + own);
    int order[2 * TEXT_HOPS];
    for (int i = 0; i < all; i++) {
        int at = i;
        // where not all can stay, the longest come first, and of equals the newest
        for (; all > most && at > 0 && lengths[order[at - 1]] < lengths[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; i < all && i < most; i++) {
        int is_own = order[i] < own;
        const struct text_index *from = is_own ? text : past;
        int32_t place = places[order[i]], *window = windows + (size_t)n * depth;
        int left = from->n - place, end = left < 0 ? 0 : left < depth ? left : depth;
        memcpy(window, from->ids + place, (size_t)end * sizeof(int32_t));
        if (is_own && end < depth) {
            int period = end + 1;
            window[end] = pending;
            for (end++; end < depth; end++) window[end] = window[end - period];
        }
        if (end) ends[n] = end, matched[n++] = lengths[order[i]];
    }
    return n;
}
