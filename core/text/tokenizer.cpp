#include "core/text/tokenizer.h"

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/base/json.h"
#include "core/base/suggest.h"
#include "core/text/added_tokens.h"
#include "core/text/bpe.h"
#include "core/text/byte_level.h"
#include "core/text/decoder.h"
#include "core/text/json_node.h"
#include "core/text/normalizer.h"
#include "core/text/post_processor.h"
#include "core/text/pre_tokenizer.h"
#include "core/text/utf8.h"
#include "core/text/word_cache.h"

namespace graft {

namespace text {

namespace {

constexpr std::size_t kLargestFile = std::size_t{256} << 20;

// What one call of encode() needs for itself.
struct EncodeWorkspace {
  Regex::Workspace regex;
  BpeModel::Workspace bpe;
  WordCache cache;
};

// Workspaces that no call is using: as many as there ever were calls at one time.
class WorkspacePool {
 public:
  class Lease {
   public:
    explicit Lease(WorkspacePool& pool) : pool_(pool), workspace_(pool.take()) {}
    ~Lease() { pool_.put(std::move(workspace_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    EncodeWorkspace& operator*() { return *workspace_; }

   private:
    WorkspacePool& pool_;
    std::unique_ptr<EncodeWorkspace> workspace_;
  };

 private:
  std::unique_ptr<EncodeWorkspace> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<EncodeWorkspace>();
    std::unique_ptr<EncodeWorkspace> workspace = std::move(idle_.back());
    idle_.pop_back();
    return workspace;
  }

  void put(std::unique_ptr<EncodeWorkspace> workspace) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(workspace));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<EncodeWorkspace>> idle_;
};

template <typename Part>
Part part_at(const JsonNode& root, const char* key) {
  const auto node = root.find(key);
  return node ? Part(*node) : Part();
}

}  // namespace

class TokenizerImpl {
 public:
  TokenizerImpl(std::string_view json, const std::string& name);

  std::vector<std::int32_t> encode(std::string_view text, bool add_special_tokens) const;
  // Null when no token has this id.
  const std::string* id_to_token(std::int32_t id) const;
  std::optional<std::int32_t> token_to_id(std::string_view token) const;
  bool is_special(std::int32_t id) const;
  std::int32_t vocab_size() const {
    return std::max(model_->largest_id(), added_tokens_.largest_id()) + 1;
  }
  const Decoder& decoder() const { return decoder_; }
  const std::string& content_hash() const { return content_hash_; }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  class WordEncoder;
  void note_what_is_ignored(const JsonNode& root);
  void note_missing_bytes(const std::string& name);

  std::string content_hash_;
  std::vector<std::string> notes_;
  std::optional<BpeModel> model_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  PostProcessor post_processor_;
  Decoder decoder_;
  AddedTokens added_tokens_;
  mutable WorkspacePool pool_;
};

TokenizerImpl::TokenizerImpl(std::string_view json, const std::string& name)
    : content_hash_(sha256_hex(json)) {
  const nlohmann::json document = parse_json(json, name);
  const JsonNode root(document, name);
  if (const auto version = root.find("version"); version && version->string() != "1.0") {
    version->fail("expected \"1.0\", got " + quoted(version->string()));
  }
  model_.emplace(root.at("model"));
  normalizer_ = part_at<Normalizer>(root, "normalizer");
  pre_tokenizer_ = part_at<PreTokenizer>(root, "pre_tokenizer");
  post_processor_ = part_at<PostProcessor>(root, "post_processor");
  if (const auto decoder = root.find("decoder")) decoder_ = Decoder(*decoder);
  if (const auto tokens = root.find("added_tokens")) {
    added_tokens_ = AddedTokens(*tokens, *model_, normalizer_);
  }
  note_what_is_ignored(root);
  if (pre_tokenizer_.is_byte_level() && model_->drops_unknown()) note_missing_bytes(name);
}

void TokenizerImpl::note_what_is_ignored(const JsonNode& root) {
  if (root.find("truncation")) {
    notes_.push_back(root.file() +
                     ": \"truncation\" is ignored: texts are cut into windows later, not here");
  }
  if (root.find("padding")) {
    notes_.push_back(root.file() + ": \"padding\" is ignored: texts are never padded");
  }
}

void TokenizerImpl::note_missing_bytes(const std::string& name) {
  std::string missing;
  for (unsigned byte = 0; byte < 0xF5; ++byte) {
    if (byte == 0xC0 || byte == 0xC1) continue;  // these, and what is above, are never in UTF-8
    std::string spelled;
    append_character(spelled, byte_to_character(static_cast<std::uint8_t>(byte)));
    if (model_->token_to_id(spelled)) continue;
    constexpr std::string_view kDigits = "0123456789ABCDEF";
    missing.append(" 0x").append(1, kDigits[byte >> 4U]).append(1, kDigits[byte & 15U]);
  }
  if (missing.empty()) return;
  notes_.push_back(name + ": model.vocab has no token for the bytes" + missing +
                   " and no unk_token: text loses them, as it does in `tokenizers`");
}

// Turns words into ids, with the cache.
class TokenizerImpl::WordEncoder final : public PreTokenizer::Sink {
 public:
  WordEncoder(const BpeModel& model, EncodeWorkspace& workspace, std::vector<std::int32_t>& ids)
      : model_(model), workspace_(workspace), ids_(ids) {}

  void word(std::string_view word) override {
    if (const auto known = workspace_.cache.find(word)) {
      ids_.insert(ids_.end(), known->begin(), known->end());
      return;
    }
    const std::size_t before = ids_.size();
    model_.encode(word, workspace_.bpe, ids_);
    workspace_.cache.insert(word, std::span(ids_).subspan(before));
  }

 private:
  const BpeModel& model_;
  EncodeWorkspace& workspace_;
  std::vector<std::int32_t>& ids_;
};

// Added tokens cut the text as it is; each piece is normalised, cut again at the added tokens that
// are looked for in normalised text, then into words.
std::vector<std::int32_t> TokenizerImpl::encode(std::string_view text,
                                                bool add_special_tokens) const {
  std::string repaired;
  if (!is_well_formed(text)) {
    repaired = replace_ill_formed(text);
    text = repaired;
  }
  WorkspacePool::Lease lease(pool_);
  EncodeWorkspace& workspace = *lease;
  std::vector<std::int32_t> ids;
  WordEncoder encoder(*model_, workspace, ids);
  const auto encode_words = [&](std::string_view piece, std::int32_t id) {
    if (id >= 0) {
      ids.push_back(id);
    } else {
      pre_tokenizer_.split(piece, workspace.regex, encoder);
    }
  };
  added_tokens_.split(text, false, [&](std::string_view piece, std::int32_t id) {
    if (id >= 0) {
      ids.push_back(id);
    } else if (normalizer_.is_identity()) {
      added_tokens_.split(piece, true, encode_words);
    } else {
      added_tokens_.split(normalizer_.apply(piece, workspace.regex), true, encode_words);
    }
  });
  if (add_special_tokens) post_processor_.apply(ids);
  return ids;
}

const std::string* TokenizerImpl::id_to_token(std::int32_t id) const {
  if (const AddedToken* added = added_tokens_.find(id)) return &added->content;
  return model_->id_to_token(id);
}

std::optional<std::int32_t> TokenizerImpl::token_to_id(std::string_view token) const {
  if (const auto id = added_tokens_.token_to_id(token)) return id;
  return model_->token_to_id(token);
}

bool TokenizerImpl::is_special(std::int32_t id) const {
  const std::string* token = id_to_token(id);
  return token != nullptr && added_tokens_.is_special(*token);
}

}  // namespace text

Tokenizer Tokenizer::from_file(const std::filesystem::path& path) {
  return from_json(read_text(path, text::kLargestFile), quoted_path(path));
}

Tokenizer Tokenizer::from_json(std::string_view json, const std::string& name) {
  return Tokenizer(std::make_shared<const text::TokenizerImpl>(json, name));
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  return impl_->encode(text, add_special_tokens);
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special_tokens) const {
  std::string out;
  text::DecodeChain chain(impl_->decoder());
  for (const std::int32_t id : ids) {
    const std::string* token = impl_->id_to_token(id);
    if (token == nullptr || (skip_special_tokens && impl_->is_special(id))) continue;
    chain.token(*token, out);
  }
  chain.finish(out);
  return out;
}

std::int32_t Tokenizer::vocab_size() const { return impl_->vocab_size(); }

std::optional<std::int32_t> Tokenizer::token_to_id(std::string_view token) const {
  return impl_->token_to_id(token);
}

std::optional<std::string> Tokenizer::id_to_token(std::int32_t id) const {
  const std::string* token = impl_->id_to_token(id);
  if (token == nullptr) return std::nullopt;
  return *token;
}

bool Tokenizer::is_special(std::int32_t id) const { return impl_->is_special(id); }

const std::string& Tokenizer::content_hash() const { return impl_->content_hash(); }

const std::vector<std::string>& Tokenizer::notes() const { return impl_->notes(); }

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool skip_special_tokens)
    : tokenizer_(tokenizer.impl_),
      skip_special_tokens_(skip_special_tokens),
      chain_(std::make_unique<text::DecodeChain>(tokenizer_->decoder())) {}

StreamDecoder::~StreamDecoder() = default;
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;

std::string StreamDecoder::push(std::int32_t id) {
  std::string out;
  const std::string* token = tokenizer_->id_to_token(id);
  if (token != nullptr && !(skip_special_tokens_ && tokenizer_->is_special(id))) {
    chain_->token(*token, out);
  }
  return out;
}

std::string StreamDecoder::finish() {
  std::string out;
  chain_->finish(out);
  return out;
}

}  // namespace graft
