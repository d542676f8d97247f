/* crc32c (Castagnoli) at the speed of the cache, and rows received under it.
 *
 * A message is a polynomial over GF(2), and its checksum the remainder by another. Blocks of it are
 * folded onto those that lie a fixed distance on, by carry-less multiplication with what that
 * distance is modulo the other polynomial; the last block goes through the processor's own crc32.
 * What is received is checksummed piece by piece, while it is still in the cache: a second pass over
 * a whole object reads it from memory once more. Optional: `tailreplay.store.checksum` does without.
 *
 * Source: Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction,
 * Intel 2009, section 3 and, for reversed bits, its appendix.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include <errno.h>
#include <immintrin.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { UNLOCKED_BYTES = 128 << 10, PIECE_BYTES = 256 << 10, MAX_PIECES = 64, WORD = 8 };
enum { WOKEN_BYTES = 512 << 10 };

static const uint32_t POLYNOMIAL = 0x82F63B78; /* reversed */

/* What multiplies the low and the high half of a block that is folded over 128, 512 and 2048 bits. */
static uint64_t over_128[2], over_512[2], over_2048[2];
static int has_wide;

/* x to the power of `n` modulo the polynomial, reversed, in the upper 32 of 33 bits. */
static uint64_t power(int n)
{
    uint32_t value = 1U << 31;
    while (n--)
        value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
    return (uint64_t)value << 1;
}

static void set_distance(uint64_t *halves, int bits)
{
    halves[0] = power(bits + 32);
    halves[1] = power(bits - 32);
}

#define SSE "sse4.2,pclmul"
#define WIDE SSE ",avx512f,vpclmulqdq"

__attribute__((target(SSE))) static uint32_t crc_small(uint32_t crc, const uint8_t *at, size_t size)
{
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        crc = (uint32_t)_mm_crc32_u64(crc, word);
    }
    for (; size; at++, size--)
        crc = _mm_crc32_u8(crc, *at);
    return crc;
}

__attribute__((target(SSE))) static inline __m128i fold(__m128i block, __m128i by, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(block, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(block, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target(SSE))) static inline __m128i load(const void *at)
{
    return _mm_loadu_si128(at);
}

/* What is left of four blocks that follow each other. */
__attribute__((target(SSE))) static inline uint32_t crc_of_blocks(const __m128i *block)
{
    __m128i by = load(over_128), all = block[0];
    for (int i = 1; i < 4; i++)
        all = fold(all, by, block[i]);
    uint64_t half[2];
    _mm_storeu_si128((__m128i *)half, all);
    return (uint32_t)_mm_crc32_u64((uint32_t)_mm_crc32_u64(0, half[0]), half[1]);
}

__attribute__((target(SSE))) static uint32_t crc_sse(uint32_t crc, const uint8_t *at, size_t size)
{
    if (size < 128)
        return crc_small(crc, at, size);
    __m128i block[4], by = load(over_512);
    for (int i = 0; i < 4; i++)
        block[i] = load(at + 16 * i);
    block[0] = _mm_xor_si128(block[0], _mm_cvtsi32_si128((int)crc));
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64)
        for (int i = 0; i < 4; i++)
            block[i] = fold(block[i], by, load(at + 16 * i));
    return crc_small(crc_of_blocks(block), at, size);
}

__attribute__((target(WIDE))) static inline __m512i fold_wide(__m512i block, __m512i by,
                                                              __m512i next)
{
    __m512i low = _mm512_clmulepi64_epi128(block, by, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(block, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* all three, exclusive */
}

__attribute__((target(WIDE))) static uint32_t crc_wide(uint32_t crc, const uint8_t *at, size_t size)
{
    if (size < 512)
        return crc_sse(crc, at, size);
    __m512i block[4], by = _mm512_broadcast_i32x4(load(over_2048));
    for (int i = 0; i < 4; i++)
        block[i] = _mm512_loadu_si512(at + 64 * i);
    __m128i first = _mm_cvtsi32_si128((int)crc);
    block[0] = _mm512_xor_si512(block[0], _mm512_zextsi128_si512(first));
    for (at += 256, size -= 256; size >= 256; at += 256, size -= 256)
        for (int i = 0; i < 4; i++)
            block[i] = fold_wide(block[i], by, _mm512_loadu_si512(at + 64 * i));
    by = _mm512_broadcast_i32x4(load(over_512));
    for (int i = 1; i < 4; i++)
        block[i] = fold_wide(block[i - 1], by, block[i]);
    __m128i last[4];
    _mm512_storeu_si512(last, block[3]);
    return crc_sse(crc_of_blocks(last), at, size);
}

/* Checksum of `size` bytes behind others whose checksum is `crc`. */
static uint32_t extended(uint32_t crc, const void *at, size_t size, int wide)
{
    return ~(wide ? crc_wide : crc_sse)(~crc, at, size);
}

static PyObject *crc32c(PyObject *module, PyObject *args)
{
    Py_buffer data;
    unsigned int crc = 0;
    int wide = 1;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*|Ip", &data, &crc, &wide))
        return NULL;
    wide = wide && has_wide;
    if (data.len < UNLOCKED_BYTES) {
        crc = extended(crc, data.buf, (size_t)data.len, wide);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = extended(crc, data.buf, (size_t)data.len, wide);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* Pages of units that lie back to back; a unit's last page may be shorter. */
static void sum_pages(const Py_buffer *data, size_t unit, size_t page, uint32_t *crc)
{
    const char *at = data->buf, *end = at + data->len;
    for (const char *unit_end; at < end; at = unit_end) {
        unit_end = (size_t)(end - at) > unit ? at + unit : end;
        for (size_t size; at < unit_end; at += size) {
            size = (size_t)(unit_end - at) > page ? page : (size_t)(unit_end - at);
            *crc++ = extended(0, at, size, has_wide);
        }
    }
}

static PyObject *tuple_of(const uint32_t *crc, Py_ssize_t count)
{
    PyObject *all = PyTuple_New(count);
    for (Py_ssize_t i = 0; all && i < count; i++) {
        PyObject *one = PyLong_FromUnsignedLong(crc[i]);
        if (!one || PyTuple_SetItem(all, i, one) < 0)
            Py_CLEAR(all);
    }
    return all;
}

static PyObject *page_checksums(PyObject *module, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t unit, page;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nn", &data, &unit, &page))
        return NULL;
    PyObject *all = NULL;
    uint32_t *crc = NULL;
    if (unit < 1 || page < 1) {
        PyErr_Format(PyExc_ValueError, "units of %zd bytes and pages of %zd, wanted at least 1",
                     unit, page);
    } else {
        Py_ssize_t pages = unit / page + !!(unit % page), left = data.len % unit;
        Py_ssize_t count = data.len / unit * pages + left / page + !!(left % page);
        crc = PyMem_Malloc(count ? (size_t)count * sizeof *crc : 1);
        if (!crc) {
            PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            sum_pages(&data, (size_t)unit, (size_t)page, crc);
            Py_END_ALLOW_THREADS
            all = tuple_of(crc, count);
        }
    }
    PyMem_Free(crc);
    PyBuffer_Release(&data);
    return all;
}

/* The product of two remainders and x^33, the latter for what reversing leaves over. */
__attribute__((target(SSE))) static uint32_t product(uint32_t one, uint32_t other)
{
    __m128i left = _mm_cvtsi32_si128((int)one), right = _mm_cvtsi32_si128((int)other);
    __m128i both = _mm_clmulepi64_si128(left, right, 0x00);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(both));
}

/* What moves a remainder on by `size` bytes, at least a word, as a factor of `product`: x to the
 * power of their bits less 33, so that the factors of two sizes make that of their sum. */
static uint32_t shift_of(size_t size)
{
    uint32_t all = (uint32_t)(power(64 + 8 * (int)(size % WORD) - 33) >> 1);
    uint32_t words = (uint32_t)(power(64 - 33) >> 1);
    for (size_t more = size / WORD - 1; more; more >>= 1, words = product(words, words))
        if (more & 1)
            all = product(all, words);
    return all;
}

static PyObject *join(PyObject *module, PyObject *args)
{
    unsigned int crc;
    PyObject *following;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "IO!n", &crc, &PyTuple_Type, &following, &size))
        return NULL;
    if (size < WORD)
        return PyErr_Format(PyExc_ValueError, "checksums of %zd bytes each, wanted %d and more",
                            size, WORD);
    uint32_t shift = shift_of((size_t)size);
    for (Py_ssize_t i = 0, count = PyTuple_Size(following); i < count; i++) {
        unsigned long other = PyLong_AsUnsignedLong(PyTuple_GetItem(following, i));
        if (other == (unsigned long)-1 && PyErr_Occurred())
            return NULL;
        crc = product(crc, shift) ^ (uint32_t)other;
    }
    return PyLong_FromUnsignedLong(crc);
}

/* Where rows go that come one unit after the other, and what has come of them; `ahead` is for the
 * first bytes behind them, if they are there already. */
struct rows {
    char *base;
    size_t unit_bytes, stride, units;
    size_t unit, at;
    struct iovec ahead;
    size_t ahead_bytes;
};

/* The next pieces of memory, as far as they are wanted at a time. */
static int next_pieces(const struct rows *rows, struct iovec *piece)
{
    size_t unit = rows->unit, at = rows->at, room = PIECE_BYTES;
    int count = 0;
    for (; unit < rows->units && room && count < MAX_PIECES; unit++) {
        size_t size = rows->unit_bytes - at < room ? rows->unit_bytes - at : room;
        piece[count++] = (struct iovec){rows->base + unit * rows->stride + at, size};
        room -= size;
        at += size;
        if (at < rows->unit_bytes)
            return count;
        at = 0;
    }
    if (unit == rows->units)
        piece[count++] = rows->ahead;
    return count;
}

static uint32_t take(struct rows *rows, size_t got, uint32_t crc)
{
    while (got) {
        if (rows->unit == rows->units) {
            rows->ahead_bytes = got;
            break;
        }
        size_t left = rows->unit_bytes - rows->at, size = left < got ? left : got;
        crc = extended(crc, rows->base + rows->unit * rows->stride + rows->at, size, has_wide);
        rows->at += size, got -= size;
        if (rows->at == rows->unit_bytes)
            rows->unit++, rows->at = 0;
    }
    return crc;
}

/* Waits for the next bytes, and sleeps until many have come: each waking costs both ends. What has
 * come after the timeout counts all the same; returns 0, or errno. */
static int await(int fd, const struct rows *rows, int timeout_ms)
{
    size_t left = (rows->units - rows->unit) * rows->unit_bytes - rows->at;
    int many = left < WOKEN_BYTES ? (int)left : WOKEN_BYTES, one = 1;
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &many, sizeof many);
    int ready = poll(&wait, 1, timeout_ms), failed = ready < 0 ? errno : 0;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
    return ready ? failed : poll(&wait, 1, 0) ? 0 : ETIMEDOUT;
}

/* Fills rows; returns 0, or errno, with 0 in `open` at the end of the stream. */
static int receive(int fd, struct rows *rows, int timeout_ms, uint32_t *crc, int *open)
{
    struct iovec piece[MAX_PIECES + 1];
    struct msghdr message = {.msg_iov = piece};
    while (rows->unit < rows->units) {
        message.msg_iovlen = (size_t)next_pieces(rows, piece);
        ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
        if (got > 0) {
            *crc = take(rows, (size_t)got, *crc);
            continue;
        }
        if (!got) {
            *open = 0;
            return 0;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return errno;
        int failed = await(fd, rows, timeout_ms);
        if (failed)
            return failed;
    }
    return 0;
}

static const char *fault(const Py_buffer *to)
{
    if (to->ndim != 3 || to->itemsize != 1)
        return "target is not [units, rows, row bytes] of bytes";
    if (to->len && (to->strides[2] != 1 || to->strides[1] != to->shape[2] || to->strides[0] < 0))
        return "a unit of the target is not contiguous";
    return NULL;
}

static PyObject *receive_rows(PyObject *module, PyObject *args)
{
    int fd, timeout_ms, open = 1, failed;
    PyObject *target;
    Py_buffer to, ahead;
    uint32_t crc = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOiw*", &fd, &target, &timeout_ms, &ahead))
        return NULL;
    if (PyObject_GetBuffer(target, &to, PyBUF_STRIDED) < 0) {
        PyBuffer_Release(&ahead);
        return NULL;
    }
    const char *wrong = fault(&to);
    if (wrong) {
        PyBuffer_Release(&to);
        PyBuffer_Release(&ahead);
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    struct rows rows = {.base = to.buf,
                        .unit_bytes = (size_t)(to.shape[1] * to.shape[2]),
                        .stride = (size_t)to.strides[0],
                        .units = to.len ? (size_t)to.shape[0] : 0,
                        .ahead = {ahead.buf, (size_t)ahead.len}};
    do {
        Py_BEGIN_ALLOW_THREADS
        failed = receive(fd, &rows, timeout_ms, &crc, &open);
        Py_END_ALLOW_THREADS
    } while (failed == EINTR && !PyErr_CheckSignals());
    PyBuffer_Release(&to);
    PyBuffer_Release(&ahead);
    if (PyErr_Occurred())
        return NULL;
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!open)
        Py_RETURN_NONE;
    return Py_BuildValue("kn", (unsigned long)crc, (Py_ssize_t)rows.ahead_bytes);
}

static PyMethodDef methods[] = {
    {"crc32c", crc32c, METH_VARARGS, 
     "crc32c(data, crc=0, wide=True): checksum of data behind other bytes; with registers of 512 "
     "bits where the processor has them, or not"},
    {"page_checksums", page_checksums, METH_VARARGS,
     "page_checksums(data, unit_bytes, page_bytes): checksum of each page of units"},
    {"join", join, METH_VARARGS,
     "join(crc, following, size): checksum of buffers joined, the first's and then those of size "
     "bytes each"},
    {"receive_rows", receive_rows, METH_VARARGS,
     "receive_rows(fd, target, timeout_ms, ahead): fill target [units, rows, row bytes] from a "
     "socket, and ahead with what lies there behind it; return the checksum, and bytes of ahead; "
     "None where the stream ends before"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_crc32c", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__crc32c(void)
{
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) {
        PyErr_SetString(PyExc_ImportError, "this processor multiplies nothing without carries");
        return NULL;
    }
    has_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    set_distance(over_128, 128);
    set_distance(over_512, 512);
    set_distance(over_2048, 2048);
    return PyModule_Create(&definition);
}
#else
PyMODINIT_FUNC PyInit__crc32c(void)
{
    PyErr_SetString(PyExc_ImportError, "written for x86-64 and Linux");
    return NULL;
}
#endif
