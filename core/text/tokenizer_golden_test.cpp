#include <filesystem>
#include <string>

#include "core/text/testing.h"

// Ids and texts made by the PyPI package `tokenizers` (tests/golden/scripts/make_tok.py and
// tests/golden/tokenizers/make_variants.py).

namespace graft::text {
namespace {

using nlohmann::json;

void expect_ids(const Tokenizer& tokenizer, const std::string& key) {
  const json expected = golden_json("expected.json");
  const json& strings = expected.at("strings");
  ASSERT_GE(strings.size(), 60U);
  for (std::size_t i = 0; i < strings.size(); ++i) {
    const auto text = strings[i].get<std::string>();
    EXPECT_EQ(tokenizer.encode(text), expected.at(key)[i].get<Ids>()) << key << ": " << strings[i];
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(TokenizerGolden, TrainedTokenizers) {
  for (const std::string name : {"gpt2", "llama3", "smollm_style"}) {
    expect_ids(Tokenizer::from_file(golden(name + ".tokenizer.json")), name);
  }
}

TEST(TokenizerGolden, SmolLm2) {
  const std::filesystem::path file =
      std::filesystem::path(GRAFT_SOURCE_DIR) / "data/teacher/SmolLM2-135M-Instruct/tokenizer.json";
  if (!std::filesystem::exists(file)) {
    GTEST_SKIP() << file << " is not there; scripts/get_teacher.py makes it";
  }
  const Tokenizer tokenizer = Tokenizer::from_file(file);
  EXPECT_EQ(tokenizer.vocab_size(), 49152);
  const json expected = golden_json("expected.json");
  const json& strings = expected.at("strings");
  for (std::size_t i = 0; i < strings.size(); ++i) {
    const auto text = strings[i].get<std::string>();
    EXPECT_EQ(tokenizer.encode(text), expected.at("smollm2_digits_bytelevel")[i].get<Ids>())
        << strings[i];
  }
}

// A variant is gpt2.tokenizer.json with some of its parts replaced, or a whole tokenizer.
json variant_json(const json& variant) {
  if (variant.contains("tokenizer")) return variant.at("tokenizer");
  json document = golden_json("gpt2.tokenizer.json");
  for (const auto& [key, value] : variant.at("replace").items()) {
    if (key == "model") {
      document["model"].update(value);
    } else {
      document[key] = value;
    }
  }
  return document;
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip_special_tokens) {
  StreamDecoder decoder(tokenizer, skip_special_tokens);
  std::string text;
  for (const std::int32_t id : ids) {
    const std::string part = decoder.push(id);
    EXPECT_TRUE(is_well_formed(part));
    text += part;
  }
  return text + decoder.finish();
}

TEST(TokenizerGolden, Variants) {
  const json golden = golden_json("variants.json");
  ASSERT_GE(golden.at("strings").size(), 150U);
  ASSERT_GE(golden.at("variants").size(), 30U);
  for (const json& variant : golden.at("variants")) {
    const auto name = variant.at("name").get<std::string>();
    const Tokenizer tokenizer = Tokenizer::from_json(variant_json(variant).dump(), name);
    for (std::size_t i = 0; i < golden.at("strings").size(); ++i) {
      const std::string bytes = from_hex(golden.at("strings")[i].get<std::string>());
      SCOPED_TRACE(name + ": " + testing::PrintToString(bytes));
      const auto ids = variant.at("ids")[i].get<Ids>();
      const json& special_row = variant.at("special")[i];
      const Ids special = special_row.is_null() ? ids : special_row.get<Ids>();
      const json& text_row = variant.at("text")[i];
      const std::string text =
          text_row.is_null() ? replace_ill_formed(bytes) : text_row.get<std::string>();
      const json& bare_row = variant.at("text_without_special")[i];
      const std::string bare = bare_row.is_null() ? text : bare_row.get<std::string>();

      EXPECT_EQ(tokenizer.encode(bytes), ids);
      EXPECT_EQ(tokenizer.encode(bytes, true), special);
      EXPECT_EQ(tokenizer.decode(special), text);
      EXPECT_EQ(tokenizer.decode(special, true), bare);
      EXPECT_EQ(streamed(tokenizer, special, false), text);
      EXPECT_EQ(streamed(tokenizer, special, true), bare);
    }
  }
}

}  // namespace
}  // namespace graft::text
