/* Preloaded into a process: before the n-th of the system calls with which the compiled kernel writes, once armed, the
 * process dies, or the call fails. Most are known by the descriptors: those of files that were made without a name.
 * The same for those with which it reads, armed apart; a read may also come short. Python calls others (open64, ...). */

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

static atomic_long reads_left = -1;
static int read_failure; /* SHORT: move less than was asked for */
enum { SHORT = -1 };

void steps_arm_reads(long calls, int error)
{
    read_failure = error;
    atomic_store(&reads_left, calls);
}

long steps_reads_left(void) { return atomic_load(&reads_left); }

static int strikes_read(void)
{
    if (atomic_load(&reads_left) <= 0 || atomic_fetch_sub(&reads_left, 1) != 1)
        return 0;
    errno = read_failure;
    return 1;
}

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
    const int is_read = (flags & O_ACCMODE) == O_RDONLY && !(flags & O_DIRECTORY);
    const int is_struck = is_unnamed ? strikes() : is_read && read_failure != SHORT && strikes_read();
    const int descriptor = is_struck ? -1 : REAL(open)(path, flags, mode);
    if (descriptor >= 0)
        unnamed[descriptor] = (char)is_unnamed;
    return descriptor;
}

ssize_t pwritev(int descriptor, const struct iovec *parts, int count, off_t at)
{
    return strikes() ? -1 : REAL(pwritev)(descriptor, parts, count, at);
}

ssize_t preadv(int descriptor, const struct iovec *parts, int count, off_t at)
{
    if (!strikes_read())
        return REAL(preadv)(descriptor, parts, count, at);
    if (read_failure != SHORT)
        return -1;
    const struct iovec first = {parts[0].iov_base, 4096};
    return REAL(preadv)(descriptor, &first, 1, at);
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
