#include "core/text/token_block.h"

#include <array>
#include <cstring>
#include <type_traits>

#include "core/base/error.h"

namespace graft::text {

namespace {

constexpr std::size_t kHashDigits = 64;
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::array<char, 8> kMagic = {'g', 'r', 'a', 'f', 't', 'T', 'O', 'K'};

struct Header {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t byte_order;
  std::array<char, kHashDigits> key;
};

struct Trailer {
  std::uint64_t tokens;
  std::uint64_t documents;
  std::array<char, kHashDigits> sha256;
};

static_assert(sizeof(Header) == 80 && sizeof(Trailer) == 80 && sizeof(TokenBlock::Entry) == 16);
static_assert(std::is_trivially_copyable_v<Header> && std::is_trivially_copyable_v<Trailer>);

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

constexpr std::uint64_t padding_behind(std::uint64_t tokens) { return tokens % 2 * 4; }

}  // namespace

TokenBlock::Writer::Writer(FileWriter& file, std::string_view key) : file_(file) {
  Header header{kMagic, kVersion, kByteOrder, {}};
  if (key.size() != kHashDigits) fail(ErrorKind::internal, "a token block's key has 64 characters");
  std::copy(key.begin(), key.end(), header.key.begin());
  write(bytes_of(header));
}

void TokenBlock::Writer::write(std::span<const std::byte> bytes) {
  hash_.update(bytes);
  file_.write(bytes);
}

void TokenBlock::Writer::add(std::span<const std::int32_t> ids, std::uint64_t line) {
  write(std::as_bytes(ids));
  entries_.push_back({ids.size(), line});
  tokens_ += ids.size();
}

void TokenBlock::Writer::finish() {
  constexpr std::array<std::byte, 8> zeros{};
  write(std::span(zeros).first(padding_behind(tokens_)));
  write(std::as_bytes(std::span(entries_)));
  Trailer trailer{tokens_, entries_.size(), {}};
  const std::string sha256 = hash_.hex();
  std::copy(sha256.begin(), sha256.end(), trailer.sha256.begin());
  file_.write(bytes_of(trailer));
}

std::shared_ptr<const TokenBlock> TokenBlock::open(const std::filesystem::path& path,
                                                   std::string_view key) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return nullptr;
  const std::shared_ptr<TokenBlock> block(new TokenBlock(MappedFile(path)));
  return block->check(key) ? block : nullptr;
}

// Sets the spans; false when anything is not as the writer left it.
bool TokenBlock::check(std::string_view key) {
  const std::span<const std::byte> bytes = file_.bytes();
  if (bytes.size() < sizeof(Header) + sizeof(Trailer)) return false;
  Header header;
  Trailer trailer;
  const std::span<const std::byte> body = bytes.first(bytes.size() - sizeof(Trailer));
  std::memcpy(&header, bytes.data(), sizeof(Header));
  std::memcpy(&trailer, body.data() + body.size(), sizeof(Trailer));
  if (header.magic != kMagic || header.version != kVersion || header.byte_order != kByteOrder ||
      std::string_view(header.key.data(), kHashDigits) != key) {
    return false;
  }
  // Bounds that keep the sum below from overflowing.
  if (trailer.tokens > bytes.size() || trailer.documents > bytes.size()) return false;
  const std::uint64_t ids_size = trailer.tokens * 4 + padding_behind(trailer.tokens);
  if (sizeof(Header) + ids_size + trailer.documents * sizeof(Entry) != body.size()) return false;
  if (sha256_hex(body) != std::string_view(trailer.sha256.data(), kHashDigits)) return false;
  const std::byte* ids = body.data() + sizeof(Header);
  tokens_ = {reinterpret_cast<const std::int32_t*>(ids), trailer.tokens};
  entries_ = {reinterpret_cast<const Entry*>(ids + ids_size), trailer.documents};
  std::uint64_t sum = 0;
  for (const Entry& entry : entries_) sum += entry.tokens;
  return sum == trailer.tokens;
}

}  // namespace graft::text
