#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/text/tokenizer.h"

namespace graft {

struct CorpusOptions {
  // The key of each .jsonl line that holds the text.
  std::string jsonl_field = "text";
  // Called while files are read: bytes done of bytes in all. May be empty.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
  // Where token blocks are kept between runs; empty: default_cache_dir().
  std::filesystem::path cache_dir;
};

// $GRAFT_CACHE_DIR, else $XDG_CACHE_HOME/graft, else $HOME/.cache/graft, else <temp>/graft-cache.
std::filesystem::path default_cache_dir();

namespace text {
class TokenBlock;
}

// One text, tokenised without special tokens. The ids live in a memory-mapped file that the Corpus
// keeps: valid while the Corpus (or a copy of it) lives.
struct Document {
  std::string name;  // the .txt file, or "file.jsonl:LINE"
  std::span<const int32_t> tokens;
};

// Text files as token ids. Each file is tokenised once and kept in the cache under the hash of its
// content, the tokenizer and the options; a cache entry that is damaged is made again.
// Copies share the mapped blocks. Const members may be called from several threads at once.
class Corpus {
 public:
  struct Source {
    std::filesystem::path path;
    std::string sha256;  // of the file's bytes: equal for files of equal text
    int64_t documents = 0;
    int64_t tokens = 0;
    bool from_cache = false;
  };

  // A .txt file is one document; each line of a .jsonl file is one, its text under
  // `options.jsonl_field`. Folders are searched recursively for both and taken in sorted order. A
  // UTF-8 byte order mark is not text; line ends are kept as they are.
  // Throws Error(input) naming file (and line) and cause: missing, empty, binary, not UTF-8,
  // malformed line, no such field, folder without texts, file named twice.
  static Corpus open(const std::vector<std::filesystem::path>& files_or_folders,
                     const Tokenizer& tokenizer, const CorpusOptions& options = {});

  std::vector<Document> documents() const;
  int64_t total_tokens() const;
  const std::vector<Source>& sources() const { return sources_; }

  // Names this corpus as tokenised: changes with any text, their order, the tokenizer or the
  // options.
  const std::string& content_hash() const { return content_hash_; }

 private:
  Corpus() = default;
  std::vector<Source> sources_;
  std::vector<std::shared_ptr<const text::TokenBlock>> blocks_;  // one for each source
  std::string content_hash_;
};

// The lines of a text file that are not blank, without their ends; of a .jsonl file what stands
// under `jsonl_field`. Errors as Corpus::open's.
std::vector<std::string> read_lines(const std::filesystem::path& path,
                                    const std::string& jsonl_field = "text");

// Throws Error(input) unless `document` has at least `needed` tokens. `purpose` ends the sentence
// "N tokens are needed for ...", e.g. "one evaluation window".
void require_tokens(const Document& document, int64_t needed, const std::string& purpose);

}  // namespace graft
