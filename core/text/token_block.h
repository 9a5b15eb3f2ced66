#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/file.h"
#include "core/base/hash.h"

namespace graft::text {

// The token ids of one source file, memory-mapped. The file, in the machine's byte order:
//   Header   magic, version, byte order mark, the key it is cached under
//   int32    all ids, document after document; zero-padded to 8 bytes
//   Entry    for each document
//   Trailer  counts, sha256 of everything before it
class TokenBlock {
 public:
  struct Entry {
    std::uint64_t tokens;
    std::uint64_t line;  // of the source file, from 1; 0 when the document is the whole file
  };

  // Writes a block into an open file; add() each document, then finish().
  class Writer {
   public:
    Writer(FileWriter& file, std::string_view key);
    void add(std::span<const std::int32_t> ids, std::uint64_t line);
    void finish();

   private:
    void write(std::span<const std::byte> bytes);

    FileWriter& file_;
    Sha256 hash_;
    std::vector<Entry> entries_;
    std::uint64_t tokens_ = 0;
  };

  // The block in `path`, or null when there is none, or one that is damaged, of another version, or
  // not of `key` (64 characters). Reads the whole file, to compare its hash.
  static std::shared_ptr<const TokenBlock> open(const std::filesystem::path& path,
                                                std::string_view key);

  std::span<const Entry> entries() const { return entries_; }
  std::span<const std::int32_t> tokens() const { return tokens_; }

 private:
  explicit TokenBlock(MappedFile file) : file_(std::move(file)) {}
  bool check(std::string_view key);

  MappedFile file_;
  std::span<const std::int32_t> tokens_;
  std::span<const Entry> entries_;
};

}  // namespace graft::text
