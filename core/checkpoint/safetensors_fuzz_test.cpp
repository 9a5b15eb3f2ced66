#include <cstdint>
#include <random>
#include <string>

#include "core/base/json.h"
#include "core/base/testing.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/testing.h"

namespace graft {
namespace {

// Damages files at random, with a fixed seed. Whatever comes of it is either refused with an error
// or a file whose every byte can be read; under the sanitizers this sees over-reads.
class Damage {
 public:
  explicit Damage(std::uint32_t seed) : random_(seed) {}

  // `limit` is how far from the start the damage goes.
  std::string apply(std::string bytes, std::size_t limit) {
    for (std::size_t times = 1 + below(4); times > 0; --times) {
      const std::size_t at = below(std::min(limit, bytes.size()));
      switch (below(7)) {
        case 0:
          bytes[at] = static_cast<char>(below(256));
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
          break;
        case 2:
          bytes.erase(at, 1 + below(16));
          break;
        case 3:
          bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(64)));
          break;
        case 4:
          bytes.resize(below(bytes.size() + 1));
          break;
        case 5:
          bytes.insert(at, token());
          break;
        default:
          bytes.replace(at, 1, token());
      }
      if (bytes.empty()) bytes = " ";
    }
    return bytes;
  }

 private:
  std::size_t below(std::size_t end) { return random_() % end; }
  std::string token() {
    static const std::vector<std::string> kTokens = {"{",
                                                     "}",
                                                     "[",
                                                     "]",
                                                     ",",
                                                     ":",
                                                     "\"",
                                                     "-1",
                                                     "0",
                                                     "1e99",
                                                     "null",
                                                     "18446744073709551615",
                                                     "9223372036854775807",
                                                     "\\u0000",
                                                     "-0",
                                                     "0.5",
                                                     "true",
                                                     "\"dtype\"",
                                                     "\"shape\"",
                                                     "\"data_offsets\"",
                                                     "\"__metadata__\"",
                                                     "\xff",
                                                     std::string(1, '\0')};
    return kTokens[below(kTokens.size())];
  }

  std::mt19937 random_;
};

std::string valid_file() {
  return framed(R"({"__metadata__":{"format":"pt"},)"
                R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
                R"("c":{"dtype":"U8","shape":[],"data_offsets":[32,33]}})",
                std::string(33, '\x3f'));
}

unsigned read_all(const SafetensorsFile& file) {
  unsigned sum = 0;
  for (const TensorView& tensor : file.tensors()) {
    find_non_finite(tensor);
    for (const char byte : bytes_of(tensor)) sum += static_cast<unsigned char>(byte);
  }
  return sum;
}

TEST(SafetensorsFuzz, DamagedFilesAreReadOrRefused) {
  const TempFolder folder;
  const std::filesystem::path path = folder / "m.safetensors";
  const std::string valid = valid_file();
  Damage damage(20240607);
  int opened = 0, refused = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string bytes = damage.apply(valid, valid.size());
    // Half keep a true header length, or nearly all would be refused for that alone.
    if (i % 2 == 0 && bytes.size() >= 8 + 33) {
      const std::uint64_t length = bytes.size() - 8 - 33;
      std::memcpy(bytes.data(), &length, sizeof(length));
    }
    put_file(path, bytes);
    try {
      read_all(SafetensorsFile::open(path));
      ++opened;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::input);
      EXPECT_THAT(error.what(), testing::HasSubstr("m.safetensors"));
      ++refused;
    }
  }
  // Both ways are taken.
  EXPECT_GT(opened, 50);
  EXPECT_GT(refused, 2000);
}

TEST(SafetensorsFuzz, EveryTruncationIsRefused) {
  const TempFolder folder;
  const std::string valid = valid_file();
  for (std::size_t size = 0; size < valid.size(); ++size) {
    put_file(folder / "m", std::string_view(valid).substr(0, size));
    EXPECT_THROW(SafetensorsFile::open(folder / "m"), Error) << size;
  }
}

TEST(SafetensorsFuzz, DamagedIndexesAreReadOrRefused) {
  const TempFolder folder;
  write_file_atomically(folder / "config.json", std::string_view("{}"));
  write_file_atomically(folder / "s1.safetensors", valid_file());
  const std::string valid = R"({"metadata":{"total_size":33},"weight_map":)"
                            R"({"a":"s1.safetensors","b":"s1.safetensors","c":"s1.safetensors"}})";
  Damage damage(7);
  int opened = 0, refused = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::string bytes = damage.apply(valid, valid.size());
    put_file(folder / "model.safetensors.index.json", bytes);
    try {
      const Checkpoint checkpoint = Checkpoint::open(folder.path());
      EXPECT_THAT(checkpoint.names(), testing::ElementsAre("a", "b", "c"));
      ++opened;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::input);
      ++refused;
    }
  }
  EXPECT_GT(opened, 20);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace graft
