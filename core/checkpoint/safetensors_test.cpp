#include "core/checkpoint/safetensors.h"

#include <filesystem>
#include <string>

#include "core/base/testing.h"
#include "core/checkpoint/testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

SafetensorsFile open_bytes(const TempFolder& folder, std::string_view bytes) {
  put_file(folder / "m.safetensors", bytes);
  return SafetensorsFile::open(folder / "m.safetensors");
}

// ---- Files the format allows

TEST(Safetensors, ReadsTensorsInTheOrderOfTheirData) {
  const TempFolder folder;
  const SafetensorsFile file =
      open_bytes(folder, framed(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},)"
                                R"("__metadata__":{"format":"pt","Việt":"\u0000 \"x\""},)"
                                R"("a":{"data_offsets":[0,4],"shape":[1,2],"dtype":"BF16"}}  )",
                                "abcdef"));
  EXPECT_THAT(file.names(), ElementsAre("a", "b"));
  EXPECT_EQ(file.path(), folder / "m.safetensors");
  EXPECT_EQ(file.at("a").dtype, DType::BF16);
  EXPECT_THAT(file.at("a").shape, ElementsAre(1, 2));
  EXPECT_EQ(bytes_of(file.at("a")), "abcd");
  EXPECT_EQ(bytes_of(file.at("b")), "ef");
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("Việt"), std::string("\0 \"x\"", 5));
  EXPECT_EQ(file.find("c"), nullptr);
}

TEST(Safetensors, ViewsOutliveTheFileObject) {
  const TempFolder folder;
  TensorView view;
  {
    const SafetensorsFile file = open_bytes(
        folder, framed(R"({"x":{"dtype":"I16","shape":[],"data_offsets":[0,2]}})", "hi"));
    view = file.at("x");
  }
  fs::remove(folder / "m.safetensors");
  EXPECT_EQ(bytes_of(view), "hi");
  EXPECT_EQ(element_count(view), 1);
}

TEST(Safetensors, EmptyTensorsTakeNoRoom) {
  const TempFolder folder;
  const SafetensorsFile file =
      open_bytes(folder, framed(R"({"z":{"dtype":"F64","shape":[3,0,9223372036854775807],)"
                                R"("data_offsets":[1,1]},)"
                                R"("y":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                                R"("x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                R"("w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
                                "ab"));
  EXPECT_EQ(element_count(file.at("z")), 0);
  EXPECT_EQ(element_count(file.at("w")), 0);
  EXPECT_EQ(bytes_of(file.at("x")), "a");
  EXPECT_EQ(bytes_of(file.at("y")), "b");
}

TEST(Safetensors, NoTensorsAtAll) {
  const TempFolder folder;
  EXPECT_THAT(open_bytes(folder, framed("{}")).names(), IsEmpty());
  EXPECT_THAT(open_bytes(folder, framed(R"({"__metadata__":{}})")).metadata(), IsEmpty());
}

struct DTypeCase {
  DType dtype;
  const char* name;
  std::size_t size;
};

class EveryDType : public testing::TestWithParam<DTypeCase> {};

TEST_P(EveryDType, IsReadByName) {
  const auto& [dtype, dtype_name, size] = GetParam();
  EXPECT_STREQ(name(dtype), dtype_name);
  EXPECT_EQ(size_of(dtype), size);
  const TempFolder folder;
  const std::string header = std::string(R"({"x":{"dtype":")") + dtype_name +
                             R"(","shape":[3],"data_offsets":[0,)" + std::to_string(3 * size) +
                             "]}}";
  const SafetensorsFile file = open_bytes(folder, framed(header, std::string(3 * size, 'x')));
  EXPECT_EQ(file.at("x").dtype, dtype);
  EXPECT_EQ(file.at("x").bytes, 3 * size);
}

INSTANTIATE_TEST_SUITE_P(
    Format, EveryDType,
    testing::Values(DTypeCase{DType::BOOL, "BOOL", 1}, DTypeCase{DType::U8, "U8", 1},
                    DTypeCase{DType::I8, "I8", 1}, DTypeCase{DType::F8_E5M2, "F8_E5M2", 1},
                    DTypeCase{DType::F8_E4M3, "F8_E4M3", 1}, DTypeCase{DType::I16, "I16", 2},
                    DTypeCase{DType::U16, "U16", 2}, DTypeCase{DType::F16, "F16", 2},
                    DTypeCase{DType::BF16, "BF16", 2}, DTypeCase{DType::I32, "I32", 4},
                    DTypeCase{DType::U32, "U32", 4}, DTypeCase{DType::F32, "F32", 4},
                    DTypeCase{DType::F64, "F64", 8}, DTypeCase{DType::I64, "I64", 8},
                    DTypeCase{DType::U64, "U64", 8}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Safetensors, UnknownNameSuggestsTheNearest) {
  const TempFolder folder;
  const SafetensorsFile file = open_bytes(
      folder, framed(R"({"lm_head.weight":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"));
  EXPECT_GRAFT_ERROR(file.at("lm_head.weigth"), ErrorKind::input,
                     AllOf(HasSubstr("m.safetensors': no tensor 'lm_head.weigth'"),
                           HasSubstr("(did you mean 'lm_head.weight'?)")));
  EXPECT_GRAFT_ERROR(file.at("bias"), ErrorKind::input, HasSubstr("; known: lm_head.weight"));
}

// ---- Files it does not

struct Malformed {
  std::string label, bytes, message;
};

void PrintTo(const Malformed& bad, std::ostream* out) { *out << bad.label; }

class Refused : public testing::TestWithParam<Malformed> {};

TEST_P(Refused, NamesFileAndFault) {
  const TempFolder folder;
  EXPECT_GRAFT_ERROR(open_bytes(folder, GetParam().bytes), ErrorKind::input,
                     AllOf(StartsWith("'" + (folder / "m.safetensors").string() + "': "),
                           HasSubstr(GetParam().message)));
}

std::string label_of(const testing::TestParamInfo<Malformed>& info) { return info.param.label; }

// A file of one tensor 'x' whose fields are given, with `data`.
std::string one(const std::string& fields, const std::string& data = "abcd") {
  return framed("{\"x\":{" + fields + "}}", data);
}

// A file of the tensors 'x' and 'y', U8, at these offsets.
std::string two(int x0, int x1, int y0, int y1, std::size_t data_bytes) {
  const auto entry = [](const char* name, int begin, int end) {
    return "\"" + std::string(name) + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) +
           R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  return framed("{" + entry("x", x0, x1) + "," + entry("y", y0, y1) + "}",
                std::string(data_bytes, 'd'));
}

std::string length_only(std::uint64_t length, const std::string& rest) {
  std::string bytes = framed("");
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + rest;
}

INSTANTIATE_TEST_SUITE_P(
    Framing, Refused,
    testing::Values(
        Malformed{"empty", "", "not a safetensors file: 0 bytes, expected at least 8"},
        Malformed{"seven_bytes", "1234567", "not a safetensors file: 7 bytes, expected at least 8"},
        Malformed{"length_past_the_end", length_only(100, "{}"),
                  "the header takes 100 bytes, but the file has 2 after its length"},
        Malformed{"length_at_the_limit", length_only(100'000'000, "{}"),
                  "the header takes 100000000 bytes, but the file has 2"},
        Malformed{"length_over_the_limit", length_only(100'000'001, "{}"),
                  "a header of 100000001 bytes, the format allows 100000000"},
        Malformed{"length_of_all_ones", length_only(~std::uint64_t{0}, "{}"),
                  "a header of 18446744073709551615 bytes"},
        Malformed{"length_zero", framed(""), "the header must start with '{', found ''"},
        Malformed{"git_lfs", "version https://git-lfs.github.com/spec/v1\noid sha256:00",
                  "it is a Git LFS pointer, not the weights: run git lfs pull"},
        Malformed{"torch_archive", "PK\x03\x04 and so on for a while", "a PyTorch archive"},
        Malformed{"pickle", "\x80\x02}q\x01 and so on", "a Python pickle"},
        Malformed{"gguf", std::string("GGUF\x03\0\0\0\x01\0", 10), "it is a GGUF file"},
        Malformed{"web_page", "<!DOCTYPE html><html>", "download the file itself"}),
    label_of);

INSTANTIATE_TEST_SUITE_P(
    Json, Refused,
    testing::Values(
        Malformed{"not_json", framed("{\"x\" 1}"), "the header is not valid JSON at byte 6: "},
        Malformed{"cut_short", framed("{\"x\":{\"dtype\":"), "not valid JSON at byte 15: "},
        Malformed{"text_after", framed("{} {}"), "not valid JSON at byte 4: "},
        Malformed{"nul_after", framed(std::string_view("{}\0{}", 5)), "byte 3: a NUL byte"},
        Malformed{"space_before", framed(" {}"), "must start with '{', found ' {}'"},
        Malformed{"byte_order_mark", framed("\xef\xbb\xbf{}"), "must start with '{'"},
        Malformed{"an_array", framed("[1]"), "must start with '{', found '[1]'"},
        Malformed{"not_utf8", framed("{\"\xff\xfe\":1}"), "not valid JSON at byte 3: "},
        Malformed{"lone_surrogate", framed(R"({"\ud800":1})"), "not valid JSON at byte "},
        Malformed{"control_in_name", framed("{\"a\nb\":1}"), "not valid JSON at byte "},
        Malformed{"overflowing_number", framed(R"({"x":1e999})"), "number overflow"},
        Malformed{"deep_arrays", framed("{\"x\":" + std::string(1'000'000, '[')),
                  "tensor 'x' is an array, expected an object"},
        Malformed{"deep_objects", framed(R"({"x":{"shape":[)" + std::string(1'000'000, '[')),
                  "tensor 'x': shape holds an array, expected whole numbers"}),
    label_of);

INSTANTIATE_TEST_SUITE_P(
    Entries, Refused,
    testing::Values(
        Malformed{"number_for_tensor", framed(R"({"x":5})"), "tensor 'x' is 5, expected an object"},
        Malformed{"null_for_tensor", framed(R"({"x":null})"), "tensor 'x' is null, expected"},
        Malformed{"duplicate_tensor",
                  framed(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                         "ab"),
                  "tensor 'x' stands twice in the header"},
        Malformed{"duplicate_by_escape",
                  framed(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("\u0078":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                         "ab"),
                  "tensor 'x' stands twice in the header"},
        Malformed{"duplicate_field", one(R"("dtype":"U8","dtype":"I8")"),
                  "tensor 'x': the key 'dtype' stands twice"},
        Malformed{"unknown_field", one(R"("dtype":"U8","strides":[1])"),
                  "tensor 'x': unknown key 'strides'; expected dtype, shape and data_offsets"},
        Malformed{"no_dtype", one(R"("shape":[4],"data_offsets":[0,4])"), "x': dtype is missing"},
        Malformed{"no_shape", one(R"("dtype":"U8","data_offsets":[0,4])"), "x': shape is missing"},
        Malformed{"no_offsets", one(R"("dtype":"U8","shape":[4])"), "x': data_offsets is missing"},
        Malformed{"empty_entry", one(""), "tensor 'x': dtype is missing"},
        Malformed{
            "unknown_dtype", one(R"("dtype":"F4","shape":[4],"data_offsets":[0,4])"),
            "tensor 'x': unknown dtype 'F4'; known: BOOL, U8, I8, F8_E5M2, F8_E4M3, I16, U16, "
            "F16, BF16, I32, U32, F32, F64, I64, U64"},
        Malformed{"lower_case_dtype", one(R"("dtype":"f32")"), "unknown dtype 'f32'"},
        Malformed{"dtype_number", one(R"("dtype":4)"),
                  "tensor 'x': dtype is 4, expected a text such as \"F32\""},
        Malformed{"shape_text", one(R"("shape":"4")"),
                  "tensor 'x': shape is the text '4', expected an array of numbers"},
        Malformed{"shape_object", one(R"("shape":{})"), "tensor 'x': shape is an object"},
        Malformed{"shape_negative", one(R"("dtype":"U8","shape":[-1],"data_offsets":[0,4])"),
                  "tensor 'x': shape holds -1, expected whole numbers of 0 and more"},
        Malformed{"shape_float", one(R"("dtype":"U8","shape":[4.0],"data_offsets":[0,4])"),
                  "tensor 'x': shape holds the number 4.0, expected whole numbers"},
        Malformed{"shape_exponent", one(R"("shape":[1e3])"), "shape holds the number 1e3"},
        Malformed{"shape_true", one(R"("shape":[true])"), "shape holds true"},
        Malformed{"shape_over_int64", one(R"("shape":[9223372036854775808])"),
                  "shape holds 9223372036854775808, more than 63 bits count"},
        Malformed{"shape_over_uint64", one(R"("shape":[18446744073709551616])"),
                  "shape holds the number 18446744073709551616, expected whole numbers"},
        Malformed{"rank_65",
                  one(R"("shape":[1)" +
                      [] {
                        std::string ones;
                        for (int i = 0; i < 64; ++i) ones += ",1";
                        return ones;
                      }() +
                      "]"),
                  "tensor 'x': shape has more than 64 dimensions"},
        Malformed{"one_offset", one(R"("dtype":"U8","shape":[4],"data_offsets":[4])"),
                  "tensor 'x': data_offsets has 1 numbers, expected 2"},
        Malformed{"three_offsets", one(R"("data_offsets":[0,4,4])"),
                  "tensor 'x': data_offsets has more than 2 numbers"},
        Malformed{"negative_offset", one(R"("data_offsets":[-4,0])"),
                  "tensor 'x': data_offsets holds -4, expected two whole numbers"},
        Malformed{"float_offset", one(R"("data_offsets":[0.5,4])"),
                  "tensor 'x': data_offsets holds the number 0.5"},
        Malformed{"escapes_in_name", framed("{\"\\u001b[31m\":1}"), "tensor '\\x1b[31m' is 1"}),
    label_of);

INSTANTIATE_TEST_SUITE_P(
    Metadata, Refused,
    testing::Values(Malformed{"a_list", framed(R"({"__metadata__":[]})"),
                              "__metadata__ is an array, expected an object of texts"},
                    Malformed{"a_number_inside", framed(R"({"__metadata__":{"step":3}})"),
                              "__metadata__: 'step' is 3, expected a text"},
                    Malformed{"an_object_inside", framed(R"({"__metadata__":{"a":{}}})"),
                              "__metadata__: 'a' is an object, expected a text"},
                    Malformed{"duplicate_key", framed(R"({"__metadata__":{"a":"1","a":"2"}})"),
                              "__metadata__: the key 'a' stands twice"},
                    Malformed{"twice", framed(R"({"__metadata__":{},"__metadata__":{}})"),
                              "the key '__metadata__' stands twice"}),
    label_of);

INSTANTIATE_TEST_SUITE_P(
    Extents, Refused,
    testing::Values(
        Malformed{
            "shape_larger_than_data",
            one(R"("dtype":"F32","shape":[1000,1000],"data_offsets":[0,4])"),
            "tensor 'x': F32 [1000, 1000] takes 4000000 bytes, but data_offsets [0, 4] hold 4"},
        Malformed{"shape_smaller_than_data",
                  one(R"("dtype":"U8","shape":[3],"data_offsets":[0,4])"),
                  "tensor 'x': U8 [3] takes 3 bytes, but data_offsets [0, 4] hold 4"},
        Malformed{"scalar_of_four", one(R"("dtype":"U8","shape":[],"data_offsets":[0,4])"),
                  "tensor 'x': U8 [] takes 1 bytes"},
        Malformed{"product_wraps_to_four",
                  one(R"("dtype":"U8","shape":[4611686018427387905,4],"data_offsets":[0,4])"),
                  "tensor 'x': U8 [4611686018427387905, 4] takes more bytes than 63 bits count"},
        Malformed{"size_wraps_to_zero",
                  one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])"),
                  "tensor 'x': F64 [2305843009213693952] takes more bytes"},
        Malformed{"backwards", one(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])"),
                  "tensor 'x': data_offsets [4, 0] end before they begin"},
        Malformed{
            "past_the_end", one(R"("dtype":"U8","shape":[8],"data_offsets":[0,8])"),
            "tensor 'x': data_offsets [0, 8] reach beyond the file, which has 4 bytes of data; "
            "it is truncated"},
        Malformed{"far_past_the_end",
                  one(R"("dtype":"U8","shape":[4],)"
                      R"("data_offsets":[18446744073709551611,18446744073709551615])"),
                  "reach beyond the file"},
        Malformed{"no_data_at_all", one(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", ""),
                  "tensor 'x': data_offsets [0, 4] reach beyond the file, which has 0 bytes"},
        Malformed{"overlap", two(0, 3, 2, 4, 4),
                  "tensor 'y': data_offsets [2, 4] overlap [0, 3] of tensor 'x'"},
        Malformed{"same_place", two(0, 4, 0, 4, 4),
                  "tensor 'y': data_offsets [0, 4] overlap [0, 4] of tensor 'x'"},
        Malformed{"inside", two(0, 4, 1, 2, 4),
                  "tensor 'y': data_offsets [1, 2] overlap [0, 4] of tensor 'x'"},
        Malformed{"hole_between", two(0, 1, 2, 4, 4),
                  "tensor 'y': data_offsets [2, 4] leave a hole: the bytes from 1 on"},
        Malformed{"hole_before", two(2, 4, 1, 2, 4),
                  "tensor 'y': data_offsets [1, 2] leave a hole: the bytes from 0 on"},
        Malformed{"data_after_the_last", two(0, 1, 1, 2, 4),
                  "has 2 bytes of data after its last tensor 'y'; expected a file of 2 bytes of "
                  "data, found 4"},
        Malformed{"data_without_tensors", framed("{}", "abcd"),
                  "has 4 bytes of data but no tensor"}),
    label_of);

TEST(Safetensors, NoSuchFile) {
  const TempFolder folder;
  EXPECT_GRAFT_ERROR(SafetensorsFile::open(folder / "no"), ErrorKind::input,
                     HasSubstr("no': No such file or directory"));
  EXPECT_GRAFT_ERROR(SafetensorsFile::open(folder.path()), ErrorKind::input,
                     HasSubstr("it is a folder, not a file"));
}

// The largest header there may be, of one name: read in time and without a copy for every key.
TEST(Safetensors, LongestHeaderIsReadOrRefused) {
  const TempFolder folder;
  const std::string start = "{\"", rest = R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const std::string name(100'000'000 - start.size() - rest.size(), 'n');
  EXPECT_EQ(open_bytes(folder, framed(start + name + rest, "x")).tensors().at(0).name.size(),
            name.size());
  EXPECT_GRAFT_ERROR(open_bytes(folder, framed(start + name + ".." + rest, "x")), ErrorKind::input,
                     HasSubstr("a header of 100000002 bytes"));
}

TEST(Safetensors, ErrorsStayShort) {
  const TempFolder folder;
  const std::string name(1'000'000, 'n');
  try {
    open_bytes(folder, framed("{\"" + name + "\":1}"));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_LT(std::string(error.what()).size(), 1000U);
  }
}

// ---- Files by others

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, OpensAndAddsUp) {
  const SafetensorsFile file = SafetensorsFile::open(fs::path(GRAFT_TEST_DATA) / GetParam());
  ASSERT_FALSE(file.tensors().empty());
  std::uint64_t bytes = 0;
  for (const TensorView& tensor : file.tensors()) {
    EXPECT_EQ(tensor.bytes,
              static_cast<std::uint64_t>(element_count(tensor)) * size_of(tensor.dtype));
    EXPECT_EQ(file.find(tensor.name), &tensor);
    EXPECT_FALSE(find_non_finite(tensor)) << tensor.name;
    bytes += tensor.bytes;
  }
  std::uint64_t header = 0;
  const MappedFile mapped(file.path());
  std::memcpy(&header, mapped.bytes().data(), sizeof(header));
  EXPECT_EQ(sizeof(header) + header + bytes, mapped.bytes().size());
}

INSTANTIATE_TEST_SUITE_P(Files, Golden,
                         testing::Values("models/llama/model.safetensors",
                                         "models/llama/expected.safetensors",
                                         "models/llama_bf16/model.safetensors",
                                         "models/qwen2/model.safetensors",
                                         "models/qwen3/model.safetensors",
                                         "models/gpt_neox/model.safetensors", "gdn.safetensors"));

}  // namespace
}  // namespace graft
