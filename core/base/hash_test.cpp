#include "core/base/hash.h"

#include <string>

#include "core/base/file.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using testing::HasSubstr;

struct Vector {
  std::string text, digest;
};

class Sha256Vector : public testing::TestWithParam<Vector> {};

TEST_P(Sha256Vector, WholeAndInPieces) {
  const auto& [text, digest] = GetParam();
  EXPECT_EQ(sha256_hex(text), digest);
  for (const std::size_t piece : {1U, 7U, 64U, 1000U}) {
    Sha256 hash;
    for (std::size_t at = 0; at < text.size(); at += piece) {
      hash.update(std::string_view(text).substr(at, piece));
    }
    EXPECT_EQ(hash.hex(), digest) << "in pieces of " << piece;
  }
}

// FIPS 180-4's examples.
INSTANTIATE_TEST_SUITE_P(
    Fips, Sha256Vector,
    testing::Values(Vector{"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
                    Vector{"abc",
                           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
                    Vector{"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
                    Vector{std::string(1'000'000, 'a'),
                           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}));

TEST(Sha256Test, GoesOnAfterHexAndAcrossAMove) {
  Sha256 hash;
  hash.update("a");
  EXPECT_EQ(hash.hex(), sha256_hex("a"));
  Sha256 moved = std::move(hash);
  EXPECT_EQ(moved.update("bc").hex(), sha256_hex("abc"));
}

TEST(Sha256Test, OfFiles) {
  const TempFolder folder;
  write_file_atomically(folder / "empty", std::string_view());
  write_file_atomically(folder / "abc", std::string_view("abc"));
  EXPECT_EQ(sha256_hex_of_file(folder / "empty"), sha256_hex(""));
  EXPECT_EQ(sha256_hex_of_file(folder / "abc"), sha256_hex("abc"));
  EXPECT_GRAFT_ERROR(sha256_hex_of_file(folder / "none"), ErrorKind::input,
                     HasSubstr("none': No such file or directory"));
}

}  // namespace
}  // namespace graft
