// The kernels' library holds machine code for every architecture that the build was configured for,
// and PTX of the last. Reads the device code's container as `cuobjdump --list-elf --list-ptx` does,
// which not every toolkit has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace graft::cuda {
namespace {

struct Container {
  uint32_t magic;
  uint16_t version, header_size;
  uint64_t size;  // of the entries behind the header
};
struct Entry {
  uint16_t kind, version;
  uint32_t header_size;
  uint64_t size;
  uint32_t ignored[3], architecture;
};
constexpr uint32_t kMagic = 0xba55ed50;

template <class T>
T read(const std::string& bytes, std::size_t at) {
  T out{};
  if (at + sizeof(T) <= bytes.size()) std::memcpy(&out, bytes.data() + at, sizeof(T));
  return out;
}

// "sm_90" for machine code, "compute_90" for PTX; of one container.
std::multiset<std::string> entries(const std::string& bytes, std::size_t at) {
  std::multiset<std::string> out;
  const auto container = read<Container>(bytes, at);
  std::size_t entry = at + container.header_size;
  const std::size_t end = std::min<std::size_t>(entry + container.size, bytes.size());
  while (entry + sizeof(Entry) <= end) {
    const auto e = read<Entry>(bytes, entry);
    if (e.header_size == 0) break;
    out.insert((e.kind == 1 ? "compute_" : "sm_") + std::to_string(e.architecture));
    entry += e.header_size + e.size;
  }
  return out;
}

TEST(CudaArchitectures, EveryKernelFileHasMachineCodeForEachAndPtxOfTheLast) {
  std::ifstream file(CUDA_LIBRARY, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  ASSERT_FALSE(bytes.empty()) << CUDA_LIBRARY;
  // As CMAKE_CUDA_ARCHITECTURES has them: "80-real 90-real 100".
  std::multiset<std::string> wanted;
  std::istringstream configured(CUDA_ARCHITECTURES);
  for (std::string word; configured >> word;) {
    const std::string number = word.substr(0, word.find('-'));
    if (!word.ends_with("-virtual")) wanted.insert("sm_" + number);
    if (!word.ends_with("-real")) wanted.insert("compute_" + number);
  }
  const std::string magic(reinterpret_cast<const char*>(&kMagic), sizeof(kMagic));
  int containers = 0;
  for (std::size_t at = bytes.find(magic); at != std::string::npos; at = bytes.find(magic, at + 1)) {
    EXPECT_THAT(entries(bytes, at), testing::ContainerEq(wanted)) << "container at byte " << at;
    ++containers;
  }
  EXPECT_EQ(containers, CUDA_FILES);
}

}  // namespace
}  // namespace graft::cuda
