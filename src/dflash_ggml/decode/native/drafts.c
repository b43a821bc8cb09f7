#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "drafts.h"

// A log-probability rounded in float32 may exceed 0 by an ulp or two; anything larger was never normalised.
#define ROUNDING 1e-3f

int rows_fault(int n_depths, int n_ranks, const float *log_probs) {
    int falls = 1;
    for (int depth = 0; depth < n_depths; depth++) {
        const float *row = log_probs + (size_t)depth * n_ranks;
        for (int i = 0; i < n_ranks; i++) {
            if (!(row[i] <= ROUNDING)) return 1;
            if (i && row[i] > row[i - 1]) falls = 0;
        }
    }
    return falls ? 0 : 2;
}

int pairs_fault(size_t n, const float *pairs) {
    int found = 0;
    for (size_t i = 0; i < n; i++) found |= pairs[i] != pairs[i];
    return found;
}

double row_mass(const struct draft *draft, int depth) {
    const float *scores = draft->log_probs + (size_t)depth * draft->n_ranks;
    double mass = 0;
    for (int i = 0; i < draft->n_ranks; i++) mass += exp((double)scores[i]);
    // other tokens have the remaining probability; rounding must not make it negative
    return fmin(mass > 0 ? log(mass) : 0, 0);
}

int pairs_after(const struct draft *draft, int depth, int index, double mass, int32_t *tokens, int32_t *ranks,
                double *log_probs) {
    int k = draft->n_ranks, n = 0;
    const int32_t *ids = draft->ids + (size_t)depth * k;
    const float *scores = draft->log_probs + (size_t)depth * k;
    const float *pairs = draft->pairs + ((size_t)depth * k + index) * k;
    double best = -INFINITY, total = 0;
    for (int i = 0; i < k; i++) {
        double joint = (double)scores[i] + pairs[i];
        if (joint > best) best = joint;
    }
    for (int i = 0; i < k; i++) total += exp((double)scores[i] + pairs[i] - best);
    double shift = mass - log(total);
    for (int i = 0; i < k; i++) {
        double joint = (double)scores[i] + pairs[i] - best + shift;
        if (!(joint > -INFINITY)) continue;
        int at = n++;
        for (; at > 0 && log_probs[at - 1] < joint; at--) log_probs[at] = log_probs[at - 1], ranks[at] = ranks[at - 1];
        log_probs[at] = joint, ranks[at] = i;
    }
    for (int i = 0; i < n; i++) tokens[i] = ids[ranks[i]];
    return n;
}

// A row with capacity for n candidates.
static struct row *new_row(struct reading *reading, int n) {
    struct row *row = malloc(sizeof(struct row) + (n > 0 ? n : 1) * (sizeof(double) + 2 * sizeof(int32_t)));
    if (!row) return NULL;
    row->n = 0, row->other = -1, row->next = reading->rows;
    row->tokens = (int32_t *)(row->scores + n), row->cursors = row->tokens + n;
    return reading->rows = row;
}

int32_t reading_open(struct reading *reading, const struct draft *draft) {
    *reading = (struct reading){.draft = draft};
    if (!draft) return -1;
    if (!draft->n_parts) {
        size_t cursors = (size_t)draft->n_depths * (draft->pairs ? draft->n_ranks : 1);
        reading->known = calloc(cursors + 1, sizeof(struct row *));
        if (draft->pairs) reading->masses = malloc((draft->n_depths + 1) * sizeof(double));
        if (!reading->known || (draft->pairs && !reading->masses)) return -2;
        for (int depth = 0; draft->pairs && depth < draft->n_depths; depth++) reading->masses[depth] = NAN;
        return draft->n_depths ? 0 : -1;
    }
    reading->parts = calloc(draft->n_parts, sizeof(struct reading));
    reading->spots = malloc(draft->n_parts * sizeof(int32_t));
    if (!reading->parts || !reading->spots) return -2;
    reading->n_spots = reading->room = 1;
    for (int i = 0; i < draft->n_parts; i++) {
        if ((reading->spots[i] = reading_open(&reading->parts[i], draft->parts[i])) == -2) return -2;
    }
    return 0;
}

void reading_close(struct reading *reading) {
    for (struct row *row = reading->rows, *next; row; row = next) {
        next = row->next;
        free(row);
    }
    for (int i = 0; reading->parts && i < reading->draft->n_parts; i++) reading_close(&reading->parts[i]);
    free(reading->parts);
    free(reading->spots);
    free(reading->known);
    free(reading->masses);
}

// Moves the last of n candidates to its sorted position; stable for ties.
static void sort_in(struct row *row, int n) {
    double score = row->scores[n - 1];
    int32_t token = row->tokens[n - 1], cursor = row->cursors[n - 1];
    int at = n - 1;
    for (; at > 0 && row->scores[at - 1] < score; at--) {
        row->scores[at] = row->scores[at - 1];
        row->tokens[at] = row->tokens[at - 1], row->cursors[at] = row->cursors[at - 1];
    }
    row->scores[at] = score, row->tokens[at] = token, row->cursors[at] = cursor;
}

// The mean of the distributions of the drafts that reach this node.
static const struct row *mean_row(struct reading *reading, int32_t cursor) {
    int n_parts = reading->draft->n_parts, most = 0, speaking = 0;
    for (int i = 0; i < n_parts; i++) {
        int32_t at = reading->spots[(size_t)cursor * n_parts + i];
        if (at < 0) continue;
        const struct row *part = reading_at(&reading->parts[i], at);
        if (!part) return NULL;
        most += part->n, speaking += part->n > 0;
    }
    struct row *row = new_row(reading, most);
    if (!row) return NULL;
    if (reading->n_spots + most > reading->room) {
        size_t room = 2 * ((size_t)reading->n_spots + most);
        int32_t *spots = room < INT32_MAX ? realloc(reading->spots, room * n_parts * sizeof(int32_t)) : NULL;
        if (!spots) return NULL;
        reading->spots = spots, reading->room = (int32_t)room;
    }
    int32_t first = reading->n_spots;
    for (int i = 0; i < n_parts; i++) {
        int32_t at = reading->spots[(size_t)cursor * n_parts + i];
        const struct row *part = at < 0 ? NULL : reading_at(&reading->parts[i], at);
        for (int rank = 0; part && rank < part->n; rank++) {
            int same = 0;
            while (same < row->n && row->tokens[same] != part->tokens[rank]) same++;
            int32_t *spot = reading->spots + (size_t)(first + same) * n_parts;
            if (same == row->n) {
                row->tokens[same] = part->tokens[rank], row->cursors[same] = first + same, row->scores[same] = 0;
                for (int j = 0; j < n_parts; j++) spot[j] = -1;
                row->n++;
            }
            row->scores[same] += exp(part->scores[rank]);
            spot[i] = part->cursors[rank];
        }
    }
    reading->n_spots += row->n;
    for (int i = 1; i < row->n; i++) sort_in(row, i + 1);
    while (row->n && !(row->scores[row->n - 1] > 0)) row->n--;
    for (int i = 0; i < row->n; i++) row->scores[i] = log(row->scores[i] / speaking);
    return row;
}

const struct row *reading_at(struct reading *reading, int32_t cursor) {
    const struct draft *draft = reading->draft;
    if (draft->n_parts) return mean_row(reading, cursor);
    if (reading->known[cursor]) return reading->known[cursor];
    int k = draft->n_ranks, depth = draft->pairs ? cursor / k : cursor, goes_on = depth + 1 < draft->n_depths;
    struct row *row = new_row(reading, k);
    if (!row) return NULL;
    if (draft->pairs) {
        double *mass = &reading->masses[depth];
        if (isnan(*mass)) *mass = row_mass(draft, depth);
        row->n = pairs_after(draft, depth, cursor % k, *mass, row->tokens, row->cursors, row->scores);
        for (int i = 0; i < row->n; i++) row->cursors[i] = goes_on ? (depth + 1) * k + row->cursors[i] : -1;
    } else {
        const float *scores = draft->log_probs + (size_t)depth * k;
        memcpy(row->tokens, draft->ids + (size_t)depth * k, k * sizeof(int32_t));
        if (goes_on) row->other = depth + 1; // a plain row continues below any token
        for (; row->n < k && scores[row->n] > -INFINITY; row->n++) {
            row->scores[row->n] = scores[row->n], row->cursors[row->n] = row->other;
        }
    }
    return reading->known[cursor] = row;
}
