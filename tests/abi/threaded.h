/* One call forward and one backward that are worth several threads, which the shared cases are too
 * small for. C99. */
#ifndef FLASHATTN_TESTS_THREADED_H
#define FLASHATTN_TESTS_THREADED_H

#include <stdint.h>

enum { THREADED = 4 /* threads that take part at the most */ };

/* digest: out, of the bits of all results. 0 when something failed. Any threads may call it. */
int threaded_run(uint64_t* digest);

#endif
