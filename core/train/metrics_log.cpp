#include "core/train/metrics_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

#include "core/base/error.h"
#include "core/base/file.h"

namespace graft {
namespace {

[[noreturn]] void fail_writing(const std::filesystem::path& path, int error) {
  fail(
      error == EACCES || error == EROFS || error == ENOENT ? ErrorKind::usage : ErrorKind::internal,
      "cannot write " + quoted_path(path) + ": " + std::generic_category().message(error));
}

}  // namespace

MetricsLog::MetricsLog(std::filesystem::path path)
    : path_(std::move(path)),
      descriptor_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail_writing(path_, errno);
}

MetricsLog::~MetricsLog() { ::close(descriptor_); }

void MetricsLog::append(const nlohmann::ordered_json& line) {
  const std::string text = line.dump() + "\n";
  const off_t before = ::lseek(descriptor_, 0, SEEK_END);
  std::string_view rest = text;
  while (!rest.empty()) {
    const ssize_t wrote = ::write(descriptor_, rest.data(), rest.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const int error = errno;
      if (::ftruncate(descriptor_, before) != 0) fail_writing(path_, errno);
      fail_writing(path_, error);
    }
    rest.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

void MetricsLog::sync() {
  if (::fsync(descriptor_) != 0 && errno != EINVAL) fail_writing(path_, errno);
}

void truncate_metrics(const std::filesystem::path& path, std::int64_t stage, std::int64_t step) {
  if (!std::filesystem::exists(path)) return;
  const std::string all = read_text(path);
  std::string kept;
  for (std::string_view rest = all; !rest.empty();) {
    const auto end = rest.find('\n');
    if (end == std::string_view::npos) break;  // half a line
    const std::string_view line = rest.substr(0, end + 1);
    rest.remove_prefix(end + 1);
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) continue;
    const auto of_stage = json.value("stage_index", std::int64_t{0});
    if (of_stage < stage || (of_stage == stage && json.value("step", std::int64_t{0}) <= step))
      kept += line;
  }
  if (kept.size() != all.size()) write_file_atomically(path, kept);
}

}  // namespace graft
