#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace graft {

// Files are read whole or mapped, and written all or nothing.
//
// Errors name the path and the system's reason. What cannot be read is ErrorKind::input; a place
// that cannot be written to (missing, read-only, in the way) is ErrorKind::usage; a machine that
// gives up in the middle (disk full, quota, I/O error) is ErrorKind::internal.

// A path in single quotes for messages; control characters and invalid UTF-8 as \xNN.
std::string quoted_path(const std::filesystem::path& path);

// What stands there, links followed; not_found where nothing does. Error(input) "cannot read ..."
// when that cannot be told: a folder that may not be entered, links in a circle.
std::filesystem::file_type file_type_of(const std::filesystem::path& path);

// The bytes of a file or pipe, as they are: no newline or encoding is touched. Refuses folders,
// devices, and more than `max_bytes`.
std::string read_text(const std::filesystem::path& path,
                      std::size_t max_bytes = std::numeric_limits<std::size_t>::max());

// A regular file mapped read-only. An empty file gives an empty span. The mapping lives as long as
// the object; replacing the file by rename (as everything here does) leaves it valid, but another
// program that truncates the file in place makes reads beyond the new end fault (SIGBUS).
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  // The same bytes as characters.
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data_), size_}; }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// The open end of a file being written by write_file_atomically. Small writes are gathered.
class FileWriter {
 public:
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // `what` is named in the error when the write fails: "tensor 'lm_head.weight'".
  void write(std::span<const std::byte> bytes, std::string_view what = {});
  void write(std::string_view text, std::string_view what = {});
  // Bytes accepted so far.
  std::uint64_t position() const noexcept { return written_ + buffer_.size(); }

 private:
  friend void write_file_atomically(const std::filesystem::path& path,
                                    const std::function<void(FileWriter&)>& fill);
  FileWriter(std::filesystem::path target, int descriptor);
  void flush();
  void write_through(std::span<const std::byte> bytes);

  std::filesystem::path target_;
  int descriptor_;
  std::string buffer_;
  std::string what_;
  std::uint64_t written_ = 0;
};

// Writes `path` so that other processes see the old file or the whole new one, never a part: the
// bytes go to a file beside it, which is fsynced and renamed over `path`. When anything fails, an
// exception of `fill` included, the old file is untouched and nothing else remains. A symbolic link
// is followed: the file it points to is replaced. The folder must exist.
void write_file_atomically(const std::filesystem::path& path,
                           const std::function<void(FileWriter&)>& fill);
void write_file_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes);
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// True when `path` is `folder` or lies in it, links followed: replacing the folder would lose it.
bool is_within(const std::filesystem::path& path, const std::filesystem::path& folder);

// A folder that appears under its final name only when it is complete.
//
//   AtomicDirectory out(final_path, /*replace_existing=*/false);
//   write_file_atomically(out.path() / "config.json", config);
//   out.commit();
//
// The constructor makes missing parents and an empty folder beside `final_path`, so that every
// cause known beforehand (not writable, not empty) is an error before the work and not after it.
// The destructor removes what was not committed, and the parents that were made for it. Only when
// the last step of commit() fails does the finished folder stay, and the error says where. A final
// path that exists must be an empty folder, unless `replace_existing`; the folder in use (current
// directory or above it) is never replaced.
class AtomicDirectory {
 public:
  AtomicDirectory(const std::filesystem::path& final_path, bool replace_existing);
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  // Where to write until commit().
  const std::filesystem::path& path() const noexcept { return partial_; }
  const std::filesystem::path& final_path() const noexcept { return final_; }
  // Fsyncs every file and renames the folder to its final name, replacing what stood there.
  void commit();

 private:
  void publish();
  void remove_made() const;

  std::filesystem::path final_;
  std::filesystem::path partial_;
  bool replace_existing_;
  std::vector<std::filesystem::path> made_;  // the parents that were missing, the deepest first
  bool committed_ = false;
  bool kept_ = false;
};

}  // namespace graft
