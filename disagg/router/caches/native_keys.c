/* A prompt's token ids as bytes, and the keys of its blocks: block_keys.py's `packed` and `chain`.

   Python takes 115 us to do both for 8,000 tokens, half of all that a choice of an engine may take;
   this takes 25 us. Where no compiler is found at installation, block_keys.py does without.

   The key of a block mixes its bytes, 16 at a time, into the key of the block before it: each step
   multiplies two 64-bit words and folds the 128-bit product. It is no cryptographic hash. A
   collision costs a worse choice of engine, never a wrong token. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* Odd numbers with as many ones as zeros, made at random. No token ids make a factor zero: the
   upper halves are ids of no vocabulary. A block begins with another number than its steps have:
   two factors that are almost the same leave what differs in two blocks almost as it was. */
#define FIRST 0x9e82e870326f8d1fu
#define SECOND 0xecaea8295c2492efu
#define LAST 0xb4b0cec60e9ed42du

static inline uint64_t fold(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Mixes `size` bytes into `state`; the last step's words are filled up with zeros. */
static uint64_t mix(uint64_t state, const char *bytes, Py_ssize_t size) {
    uint64_t words[2];
    Py_ssize_t left = size;
    for (; left >= 16; left -= 16, bytes += 16) {
        memcpy(words, bytes, 16);
        state = fold(words[0] ^ FIRST, words[1] ^ state);
    }
    if (left > 0) {
        memset(words, 0, 16);
        memcpy(words, bytes, (size_t)left);
        state = fold(words[0] ^ SECOND, words[1] ^ state);
    }
    return fold(state ^ LAST, (uint64_t)size ^ SECOND);
}

/* The value of a small int without a call; -1 of what is none. Most token ids are small. */
static inline Py_ssize_t small(PyObject *id) {
    if (!PyLong_CheckExact(id))
        return -1;
#if PY_VERSION_HEX >= 0x030C0000
    PyLongObject *number = (PyLongObject *)id;
    return PyUnstable_Long_IsCompact(number) ? PyUnstable_Long_CompactValue(number) : -1;
#else
    return Py_SIZE(id) == 1 ? (Py_ssize_t)((PyLongObject *)id)->ob_digit[0] : -1;
#endif
}

static PyObject *packed(PyObject *module, PyObject *ids) {
    PyObject *list = PySequence_Fast(ids, "token ids are a list");
    if (list == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    PyObject **items = PySequence_Fast_ITEMS(list);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, count * 4);
    if (bytes == NULL)
        goto failed;
    char *at = PyBytes_AS_STRING(bytes);
    for (Py_ssize_t number = 0; number < count; number++, at += 4) {
        Py_ssize_t value = small(items[number]);
        /* No `__index__` is called, so nobody changes the list meanwhile. */
        unsigned long long whole = value >= 0 ? (unsigned long long)value
                                              : PyLong_AsUnsignedLongLong(items[number]);
        if (whole > UINT32_MAX) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_OverflowError, "a token id is above 4294967295");
            goto failed;
        }
        uint32_t narrow = (uint32_t)whole;
        memcpy(at, &narrow, 4);
    }
    Py_DECREF(list);
    return bytes;
failed:
    Py_XDECREF(bytes);
    Py_DECREF(list);
    return NULL;
}

static PyObject *chain(PyObject *module, PyObject *args) {
    Py_buffer data;
    Py_ssize_t width;
    unsigned long long parent;
    PyObject *extra = Py_None, *keys = NULL;
    if (!PyArg_ParseTuple(args, "y*nK|O", &data, &width, &parent, &extra))
        return NULL;
    if (width <= 0 || data.len % width) {
        PyErr_SetString(PyExc_ValueError, "the data are not whole blocks");
        goto done;
    }
    Py_ssize_t count = data.len / width;
    if (extra != Py_None && (!PyList_Check(extra) || PyList_GET_SIZE(extra) != count)) {
        PyErr_SetString(PyExc_ValueError, "extra: one item for each block");
        goto done;
    }
    keys = PyList_New(count);
    const char *block = data.buf;
    for (Py_ssize_t number = 0; keys != NULL && number < count; number++, block += width) {
        uint64_t key = mix(parent ^ SECOND, block, width);
        if (extra != Py_None) {
            char *more;
            Py_ssize_t size;
            if (PyBytes_AsStringAndSize(PyList_GET_ITEM(extra, number), &more, &size) < 0) {
                Py_CLEAR(keys);
                break;
            }
            if (size > 0)
                key = mix(key, more, size);
        }
        PyObject *given = PyLong_FromUnsignedLongLong(key);
        if (given == NULL)
            Py_CLEAR(keys);
        else
            PyList_SET_ITEM(keys, number, given);
        parent = key;
    }
done:
    PyBuffer_Release(&data);
    return keys;
}

static PyMethodDef methods[] = {
    {"packed", packed, METH_O, NULL},
    {"chain", chain, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "native_keys", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit_native_keys(void) { return PyModuleDef_Init(&definition); }
