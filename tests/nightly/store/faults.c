/* A failing file system, by LD_PRELOAD: calls below one directory go wrong as `faults_set` says.

   int faults_set(root, call, mode, at, every): the next calls whose name begins with `call` ("" for all) are counted;
   the at-th one fails, or each every-th one. Returns how many were counted since the last call.
   mode: 'h' half of it, 'i' EINTR, 'e' EIO, 's' ENOSPC, 'n' ENOSYS, 'k' SIGKILL, 't' half of it, then SIGKILL.
   int faults_deny_renameat2(yes): renameat2 is not there at all. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long counted;
static char root[PATH_MAX], call[32];
static int mode, deny;
static long at, every;

int faults_set(const char *r, const char *c, int m, long a, long e) {
    snprintf(root, sizeof root, "%s", r);
    snprintf(call, sizeof call, "%s", c);
    mode = m, at = a, every = e;
    return (int)atomic_exchange(&counted, 0);
}

void faults_deny_renameat2(int yes) { deny = yes; }

static int below(const char *path) { return root[0] && !strncmp(path, root, strlen(root)); }

static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}

/* Whether this call is the one. */
static int hit(const char *name) {
    if (strncmp(name, call, strlen(call))) return 0;
    long n = atomic_fetch_add(&counted, 1) + 1;
    return n == at || (every && n % every == 0);
}

/* What the call that goes wrong does: -1 with errno, or 0 to go on as if nothing were. */
static int act(void) {
    if (mode == 'k' || mode == 't') kill(getpid(), SIGKILL);
    errno = mode == 'i' ? EINTR : mode == 'e' ? EIO : mode == 's' ? ENOSPC : mode == 'n' ? ENOSYS : 0;
    return errno ? -1 : 0;
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define TRANSFER(name, group, buffer) \
    ssize_t name(int fd, buffer data, size_t size, off64_t offset) { \
        REAL(ssize_t, name, int, buffer, size_t, off64_t); \
        if (below_fd(fd) && hit(group)) { \
            if ((mode == 'h' || mode == 't') && size > 1) { \
                ssize_t done = real(fd, data, size / 2, offset); \
                return mode == 't' ? act() : done; \
            } \
            if (act()) return -1; \
        } \
        return real(fd, data, size, offset); \
    }
TRANSFER(pwrite, "write", const void *)
TRANSFER(pwrite64, "write", const void *)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (below_fd(fd) && hit("write")) {
        if ((mode == 'h' || mode == 't') && size > 1) {
            ssize_t done = real(fd, data, size / 2);
            return mode == 't' ? act() : done;
        }
        if (act()) return -1;
    }
    return real(fd, data, size);
}

static ssize_t half(int fd, const struct iovec *v, off64_t offset) {
    return pread64(fd, v[0].iov_base, v[0].iov_len > 1 ? v[0].iov_len / 2 : v[0].iov_len, offset);
}

#define READ(name, extra, more) \
    ssize_t name(int fd, const struct iovec *v, int n, off64_t offset extra) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t extra); \
        if (below_fd(fd) && hit("read")) { \
            if (mode == 'h') return half(fd, v, offset); \
            if (act()) return -1; \
        } \
        return real(fd, v, n, offset more); \
    }
#define COMMA ,
READ(preadv, , )
READ(preadv64, , )
READ(preadv2, COMMA int flags, COMMA flags)
READ(preadv64v2, COMMA int flags, COMMA flags)

#define ON_FD(name) \
    int name(int fd) { \
        REAL(int, name, int); \
        return below_fd(fd) && hit("sync") && act() ? -1 : real(fd); \
    }
ON_FD(fsync)
ON_FD(fdatasync)

#define CUT(name) \
    int name(int fd, off64_t size) { \
        REAL(int, name, int, off64_t); \
        return below_fd(fd) && hit("cut") && act() ? -1 : real(fd, size); \
    }
CUT(ftruncate)
CUT(ftruncate64)

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return below(to) && hit("rename") && act() ? -1 : real(from, to);
}

int renameat2(int d, const char *from, int e, const char *to, unsigned flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    if (deny) return errno = ENOSYS, -1;
    return below(to) && hit("rename") && act() ? -1 : real(d, from, e, to, flags);
}

int mkdir(const char *path, mode_t permissions) {
    REAL(int, mkdir, const char *, mode_t);
    return below(path) && hit("mkdir") && act() ? -1 : real(path, permissions);
}
