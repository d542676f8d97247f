/* Copying rows out of a mapped pool: past the cache, in pieces, without the interpreter's lock.
 *
 * A copy that goes through the cache reads the target before it writes it, which is a third of the
 * traffic. The C library avoids that for a single copy of some hundred MiB alone; what a fetch
 * copies is as much, but in pieces of a layer and a block. Optional: `tailreplay.store.copying` does
 * without.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { LINE = 64, PAGE = 4096, BLOCK = 4 * PAGE };

#define LINE_SSE2(to, from)                                                                       \
    for (int at_ = 0; at_ < LINE; at_ += 16)                                                      \
    _mm_stream_si128((__m128i *)((to) + at_), _mm_loadu_si128((const __m128i *)((from) + at_)))
#define LINE_AVX512(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512(from))

/* Four pages side by side keep memory busier than one after the other. */
#define DEFINE_STREAM(NAME, TARGET, COPY_LINE)                                                    \
    __attribute__((target(TARGET))) static void NAME(char *to, const char *from, size_t size)     \
    {                                                                                             \
        size_t head = (size_t)(-(uintptr_t)to) % LINE;                                            \
        if (head > size)                                                                          \
            head = size;                                                                          \
        memcpy(to, from, head);                                                                   \
        to += head, from += head, size -= head;                                                   \
        for (; size >= BLOCK; to += BLOCK, from += BLOCK, size -= BLOCK)                          \
            for (size_t at = 0; at < PAGE; at += LINE)                                            \
                for (size_t page = at; page < BLOCK; page += PAGE) {                              \
                    if (size >= 2 * BLOCK)                                                        \
                        _mm_prefetch(from + page + BLOCK, _MM_HINT_T0);                           \
                    COPY_LINE(to + page, from + page);                                            \
                }                                                                                 \
        for (; size >= LINE; to += LINE, from += LINE, size -= LINE)                              \
            COPY_LINE(to, from);                                                                  \
        memcpy(to, from, size);                                                                   \
        _mm_sfence();                                                                             \
    }

DEFINE_STREAM(stream_sse2, "sse2", LINE_SSE2)
DEFINE_STREAM(stream_avx512, "avx512f", LINE_AVX512)

static void stream(char *to, const char *from, size_t size)
{
    if (__builtin_cpu_supports("avx512f"))
        stream_avx512(to, from, size);
    else
        stream_sse2(to, from, size);
}
#else
static void stream(char *to, const char *from, size_t size) { memcpy(to, from, size); }
#endif

static const char *fault(const Py_buffer *to, const Py_buffer *from, Py_ssize_t offset,
                         Py_ssize_t stride)
{
    if (to->ndim != 3 || to->itemsize != 1)
        return "target is not [units, rows, row bytes] of bytes";
    if (to->strides[2] != 1 || to->strides[1] != to->shape[2] || to->strides[0] < 0)
        return "a unit of the target is not contiguous";
    Py_ssize_t size = to->shape[1] * to->shape[2], units = to->shape[0];
    if (offset < 0 || stride < 0 || offset > from->len || size > from->len - offset)
        return "the first unit lies outside the source";
    if (units > 1 && stride && units - 1 > (from->len - offset - size) / stride)
        return "the last unit lies outside the source";
    return NULL;
}

static PyObject *copy_units(PyObject *module, PyObject *args)
{
    PyObject *target, *source;
    Py_ssize_t offset, stride;
    Py_buffer to, from;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnn", &target, &source, &offset, &stride))
        return NULL;
    if (PyObject_GetBuffer(target, &to, PyBUF_STRIDED) < 0)
        return NULL;
    if (PyObject_GetBuffer(source, &from, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&to);
        return NULL;
    }
    const char *wrong = fault(&to, &from, offset, stride);
    if (!wrong) {
        size_t size = (size_t)(to.shape[1] * to.shape[2]);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t unit = 0; unit < to.shape[0]; unit++)
            stream((char *)to.buf + unit * to.strides[0],
                   (const char *)from.buf + offset + unit * stride, size);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_units", copy_units, METH_VARARGS,
     "copy_units(target, source, offset, stride): fill target [units, rows, row bytes]"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) { return PyModule_Create(&definition); }
