#include "core/base/json.h"

#include <string>

#include "core/base/file.h"
#include "core/base/testing.h"

namespace graft {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

TEST(Json, ReadsWhatIsValid) {
  EXPECT_EQ(parse_json(R"({"a": [1, 2.5, null, {"a": "Việt"}], "b": {"a": 1}})", "x"),
            nlohmann::json::parse(R"({"a": [1, 2.5, null, {"a": "Việt"}], "b": {"a": 1}})"));
  EXPECT_EQ(parse_json(" 7\n", "x"), 7);
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  EXPECT_EQ(parse_json(deep, "x").dump(), deep);
}

struct BadJson {
  std::string label, text, message;
};

class JsonRefuses : public testing::TestWithParam<BadJson> {};

TEST_P(JsonRefuses, NamesSourceAndPlace) {
  EXPECT_GRAFT_ERROR(parse_json(GetParam().text, "'config.json'"), ErrorKind::input,
                     AllOf(StartsWith("'config.json'"), HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    Texts, JsonRefuses,
    testing::Values(
        BadJson{"empty", "", "line 1, column 1: not valid JSON: "},
        BadJson{"unclosed", "{\"a\": 1,\n \"b\": 2,\n}",
                "line 3, column 1: not valid JSON: syntax"},
        BadJson{"trailing", "{} x", "line 1, column 4: not valid JSON: "},
        BadJson{"nul", std::string("{}\0{}", 5), "line 1, column 3: not valid JSON: a NUL byte"},
        BadJson{"utf8", "{\"\xff\": 1}", "not valid JSON: syntax error"},
        BadJson{"surrogate", R"({"a": "\ud800"})", "not valid JSON: syntax error"},
        BadJson{"huge", R"({"a": 1e999})", "not valid JSON: number overflow"},
        BadJson{"twice", R"({"a": 1, "b": {"a": 1}, "a": 2})", "the key 'a' stands twice"},
        BadJson{"nested_twice", R"([{"x": 1}, {"c": 1, "c": 1}])", "the key 'c' stands twice"},
        BadJson{"deep", std::string(101, '['), "nested deeper than 100 levels"},
        BadJson{"deep_million", std::string(1'000'000, '['), "nested deeper than 100 levels"}),
    [](const auto& info) { return info.param.label; });

TEST(Json, ReadsFiles) {
  const TempFolder folder;
  write_file_atomically(folder / "a.json", std::string_view("{\"a\": [1]}"));
  EXPECT_EQ(read_json(folder / "a.json")["a"][0], 1);
  EXPECT_GRAFT_ERROR(read_json(folder / "a.json", 5), ErrorKind::input,
                     HasSubstr("a.json': it is larger than 5 bytes"));
  EXPECT_GRAFT_ERROR(read_json(folder / "b.json"), ErrorKind::input,
                     HasSubstr("b.json': No such file or directory"));
}

}  // namespace
}  // namespace graft
