/* Reads and proves, or writes and publishes, whole batches of block files, many at once, without the interpreter.
 *
 * Why: between two system calls a Python thread needs the interpreter lock, and while another thread of the process is
 * busy in Python it can wait 5 ms for it. Here a batch costs one call, and so one such wait, however many blocks it has.
 *
 * A block that was read is DONE if everything that blockfile.py would check is right; one that was written, if it now has
 * its name. Whatever else became of it (missing, damaged, of a newer format, there already, no room) is not said here:
 * the caller takes such a block to the Python path, where that is decided once for both. So nothing here moves, removes
 * or changes a file that has a name.
 *
 * Ownership: all memory in a job is the caller's and must stay where it is until forebay_wait has returned 1. A transfer
 * is the caller's too, until forebay_end: a caller that is interrupted may wait for it again, however it had ended. A pool and
 * its threads belong to whoever opened it. The threads take no signals: those are the interpreter's.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* The header page, as in format.py. */
enum { PAGE_BYTES = 4096, KEY_AT = 48, KEY_BYTES = 32, AFTER_KEY = 80, DIGEST_AT = 96, DIGEST_BYTES = 16 };
enum { CHECKED_BYTES = PAGE_BYTES - DIGEST_BYTES, STACK_BYTES = 256 * 1024 };
enum { SPARE_THREADS = 2 }; /* which compute checksums, so that as many transfers as were asked for stay in flight */
enum { NOT_DONE = 0, DONE = 1 };
enum task { PROVE_HEADER = 0, PROVE_PAYLOAD = 1, PUBLISH = 2 };

struct pool;

/* Blocks of one root. Mirrored field by field in native/__init__.py. */
struct job {
    struct pool *pool;
    const char *const *paths;      /* [blocks] */
    const unsigned char *keys;     /* [blocks][KEY_BYTES] */
    void *const *views;            /* [blocks], each view_bytes long; page-aligned for direct I/O */
    unsigned char *results;        /* [blocks], out: DONE or NOT_DONE */
    const unsigned char *expected; /* [DIGEST_AT]: how every header of this namespace begins; the key is put in */
    uint64_t blocks;
    uint64_t file_bytes;
    uint64_t payload_bytes;
    uint64_t view_bytes;           /* what is read after the header: the payload, padded for direct I/O */
    int32_t open_flags;            /* of the file that is read, or of the directory in which one is made */
    int32_t task;
};

struct batch {
    const struct job *job;
    uint64_t next, done;
    struct batch *behind;
    pthread_cond_t ended;
};

struct pool {
    pthread_mutex_t lock;          /* guards all below, and next, done and behind of its batches */
    pthread_cond_t work;
    struct batch *first, *last;    /* batches with blocks that nobody has taken, first come, first served */
    int closed;
    pid_t process;                 /* a fork has the memory and not the threads */
    sem_t transfers;               /* how many more may be in flight */
    unsigned threads;
    pthread_t ids[];
};

typedef void checksum_function(const void *, size_t, unsigned char[DIGEST_BYTES]);
checksum_function checksum_any, checksum_avx2;
static checksum_function *checksum = checksum_any;

__attribute__((constructor)) static void choose_checksum(void)
{
#ifdef WITH_AVX2
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        checksum = checksum_avx2;
#endif
}

typedef ssize_t move_function(int, const struct iovec *, int, off_t);

/* All of `parts`, from the start of the file, continued after short transfers; 0 unless all was moved. Uses them up. */
static int move_fully(move_function *move, int descriptor, struct iovec *parts, int count)
{
    off_t at_bytes = 0;
    while (count > 0) {
        const ssize_t moved_bytes = move(descriptor, parts, count, at_bytes);
        if (moved_bytes < 0 && errno == EINTR)
            continue;
        if (moved_bytes <= 0)
            return 0;
        at_bytes += moved_bytes;
        size_t left_bytes = (size_t)moved_bytes;
        for (; count > 0 && left_bytes >= parts->iov_len; count--, parts++)
            left_bytes -= parts->iov_len;
        if (count > 0) {
            parts->iov_base = (unsigned char *)parts->iov_base + left_bytes;
            parts->iov_len -= left_bytes;
        }
    }
    return 1;
}

static int is_claimed(const struct job *job, uint64_t i, const unsigned char *page)
{
    unsigned char digest[DIGEST_BYTES];
    if (memcmp(page, job->expected, KEY_AT) != 0 ||
        memcmp(page + KEY_AT, job->keys + i * KEY_BYTES, KEY_BYTES) != 0 ||
        memcmp(page + AFTER_KEY, job->expected + AFTER_KEY, DIGEST_AT - AFTER_KEY) != 0)
        return 0;
    checksum(page, CHECKED_BYTES, digest);
    if (memcmp(page + CHECKED_BYTES, digest, DIGEST_BYTES) != 0)
        return 0;
    if (job->task == PROVE_HEADER)
        return 1;
    checksum(job->views[i], job->payload_bytes, digest);
    return memcmp(page + DIGEST_AT, digest, DIGEST_BYTES) == 0;
}

static void begin_transfer(const struct job *job)
{
    while (sem_wait(&job->pool->transfers) != 0) /* EINTR */
        ;
}

static void end_transfer(const struct job *job)
{
    sem_post(&job->pool->transfers);
}

static int read_whole(const struct job *job, uint64_t i, unsigned char *page)
{
    struct stat found;
    struct iovec parts[2] = {{page, PAGE_BYTES}, {job->views[i], job->view_bytes}};
    const int descriptor = open(job->paths[i], job->open_flags);
    if (descriptor < 0)
        return 0;
    const int whole = fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode) &&
                      (uint64_t)found.st_size == job->file_bytes && move_fully(preadv, descriptor, parts, 2);
    close(descriptor);
    return whole;
}

static int prove(const struct job *job, uint64_t i, unsigned char *page)
{
    begin_transfer(job);
    const int whole = read_whole(job, i, page);
    end_transfer(job);
    return whole && is_claimed(job, i, page) ? DONE : NOT_DONE;
}

/* A file without a name, in the directory that the block belongs to. It is gone when its last descriptor is. Its space is
 * asked for at once, which on ext4 makes the write itself faster by a few percent (ADR 13). */
static int make_file(const struct job *job, const char *path)
{
    const char *end = strrchr(path, '/');
    char directory[PATH_MAX];
    if (end == NULL || end - path >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(directory, path, (size_t)(end - path));
    directory[end - path] = 0;
    int descriptor = open(directory, job->open_flags, 0600);
    if (descriptor < 0 && errno == ENOENT && (mkdir(directory, 0700) == 0 || errno == EEXIST)) /* its first block */
        descriptor = open(directory, job->open_flags, 0600);
    if (descriptor >= 0 && job->open_flags & O_DIRECT)
        (void)fallocate(descriptor, 0, 0, (off_t)job->file_bytes); /* where it fails, the write says why */
    return descriptor;
}

/* The block gets its name when it is whole: whoever dies before leaves nothing behind. */
static int write_whole(const struct job *job, uint64_t i, struct iovec *parts, int count)
{
    char name[sizeof "/proc/self/fd/" + 12];
    const int descriptor = make_file(job, job->paths[i]);
    if (descriptor < 0)
        return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    /* closing any descriptor makes a network file system send the file, and say what went wrong */
    const int whole = move_fully(pwritev, descriptor, parts, count) && close(dup(descriptor)) == 0 &&
                      linkat(AT_FDCWD, name, AT_FDCWD, job->paths[i], AT_SYMLINK_FOLLOW) == 0;
    close(descriptor);
    return whole;
}

/* `pages`: two of them. */
static int publish(const struct job *job, uint64_t i, unsigned char *pages)
{
    unsigned char *header = pages, *tail = pages + PAGE_BYTES, *payload = job->views[i];
    const uint64_t rest_bytes = job->payload_bytes % PAGE_BYTES, full_bytes = job->payload_bytes - rest_bytes;
    struct iovec parts[3] = {{header, PAGE_BYTES}, {payload, full_bytes}, {tail, PAGE_BYTES}};
    memset(pages, 0, 2 * PAGE_BYTES);
    memcpy(header, job->expected, DIGEST_AT);
    memcpy(header + KEY_AT, job->keys + i * KEY_BYTES, KEY_BYTES);
    checksum(payload, job->payload_bytes, header + DIGEST_AT);
    checksum(header, CHECKED_BYTES, header + CHECKED_BYTES);
    memcpy(tail, payload + full_bytes, rest_bytes);
    begin_transfer(job);
    const int whole = write_whole(job, i, parts, rest_bytes ? 3 : 2);
    end_transfer(job);
    return whole ? DONE : NOT_DONE;
}

static int perform(const struct job *job, uint64_t i, unsigned char *pages)
{
    if (pages == NULL)
        return NOT_DONE;
    return job->task == PUBLISH ? publish(job, i, pages) : prove(job, i, pages);
}

static void *serve(void *given)
{
    struct pool *pool = given;
    unsigned char *pages = NULL;
    if (posix_memalign((void **)&pages, PAGE_BYTES, 2 * PAGE_BYTES) != 0)
        pages = NULL; /* nothing is done by this thread */
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->first == NULL && !pool->closed)
            pthread_cond_wait(&pool->work, &pool->lock);
        struct batch *batch = pool->first;
        if (batch == NULL)
            break;
        const uint64_t i = batch->next++;
        if (batch->next == batch->job->blocks) /* taken whole */
            pool->first = batch->behind;
        pthread_mutex_unlock(&pool->lock);
        batch->job->results[i] = (unsigned char)perform(batch->job, i, pages);
        pthread_mutex_lock(&pool->lock);
        if (++batch->done == batch->job->blocks)
            pthread_cond_signal(&batch->ended);
    }
    pthread_mutex_unlock(&pool->lock);
    free(pages);
    return NULL;
}

/* Returns 0 when the blocks are queued; else why not. */
static int start(struct batch *batch, const struct job *job)
{
    struct pool *pool = job->pool;
    if (pool->process != getpid())
        return ECHILD; /* before its lock is touched: who held that may not exist here */
    pthread_mutex_lock(&pool->lock);
    if (pool->closed) {
        pthread_mutex_unlock(&pool->lock);
        return ESHUTDOWN;
    }
    *batch = (struct batch){.job = job};
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&batch->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pool->first == NULL)
        pool->first = batch;
    else
        pool->last->behind = batch;
    pool->last = batch;
    if (job->blocks < pool->threads)
        for (uint64_t i = 0; i < job->blocks; i++)
            pthread_cond_signal(&pool->work);
    else
        pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* Finish what is queued and end the threads. Once only; the pool's memory stays until forebay_free. */
EXPORT void forebay_close(struct pool *pool)
{
    if (pool->process != getpid())
        return;
    pthread_mutex_lock(&pool->lock);
    pool->closed = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->threads; i++)
        pthread_join(pool->ids[i], NULL);
}

/* A pool that has up to `transfers` of them in flight; NULL with errno set when its threads cannot be had. */
EXPORT struct pool *forebay_open(unsigned transfers)
{
    const unsigned threads = transfers + SPARE_THREADS;
    struct pool *pool = calloc(1, sizeof *pool + threads * sizeof pool->ids[0]);
    if (pool == NULL)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    sem_init(&pool->transfers, 0, transfers);
    pool->process = getpid();
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int trouble = 0;
    while (pool->threads < threads && trouble == 0) {
        trouble = pthread_create(&pool->ids[pool->threads], &attributes, serve, pool);
        pool->threads += trouble == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (trouble == 0)
        return pool;
    forebay_close(pool);
    free(pool);
    errno = trouble;
    return NULL;
}

struct transfer {
    unsigned count;
    struct batch batches[];
};

/* Queue the blocks of all jobs, each job with at least one; returns at once.
 *
 * *transfer is set before any block is queued: NULL on entry, and afterwards what forebay_wait and forebay_end are for.
 * Returns 0; or ESHUTDOWN or ECHILD when a pool has been closed or belongs to another process: the blocks of that job
 * are then not moved, those of the others are; or ENOMEM: nothing is moved, and *transfer stays NULL.
 */
EXPORT int forebay_start(const struct job *jobs, unsigned count, struct transfer **transfer)
{
    int trouble = 0;
    struct transfer *made = calloc(1, sizeof *made + count * sizeof made->batches[0]);
    if (made == NULL)
        return ENOMEM;
    made->count = count;
    *transfer = made;
    for (unsigned j = 0; j < count; j++) {
        memset(jobs[j].results, NOT_DONE, jobs[j].blocks);
        const int refused = start(&made->batches[j], &jobs[j]);
        if (refused)
            trouble = refused;
    }
    return trouble;
}

/* Wait until all blocks are through, or the monotonic clock reaches deadline_ns; done[j] is how many of job j have.
 * Returns 1 when all have: then the memory of the jobs is the caller's again. Else 0. May be called again after either.
 */
EXPORT int forebay_wait(struct transfer *transfer, uint64_t deadline_ns, uint64_t *done)
{
    const struct timespec deadline = {(time_t)(deadline_ns / 1000000000), (long)(deadline_ns % 1000000000)};
    int all = 1;
    for (unsigned j = 0; j < transfer->count; j++) {
        struct batch *batch = &transfer->batches[j];
        if (batch->job == NULL) /* refused */
            continue;
        struct pool *pool = batch->job->pool;
        pthread_mutex_lock(&pool->lock);
        int waiting = 0;
        while (batch->done < batch->job->blocks && waiting == 0)
            waiting = pthread_cond_timedwait(&batch->ended, &pool->lock, &deadline);
        done[j] = batch->done;
        all &= batch->done == batch->job->blocks;
        pthread_mutex_unlock(&pool->lock);
    }
    return all;
}

/* Free the transfer, once forebay_wait has returned 1, and set *transfer to NULL, for which nothing is done. */
EXPORT void forebay_end(struct transfer **transfer)
{
    struct transfer *ended = *transfer;
    if (ended == NULL)
        return;
    *transfer = NULL;
    for (unsigned j = 0; j < ended->count; j++)
        if (ended->batches[j].job != NULL)
            pthread_cond_destroy(&ended->batches[j].ended);
    free(ended);
}

/* When no call on the pool is running or can begin; ends the threads first if that was forgotten. */
EXPORT void forebay_free(struct pool *pool)
{
    if (!pool->closed)
        forebay_close(pool);
    free(pool);
}

/* Which source this was compiled from: compile.py looks for it in the file. */
EXPORT const char *forebay_source(void)
{
    return SOURCE_DIGEST;
}
