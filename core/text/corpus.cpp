#include "core/text/corpus.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/base/json.h"
#include "core/base/suggest.h"
#include "core/text/token_block.h"
#include "core/text/utf8.h"

namespace graft {

namespace fs = std::filesystem;

namespace {

using text::TokenBlock;

// Changes when the same text, tokenizer and options would give other ids.
constexpr std::string_view kScheme = "graft tokens 1";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

[[noreturn]] void refuse(const fs::path& path, const std::string& cause) {
  fail(ErrorKind::input, quoted_path(path) + ": " + cause);
}

[[noreturn]] void refuse_line(const fs::path& path, std::uint64_t line, const std::string& cause) {
  fail(ErrorKind::input, quoted_path(path) + ":" + std::to_string(line) + ": " + cause);
}

bool is_jsonl(const fs::path& path) { return path.extension() == ".jsonl"; }
bool is_text(const fs::path& path) { return path.extension() == ".txt" || is_jsonl(path); }

// The .txt and .jsonl files under `folder`, sorted by their path.
std::vector<fs::path> texts_in(const fs::path& folder) {
  std::vector<fs::path> files;
  try {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
      // A link to nowhere is kept, for the error when it is opened.
      if (is_text(entry.path()) && !entry.is_directory()) files.push_back(entry.path());
    }
  } catch (const fs::filesystem_error& error) {
    refuse(error.path1().empty() ? folder : error.path1(),
           "cannot be searched: " + error.code().message());
  }
  if (files.empty()) refuse(folder, "the folder holds no .txt or .jsonl file");
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    return a.generic_string() < b.generic_string();
  });
  return files;
}

std::vector<fs::path> expand(const std::vector<fs::path>& files_or_folders) {
  std::vector<fs::path> files;
  for (const fs::path& path : files_or_folders) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::not_found) refuse(path, "no such file or folder");
    if (error) refuse(path, "cannot be read: " + error.message());
    if (fs::is_directory(status)) {
      const std::vector<fs::path> found = texts_in(path);
      files.insert(files.end(), found.begin(), found.end());
    } else if (is_text(path)) {
      files.push_back(path);
    } else {
      refuse(path, "not a .txt or .jsonl file, nor a folder of them");
    }
  }
  if (files.empty()) fail(ErrorKind::usage, "no text was named");
  std::set<fs::path> seen;
  for (const fs::path& file : files) {
    std::error_code error;
    const fs::path real = fs::weakly_canonical(file, error);
    if (error) refuse(file, "cannot be read: " + error.message());
    if (!seen.insert(real).second) refuse(file, "named more than once");
  }
  return files;
}

void require_text(const fs::path& path, std::string_view content) {
  const auto place = [&](std::size_t offset) {
    const auto line =
        1 + std::count(content.begin(), content.begin() + std::ptrdiff_t(offset), '\n');
    return " at byte " + std::to_string(offset) + " (line " + std::to_string(line) + ")";
  };
  if (const std::size_t nul = content.find('\0'); nul != content.npos) {
    refuse(path, "not a text file: a NUL byte" + place(nul));
  }
  if (const std::size_t good = text::well_formed_prefix(content); good < content.size()) {
    refuse(path, "not UTF-8 text: an invalid sequence" + place(good) +
                     "; convert the file to UTF-8 first");
  }
}

// The text of one line of a .jsonl file.
std::string text_of_line(const fs::path& path, std::uint64_t number, std::string_view line,
                         const std::string& field) {
  nlohmann::json value =
      parse_json(line, quoted_path(path) + ":" + std::to_string(number) + ": the record");
  if (!value.is_object()) refuse_line(path, number, "each line must be an object with a text");
  const auto member = value.find(field);
  if (member == value.end()) {
    std::vector<std::string> keys;
    for (const auto& item : value.items()) keys.push_back(item.key());
    refuse_line(path, number, "no key " + quoted(field) + did_you_mean(field, keys));
  }
  if (!member->is_string()) {
    refuse_line(
        path, number,
        "expected a string under " + quoted(field) + ", got " + printable(member->dump(), 40));
  }
  return std::move(member->get_ref<std::string&>());
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

// One source file on its way to a block.
struct Job {
  const Tokenizer& tokenizer;
  const CorpusOptions& options;
  fs::path path;
  std::string_view content;
  std::function<void(std::uint64_t done)> progress;
};

// Each line that is not blank, with its number from 1 and where the next one begins.
void for_each_line(std::string_view content,
                   const std::function<void(std::uint64_t, std::string_view, std::size_t)>& visit) {
  std::uint64_t number = 0;
  for (std::size_t begin = 0; begin < content.size();) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view line = content.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (!is_blank(line)) visit(number, line, std::min(begin, content.size()));
  }
}

void write_lines(const Job& job, std::string_view content, TokenBlock::Writer& writer) {
  for_each_line(content, [&](std::uint64_t number, std::string_view line, std::size_t next) {
    const std::string text = text_of_line(job.path, number, line, job.options.jsonl_field);
    writer.add(job.tokenizer.encode(text), number);
    job.progress(next);
  });
}

// What is to be read of a text file; refuses other files, and empty ones.
std::string_view checked_text(const fs::path& path, std::string_view content) {
  require_text(path, content);
  if (content.starts_with(kByteOrderMark)) content.remove_prefix(kByteOrderMark.size());
  if (content.empty()) refuse(path, "the file is empty");
  return content;
}

void write_block(const Job& job, const fs::path& target, const std::string& key) {
  const std::string_view content = checked_text(job.path, job.content);
  write_file_atomically(target, [&](FileWriter& file) {
    TokenBlock::Writer writer(file, key);
    if (is_jsonl(job.path)) {
      write_lines(job, content, writer);
    } else {
      writer.add(job.tokenizer.encode(content), 0);
    }
    writer.finish();
  });
}

fs::path prepare_cache(const CorpusOptions& options) {
  const fs::path folder =
      (options.cache_dir.empty() ? default_cache_dir() : options.cache_dir) / "tokens";
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    fail(ErrorKind::usage, "the cache folder " + quoted_path(folder) + " cannot be made: " +
                               error.message() + "; name another with GRAFT_CACHE_DIR");
  }
  return folder;
}

std::string key_of(const fs::path& path, const std::string& sha256, const Tokenizer& tokenizer,
                   const CorpusOptions& options) {
  Sha256 hash;
  hash.update(kScheme).update("\n").update(sha256).update("\n").update(tokenizer.content_hash());
  if (is_jsonl(path)) hash.update("\njsonl\n").update(options.jsonl_field);
  return hash.hex();
}

}  // namespace

std::vector<std::string> read_lines(const fs::path& path, const std::string& jsonl_field) {
  const MappedFile file(path);
  std::vector<std::string> lines;
  for_each_line(checked_text(path, file.text()),
                [&](std::uint64_t number, std::string_view line, std::size_t) {
                  if (line.ends_with('\r')) line.remove_suffix(1);
                  lines.push_back(is_jsonl(path) ? text_of_line(path, number, line, jsonl_field)
                                                 : std::string(line));
                });
  if (lines.empty()) refuse(path, "the file has nothing but blank lines");
  return lines;
}

fs::path default_cache_dir() {
  const auto variable = [](const char* name) -> fs::path {
    const char* value = std::getenv(name);
    return value == nullptr ? fs::path() : fs::path(value);
  };
  if (const fs::path own = variable("GRAFT_CACHE_DIR"); !own.empty()) return own;
  if (const fs::path xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) return xdg / "graft";
  if (const fs::path home = variable("HOME"); !home.empty()) return home / ".cache" / "graft";
  return fs::temp_directory_path() / "graft-cache";
}

Corpus Corpus::open(const std::vector<fs::path>& files_or_folders, const Tokenizer& tokenizer,
                    const CorpusOptions& options) {
  const std::vector<fs::path> files = expand(files_or_folders);
  const fs::path cache = prepare_cache(options);
  std::uint64_t total = 0;
  for (const fs::path& file : files) {
    std::error_code error;  // of a file that will be refused below
    const std::uintmax_t size = fs::file_size(file, error);
    if (!error) total += size;
  }

  Corpus corpus;
  Sha256 identity;
  std::uint64_t done = 0;
  for (const fs::path& path : files) {
    const MappedFile file(path);
    const auto progress = [&](std::uint64_t part) {
      if (options.progress) options.progress(done + part, total);
    };
    Source source{path, sha256_hex(file.bytes()), 0, 0, true};
    const std::string key = key_of(path, source.sha256, tokenizer, options);
    const fs::path target = cache / (key + ".tokens");
    std::shared_ptr<const TokenBlock> block = TokenBlock::open(target, key);
    if (!block) {
      source.from_cache = false;
      write_block({tokenizer, options, path, file.text(), progress}, target, key);
      block = TokenBlock::open(target, key);
      if (!block) {
        fail(ErrorKind::internal, quoted_path(target) + ": not readable after it was written");
      }
    }
    if (block->tokens().empty()) refuse(path, "the file holds no text");
    source.documents = static_cast<std::int64_t>(block->entries().size());
    source.tokens = static_cast<std::int64_t>(block->tokens().size());
    corpus.sources_.push_back(std::move(source));
    corpus.blocks_.push_back(std::move(block));
    identity.update(key);
    done += file.bytes().size();
    progress(0);
  }
  corpus.content_hash_ = identity.hex();
  return corpus;
}

std::vector<Document> Corpus::documents() const {
  std::vector<Document> documents;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const std::string name = sources_[i].path.string();
    std::size_t begin = 0;
    for (const TokenBlock::Entry& entry : blocks_[i]->entries()) {
      documents.push_back({entry.line == 0 ? name : name + ":" + std::to_string(entry.line),
                           blocks_[i]->tokens().subspan(begin, entry.tokens)});
      begin += entry.tokens;
    }
  }
  return documents;
}

std::int64_t Corpus::total_tokens() const {
  std::int64_t total = 0;
  for (const Source& source : sources_) total += source.tokens;
  return total;
}

void require_tokens(const Document& document, std::int64_t needed, const std::string& purpose) {
  const auto have = static_cast<std::int64_t>(document.tokens.size());
  if (have >= needed) return;
  fail(ErrorKind::input, quoted(document.name) + ": the text has " + std::to_string(have) +
                             " tokens, but " + std::to_string(needed) + " are needed for " +
                             purpose);
}

}  // namespace graft
