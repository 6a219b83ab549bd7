/* A slow disk: reads and writes of files below FOLDER pass at BYTES_PER_S, over all processes. For LD_PRELOAD.
 * STATE is a file that the processes share, as `struct shared`. slow_disk.py compiles this with the three constants. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define UNIT (256 << 10) /* the processes take turns after this many bytes */

static struct shared { _Atomic int64_t free_at, read, written; } *shared;

__attribute__((constructor)) static void begin(void) {
    int fd = open(STATE, O_RDWR | O_CLOEXEC);
    shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) perror(STATE), abort();
    close(fd);
}

static int is_slow(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, FOLDER "/", sizeof FOLDER);
}

/* Wait until these bytes have passed. A process that is killed leaves no more than a unit of each thread behind. */
static ssize_t pass(int fd, _Atomic int64_t *sum, ssize_t bytes) {
    if (bytes <= 0 || !is_slow(fd)) return bytes;
    int error = errno;
    for (ssize_t left = bytes; left > 0; left -= UNIT) {
        struct timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        int64_t now = time.tv_sec * INT64_C(1000000000) + time.tv_nsec, before = atomic_load(&shared->free_at), until;
        int64_t unit = left < UNIT ? left : UNIT, cost = (int64_t)(unit * 1e9 / BYTES_PER_S);
        do {
            until = (before > now ? before : now) + cost;
        } while (!atomic_compare_exchange_weak(&shared->free_at, &before, until));
        time.tv_sec = until / 1000000000, time.tv_nsec = until % 1000000000;
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR) continue;
        atomic_fetch_add(sum, unit);
    }
    errno = error;
    return bytes;
}

#define CALL(sum, name, parameters, arguments)                              \
    ssize_t name parameters {                                               \
        static ssize_t(*next) parameters;                                   \
        if (!next) next = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);   \
        return pass(fd, &shared->sum, next arguments);                      \
    }

#define CALLS(sum, one, type)                                                                                          \
    CALL(sum, one, (int fd, type data, size_t size), (fd, data, size))                                                 \
    CALL(sum, p##one, (int fd, type data, size_t size, off_t at), (fd, data, size, at))                                \
    CALL(sum, p##one##64, (int fd, type data, size_t size, off64_t at), (fd, data, size, at))                          \
    CALL(sum, one##v, (int fd, const struct iovec *data, int count), (fd, data, count))                                \
    CALL(sum, p##one##v, (int fd, const struct iovec *data, int count, off_t at), (fd, data, count, at))               \
    CALL(sum, p##one##v64, (int fd, const struct iovec *data, int count, off64_t at), (fd, data, count, at))           \
    CALL(sum, p##one##v2, (int fd, const struct iovec *data, int count, off_t at, int flags), (fd, data, count, at, flags)) \
    CALL(sum, p##one##v64v2, (int fd, const struct iovec *data, int count, off64_t at, int flags), (fd, data, count, at, flags))

CALLS(read, read, void *)
CALLS(written, write, const void *)
CALL(read, __read_chk, (int fd, void *data, size_t size, size_t most), (fd, data, size, most))
CALL(read, __pread_chk, (int fd, void *data, size_t size, off_t at, size_t most), (fd, data, size, at, most))
CALL(read, __pread64_chk, (int fd, void *data, size_t size, off64_t at, size_t most), (fd, data, size, at, most))

#define COPY(name, parameters, arguments)                                     \
    ssize_t name parameters {                                                 \
        static ssize_t(*next) parameters;                                     \
        if (!next) next = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);     \
        return pass(out, &shared->written, pass(in, &shared->read, next arguments)); \
    }

COPY(sendfile, (int out, int in, off_t *at, size_t size), (out, in, at, size))
COPY(sendfile64, (int out, int in, off64_t *at, size_t size), (out, in, at, size))
COPY(copy_file_range, (int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags), (in, from, out, to, size, flags))
