#include <sys/resource.h>
#include <csignal>
#include <cstdint>
#include <string>

#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

TEST(WriteSafetensors, ExactBytes) {
  const TempFolder folder;
  const std::vector<float> floats = {1.0F, -2.0F};
  const std::vector<std::uint8_t> bytes = {7};
  const std::vector<std::int64_t> ids = {-1};
  write_safetensors(folder / "m",
                    {view_of("u", DType::U8, {1}, bytes), view_of("f", DType::F32, {1, 2}, floats),
                     view_of("i", DType::I64, {}, ids)},
                    {{"step", "3"}});
  const std::string header = R"({"__metadata__":{"format":"pt","step":"3"},)"
                             R"("i":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                             R"("f":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},)"
                             R"("u":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}})";
  const std::string padding((8 - header.size() % 8) % 8, ' ');
  const std::string data("\xff\xff\xff\xff\xff\xff\xff\xff\0\0\x80\x3f\0\0\0\xc0\x07", 17);
  EXPECT_EQ(read_text(folder / "m"), framed(header + padding, data));
  EXPECT_EQ((header + padding).size() % 8, 0U);
}

TEST(WriteSafetensors, SameTensorsInAnyOrderGiveTheSameBytes) {
  const TempFolder folder;
  const std::vector<float> floats = {1, 2, 3};
  const TensorView a = view_of("a", DType::F32, {3}, floats);
  const TensorView b = view_of("b", DType::F32, {3}, floats);
  const TensorView c = view_of("c", DType::BF16, {6}, floats);
  write_safetensors(folder / "1", {a, b, c});
  write_safetensors(folder / "2", {c, b, a});
  EXPECT_EQ(read_text(folder / "1"), read_text(folder / "2"));
}

TEST(WriteSafetensors, NothingAndEmptyTensors) {
  const TempFolder folder;
  write_safetensors(folder / "m", {});
  EXPECT_EQ(SafetensorsFile::open(folder / "m").metadata().at("format"), "pt");
  write_safetensors(folder / "m", {{"empty", DType::F32, {0, 5}, nullptr, 0, nullptr}});
  EXPECT_THAT(SafetensorsFile::open(folder / "m").at("empty").shape, ElementsAre(0, 5));
}

TEST(WriteSafetensors, FormatIsAlwaysPt) {
  const TempFolder folder;
  write_safetensors(folder / "m", {}, {{"format", "np"}});
  EXPECT_EQ(SafetensorsFile::open(folder / "m").metadata().at("format"), "pt");
}

struct RoundTrip {
  DType dtype;
  std::size_t elements;
};

class EveryTypeAndSize : public testing::TestWithParam<std::tuple<DType, std::int64_t>> {};

TEST_P(EveryTypeAndSize, ComesBackEqualAndAligned) {
  const auto [dtype, count] = GetParam();
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 7);
  const std::vector<std::uint8_t> odd = {1, 2, 3};
  const std::string name = "tên với dấu cách \"và\" \\ \n\x7f";
  const TempFolder folder;
  write_safetensors(folder / "m", {view_of("odd", DType::U8, {3}, odd),
                                   view_of(name, dtype, {1, count, 1}, bytes)});
  const SafetensorsFile file = SafetensorsFile::open(folder / "m");
  EXPECT_THAT(file.at(name).shape, ElementsAre(1, count, 1));
  EXPECT_EQ(file.at(name).dtype, dtype);
  EXPECT_EQ(bytes_of(file.at(name)), bytes_of(view_of("", dtype, {}, bytes)));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.at(name).data) % size_of(dtype), 0U);
  EXPECT_EQ(bytes_of(file.at("odd")), "\x01\x02\x03");
}

INSTANTIATE_TEST_SUITE_P(
    Sweep, EveryTypeAndSize,
    testing::Combine(testing::Values(DType::BOOL, DType::U8, DType::I8, DType::F8_E5M2,
                                     DType::F8_E4M3, DType::I16, DType::U16, DType::F16,
                                     DType::BF16, DType::I32, DType::U32, DType::F32, DType::F64,
                                     DType::I64, DType::U64),
                     testing::Values(0, 1, 7, 1000, 100'003)));

TEST(WriteSafetensors, OverTheFileItReadsFrom) {
  const TempFolder folder;
  const std::vector<float> floats(100'000, 1.5F);
  write_safetensors(folder / "m", {view_of("a", DType::F32, {100'000}, floats)});
  const SafetensorsFile file = SafetensorsFile::open(folder / "m");
  write_safetensors(folder / "m", file.tensors(), file.metadata());
  EXPECT_EQ(bytes_of(SafetensorsFile::open(folder / "m").at("a")), bytes_of(file.at("a")));
}

TEST(WriteSafetensors, FileOfAnotherLibraryComesBackEqual) {
  const std::filesystem::path source =
      std::filesystem::path(GRAFT_TEST_DATA) / "models/llama_bf16/model.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(source);
  const TempFolder folder;
  write_safetensors(folder / "m", file.tensors(), file.metadata());
  // One element type and names in order: our order is that library's, and so is every byte.
  EXPECT_EQ(read_text(folder / "m"), read_text(source));
}

TEST(WriteSafetensors, RefusesViewsThatContradictThemselves) {
  const TempFolder folder;
  const std::vector<float> floats = {1, 2};
  const auto refuses = [&](std::vector<TensorView> tensors, const std::string& message) {
    EXPECT_GRAFT_ERROR(
        write_safetensors(folder / "m", tensors), ErrorKind::internal,
        AllOf(StartsWith("cannot write '" + (folder / "m").string() + "': "), HasSubstr(message)));
  };
  const TensorView good = view_of("a", DType::F32, {2}, floats);
  TensorView half = view_of("a", DType::BF16, {4}, floats);
  refuses({good, half}, "tensor 'a' is given twice");
  refuses({view_of("__metadata__", DType::F32, {2}, floats)}, "the name is the format's own");
  refuses({view_of("x", DType::F32, {3}, floats)},
          "tensor 'x': F32 [3] takes 12 bytes, but 8 are given");
  refuses({view_of("x", DType::F32, {-2}, floats)}, "tensor 'x': F32 [-2] is not a possible size");
  refuses({view_of("x", DType::F32, {std::int64_t{1} << 62, 4}, floats)}, "is not a possible size");
  refuses({view_of("\xff", DType::F32, {2}, floats)}, "'\\xff' is not UTF-8");
  refuses({{"x", DType::F32, {2}, nullptr, 8, nullptr}}, "tensor 'x': it has no data");
  EXPECT_GRAFT_ERROR(write_safetensors(folder / "m", {good}, {{"k", "\xc0"}}), ErrorKind::internal,
                     HasSubstr("'\\xc0' is not UTF-8"));
  EXPECT_THAT(folder.entries(), ElementsAre());
}

TEST(WriteSafetensors, DiskFullNamesTheTensorAndLeavesTheOldFile) {
  const TempFolder folder;
  const std::vector<float> floats(100'000, 1.5F);
  write_safetensors(folder / "m", {});
  const std::string before = read_text(folder / "m");
  rlimit old = {};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limited = {600'000, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limited);
  EXPECT_GRAFT_ERROR(
      write_safetensors(folder / "m", {view_of("a", DType::F32, {100'000}, floats),
                                       view_of("b", DType::F32, {100'000}, floats)}),
      ErrorKind::internal,
      AllOf(HasSubstr("m': File too large"), HasSubstr("while writing tensor 'b' at byte 600000")));
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read_text(folder / "m"), before);
  EXPECT_THAT(folder.entries(), ElementsAre("m"));
}

}  // namespace
}  // namespace graft
