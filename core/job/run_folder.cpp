#include "core/job/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/base/error.h"
#include "core/base/file.h"

namespace graft {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = "run.lock";

bool holds_nothing(const fs::path& folder) {
  std::error_code error;
  return !fs::exists(folder, error) || fs::is_empty(folder, error);
}

// The lock is the first file of a run, so it marks one that was killed before its record.
bool holds_run(const fs::path& folder) {
  return fs::exists(folder / "run.json") || fs::exists(folder / kLock);
}

[[noreturn]] void refuse(const fs::path& folder, const std::string& why) {
  fail(ErrorKind::usage, "cannot train in the folder " + quoted_path(folder) + ": " + why);
}

void remove_run(const fs::path& folder) {
  std::error_code error;
  for (const char* name : {"student", "checkpoints", "metrics.jsonl", "config.toml", "run.json",
                           "report.html", "events", "samples.json"}) {
    fs::remove_all(folder / name, error);
    if (error)
      refuse(folder, std::string("its ") + name + " cannot be removed: " + error.message());
  }
}

// What a killed process was writing.
void remove_partial(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().find(".partial-") != std::string::npos)
      fs::remove_all(entry.path(), ignored);
}

}  // namespace

RunFolder::RunFolder(fs::path folder, Start start) : folder_(std::move(folder)) {
  if (fs::exists(folder_) && !fs::is_directory(folder_))
    refuse(folder_, "a file of that name exists");
  if (!holds_nothing(folder_)) {
    if (!holds_run(folder_)) refuse(folder_, "it holds something that is no run; name another");
    if (start == Start::fresh)
      refuse(folder_, "it holds a run; --resume goes on with it, --force replaces it");
  }
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) refuse(folder_, error.message());
  lock();
  if (start == Start::replace) remove_run(folder_);
  remove_partial(folder_);
}

RunFolder::~RunFolder() { ::close(lock_); }

void RunFolder::lock() {
  lock_ = ::open((folder_ / kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) refuse(folder_, std::generic_category().message(errno));
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  ::close(lock_);
  refuse(folder_, error == EWOULDBLOCK ? "another process trains in it"
                                       : std::generic_category().message(error));
}

}  // namespace graft
