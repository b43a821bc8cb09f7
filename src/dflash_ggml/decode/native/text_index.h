// Where the end of a text has stood before; see text_index.py.

#define TEXT_LONGEST 48 // tokens of a match that are looked at
#define TEXT_HOPS 6     // places of one hash that are looked at, newest first
#define TEXT_ENOUGH 64  // tokens matched in sum after which no more places are looked at
#define TEXT_ORDERS 2

// A text ids [n]. For each order, newest [slots] is the last place of a hash, and before [n + 1] the one before each place, 0 for
// none. A place p stands before token p. There is room for `capacity` tokens, and slots are a power of two.
struct text_index {
    int32_t n, capacity, slots;
    int32_t *ids, *newest[TEXT_ORDERS], *before[TEXT_ORDERS];
};

// Put n tokens behind the text. Returns 0, or -1 where there is no room for them, or fewer slots than tokens.
int text_index_extend(struct text_index *index, const int32_t *ids, int n);

// Put one token behind the text, as text_index_extend.
int text_index_add(struct text_index *index, int32_t id);

// Keep the first n tokens.
void text_index_cut(struct text_index *index, int n);

// Where the last tokens of tail [have] stood before, newest first: places and lengths [TEXT_HOPS]. Returns how many.
int text_index_find(const struct text_index *index, const int32_t *tail, int have, int32_t *places, int32_t *lengths);

// What followed where the end of `text` and a token behind it stood before, in it or in `past`: of the `most` longest matches
// windows [most][depth], of which ends [most] tokens are there, and the tokens matched [most]. Returns how many; most is no more
// than 2 * TEXT_HOPS. What reaches its own beginning goes on with itself.
int text_continuations(const struct text_index *text, const struct text_index *past, int32_t pending, int depth, int most,
                       int32_t *windows, int32_t *ends, int32_t *matched);
