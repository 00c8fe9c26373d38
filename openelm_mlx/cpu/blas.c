/* cblas_sgemm for MLX's CPU backend, in front of the OpenBLAS that NumPy brings.
 *
 * MLX calls cblas_sgemm for every float32 matrix product, also for the few rows of a decode step or a short prompt. There
 * the weights are used a few times each and memory sets the pace, but OpenBLAS's gemm first packs them, which reads and
 * writes them once more. Products of at most MOST_ROWS rows are therefore computed here, straight from the weights as
 * they lie; all others are OpenBLAS's. So are products with weights in bfloat16, which cblas_sgemm has no type for: see
 * openelm_bfloat16_alpha.
 *
 * Either kind is cut into pieces, handed out to whichever thread is free, so that a thread that the system takes away
 * for a while (the machine has other work) delays one piece and not the whole product. OpenBLAS computes a piece in the
 * thread that asks for it: its own threads have fixed shares and wait for each other without sleeping, and of two
 * programs at once each would keep the other's from the processors.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
enum { MOST_ROWS = 48 };  /* From here on packing the weights pays. */
enum { SMALL = 1 << 16 };  /* Weights below which waking other threads costs more than it saves. */
enum { PIECE = 1 << 16 };  /* Weights in a piece: 256 KiB, which the second cache holds. */
enum { LEAST_BLOCK = 1 << 18 };  /* Multiplications in a piece of OpenBLAS's: some microseconds. */
enum { LONG_BLOCK = 1 << 28 };   /* Some milliseconds, as long as the system lets another program run. */
enum { LARGE_BLOCK = 1 << 20 };  /* Numbers of C in one: from here on packing costs next to nothing. */
enum { EXPANDED_ROWS = 768 };    /* Rows of bfloat16 weights that are floats at once. */
enum { LINE = 16 };              /* Blocks begin at multiples of it, as OpenBLAS's own do. */

typedef void gemm_fn(int order, int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                     int64_t lda, const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

static gemm_fn *openblas_gemm;
static int (*openblas_threads)(void);
static void (*openblas_set_threads)(int);
static int thread_count = 1;

/* C (m, n) = alpha A (m, k) B + beta C. B is (n, k) in `dots`, (k, n) in `sums`, for OpenBLAS as `ta` and `tb` say. */
typedef struct {
    int ta, tb;
    int64_t m, n, k;
    float alpha;
    const float *a;
    int64_t lda;
    const void *b; /* Floats, or where `half` is set words of two bfloat16s, and k and ldb count words. */
    int64_t ldb;
    float beta;
    float *c;
    int64_t ldc;
    int half;
    int64_t rows, columns; /* Of C in a piece. */
    const float *packed;   /* A for `dots`, see `pack`; NULL where OpenBLAS computes. */
    int64_t skew;
} product;

/* Vectors as wide as the processor's, and accumulators for as many rows as its registers hold. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 3 };
#else
enum { LANES = 4, ROWS = 6 };
#endif
enum { AT_ONCE = 4 }; /* Rows of the weights. */
typedef float vec __attribute__((vector_size(LANES * sizeof(float)), may_alias));
typedef int32_t mask __attribute__((vector_size(LANES * sizeof(float))));

typedef uint32_t words __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

#if defined(__AVX512F__)
static const mask lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX__)
static const mask lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const mask lane_numbers = {0, 1, 2, 3};
#endif

/* Lane i of the result is lane i + by of `v`, round and round. */
static inline mask rotated(mask v, int64_t by) {
#if defined(__clang__)
    int32_t twice[2 * LANES];
    *(words *)twice = *(words *)(twice + LANES) = (words)v;
    return (mask)*(words *)(twice + by % LANES);
#else
    return __builtin_shuffle(v, (lane_numbers + (int32_t)by) & (LANES - 1));
#endif
}

static inline float total(vec v) {
    for (int width = LANES / 2; width; width /= 2) v += (vec)rotated((mask)v, width);
    return v[0];
}

/* Loads that straddle two lines of the cache take twice as long, and what malloc returns begins in the middle of one.
 * So a row of the weights is read as: what comes before `skew`, where a line begins, in one vector; whole aligned vectors
 * from there; what is left in one vector more. The first and the last are read from where the row begins and ends, and
 * rotated so that element i is always in lane (i - skew) % LANES, with zeros in the lanes they do not fill (what is read
 * there may be infinite). A is copied into the same vectors, those of ROWS rows side by side: every tile reads them in
 * order. `total` goes round and round the lanes, so what is added to what, and when, does not depend on `skew`. */
static int64_t vectors(const product *p) { return 2 + (p->k - p->skew) / LANES; }

static inline int64_t aligned_end(const product *p) { return p->skew + (vectors(p) - 2) * LANES; }

static inline mask from_lane(int64_t first) {
    return lane_numbers >= (int32_t)first;
}

/* Weights in a word: a float, or two bfloat16s, the first of them in the lower half. */
static inline int parts(int half) { return half ? 2 : 1; }

static int64_t packed_floats(const product *p) {
    return (p->m + ROWS - 1) / ROWS * ROWS * vectors(p) * LANES * parts(p->half);
}

static void pack(product *p, float *to) {
    const int64_t count = vectors(p);
    const int in_word = parts(p->half);
    p->packed = to;
    for (int64_t row = 0; row < p->m; row += ROWS) {
        const int rows = p->m - row < ROWS ? p->m - row : ROWS;
        for (int64_t v = 0; v < count; v++)
            for (int r = 0; r < rows; r++)
                for (int part = 0; part < in_word; part++) {
                    const float *a = p->a + (row + r) * p->lda + part;
                    const int64_t at = p->skew + (v - 1) * LANES; /* Below 0 and beyond k there are no words. */
                    for (int64_t i = at; i < at + LANES; i++) *to++ = i < 0 || i >= p->k ? 0 : a[i * in_word];
                }
    }
}

/* Sums for a piece of the weights' rows and for ROWS rows of A, kept together: rows of C can lie so that all of them
 * fall on the same few lines of the cache. */
enum { MOST_COLUMNS = 256 };
typedef float sums_of_piece[ROWS][MOST_COLUMNS];

static inline __attribute__((always_inline)) void add(vec sum[ROWS][AT_ONCE], const vec *x, const words *w,
                                                      const int m, const int n, const int half) {
    for (int s = 0; s < n; s++) {
        const vec first = (vec)(half ? w[s] << 16 : w[s]), second = (vec)(w[s] & 0xffff0000u);
        for (int r = 0; r < m; r++) {
            sum[r][s] += x[r * parts(half)] * first;
            if (half) sum[r][s] += x[r * 2 + 1] * second;
        }
    }
}

static inline words load(const uint32_t *from) { return *(const words *)from; }

/* `m` rows of A from `row` on, times `n` rows of the weights from `column` on. With both numbers known to the compiler
 * the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const product *p, int row, const int m, int64_t column,
                                                       const int n, const int half, sums_of_piece out, int64_t at) {
    const int64_t k = p->k, ldb = p->ldb, count = vectors(p), last = k - LANES;
    const uint32_t *b = (const uint32_t *)p->b + column * ldb, *next = b + AT_ONCE * ldb;
    const vec *x = (const vec *)p->packed + row * count * parts(half);
    const mask head = from_lane(LANES - p->skew), tail = ~from_lane(k - aligned_end(p));
    vec sum[ROWS][AT_ONCE] = {{{0}}};
    words w[AT_ONCE];
    for (int s = 0; s < n; s++) w[s] = (words)(rotated((mask)load(b + s * ldb), p->skew) & head);
    add(sum, x, w, m, n, half);
    for (int64_t v = 1, i = p->skew; v < count - 1; v++, i += LANES) {
        x += m * parts(half);
        for (int s = 0; s < n; s++) {
            w[s] = load(b + s * ldb + i);
            if (row == 0) __builtin_prefetch(next + s * ldb + i); /* What comes next, at every place. */
        }
        add(sum, x, w, m, n, half);
    }
    for (int s = 0; s < n; s++)
        w[s] = (words)(rotated((mask)load(b + s * ldb + last), aligned_end(p) - last) & tail);
    add(sum, x + m * parts(half), w, m, n, half);
    for (int r = 0; r < m; r++)
        for (int s = 0; s < n; s++)
            out[r][at + s] = total(sum[r][s]);
}

typedef void tiles_fn(const product *, int row, int64_t first, int64_t count, sums_of_piece out);
#define TILES(NAME, M, HALF)                                                                                \
    static void NAME(const product *p, int row, int64_t first, int64_t count, sums_of_piece out) {          \
        int64_t j = 0;                                                                                      \
        for (; j + AT_ONCE <= count; j += AT_ONCE) tile(p, row, M, first + j, AT_ONCE, HALF, out, j);       \
        for (; j < count; j++) tile(p, row, M, first + j, 1, HALF, out, j);                                 \
    }
#define BOTH_TILES(M) TILES(tiles_##M, M, 0) TILES(half_tiles_##M, M, 1)
BOTH_TILES(1)
BOTH_TILES(2)
BOTH_TILES(3)
#if defined(__AVX__) && !defined(__AVX512F__)
static tiles_fn *const tiles[2][ROWS + 1] = {
    {0, tiles_1, tiles_2, tiles_3},
    {0, half_tiles_1, half_tiles_2, half_tiles_3},
};
#else
BOTH_TILES(4)
BOTH_TILES(5)
BOTH_TILES(6)
static tiles_fn *const tiles[2][ROWS + 1] = {
    {0, tiles_1, tiles_2, tiles_3, tiles_4, tiles_5, tiles_6},
    {0, half_tiles_1, half_tiles_2, half_tiles_3, half_tiles_4, half_tiles_5, half_tiles_6},
};
#endif

/* Columns of C that one piece makes: the weights behind them stay in the nearest caches while all of A passes. */
static int64_t columns_of_piece(const product *p) {
    const int64_t columns = PIECE / p->k & ~(int64_t)(AT_ONCE - 1);
    return columns < AT_ONCE ? AT_ONCE : columns > MOST_COLUMNS ? MOST_COLUMNS : columns;
}

static void dots(const product *p, int64_t first, int64_t count) {
    sums_of_piece sums;
    for (int64_t row = 0; row < p->m; row += ROWS) {
        const int rows = p->m - row < ROWS ? p->m - row : ROWS;
        tiles[p->half][rows](p, row, first, count, sums);
        for (int r = 0; r < rows; r++) {
            float *restrict c = p->c + (row + r) * p->ldc + first;
            for (int64_t j = 0; j < count; j++) c[j] = p->alpha * sums[r][j] + (p->beta == 0 ? 0 : p->beta * c[j]);
        }
    }
}

/* Attention's weights times values: few columns, which stay in the nearest cache while B is read once. */
static void sums(const product *p) {
    for (int r = 0; r < p->m; r++) {
        float *restrict c = p->c + r * p->ldc;
        for (int64_t j = 0; j < p->n; j++) c[j] = p->beta == 0 ? 0 : p->beta * c[j];
    }
    for (int64_t i = 0; i < p->k; i++) {
        const float *restrict b = (const float *)p->b + i * p->ldb;
        for (int r = 0; r < p->m; r++) {
            float *restrict c = p->c + r * p->ldc;
            const float scale = p->alpha * p->a[r * p->lda + i];
            for (int64_t j = 0; j < p->n; j++) c[j] += scale * b[j];
        }
    }
}

/* Room for A, packed, or for weights as floats; one for each thread. NULL when memory has run out. */
static pthread_key_t room_of_thread;  /* Frees it when the thread ends. */

static float *room_for(int64_t floats) {
    static _Thread_local float *room;
    static _Thread_local int64_t held;
    if (floats > held) {
        free(room);
        held = 0;
        if (posix_memalign((void **)&room, 64, floats * sizeof(float))) room = NULL;
        else held = floats;
        pthread_setspecific(room_of_thread, room);
    }
    return room;
}

static void without_vectors(const product *p, int64_t row, int64_t rows, int64_t first, int64_t count) {
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t j = first; j < first + count; j++) {
            float sum = 0;
            for (int64_t i = 0; i < p->k; i++) {
                const union { uint32_t word; float value; } w = {
                    (uint32_t)((const uint16_t *)p->b)[j * p->ldb + i] << 16};
                sum += p->a[r * p->lda + i] * w.value;
            }
            p->c[r * p->ldc + j] = sum;
        }
}

/* OpenBLAS's, which gets bfloat16 weights as floats. */
static void block(const product *p, int64_t row, int64_t rows, int64_t first, int64_t count) {
    const float *a = p->a + row * (p->ta == PLAIN ? p->lda : 1), *b = p->b;
    int64_t ldb = p->ldb;
    if (!p->half) {
        b += first * (p->tb == PLAIN ? 1 : ldb);
    } else {
        float *room = room_for(count * p->k);
        if (!room) {
            without_vectors(p, row, rows, first, count);
            return;
        }
        for (int64_t s = 0; s < count; s++) {
            const uint16_t *from = (const uint16_t *)p->b + (first + s) * p->ldb;
            uint32_t *restrict to = (uint32_t *)(room + s * p->k);
            for (int64_t i = 0; i < p->k; i++) to[i] = (uint32_t)from[i] << 16;
        }
        b = room;
        ldb = p->k;
    }
    openblas_gemm(ROW_MAJOR, p->ta, p->tb, rows, count, p->k, p->alpha, a, p->lda, b, ldb, p->beta,
                  p->c + row * p->ldc + first, p->ldc);
}

static inline int64_t pieces_in_row(const product *p) { return (p->n + p->columns - 1) / p->columns; }

static int64_t pieces(const product *p) { return (p->m + p->rows - 1) / p->rows * pieces_in_row(p); }

static void do_piece(const product *p, int64_t number) {
    const int64_t row = number / pieces_in_row(p) * p->rows, first = number % pieces_in_row(p) * p->columns;
    const int64_t count = p->n - first < p->columns ? p->n - first : p->columns;
    if (p->packed) dots(p, first, count);
    else block(p, row, p->m - row < p->rows ? p->m - row : p->rows, first, count);
}

/* How many threads OpenBLAS takes is one number for the process, and NumPy's too. It is 1 while there are products of
 * ours, and then what it was; reading and writing it is all that its functions do. Whoever changes it meanwhile has the
 * last word; what NumPy computes meanwhile it computes in one thread. A fork waits until there are none: the child could
 * have OpenBLAS's locks closed, and nobody to open them. */
static pthread_mutex_t borrowing = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int borrowers, forking, threads_before = 1;

static void borrow_openblas(void) {
    pthread_mutex_lock(&borrowing);
    while (forking) pthread_cond_wait(&changed, &borrowing);
    borrowers++;
    const int now = openblas_threads();
    if (now > 1) {
        threads_before = now;
        openblas_set_threads(1);
    }
    pthread_mutex_unlock(&borrowing);
}

static void give_openblas_back(void) {
    pthread_mutex_lock(&borrowing);
    if (--borrowers == 0) {
        if (threads_before > 1 && openblas_threads() == 1) openblas_set_threads(threads_before);
        threads_before = 1;
        if (forking) pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&borrowing);
}

static void before_fork(void) {
    pthread_mutex_lock(&borrowing);
    forking++;
    while (borrowers) pthread_cond_wait(&changed, &borrowing);
}

static void after_fork(void) {
    forking--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&borrowing);
}

/* The helpers. `ticket` is odd while there is a product to work at; a helper counts itself in `working` before it
 * looks at the ticket again, and whoever closes the ticket waits until nobody is counted: no helper touches a product
 * whose call has returned. */
static product shared;
static atomic_llong next_piece;
static atomic_uint ticket;
static atomic_int working, sleeping;
static int started;
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER, sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_pieces(void) {
    const int64_t count = pieces(&shared);
    for (int64_t i; (i = atomic_fetch_add(&next_piece, 1)) < count;) do_piece(&shared, i);
}

static void wait_for_a_change(unsigned seen) {
    for (int i = 0; i < 20000; i++) {  /* The next product of a decode step comes within microseconds. */
        if (atomic_load(&ticket) != seen) return;
        relax();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleeping, 1);
    while (atomic_load(&ticket) == seen) pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&sleep_lock);
}

static void *help(void *unused) {
    unsigned seen = 0;
    for (;;) {
        wait_for_a_change(seen);
        seen = atomic_load(&ticket);
        if (seen % 2 == 0) continue;
        atomic_fetch_add(&working, 1);
        if (atomic_load(&ticket) == seen) take_pieces();
        atomic_fetch_sub(&working, 1);
    }
    return unused;
}

static void after_fork_in_child(void) {  /* It has this thread alone. */
    started = forking = 0;
    atomic_store(&ticket, 0);
    atomic_store(&working, 0);
    atomic_store(&sleeping, 0);
    pthread_mutex_init(&in_use, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_mutex_init(&borrowing, NULL);
    pthread_cond_init(&changed, NULL);
}

static void start_helpers(void) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  /* Signals are for the program's own threads. */
    for (int i = 1; i < thread_count && pthread_create(&thread, NULL, help, NULL) == 0; i++) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    started = 1;
}

static void together(const product *p) {
    if (!started) start_helpers();
    shared = *p;
    atomic_store(&next_piece, 0);
    atomic_fetch_add(&ticket, 1);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_lock);
    }
    take_pieces();
    atomic_fetch_add(&ticket, 1);
    for (int i = 0; atomic_load(&working); i++) i < 20000 ? relax() : (void)sched_yield();
}

/* The pieces are the same whoever computes them, and so are the bits. */
static void compute(const product *p, int alone) {
    if (alone || thread_count < 2 || pieces(p) < 2 || pthread_mutex_trylock(&in_use)) {
        const int64_t count = pieces(p);
        for (int64_t i = 0; i < count; i++) do_piece(p, i);
    } else {
        together(p);
        pthread_mutex_unlock(&in_use);
    }
}

/* Elements of a row of B before the first that begins a vector's width in memory; 0 where rows differ in that. */
static int64_t skew_of(const product *p) {
    const int64_t past = (uintptr_t)p->b / sizeof(float) % LANES;
    return p->ldb % LANES == 0 && past ? LANES - past : 0;
}

static int few_rows(product p) {
    p.skew = skew_of(&p);
    if (p.k < 2 * LANES) return 0;
    float *room = room_for(packed_floats(&p));
    if (!room) return 0;
    pack(&p, room);
    p.rows = p.m;
    p.columns = columns_of_piece(&p);
    compute(&p, p.n * p.k < SMALL);
    return 1;
}

static inline int64_t share(int64_t whole, int64_t count) {
    return ((whole + count - 1) / count + LINE - 1) / LINE * LINE;
}

/* OpenBLAS packs A for every column of blocks and B for every row of them, and parts of rows of C are slower to write
 * than whole ones, a quarter of a number's packing for each. Every thread gets one block, and of long products at least
 * two, which even out what it loses to other programs. */
static void cut(product *p) {
    const double work = (double)p->m * p->n * p->k;
    const int64_t two_each = 2 * thread_count;
    int64_t count = thread_count;
    double best = 0;
    if (count > 1 && work < (double)count * LEAST_BLOCK) count = 1 + (int64_t)(work / LEAST_BLOCK);
    if (count > 1 && work > (double)count * LONG_BLOCK) count = two_each * (1 + p->m * p->n / (two_each * LARGE_BLOCK));
    for (int64_t down = 1; down <= count; down++) {
        const int64_t beside = count / down;
        const double packed = (double)p->k * (down * p->n * (p->half ? 2 : 1) + beside * p->m);
        const double cost = packed + (beside > 1 ? 0.25 * p->m * p->n : 0);
        if (count % down || (down > 1 && cost >= best)) continue;
        best = cost;
        p->rows = share(p->m, down);
        p->columns = share(p->n, beside);
    }
    if (p->half && p->columns > EXPANDED_ROWS) p->columns = EXPANDED_ROWS;
}

static void many_rows(product p) {
    cut(&p);
    borrow_openblas();
    compute(&p, 0);
    give_openblas_back();
}

/* Weights in bfloat16. cblas_sgemm has no type for them, and MLX's own products with them are slow, so they come under
 * the name of floats, two in one, and with an alpha that nobody else uses. A row of B is then two rows of the weights, and
 * C, whose rows are as long as B has rows, has two of its rows for one of the product; for that A has twice the rows it
 * needs, of which the first half is read. Whatever the shapes, nothing beyond the arrays that the call names is touched. */
const float openelm_bfloat16_alpha = 0x1.8bf16p+100f;

static void with_bfloat16(product p) {
    p.m /= 2;
    p.n *= 2;
    p.ldc *= 2;
    p.alpha = 1;
    p.beta = 0;
    p.half = 1;
    if (p.m < 1 || p.n < 1) return;
    if (p.m <= MOST_ROWS && p.k % 2 == 0 && (uintptr_t)p.b % sizeof(float) == 0) {
        product in_words = p;
        in_words.k /= 2;
        in_words.ldb /= 2;
        if (few_rows(in_words)) return;
    }
    many_rows(p);
}

/* Called once, before MLX is loaded. */
void openelm_blas_setup(gemm_fn *gemm, int (*get_threads)(void), void (*set_threads)(int), int threads) {
    openblas_gemm = gemm;
    openblas_threads = get_threads;
    openblas_set_threads = set_threads;
    thread_count = threads;
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    pthread_key_create(&room_of_thread, free);
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
    product p = {ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, 0, 0, 0, NULL, 0};
    if (alpha == openelm_bfloat16_alpha && order == ROW_MAJOR && ta == PLAIN && tb == TRANSPOSED && ldb == k && ldc == n) {
        with_bfloat16(p);
        return;
    }
    if (order == ROW_MAJOR && ta == PLAIN && m > 0 && m <= MOST_ROWS && n > 0 && k > 0) {
        if (tb == TRANSPOSED && few_rows(p)) return;
        if (tb == PLAIN && m <= 8 && (int64_t)n * k < 4 * SMALL) {
            sums(&p);
            return;
        }
    }
    if (m < 1 || n < 1 || ta > TRANSPOSED || tb > TRANSPOSED || (double)m * n * k < 2 * LEAST_BLOCK) {
        borrow_openblas();
        openblas_gemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        give_openblas_back();
        return;
    }
    if (order != ROW_MAJOR) p = (product){tb, ta, n, m, k, alpha, b, ldb, a, lda, beta, c, ldc, 0, 0, 0, NULL, 0};
    many_rows(p);
}
