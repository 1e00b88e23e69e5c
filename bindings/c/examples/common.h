/* Shared by the examples: what a program has besides its calls of the library. */
#ifndef EXAMPLES_COMMON_H
#define EXAMPLES_COMMON_H

#include <flashattn.h>
#include <stddef.h>
#include <stdint.h>

/* Prints why a call of the library failed. Returns whether it succeeded. */
int succeeded(int32_t status);

/* calloc() that prints what it could not allocate. Released by free(). */
void* allocate(size_t count, size_t size);

/* Seconds of a clock that never runs back. */
double seconds(void);

/* The next number of a sequence that state determines, uniform in [-1, 1). */
float random_number(uint64_t* state);

/* ---- Where a program computes: the host, or one GPU ---- */

typedef struct compute_device compute_device;

/* Opens the device that argument names, "cpu" or "cuda"; NULL: a GPU where the library finds one.
 * Prints why it cannot, and returns NULL. */
compute_device* device_open(const char* argument);
void device_close(compute_device* device);

/* enum flashattn_device. */
int32_t device_kind(const compute_device* device);

/* Device memory, not cleared. NULL, with a message, where there is not as much. */
void* device_allocate(compute_device* device, size_t bytes);
void device_release(compute_device* device, void* memory);

/* Copies to and from device memory, in the order of the stream. The host may reuse its memory when
 * they return. Return whether they succeeded, and print why not, as do those below. */
int device_write(compute_device* device, void* to, const void* from, size_t bytes);
int device_read(compute_device* device, void* to, const void* from, size_t bytes);

/* The stream of every call: NULL on the CPU. */
void* device_stream(compute_device* device);
int device_wait(compute_device* device);

/* CUDA graphs: what is enqueued between begin and end is recorded instead of run. */
int device_has_graphs(const compute_device* device);
int device_begin_graph(compute_device* device);
int device_end_graph(compute_device* device, void** graph);
int device_launch_graph(compute_device* device, void* graph);
void device_release_graph(compute_device* device, void* graph);

#endif
