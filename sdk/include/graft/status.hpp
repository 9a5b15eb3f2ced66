// Errors of a plugin: thrown as C++ exceptions inside it, never across the ABI.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "graft/graft.h"

namespace graft::sdk {

// "expected " << 3 << " heads" as one expression: cat("expected ", 3, " heads").
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// What an author throws. `where` is a path the host shows: "config.chunk_size",
// "param:q_proj.weight", "tensor:x", "role:graft.role.query"; empty when there is nothing to point
// at.
class Status : public std::runtime_error {
 public:
  Status(graft_status code, std::string where, const std::string& message)
      : std::runtime_error(message), code_(code), where_(std::move(where)) {}
  graft_status code() const noexcept { return code_; }
  const std::string& where() const noexcept { return where_; }

 private:
  graft_status code_;
  std::string where_;
};

namespace detail {

// Copies `text` into a fixed buffer, always terminated; a cut falls between two UTF-8 characters.
inline void copy_cut(char* to, std::size_t room, std::string_view text) noexcept {
  std::size_t n = std::min(text.size(), room - 1);
  if (n < text.size()) {
    while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0u) == 0x80u) --n;
  }
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

// Fills the caller's error (which may be NULL) and gives back its code.
inline graft_status fill_error(graft_error* error, graft_status code, std::string_view where,
                               std::string_view message) noexcept {
  if (error == nullptr || !GRAFT_HAS(graft_error, error, message)) return code;
  // LibTorch appends a stack trace to its messages; the host has no use for it.
  message = message.substr(0, message.find("\nException raised from "));
  error->code = code;
  copy_cut(error->where, sizeof error->where, where);
  copy_cut(error->message, sizeof error->message, message);
  return code;
}

// Runs the body of an ABI call: whatever it throws becomes a status and a message.
template <class Body>
graft_status guarded(graft_error* error, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return GRAFT_OK;
  } catch (const Status& status) {
    // A Status with the code of success would be read as one.
    const graft_status code = status.code() == GRAFT_OK ? GRAFT_INTERNAL : status.code();
    return fill_error(error, code, status.where(), status.what());
  } catch (const std::bad_alloc&) {
    return fill_error(error, GRAFT_RESOURCE_EXHAUSTED, "", "out of memory");
  } catch (const std::exception& exception) {
    return fill_error(error, GRAFT_INTERNAL, "", exception.what());
  } catch (...) {
    return fill_error(error, GRAFT_INTERNAL, "",
                      "an exception that does not derive from std::exception");
  }
}

// What the host calls with an ABI struct may be shorter (an older host) or longer (a newer one)
// than ours: the fields it does not have become zero.
template <class Struct>
Struct widened(const Struct* given) noexcept {
  Struct full{};
  if (given != nullptr) {
    std::memcpy(&full, given, std::min<std::size_t>(given->struct_size, sizeof full));
  }
  full.struct_size = sizeof full;
  return full;
}

// Writes `full` into the caller's struct, whose struct_size says how much room it has.
template <class Struct>
void write_narrowed(const Struct& full, Struct* out) noexcept {
  const std::size_t bytes = std::min<std::size_t>(out->struct_size, sizeof full);
  std::memcpy(out, &full, bytes);
  out->struct_size = static_cast<uint32_t>(bytes);
}

}  // namespace detail

// Turns the status of a call into the host (blas, probe, ...) back into an exception.
inline void check(graft_status status, const graft_error& error, std::string_view call) {
  if (status == GRAFT_OK) return;
  throw Status(
      status, error.where,
      cat(call, ": ", error.message[0] != '\0' ? error.message : "failed without a message",
          error.message[0] != '\0' ? "" : cat(" (status ", status, ")")));
}

inline graft_error empty_error() noexcept {
  graft_error error{};
  error.struct_size = sizeof error;
  return error;
}

}  // namespace graft::sdk
