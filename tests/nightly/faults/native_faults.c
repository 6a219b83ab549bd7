/* Lets one native call below a directory fail, fall short, or be the last of the process. Preloaded; armed by native_calls.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { COUNT, FAIL, FAIL_ON, SHORT, KILL_BEFORE, KILL_HALF, KILL_AFTER, STUCK };

static char root[4096];
static long at;
static enum kind kind;
static int error;
static atomic_long seen;
static char last[64], last_path[4096];
static _Thread_local char looked_at[4096]; /* by the call that is being made */

void fi_arm(const char *directory, long number, int chosen, int code) {
    snprintf(root, sizeof root, "%s", directory);
    at = number, kind = (enum kind)chosen, error = code;
    *last = *last_path = 0;
    atomic_store(&seen, 0);
}

long fi_seen(void) { return atomic_load(&seen); }

const char *fi_name(void) { return last; }

const char *fi_path(void) { return last_path; }

static int below(const char *path) {
    size_t length = strlen(root);
    if (!length || strncmp(path, root, length) || (path[length] != '/' && path[length])) return 0;
    snprintf(looked_at, sizeof looked_at, "%s", path);
    return 1;
}

static int of_descriptor(int fd) {
    char link[64], path[4096];
    if (!*root) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int of_path(int folder, const char *path) {
    if (!*root || !path) return 0;
    return path[0] == '/' ? below(path) : folder != AT_FDCWD && of_descriptor(folder);
}

/* Whether this is the call; it counts. */
static int is_hit(const char *name) {
    long number = atomic_fetch_add(&seen, 1) + 1;
    int hit = kind == FAIL_ON ? number >= at : number == at;
    if (number == at) snprintf(last, sizeof last, "%s", name), snprintf(last_path, sizeof last_path, "%s", looked_at);
    return hit && kind != COUNT;
}

static void wait_if_stuck(void) {
    struct timespec a_while = {0, 300000000};
    if (kind == STUCK) nanosleep(&a_while, NULL);
}

/* Whether the call is to be refused, before it is made. */
static int refused(void) {
    wait_if_stuck();
    if (kind == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (kind != FAIL && kind != FAIL_ON) return 0;
    errno = error;
    return 1;
}

#define NEXT(type, name, ...) \
    static type (*next)(__VA_ARGS__); \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name);

/* A call that is done or not. */
#define WHOLE(type, name, failed, is_ours, parameters, ...) \
    type name parameters { \
        static type(*next) parameters; \
        if (!next) next = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        if (!(is_ours) || !is_hit(#name)) return next(__VA_ARGS__); \
        if (refused()) return failed; \
        type result = next(__VA_ARGS__); \
        if (kind == KILL_AFTER) kill(getpid(), SIGKILL); \
        return result; \
    }

/* A call on bytes, of which half may be done. */
#define BYTES(name, parameters, half, ...) \
    ssize_t name parameters { \
        static ssize_t(*next) parameters; \
        if (!next) next = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name); \
        if (!of_descriptor(fd) || !is_hit(#name)) return next(__VA_ARGS__); \
        if (refused()) return -1; \
        ssize_t result = kind == SHORT || kind == KILL_HALF ? half : next(__VA_ARGS__); \
        if (kind == KILL_AFTER || kind == KILL_HALF) kill(getpid(), SIGKILL); \
        return result; \
    }

#define HALF(count) ((count) > 1 ? (count) / 2 : (count))

BYTES(write, (int fd, const void *data, size_t count), next(fd, data, HALF(count)), fd, data, count)
BYTES(read, (int fd, void *data, size_t count), next(fd, data, HALF(count)), fd, data, count)
BYTES(pwrite, (int fd, const void *data, size_t count, off_t offset), next(fd, data, HALF(count), offset), fd, data, count, offset)
BYTES(pwrite64, (int fd, const void *data, size_t count, off64_t offset), next(fd, data, HALF(count), offset), fd, data, count, offset)
BYTES(pread, (int fd, void *data, size_t count, off_t offset), next(fd, data, HALF(count), offset), fd, data, count, offset)
BYTES(pread64, (int fd, void *data, size_t count, off64_t offset), next(fd, data, HALF(count), offset), fd, data, count, offset)

/* Half of the first vector, through the plain call, which is not counted again. */
static ssize_t half_vector(int fd, const struct iovec *vectors, off64_t offset) {
    NEXT(ssize_t, pread64, int, void *, size_t, off64_t)
    return next(fd, vectors[0].iov_base, HALF(vectors[0].iov_len), offset);
}
BYTES(preadv, (int fd, const struct iovec *v, int count, off_t offset), half_vector(fd, v, offset), fd, v, count, offset)
BYTES(preadv64, (int fd, const struct iovec *v, int count, off64_t offset), half_vector(fd, v, offset), fd, v, count, offset)
BYTES(preadv2, (int fd, const struct iovec *v, int count, off_t offset, int flags), half_vector(fd, v, offset), fd, v, count, offset, flags)
BYTES(preadv64v2, (int fd, const struct iovec *v, int count, off64_t offset, int flags), half_vector(fd, v, offset), fd, v, count, offset, flags)

WHOLE(int, fsync, -1, of_descriptor(fd), (int fd), fd)
WHOLE(int, fdatasync, -1, of_descriptor(fd), (int fd), fd)
WHOLE(int, ftruncate, -1, of_descriptor(fd), (int fd, off_t length), fd, length)
WHOLE(int, ftruncate64, -1, of_descriptor(fd), (int fd, off64_t length), fd, length)
WHOLE(int, futimens, -1, of_descriptor(fd), (int fd, const struct timespec *times), fd, times)
WHOLE(int, utimensat, -1, of_path(folder, path), (int folder, const char *path, const struct timespec *times, int flags), folder, path, times, flags)
WHOLE(int, mkdir, -1, of_path(AT_FDCWD, path), (const char *path, mode_t mode), path, mode)
WHOLE(int, mkdirat, -1, of_path(folder, path), (int folder, const char *path, mode_t mode), folder, path, mode)
WHOLE(int, rmdir, -1, of_path(AT_FDCWD, path), (const char *path), path)
WHOLE(int, unlink, -1, of_path(AT_FDCWD, path), (const char *path), path)
WHOLE(int, unlinkat, -1, of_path(folder, path), (int folder, const char *path, int flags), folder, path, flags)
WHOLE(int, rename, -1, of_path(AT_FDCWD, to), (const char *from, const char *to), from, to)
WHOLE(int, renameat, -1, of_path(b, to), (int a, const char *from, int b, const char *to), a, from, b, to)
WHOLE(int, renameat2, -1, of_path(b, to), (int a, const char *from, int b, const char *to, unsigned flags), a, from, b, to, flags)
WHOLE(int, link, -1, of_path(AT_FDCWD, to), (const char *from, const char *to), from, to)
WHOLE(int, linkat, -1, of_path(b, to), (int a, const char *from, int b, const char *to, int flags), a, from, b, to, flags)
WHOLE(int, stat, -1, of_path(AT_FDCWD, path), (const char *path, struct stat *found), path, found)
WHOLE(int, stat64, -1, of_path(AT_FDCWD, path), (const char *path, struct stat64 *found), path, found)
WHOLE(int, lstat, -1, of_path(AT_FDCWD, path), (const char *path, struct stat *found), path, found)
WHOLE(int, lstat64, -1, of_path(AT_FDCWD, path), (const char *path, struct stat64 *found), path, found)
WHOLE(int, fstat, -1, of_descriptor(fd), (int fd, struct stat *found), fd, found)
WHOLE(int, fstat64, -1, of_descriptor(fd), (int fd, struct stat64 *found), fd, found)
WHOLE(int, fstatat, -1, of_path(folder, path), (int folder, const char *path, struct stat *found, int flags), folder, path, found, flags)
WHOLE(int, fstatat64, -1, of_path(folder, path), (int folder, const char *path, struct stat64 *found, int flags), folder, path, found, flags)
WHOLE(struct dirent *, readdir, NULL, of_descriptor(dirfd(listed)), (DIR *listed), listed)
WHOLE(struct dirent64 *, readdir64, NULL, of_descriptor(dirfd(listed)), (DIR *listed), listed)
WHOLE(DIR *, opendir, NULL, of_path(AT_FDCWD, path), (const char *path), path)
WHOLE(DIR *, fdopendir, NULL, of_descriptor(fd), (int fd), fd)

/* It closes in any case, as Linux does. */
int close(int fd) {
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "close");
    if (!of_descriptor(fd) || !is_hit("close")) return next(fd);
    if (kind == KILL_BEFORE) kill(getpid(), SIGKILL);
    wait_if_stuck();
    int result = next(fd);
    if (kind == KILL_AFTER) kill(getpid(), SIGKILL);
    if (kind != FAIL && kind != FAIL_ON) return result;
    errno = error;
    return -1;
}

#define OPEN(name, is_ours, parameters, ...) \
    int name parameters { \
        static int (*next)(); \
        if (!next) next = (int (*)())dlsym(RTLD_NEXT, #name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if (!(is_ours) || !is_hit(#name)) return next(__VA_ARGS__, flags, mode); \
        if (refused()) return -1; \
        int result = next(__VA_ARGS__, flags, mode); \
        if (kind == KILL_AFTER) kill(getpid(), SIGKILL); \
        return result; \
    }

OPEN(open, of_path(AT_FDCWD, path), (const char *path, int flags, ...), path)
OPEN(open64, of_path(AT_FDCWD, path), (const char *path, int flags, ...), path)
OPEN(openat, of_path(folder, path), (int folder, const char *path, int flags, ...), folder, path)
OPEN(openat64, of_path(folder, path), (int folder, const char *path, int flags, ...), folder, path)
