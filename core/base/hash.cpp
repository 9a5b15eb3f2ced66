#include "core/base/hash.h"

#include <openssl/evp.h>

#include <array>

#include "core/base/error.h"
#include "core/base/file.h"

namespace graft {
namespace {

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_MD_CTX, FreeContext>;

void check(bool ok) {
  if (!ok) fail(ErrorKind::internal, "OpenSSL cannot compute SHA-256 on this machine");
}

Context new_context() {
  Context context(EVP_MD_CTX_new());
  check(context != nullptr);
  return context;
}

}  // namespace

struct Sha256::State {
  Context context = new_context();
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  check(EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr) == 1);
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

Sha256& Sha256::update(std::span<const std::byte> bytes) {
  check(EVP_DigestUpdate(state_->context.get(), bytes.data(), bytes.size()) == 1);
  return *this;
}

Sha256& Sha256::update(std::string_view text) { return update(std::as_bytes(std::span(text))); }

std::string Sha256::hex() const {
  // Finishing spoils a context; the copy leaves this one open for more.
  const Context copy = new_context();
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest = {};
  unsigned length = 0;
  check(EVP_MD_CTX_copy_ex(copy.get(), state_->context.get()) == 1);
  check(EVP_DigestFinal_ex(copy.get(), digest.data(), &length) == 1);
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (unsigned i = 0; i < length; ++i) {
    hex += kDigits[digest[i] >> 4];
    hex += kDigits[digest[i] & 15];
  }
  return hex;
}

std::string sha256_hex(std::span<const std::byte> bytes) { return Sha256().update(bytes).hex(); }

std::string sha256_hex(std::string_view text) { return Sha256().update(text).hex(); }

std::string sha256_hex_of_file(const std::filesystem::path& path) {
  return sha256_hex(MappedFile(path).bytes());
}

}  // namespace graft
