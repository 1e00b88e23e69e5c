/* The functions that case_file.c calls, for a program that links no libflashattn: each thread finds
 * them in the library that it opened. */
#ifndef FLASHATTN_TESTS_LATE_H
#define FLASHATTN_TESTS_LATE_H

/* mode: of dlopen. NULL when the library or a function is missing; the reason is printed. */
void* late_open(const char* library, int mode);
/* 0 when dlclose failed. */
int late_close(void* handle);

#endif
