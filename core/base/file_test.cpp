#include "core/base/file.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/base/testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr std::size_t kBuffer = std::size_t{256} << 10;  // FileWriter's

std::string pattern(std::size_t size) {
  std::string text(size, '\0');
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 + i / 256);
  return text;
}

// Tests often run as root, whom permissions do not stop: act as nobody meanwhile.
class WithoutPrivileges {
 public:
  WithoutPrivileges() {
    if (::geteuid() == 0) changed_ = ::seteuid(65534) == 0;
  }
  ~WithoutPrivileges() {
    if (changed_ && ::seteuid(0) != 0) std::abort();
  }

 private:
  bool changed_ = false;
};

// No file of this process may grow beyond `bytes`: write() fails with EFBIG as it does with ENOSPC.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limited = {bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_ = {};
  void (*old_handler_)(int);
};

// A small file system of its own, where the test may mount one.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& options)
      : mounted_(::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options.c_str()) == 0) {}
  ~SmallDisk() {
    if (mounted_) ::umount(folder_.path().c_str());
  }
  bool mounted() const { return mounted_; }
  const TempFolder& folder() const { return folder_; }

 private:
  TempFolder folder_;
  bool mounted_;
};

class Sizes : public testing::TestWithParam<std::size_t> {};

TEST_P(Sizes, WrittenReadAndMapped) {
  const TempFolder folder;
  const fs::path path = folder / "a file, được 😊.bin";
  const std::string text = pattern(GetParam());
  write_file_atomically(path, text);
  EXPECT_EQ(read_text(path), text);
  const MappedFile mapped(path);
  EXPECT_EQ(mapped.text(), text);
  EXPECT_EQ(mapped.bytes().size(), text.size());
  EXPECT_EQ(mapped.path(), path);
  EXPECT_THAT(folder.entries(), ElementsAre(path.filename().string()));
}

TEST_P(Sizes, WrittenInPieces) {
  const TempFolder folder;
  const std::string text = pattern(GetParam());
  for (const std::size_t piece : {std::size_t{1000}, kBuffer - 1, kBuffer, kBuffer + 1}) {
    write_file_atomically(folder / "f", [&](FileWriter& writer) {
      for (std::size_t at = 0; at < text.size(); at += piece) {
        EXPECT_EQ(writer.position(), at);
        writer.write(std::string_view(text).substr(at, piece), at % 2 == 0 ? "even" : "odd");
      }
      EXPECT_EQ(writer.position(), text.size());
    });
    EXPECT_EQ(read_text(folder / "f"), text) << "in pieces of " << piece;
  }
}

INSTANTIATE_TEST_SUITE_P(Edges, Sizes,
                         testing::Values(0, 1, 4095, 4096, 4097, kBuffer - 1, kBuffer, kBuffer + 1,
                                         3 * kBuffer + 17));

TEST(ReadText, RefusesWithTheReason) {
  const TempFolder folder;
  write_file_atomically(folder / "ten", std::string_view("0123456789"));
  EXPECT_EQ(read_text(folder / "ten", 10), "0123456789");
  EXPECT_GRAFT_ERROR(read_text(folder / "ten", 9), ErrorKind::input,
                     HasSubstr("ten': it is larger than 9 bytes, the most allowed here"));
  EXPECT_GRAFT_ERROR(read_text(folder / "none"), ErrorKind::input,
                     AllOf(HasSubstr("cannot read '" + (folder / "none").string()),
                           HasSubstr("No such file or directory")));
  EXPECT_GRAFT_ERROR(read_text(folder.path()), ErrorKind::input,
                     HasSubstr("it is a folder, not a file"));
  EXPECT_GRAFT_ERROR(read_text("/dev/zero"), ErrorKind::input,
                     HasSubstr("cannot read '/dev/zero': it is not a file or pipe"));
}

TEST(ReadText, ReadsPipesAndFilesWithoutASize) {
  const TempFolder folder;
  const fs::path pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string text = pattern(200'000);
  std::thread writer([&] {
    const int descriptor = ::open(pipe.c_str(), O_WRONLY);
    for (std::size_t at = 0; at < text.size();) {
      at += static_cast<std::size_t>(::write(descriptor, text.data() + at, text.size() - at));
    }
    ::close(descriptor);
  });
  EXPECT_EQ(read_text(pipe), text);
  writer.join();
  EXPECT_THAT(read_text("/proc/self/status"), HasSubstr("Pid:"));
}

TEST(MappedFileTest, RefusesWithTheReason) {
  const TempFolder folder;
  EXPECT_GRAFT_ERROR(MappedFile(folder / "none"), ErrorKind::input,
                     HasSubstr("none': No such file or directory"));
  EXPECT_GRAFT_ERROR(MappedFile(folder.path()), ErrorKind::input,
                     HasSubstr("it is a folder, not a file"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_GRAFT_ERROR(MappedFile(folder / "pipe"), ErrorKind::input,
                     HasSubstr("it is not a regular file"));
  fs::create_symlink("/no/such/blob", folder / "link");
  EXPECT_GRAFT_ERROR(
      MappedFile(folder / "link"), ErrorKind::input,
      HasSubstr("link': No such file or directory (it is a link to '/no/such/blob')"));
}

TEST(MappedFileTest, UnreadableFile) {
  const TempFolder folder;
  write_file_atomically(folder / "secret", std::string_view("x"));
  fs::permissions(folder / "secret", fs::perms::none);
  const WithoutPrivileges nobody;
  EXPECT_GRAFT_ERROR(MappedFile(folder / "secret"), ErrorKind::input,
                     HasSubstr("secret': Permission denied"));
  EXPECT_GRAFT_ERROR(read_text(folder / "secret"), ErrorKind::input,
                     HasSubstr("secret': Permission denied"));
}

TEST(MappedFileTest, MovesAndOutlivesReplacement) {
  const TempFolder folder;
  write_file_atomically(folder / "f", std::string_view("old"));
  MappedFile first(folder / "f");
  MappedFile second = std::move(first);
  write_file_atomically(folder / "f", std::string_view("new!"));
  EXPECT_EQ(second.text(), "old");
  MappedFile third(folder / "f");
  third = std::move(second);
  EXPECT_EQ(third.text(), "old");
  EXPECT_EQ(MappedFile(folder / "f").text(), "new!");
}

TEST(WriteAtomically, ReplacesAndFollowsLinks) {
  const TempFolder folder;
  fs::create_directory(folder / "real");
  write_file_atomically(folder / "real" / "f", std::string_view("old"));
  fs::create_symlink("real/f", folder / "link");
  write_file_atomically(folder / "link", std::string_view("new"));
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "real" / "f"), "new");
  EXPECT_THAT(folder.entries(), ElementsAre("link", "real"));
}

TEST(WriteAtomically, TakesTheLongestNameThereIs) {
  const TempFolder folder;
  const std::string name(255, 'n');
  write_file_atomically(folder / name, std::string_view("x"));
  EXPECT_THAT(folder.entries(), ElementsAre(name));
}

TEST(WriteAtomically, RelativePathAndUmask) {
  const TempFolder folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  const mode_t mask = ::umask(027);
  write_file_atomically("here", std::string_view("x"));
  ::umask(mask);
  fs::current_path(before);
  EXPECT_EQ(fs::status(folder / "here").permissions(), fs::perms(0640));
}

TEST(WriteAtomically, LeavesTheOldFileWhenTheWriterThrows) {
  const TempFolder folder;
  write_file_atomically(folder / "f", std::string_view("old"));
  EXPECT_THROW(write_file_atomically(folder / "f",
                                     [](FileWriter& writer) {
                                       writer.write(std::string_view("half"));
                                       throw std::runtime_error("stop");
                                     }),
               std::runtime_error);
  EXPECT_EQ(read_text(folder / "f"), "old");
  EXPECT_THAT(folder.entries(), ElementsAre("f"));
}

TEST(WriteAtomically, RefusesWithTheReason) {
  const TempFolder folder;
  const std::string_view text = "x";
  EXPECT_GRAFT_ERROR(write_file_atomically(folder.path(), text), ErrorKind::usage,
                     HasSubstr("it is a folder"));
  EXPECT_GRAFT_ERROR(write_file_atomically("/dev/null", text), ErrorKind::usage,
                     HasSubstr("cannot write '/dev/null': it is not a regular file"));
  EXPECT_GRAFT_ERROR(write_file_atomically(folder / "a" / "b", text), ErrorKind::usage,
                     AllOf(HasSubstr("b': No such file or directory"),
                           HasSubstr("make the folder '" + (folder / "a").string() + "' first")));
  write_file_atomically(folder / "f", text);
  EXPECT_GRAFT_ERROR(write_file_atomically(folder / "f" / "b", text), ErrorKind::usage,
                     HasSubstr("b': Not a directory"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST(WriteAtomically, ReadOnlyFolder) {
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0555));
  const WithoutPrivileges nobody;
  EXPECT_GRAFT_ERROR(write_file_atomically(folder / "f", std::string_view("x")), ErrorKind::usage,
                     AllOf(HasSubstr("cannot write '" + (folder / "f").string()),
                           HasSubstr("Permission denied, while creating a file in its folder")));
  EXPECT_THAT(folder.entries(), IsEmpty());
}

// Writes `size` bytes of two named parts in pieces.
void write_parts(const fs::path& path, std::size_t size) {
  const std::string part = pattern(size / 2);
  write_file_atomically(path, [&](FileWriter& writer) {
    writer.write(part, "tensor 'a'");
    for (std::size_t at = 0; at < part.size(); at += 1000) {
      writer.write(std::string_view(part).substr(at, 1000), "tensor 'b'");
    }
  });
}

TEST(WriteAtomically, FileTooLargeLeavesNothing) {
  const TempFolder folder;
  write_file_atomically(folder / "f", std::string_view("old"));
  const FileSizeLimit limit(100'000);
  EXPECT_GRAFT_ERROR(
      write_parts(folder / "f", 150'000), ErrorKind::internal,
      AllOf(HasSubstr("f': File too large"), HasSubstr("while writing tensor 'b' at byte 100000")));
  EXPECT_GRAFT_ERROR(write_parts(folder / "f", 900'000), ErrorKind::internal,
                     HasSubstr("while writing tensor 'a' at byte 100000"));
  EXPECT_GRAFT_ERROR(write_file_atomically(folder / "f", pattern(100'001)), ErrorKind::internal,
                     HasSubstr("File too large, while writing at byte 100000"));
  EXPECT_EQ(read_text(folder / "f"), "old");
  EXPECT_THAT(folder.entries(), ElementsAre("f"));
}

TEST(WriteAtomically, DiskFullLeavesNothing) {
  const SmallDisk disk("size=256k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small tmpfs needs root";
  const fs::path path = disk.folder() / "f";
  write_file_atomically(path, std::string_view("old"));
  EXPECT_GRAFT_ERROR(write_parts(path, 400'000), ErrorKind::internal,
                     AllOf(HasSubstr("f': No space left on device"),
                           HasSubstr("while writing tensor 'b' at byte "),
                           HasSubstr("free some space or write elsewhere"),
                           HasSubstr("nothing half-written is left")));
  EXPECT_EQ(read_text(path), "old");
  EXPECT_THAT(disk.folder().entries(), ElementsAre("f"));
  write_parts(path, 200'000);  // the space is free again
  EXPECT_EQ(fs::file_size(path), 200'000U);
}

TEST(WriteAtomically, ManyWritersOfOneFileLeaveOneOfTheirs) {
  const TempFolder folder;
  std::vector<std::thread> writers;
  for (char c = 'a'; c < 'e'; ++c) {
    writers.emplace_back([&, c] {
      for (int i = 0; i < 10; ++i) write_file_atomically(folder / "f", std::string(10'000, c));
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string text = read_text(folder / "f");
  EXPECT_EQ(text, std::string(10'000, text.at(0)));
  EXPECT_THAT(folder.entries(), ElementsAre("f"));
}

// ---- AtomicDirectory

void fill(const AtomicDirectory& out, std::string_view text) {
  fs::create_directory(out.path() / "sub folder");
  write_file_atomically(out.path() / "sub folder" / "f", text);
}

TEST(AtomicDirectoryTest, AppearsWholeAndMakesParents) {
  const TempFolder folder;
  const fs::path target = folder / "runs" / "đầu tiên 1";
  AtomicDirectory out(target, false);
  fill(out, "x");
  EXPECT_FALSE(fs::exists(target));
  out.commit();
  EXPECT_EQ(read_text(target / "sub folder" / "f"), "x");
  EXPECT_EQ(out.final_path(), target);
  EXPECT_EQ(std::distance(fs::directory_iterator(target.parent_path()), {}), 1);
  EXPECT_GRAFT_ERROR(out.commit(), ErrorKind::internal, HasSubstr("was committed already"));
}

TEST(AtomicDirectoryTest, RemovedWhenNotCommitted) {
  const TempFolder folder;
  {
    AtomicDirectory out(folder / "out", false);
    fill(out, "x");
    EXPECT_EQ(folder.entries().size(), 1U);
  }
  EXPECT_THAT(folder.entries(), IsEmpty());
}

TEST(AtomicDirectoryTest, TakesAnEmptyFolderAndATrailingSlash) {
  const TempFolder folder;
  fs::create_directory(folder / "out");
  AtomicDirectory out(folder / "out/", false);
  fill(out, "x");
  out.commit();
  EXPECT_THAT(folder.entries(), ElementsAre("out"));
  EXPECT_TRUE(fs::exists(folder / "out" / "sub folder" / "f"));
}

TEST(AtomicDirectoryTest, ReplacesOnlyWhenAsked) {
  const TempFolder folder;
  fs::create_directory(folder / "out");
  write_file_atomically(folder / "out" / "precious", std::string_view("old"));
  EXPECT_GRAFT_ERROR(AtomicDirectory(folder / "out", false), ErrorKind::usage,
                     AllOf(HasSubstr("cannot write the folder '" + (folder / "out").string()),
                           HasSubstr("it is not empty; name another, or replace it with --force")));
  {
    AtomicDirectory out(folder / "out", true);
    fill(out, "new");
    EXPECT_EQ(read_text(folder / "out" / "precious"), "old");
  }
  EXPECT_EQ(read_text(folder / "out" / "precious"), "old");
  AtomicDirectory out(folder / "out", true);
  fill(out, "new");
  out.commit();
  EXPECT_FALSE(fs::exists(folder / "out" / "precious"));
  EXPECT_EQ(read_text(folder / "out" / "sub folder" / "f"), "new");
  EXPECT_THAT(folder.entries(), ElementsAre("out"));
}

TEST(AtomicDirectoryTest, FollowsALink) {
  const TempFolder folder;
  fs::create_directory(folder / "real");
  fs::create_symlink("real", folder / "link");
  AtomicDirectory out(folder / "link", false);
  fill(out, "x");
  out.commit();
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_TRUE(fs::exists(folder / "real" / "sub folder" / "f"));
}

TEST(AtomicDirectoryTest, AFolderFilledMeanwhileIsKept) {
  const TempFolder folder;
  AtomicDirectory out(folder / "out", false);
  fill(out, "mine");
  fs::create_directory(folder / "out");
  write_file_atomically(folder / "out" / "theirs", std::string_view("x"));
  EXPECT_GRAFT_ERROR(
      out.commit(), ErrorKind::usage,
      AllOf(HasSubstr("Directory not empty, while renaming the finished folder; all of it is kept"),
            HasSubstr("in '" + out.path().string() + "': move that")));
  EXPECT_TRUE(fs::exists(folder / "out" / "theirs"));
}

TEST(AtomicDirectoryTest, TheFinishedFolderOutlivesAFailedRename) {
  const TempFolder folder;
  fs::path finished;
  {
    AtomicDirectory out(folder / "out", false);
    finished = out.path();
    fill(out, "mine");
    fs::create_directory(folder / "out");
    write_file_atomically(folder / "out" / "theirs", std::string_view("x"));
    EXPECT_GRAFT_ERROR(out.commit(), ErrorKind::usage, HasSubstr("all of it is kept in"));
  }
  EXPECT_EQ(read_text(finished / "sub folder" / "f"), "mine");
}

TEST(AtomicDirectoryTest, RemovesTheParentsItMadeAndNoOthers) {
  const TempFolder folder;
  fs::create_directory(folder / "mine");
  { AtomicDirectory out(folder / "mine" / "a" / "b" / "out", false); }
  EXPECT_THAT(folder.entries(), ElementsAre("mine"));
  EXPECT_TRUE(fs::is_empty(folder / "mine"));
  {
    AtomicDirectory out(folder / "mine" / "a" / "b" / "out", false);
    write_file_atomically(folder / "mine" / "a" / "other", std::string_view("x"));
  }
  EXPECT_TRUE(fs::exists(folder / "mine" / "a" / "other"));
  EXPECT_FALSE(fs::exists(folder / "mine" / "a" / "b"));
}

TEST(IsWithin, FollowsLinksBothWays) {
  const TempFolder folder;
  fs::create_directories(folder / "out" / "deep");
  fs::create_directory(folder / "outside");
  write_file_atomically(folder / "out" / "deep" / "f", std::string_view("x"));
  write_file_atomically(folder / "outside" / "g", std::string_view("x"));
  fs::create_symlink(folder / "out" / "deep", folder / "link");
  fs::create_symlink(folder / "outside" / "g", folder / "out" / "g");
  const fs::path out = folder / "out";
  EXPECT_TRUE(is_within(out, out));
  EXPECT_TRUE(is_within(out / "", out));
  EXPECT_TRUE(is_within(out / "deep" / "f", folder / "outside" / ".." / "out/"));
  EXPECT_TRUE(is_within(folder / "link" / "f", out)) << "the file itself is in there";
  EXPECT_TRUE(is_within(out / "g", out)) << "the link is in there";
  EXPECT_FALSE(is_within(folder / "outside" / "g", out));
  EXPECT_FALSE(is_within(folder.path(), out));
}

TEST(AtomicDirectoryTest, RefusesWithTheReason) {
  const TempFolder folder;
  write_file_atomically(folder / "f", std::string_view("x"));
  EXPECT_GRAFT_ERROR(AtomicDirectory(folder / "f", true), ErrorKind::usage,
                     HasSubstr("f': a file of that name exists"));
  EXPECT_GRAFT_ERROR(AtomicDirectory(folder / "f" / "out", true), ErrorKind::usage,
                     HasSubstr("Not a directory, while making the folders above it"));
  EXPECT_GRAFT_ERROR(AtomicDirectory("", true), ErrorKind::usage, HasSubstr("its path is empty"));
  EXPECT_GRAFT_ERROR(AtomicDirectory("/", true), ErrorKind::usage,
                     HasSubstr("it is, or holds, the current folder"));
  EXPECT_THAT(folder.entries(), ElementsAre("f"));
}

TEST(AtomicDirectoryTest, NeverReplacesTheFolderInUse) {
  const TempFolder folder;
  fs::create_directories(folder / "a" / "b");
  const fs::path before = fs::current_path();
  fs::current_path(folder / "a" / "b");
  for (const char* path : {".", "..", "../../a"}) {
    EXPECT_GRAFT_ERROR(AtomicDirectory(path, true), ErrorKind::usage,
                       HasSubstr("it is, or holds, the current folder; name one inside it"));
  }
  AtomicDirectory("sibling", true).commit();
  fs::current_path(before);
  EXPECT_TRUE(fs::is_directory(folder / "a" / "b" / "sibling"));
}

TEST(AtomicDirectoryTest, ReadOnlyParent) {
  const TempFolder folder;
  fs::permissions(folder.path(), fs::perms(0555));
  const WithoutPrivileges nobody;
  EXPECT_GRAFT_ERROR(
      AtomicDirectory(folder / "out", false), ErrorKind::usage,
      AllOf(HasSubstr("out': Permission denied"), HasSubstr("while making a folder beside it")));
  EXPECT_GRAFT_ERROR(AtomicDirectory(folder / "runs" / "out", false), ErrorKind::usage,
                     HasSubstr("out': Permission denied"));
}

TEST(AtomicDirectoryTest, DiskFullLeavesNothing) {
  const SmallDisk disk("size=128k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small tmpfs needs root";
  try {
    AtomicDirectory out(disk.folder() / "out", false);
    write_file_atomically(out.path() / "a", pattern(100'000));
    write_file_atomically(out.path() / "b", pattern(100'000));
    ADD_FAILURE() << "200 kB went into 128 KiB";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("b': No space left on device")));
  }
  EXPECT_THAT(disk.folder().entries(), IsEmpty());
}

TEST(FileType, FollowsLinksAndSaysWhatCannotBeTold) {
  const TempFolder folder;
  write_file_atomically(folder / "file", std::string_view("x"));
  fs::create_symlink("file", folder / "link");
  fs::create_symlink("nowhere", folder / "dangling");
  fs::create_symlink("loop", folder / "loop");
  EXPECT_EQ(file_type_of(folder / "file"), fs::file_type::regular);
  EXPECT_EQ(file_type_of(folder / "link"), fs::file_type::regular);
  EXPECT_EQ(file_type_of(folder.path()), fs::file_type::directory);
  EXPECT_EQ(file_type_of(folder / "none"), fs::file_type::not_found);
  EXPECT_EQ(file_type_of(folder / "dangling"), fs::file_type::not_found);
  EXPECT_EQ(file_type_of(folder / "file/below"), fs::file_type::not_found);
  EXPECT_GRAFT_ERROR(file_type_of(folder / "loop"), ErrorKind::input,
                     testing::HasSubstr("cannot read '" + (folder / "loop").string() + "': "));
}

}  // namespace
}  // namespace graft
