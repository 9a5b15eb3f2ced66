// The structs of 1.0 are a prefix of today's: both headers side by side, every field of the old one
// compared with the same field of the new one. Compiled, not run.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "sdk/include/graft/dlpack/dlpack.h"

// One C function of one name cannot be declared with the structs of two namespaces.
namespace today {
#define graft_plugin_negotiate negotiate_of_today
#include "sdk/include/graft/graft.h"
#undef graft_plugin_negotiate
}  // namespace today

#undef GRAFT_GRAFT_H_
#undef GRAFT_ABI_CURRENT  // the one number that differs
namespace v1_0 {
#define graft_plugin_negotiate negotiate_of_1_0
#include "tests/abi/v1_0/graft/graft.h"
#undef graft_plugin_negotiate
}  // namespace v1_0

// The types differ in their namespace only; what is not a struct, an array or a pointer is the
// same.
template <class Now, class Then>
constexpr bool same_kind() {
  if constexpr (std::is_arithmetic_v<Then>) return std::is_same_v<Now, Then>;
  if constexpr (std::is_array_v<Then>)
    return same_kind<std::remove_extent_t<Now>, std::remove_extent_t<Then>>() &&
           std::extent_v<Now> == std::extent_v<Then>;
  if constexpr (std::is_pointer_v<Then>) {
    using NowTo = std::remove_pointer_t<Now>;
    using ThenTo = std::remove_pointer_t<Then>;
    return std::is_pointer_v<Now> && std::is_const_v<NowTo> == std::is_const_v<ThenTo> &&
           std::is_function_v<NowTo> == std::is_function_v<ThenTo>;
  }
  return std::is_class_v<Now> == std::is_class_v<Then> && sizeof(Now) == sizeof(Then);
}

#define AT(type, field, offset)                                                           \
  static_assert(offsetof(v1_0::type, field) == (offset));                                 \
  static_assert(offsetof(today::type, field) == (offset), #type "." #field " has moved"); \
  static_assert(same_kind<decltype(today::type::field), decltype(v1_0::type::field)>(),   \
                #type "." #field " has another type")
#define SIZE(type, size)                       \
  static_assert(sizeof(v1_0::type) == (size)); \
  static_assert(sizeof(today::type) >= (size), #type " has shrunk")
#define FROZEN(type, size) \
  SIZE(type, size);        \
  static_assert(sizeof(today::type) == (size), #type " has grown, which it never may")
// Numbers and names are layout_test.c's.
#define IS(number, value) static_assert(true)
#define TEXT(name, string) static_assert(true)

#include "tests/abi/v1_0/layout.inc"
