#pragma once

#include <exception>
#include <string>

#include "graft/graft.h"

namespace graft {

// "GRAFT_INVALID_ARGUMENT", ...; the number for one we do not know.
std::string status_name(graft_status status);

// Throws what a failed call left: Error(plugin), or Error(interrupted) for GRAFT_CANCELLED. `what`
// is "mixer 'gdn', forward".
[[noreturn]] void throw_plugin_error(const std::string& what, graft_status status,
                                     graft_error& error);
[[noreturn]] void throw_escaped_exception(const std::string& what, const char* message);

// Makes a call into a plugin: body(graft_error*) -> status. Gives back GRAFT_OK or `tolerated`;
// throws otherwise. A plugin must let no exception out; one that does is caught here, since the
// process can go on.
template <class Body>
graft_status call_plugin(const std::string& what, Body&& body, graft_status tolerated = GRAFT_OK) {
  graft_error error{};
  error.struct_size = sizeof error;
  graft_status status = GRAFT_OK;
  try {
    status = body(&error);
  } catch (const std::exception& exception) {
    throw_escaped_exception(what, exception.what());
  } catch (...) {
    throw_escaped_exception(what, "of a type that is no std::exception");
  }
  if (status != GRAFT_OK && status != tolerated) throw_plugin_error(what, status, error);
  return status;
}

// As call_plugin for functions that report nothing.
template <class Body>
void call_plugin_silent(const std::string& what, Body&& body) {
  call_plugin(what, [&](graft_error*) {
    body();
    return GRAFT_OK;
  });
}

}  // namespace graft
