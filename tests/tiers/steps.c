/* Preloaded into a process: before the n-th of the system calls with which the compiled kernel writes, once armed, the
 * process dies, or the call fails. Most are known by the descriptors: those of files that were made without a name. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long left = -1;
static int failure; /* 0: die */
static atomic_char unnamed[4096]; /* by descriptor */

void steps_arm(long calls, int error)
{
    failure = error;
    atomic_store(&left, calls);
}

long steps_left(void) { return atomic_load(&left); }

static int strikes(void)
{
    if (atomic_load(&left) <= 0 || atomic_fetch_sub(&left, 1) != 1)
        return 0;
    if (failure == 0)
        kill(getpid(), SIGKILL);
    errno = failure;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    const int is_unnamed = (flags & O_TMPFILE) == O_TMPFILE;
    const int descriptor = is_unnamed && strikes() ? -1 : REAL(open)(path, flags, mode);
    if (descriptor >= 0)
        unnamed[descriptor] = (char)is_unnamed;
    return descriptor;
}

ssize_t pwritev(int descriptor, const struct iovec *parts, int count, off_t at)
{
    return strikes() ? -1 : REAL(pwritev)(descriptor, parts, count, at);
}

int mkdir(const char *path, mode_t mode) { return strikes() ? -1 : REAL(mkdir)(path, mode); }

int dup(int descriptor)
{
    const int other = unnamed[descriptor] && strikes() ? -1 : REAL(dup)(descriptor);
    if (other >= 0)
        unnamed[other] = unnamed[descriptor];
    return other;
}

int linkat(int from, const char *path, int to, const char *name, int flags)
{
    return strikes() ? -1 : REAL(linkat)(from, path, to, name, flags);
}

int close(int descriptor)
{
    const int struck = descriptor >= 0 && atomic_exchange(&unnamed[descriptor], 0) && strikes();
    const int closed = REAL(close)(descriptor); /* it is closed also where it fails */
    return struck ? -1 : closed;
}
