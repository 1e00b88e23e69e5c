// Structures of other library versions, by struct_size: the rule of Linux's copy_struct_from_user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace flashattn {

// Copies the caller's structure into `own` (`own_size` bytes): what the caller does not have is
// zero, what this library does not know must be zero. `required` bytes at least must be there.
void copy_in_bytes(const void* given, const char* name, size_t required, void* own,
                   size_t own_size);

// Writes the part of `own` that the caller's structure has room for, struct_size aside.
void copy_out_bytes(const void* own, size_t own_size, void* given);

// Refuses NULL.
void check_address(const void* address, const char* name);

// Refuses reserved words that are not 0. member: their path in the call's structure.
void check_reserved(const char* structure, const char* member, const int64_t* words, int32_t count);
// The same of reserved0 and reserved.
void check_reserved(const char* structure, int64_t word, const int64_t (&words)[4]);

// Zeroes a structure of the caller's size and sets its struct_size.
void init_struct(void* given, const char* name, uint32_t struct_size);

// `required`: offset of the first member that the caller may leave out.
template <typename Struct>
Struct copy_in(const Struct* given, const char* name, size_t required) {
  static_assert(std::is_trivially_copyable<Struct>::value, "copied as bytes");
  Struct own;
  copy_in_bytes(given, name, required, &own, sizeof own);
  own.struct_size = sizeof own;
  return own;
}

template <typename Struct>
void copy_out(const Struct& own, Struct* given) {
  static_assert(std::is_trivially_copyable<Struct>::value, "copied as bytes");
  copy_out_bytes(&own, sizeof own, given);
}

}  // namespace flashattn
