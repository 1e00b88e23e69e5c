// Reads and writes structures of other library versions by struct_size, with the rule of Linux's
// copy_struct_from_user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flashattn.h"

namespace flashattn {

// Sizes of the structures in 0.2.0, the first version whose structures later ones accept, or in the
// version that brought them.
template <typename Struct>
struct FirstSize;
template <>
struct FirstSize<flashattn_desc> : std::integral_constant<size_t, 160> {};
template <>
struct FirstSize<flashattn_args> : std::integral_constant<size_t, 704> {};
template <>
struct FirstSize<flashattn_merge_args> : std::integral_constant<size_t, 112> {};
template <>
struct FirstSize<flashattn_quantize_args> : std::integral_constant<size_t, 440> {};
template <>
struct FirstSize<flashattn_append_kv_args> : std::integral_constant<size_t, 496> {};
template <>
struct FirstSize<flashattn_device_properties> : std::integral_constant<size_t, 48> {};
template <>
struct FirstSize<flashattn_plan_properties> : std::integral_constant<size_t, 96> {};
template <>
struct FirstSize<flashattn_error> : std::integral_constant<size_t, 720> {};

// The descriptor of 0.1 is larger than that of 0.2.0. No later version may have its size.
constexpr size_t kDescOf01 = 184;
static_assert(sizeof(flashattn_desc) != kDescOf01, "grow it by 8 bytes more");

// A struct_size must be at least `least`, and must not be `never`.
struct Sizes {
  size_t least, never;
};

template <typename Struct>
constexpr Sizes kSizes{FirstSize<Struct>::value,
                       std::is_same<Struct, flashattn_desc>::value ? kDescOf01 : 0};

// Refuses a struct_size that no version since 0.2.0 has.
void check_struct_size(const void* given, const char* name, Sizes sizes);

// Copies the caller's structure into `own` (`own_size` bytes). Members that the caller does not
// have become zero; members that this library does not know must be zero.
void copy_in_bytes(const void* given, const char* name, Sizes sizes, void* own, size_t own_size);

// Writes the part of `own` for which the caller's structure has room, except struct_size.
void copy_out_bytes(const void* own, size_t own_size, void* given);

// Refuses NULL.
void check_address(const void* address, const char* name);

// Zeroes a structure of the caller's size and sets its struct_size.
void init_struct(void* given, const char* name, uint32_t struct_size);

template <typename Struct>
Struct copy_in(const Struct* given, const char* name) {
  static_assert(std::is_trivially_copyable<Struct>::value, "copied as bytes");
  Struct own;
  copy_in_bytes(given, name, kSizes<Struct>, &own, sizeof own);
  own.struct_size = sizeof own;
  return own;
}

template <typename Struct>
void copy_out(const Struct& own, Struct* given) {
  static_assert(std::is_trivially_copyable<Struct>::value, "copied as bytes");
  copy_out_bytes(&own, sizeof own, given);
}

}  // namespace flashattn
