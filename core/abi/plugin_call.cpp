#include "core/abi/plugin_call.h"

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

// Longer than graft_error's own text, so that nothing a plugin can say is cut.
constexpr std::size_t kLongestMessage = 4096;

}  // namespace

std::string status_name(graft_status status) {
  switch (status) {
    case GRAFT_OK:
      return "GRAFT_OK";
    case GRAFT_CANCELLED:
      return "GRAFT_CANCELLED";
    case GRAFT_INVALID_ARGUMENT:
      return "GRAFT_INVALID_ARGUMENT";
    case GRAFT_NOT_FOUND:
      return "GRAFT_NOT_FOUND";
    case GRAFT_RESOURCE_EXHAUSTED:
      return "GRAFT_RESOURCE_EXHAUSTED";
    case GRAFT_FAILED_PRECONDITION:
      return "GRAFT_FAILED_PRECONDITION";
    case GRAFT_OUT_OF_RANGE:
      return "GRAFT_OUT_OF_RANGE";
    case GRAFT_UNIMPLEMENTED:
      return "GRAFT_UNIMPLEMENTED";
    case GRAFT_INTERNAL:
      return "GRAFT_INTERNAL";
    case GRAFT_DATA_LOSS:
      return "GRAFT_DATA_LOSS";
    case GRAFT_ABI_MISMATCH:
      return "GRAFT_ABI_MISMATCH";
    default:
      return "status " + std::to_string(status);
  }
}

void throw_plugin_error(const std::string& what, graft_status status, graft_error& error) {
  // A plugin in C may have filled the arrays to their last byte.
  error.where[sizeof error.where - 1] = '\0';
  error.message[sizeof error.message - 1] = '\0';
  std::string text = what + ": ";
  if (error.where[0] != '\0') text += printable(error.where, kLongestMessage) + ": ";
  text += error.message[0] != '\0' ? printable(error.message, kLongestMessage)
                                   : "failed with " + status_name(status) + " and no message";
  fail(status == GRAFT_CANCELLED ? ErrorKind::interrupted : ErrorKind::plugin, text);
}

void throw_escaped_exception(const std::string& what, const char* message) {
  fail(ErrorKind::plugin, what + ": the plugin let an exception out, which it must not: " +
                              printable(message, kLongestMessage));
}

}  // namespace graft
