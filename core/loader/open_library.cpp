#include "core/loader/open_library.h"

// Header-only, on std::filesystem.
#define BOOST_DLL_USE_STD_FS
#include <dlfcn.h>

#include <boost/dll/shared_library.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/suggest.h"
#include "core/loader/elf_check.h"

namespace graft {
namespace {

// Boost.DLL asks for lazy binding unless told otherwise: a missing symbol would end a run hours
// later. NODELETE, since code of the library may run after any close: thread-local destructors,
// autograd nodes, CUDA modules.
constexpr auto kMode = static_cast<boost::dll::load_mode::type>(
    boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local | RTLD_NODELETE);

void check_file(const std::filesystem::path& file, const std::string& label) {
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (!std::filesystem::exists(status)) {
    fail(ErrorKind::plugin, label + (error && error != std::errc::no_such_file_or_directory
                                         ? " cannot be read: " + error.message()
                                         : " does not exist"));
  }
  if (std::filesystem::is_directory(status)) {
    fail(ErrorKind::plugin, label + " is a folder, not a plugin file");
  }
  const std::string fault = elf_fault(file);
  if (!fault.empty()) fail(ErrorKind::plugin, label + " " + fault);
}

// What dlerror said, out of Boost's "... (dlerror system message: TEXT): Bad file descriptor".
std::string linker_message(const std::string& what) {
  static const std::string mark = "(dlerror system message: ";
  const std::size_t begin = what.find(mark);
  const std::size_t end = what.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return what;
  return what.substr(begin + mark.size(), end - begin - mark.size());
}

}  // namespace

graft_plugin_negotiate_fn open_library(const std::filesystem::path& file) {
  const std::string label = "plugin " + quoted_path(file);
  check_file(file, label);
  // shared_library closes in its destructor and cannot be told not to: what was opened stays in
  // this list, which is never destroyed.
  static auto& opened = *new std::vector<boost::dll::shared_library>;
  boost::dll::shared_library library;
  try {
    // The form that takes an error_code loses the text of dlerror.
    library = boost::dll::shared_library(std::filesystem::absolute(file), kMode);
  } catch (const std::system_error& error) {
    fail(ErrorKind::plugin,
         label + " cannot be loaded: " + printable(linker_message(error.what()), 2000));
  }
  if (!library.has(GRAFT_ENTRY_SYMBOL)) {
    fail(ErrorKind::plugin, label +
                                " is a shared library, but not a graft plugin: it has no symbol " +
                                GRAFT_ENTRY_SYMBOL);
  }
  auto* const negotiate =
      &library.get<std::remove_pointer_t<graft_plugin_negotiate_fn>>(GRAFT_ENTRY_SYMBOL);
  opened.push_back(std::move(library));
  return negotiate;
}

}  // namespace graft
