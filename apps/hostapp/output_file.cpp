#include "apps/hostapp/output_file.h"

#include "core/base/error.h"
#include "core/base/file.h"

namespace graft {

std::filesystem::path output_file(const Config& config, const std::string& extension) {
  namespace fs = std::filesystem;
  const fs::path file = config.text("out");
  if (file.empty()) return file;
  const auto reject = [&](const std::string& why) {
    fail(ErrorKind::usage, config.at("out").origin.where + ": " + quoted_path(file) + " " + why);
  };
  if (file.extension() != extension) reject("must be a file that ends in " + extension);
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) reject("is a folder; a file is written");
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, ignored)) reject("lies in a folder that is not there");
  if (fs::exists(file, ignored) && !config.get<bool>("force"))
    reject("is there already; --force replaces it");
  return file;
}

}  // namespace graft
