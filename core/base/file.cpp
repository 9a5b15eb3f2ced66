#include "core/base/file.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace graft {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kWriteBuffer = std::size_t{256} << 10;

std::string reason(int error) { return std::generic_category().message(error); }

[[noreturn]] void fail_reading(const fs::path& path, int error) {
  std::string message = "cannot read " + quoted_path(path) + ": " + reason(error);
  std::error_code ignored;
  if (error == ENOENT && fs::is_symlink(path, ignored)) {
    message += " (it is a link to " + quoted_path(fs::read_symlink(path, ignored)) + ")";
  }
  fail(ErrorKind::input, message);
}

// `doing` completes "cannot write 'path': No space left on device, ...".
[[noreturn]] void fail_writing(const fs::path& path, int error, const std::string& doing) {
  const std::array<int, 6> machine = {ENOSPC, EDQUOT, EFBIG, EIO, EMFILE, ENFILE};
  const bool gave_up = std::find(machine.begin(), machine.end(), error) != machine.end();
  std::string message = "cannot write " + quoted_path(path) + ": " + reason(error) + doing;
  if (error == ENOSPC || error == EDQUOT) {
    message += "; free some space or write elsewhere (nothing half-written is left)";
  }
  fail(gave_up ? ErrorKind::internal : ErrorKind::usage, message);
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  // 0, or the errno of the close, which on network file systems is where a full disk shows.
  int close() { return ::close(std::exchange(value_, -1)) == 0 ? 0 : errno; }

 private:
  int value_;
};

struct stat status_of(int descriptor, const fs::path& path) {
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) fail_reading(path, errno);
  if (S_ISDIR(status.st_mode)) {
    fail(ErrorKind::input, "cannot read " + quoted_path(path) + ": it is a folder, not a file");
  }
  return status;
}

// "name.partial-PID-N" beside `target`: unique among processes by the PID, within one by the count.
fs::path partial_name(const fs::path& target) {
  static std::atomic<unsigned> count = 0;
  // File names end at 255 bytes.
  const std::string stem = target.filename().string().substr(0, 200);
  return target.parent_path() /
         (stem + ".partial-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
}

// Makes a rename in `folder` survive a power cut. File systems that cannot sync a folder say
// EINVAL.
void sync_folder(const fs::path& folder, const fs::path& target) {
  const fs::path opened = folder.empty() ? fs::path(".") : folder;
  Descriptor descriptor(::open(opened.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A folder that may be written but not read cannot be opened; the data itself is safe by now.
  if (descriptor.get() < 0) return;
  if (::fsync(descriptor.get()) != 0 && errno != EINVAL) {
    fail_writing(target, errno, ", while syncing its folder");
  }
}

// Where a write to `path` must go: the end of symbolic links. Refuses what is not a file.
fs::path writable_target(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) {
    fail(ErrorKind::usage, "cannot write " + quoted_path(path) + ": it is a folder");
  }
  // Renaming over a device or pipe would put a file in its place.
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    fail(ErrorKind::usage, "cannot write " + quoted_path(path) + ": it is not a regular file");
  }
  if (!fs::is_symlink(path, error)) return path;
  const fs::path resolved = fs::weakly_canonical(path, error);
  return error ? path : resolved;
}

int create_partial(const fs::path& partial, const fs::path& target) {
  const int descriptor = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                                S_IRUSR | S_IWUSR | S_IRGRP | S_IWGRP | S_IROTH | S_IWOTH);
  if (descriptor >= 0) return descriptor;
  const int error = errno;
  const fs::path folder = target.parent_path();
  std::error_code ignored;
  if (error == ENOENT && !fs::exists(folder, ignored)) {
    fail_writing(target, error, "; make the folder " + quoted_path(folder) + " first");
  }
  fail_writing(target, error, ", while creating a file in its folder");
}

// Removes a file on the way out unless it has been renamed.
struct PartialFile {
  fs::path path;
  ~PartialFile() {
    if (!path.empty()) ::unlink(path.c_str());
  }
};

}  // namespace

std::string quoted_path(const fs::path& path) {
  std::string out = "'";
  return out.append(printable(path.string(), 4096)) += '\'';
}

fs::file_type file_type_of(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::status_known(status)) {
    fail(ErrorKind::input, "cannot read " + quoted_path(path) + ": " + error.message());
  }
  return status.type();
}

std::string read_text(const fs::path& path, std::size_t max_bytes) {
  Descriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (descriptor.get() < 0) fail_reading(path, errno);
  const struct stat status = status_of(descriptor.get(), path);
  if (!S_ISREG(status.st_mode) && !S_ISFIFO(status.st_mode)) {
    fail(ErrorKind::input, "cannot read " + quoted_path(path) + ": it is not a file or pipe");
  }
  std::string text;
  std::string chunk(std::size_t{256} << 10, '\0');
  if (S_ISREG(status.st_mode)) {
    text.reserve(std::min(static_cast<std::size_t>(status.st_size), max_bytes));
  }
  // Read to the end rather than to the size: files under /proc say 0.
  while (true) {
    const ssize_t got = ::read(descriptor.get(), chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_reading(path, errno);
    if (got == 0) return text;
    if (static_cast<std::size_t>(got) > max_bytes - text.size()) {
      fail(ErrorKind::input, "cannot read " + quoted_path(path) + ": it is larger than " +
                                 std::to_string(max_bytes) + " bytes, the most allowed here");
    }
    text.append(chunk, 0, static_cast<std::size_t>(got));
  }
}

MappedFile::MappedFile(fs::path path) : path_(std::move(path)) {
  // Without O_NONBLOCK opening a pipe would wait for its writer.
  Descriptor descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.get() < 0) fail_reading(path_, errno);
  const struct stat status = status_of(descriptor.get(), path_);
  if (!S_ISREG(status.st_mode)) {
    fail(ErrorKind::input, "cannot read " + quoted_path(path_) + ": it is not a regular file");
  }
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // mmap refuses length 0
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (mapped == MAP_FAILED) fail_reading(path_, errno);
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

FileWriter::FileWriter(fs::path target, int descriptor)
    : target_(std::move(target)), descriptor_(descriptor) {}

void FileWriter::write(std::span<const std::byte> bytes, std::string_view what) {
  // What is gathered goes out under its own name, so that an error names the right thing.
  if (what != what_ || buffer_.size() + bytes.size() > kWriteBuffer) flush();
  what_ = what;
  if (bytes.size() >= kWriteBuffer) {
    write_through(bytes);
  } else {
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
}

void FileWriter::write(std::string_view text, std::string_view what) {
  write(std::as_bytes(std::span(text)), what);
}

void FileWriter::flush() {
  write_through(std::as_bytes(std::span(buffer_)));
  buffer_.clear();
}

void FileWriter::write_through(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(descriptor_, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const std::string what = what_.empty() ? "" : " " + what_;
      fail_writing(target_, errno,
                   ", while writing" + what + " at byte " + std::to_string(written_));
    }
    written_ += static_cast<std::uint64_t>(wrote);
    bytes = bytes.subspan(static_cast<std::size_t>(wrote));
  }
}

void write_file_atomically(const fs::path& path, const std::function<void(FileWriter&)>& fill) {
  const fs::path target = writable_target(path);
  PartialFile partial;
  const fs::path beside = partial_name(target);
  Descriptor descriptor(create_partial(beside, target));
  partial.path = beside;
  FileWriter writer(path, descriptor.get());
  fill(writer);
  writer.flush();
  if (::fsync(descriptor.get()) != 0) fail_writing(path, errno, ", while syncing it to disk");
  if (const int error = descriptor.close()) fail_writing(path, error, ", while closing it");
  if (::rename(beside.c_str(), target.c_str()) != 0) {
    fail_writing(path, errno, ", while renaming the finished file");
  }
  partial.path.clear();
  sync_folder(target.parent_path(), path);
}

void write_file_atomically(const fs::path& path, std::span<const std::byte> bytes) {
  write_file_atomically(path, [&](FileWriter& writer) { writer.write(bytes); });
}

void write_file_atomically(const fs::path& path, std::string_view text) {
  write_file_atomically(path, std::as_bytes(std::span(text)));
}

namespace {

// The absolute path a folder will have, symbolic links followed and without a trailing slash.
fs::path directory_target(const fs::path& path) {
  if (path.empty()) fail(ErrorKind::usage, "cannot write a folder: its path is empty");
  std::error_code error;
  fs::path target = fs::absolute(path, error).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  if (fs::is_symlink(target, error)) target = fs::weakly_canonical(target, error);
  return target;
}

bool holds_current_directory(const fs::path& folder) {
  std::error_code error;
  for (fs::path at = fs::current_path(error); !error; at = at.parent_path()) {
    if (fs::equivalent(at, folder, error)) return true;
    if (!at.has_relative_path()) return false;
  }
  return false;
}

// True when every part of `folder` begins `path`: it is the folder, or lies in it.
bool begins(const fs::path& folder, const fs::path& path) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first ==
         folder.end();
}

void check_replaceable(const fs::path& target, bool replace_existing) {
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  if (!fs::exists(status)) return;
  const std::string refused = "cannot write the folder " + quoted_path(target) + ": ";
  if (!fs::is_directory(status)) fail(ErrorKind::usage, refused + "a file of that name exists");
  if (holds_current_directory(target)) {
    fail(ErrorKind::usage, refused + "it is, or holds, the current folder; name one inside it");
  }
  const bool empty = fs::is_empty(target, error);
  if (error) fail(ErrorKind::usage, refused + error.message());
  if (!empty && !replace_existing) {
    fail(ErrorKind::usage, refused + "it is not empty; name another, or replace it with --force");
  }
}

// Those of `folder` and the folders above it that are not there, the deepest first.
std::vector<fs::path> missing_folders(const fs::path& folder) {
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path at = folder; at.has_relative_path() && !fs::exists(at, error) && !error;
       at = at.parent_path())
    missing.push_back(at);
  return missing;
}

void sync_tree(const fs::path& root, const fs::path& target) {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root)) {
    if (entry.is_symlink()) continue;
    if (entry.is_directory()) sync_folder(entry.path(), target);
    if (!entry.is_regular_file()) continue;
    Descriptor descriptor(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (descriptor.get() < 0 || ::fsync(descriptor.get()) != 0) {
      const fs::path inside = target / entry.path().lexically_relative(root);
      fail_writing(inside, errno, ", while syncing it to disk");
    }
  }
  sync_folder(root, target);
}

// Swaps two folders, in one step where the file system can. False, with errno, if it failed.
bool exchange(const fs::path& fresh, const fs::path& old) {
  if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, old.c_str(), RENAME_EXCHANGE) == 0)
    return true;
  if (errno != EINVAL && errno != ENOSYS) return false;
  const fs::path aside = partial_name(old);
  if (::rename(old.c_str(), aside.c_str()) != 0) return false;
  if (::rename(fresh.c_str(), old.c_str()) != 0) {
    const int error = errno;
    ::rename(aside.c_str(), old.c_str());
    errno = error;
    return false;
  }
  return ::rename(aside.c_str(), fresh.c_str()) == 0;
}

}  // namespace

bool is_within(const fs::path& path, const fs::path& folder) {
  const fs::path target = directory_target(folder);
  std::error_code error;
  const fs::path real_target = fs::weakly_canonical(target, error);
  if (error || path.empty()) return false;
  // Both where the name stands and where its links lead: either would be lost with the folder.
  const fs::path real = fs::weakly_canonical(path, error);
  const fs::path where = fs::weakly_canonical(fs::absolute(path).parent_path(), error);
  return begins(real_target, real) || begins(real_target, where);
}

AtomicDirectory::AtomicDirectory(const fs::path& final_path, bool replace_existing)
    : final_(directory_target(final_path)), replace_existing_(replace_existing) {
  check_replaceable(final_, replace_existing);
  const fs::path above = final_.parent_path();
  made_ = missing_folders(above);
  std::error_code error;
  fs::create_directories(above, error);
  if (error) {
    remove_made();
    fail_writing(final_, error.value(), ", while making the folders above it");
  }
  const fs::path partial = partial_name(final_);
  if (::mkdir(partial.c_str(), S_IRWXU | S_IRWXG | S_IRWXO) != 0) {
    const int reason_of_mkdir = errno;
    remove_made();
    fail_writing(final_, reason_of_mkdir, ", while making a folder beside it");
  }
  partial_ = partial;
}

AtomicDirectory::~AtomicDirectory() {
  if (committed_ || kept_) return;
  std::error_code ignored;
  fs::remove_all(partial_, ignored);
  remove_made();
}

// Only what is empty goes: another process may have put something there meanwhile.
void AtomicDirectory::remove_made() const {
  std::error_code ignored;
  for (const fs::path& folder : made_) fs::remove(folder, ignored);
}

void AtomicDirectory::commit() {
  if (committed_) fail(ErrorKind::internal, quoted_path(final_) + " was committed already");
  try {
    sync_tree(partial_, final_);
  } catch (const fs::filesystem_error& error) {
    fail_writing(final_, error.code().value(), ", while syncing it to disk");
  }
  publish();
  sync_folder(final_.parent_path(), final_);
}

void AtomicDirectory::publish() {
  // rename() replaces an empty folder by itself, and refuses one that has been filled meanwhile.
  if (::rename(partial_.c_str(), final_.c_str()) == 0) {
    committed_ = true;
    return;
  }
  const bool occupied = errno == ENOTEMPTY || errno == EEXIST;
  if (!occupied || !replace_existing_ || !exchange(partial_, final_)) {
    const int error = errno;
    kept_ = true;  // all the work is done and in there
    fail_writing(final_, error,
                 ", while renaming the finished folder; all of it is kept in " +
                     quoted_path(partial_) + ": move that where you want it");
  }
  committed_ = true;
  std::error_code error;
  fs::remove_all(partial_, error);  // the old contents, since the exchange
  if (error) {
    spdlog::warn("the replaced contents of {} stay in {}: {}", quoted_path(final_),
                 quoted_path(partial_), error.message());
  }
}

}  // namespace graft
