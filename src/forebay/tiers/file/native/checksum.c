/* XXH3-128 in canonical (big-endian) form. Compiled twice: for every CPU, and for those with AVX2 (see compile.py). */

#define XXH_INLINE_ALL
#include "xxhash.h"

void CHECKSUM(const void *bytes, size_t length_bytes, unsigned char digest[16])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, length_bytes));
    memcpy(digest, canonical.digest, 16);
}
