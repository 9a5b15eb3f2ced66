#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/text/testing.h"

namespace graft::text {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::StrEq;

void expect_refused(const json& document, const std::string& message) {
  EXPECT_GRAFT_ERROR(tokenizer_of(document), ErrorKind::input, StartsWith("test.json: " + message));
}

// A byte-level tokenizer.json with the value at a JSON pointer replaced.
json with(const std::string& pointer, const json& value) {
  json document = byte_level_json({"a b", "ab c"});
  document["added_tokens"] = json::array({added_token("<x>", 258)});
  document[json::json_pointer(pointer)] = value;
  return document;
}

json without(const std::string& pointer, const std::string& key) {
  json document = with("/version", "1.0");
  document[json::json_pointer(pointer)].erase(key);
  return document;
}

TEST(TokenizerErrors, Files) {
  const TempFolder folder;
  EXPECT_GRAFT_ERROR(Tokenizer::from_file(folder / "none.json"), ErrorKind::input,
                     HasSubstr("none.json"));
  EXPECT_GRAFT_ERROR(Tokenizer::from_file(folder.path()), ErrorKind::input,
                     HasSubstr(folder.path().filename().string()));
  std::ofstream(folder / "bad.json") << "{\"model\": ";
  EXPECT_GRAFT_ERROR(
      Tokenizer::from_file(folder / "bad.json"), ErrorKind::input,
      AllOf(HasSubstr("bad.json"), HasSubstr("line 1"), HasSubstr("not valid JSON")));
}

TEST(TokenizerErrors, NotJson) {
  const std::string whole = byte_level_json({"a b"}).dump();
  for (const std::string& text :
       {std::string(), std::string("tokenizer"), std::string("\xFF\xFE{}"), whole + "}",
        std::string("{}\0{}", 5)}) {
    EXPECT_GRAFT_ERROR(Tokenizer::from_json(text, "test.json"), ErrorKind::input,
                       AllOf(StartsWith("test.json"), HasSubstr("not valid JSON")));
  }
  for (std::size_t length = 0; length < whole.size(); length += 97) {
    EXPECT_GRAFT_ERROR(Tokenizer::from_json(whole.substr(0, length), "test.json"), ErrorKind::input,
                       StartsWith("test.json"));
  }
}

TEST(TokenizerErrors, DeepNesting) {
  const std::string open = R"({"type":"Sequence","pretokenizers":[)";
  std::string nested = R"({"model":{},"pre_tokenizer":)";
  for (int i = 0; i < 100'000; ++i) nested += open;
  EXPECT_GRAFT_ERROR(Tokenizer::from_json(nested, "test.json"), ErrorKind::input,
                     StartsWith("test.json: nested deeper than"));
  EXPECT_GRAFT_ERROR(Tokenizer::from_json(std::string(1'000'000, '['), "test.json"),
                     ErrorKind::input, StartsWith("test.json: nested deeper than"));
}

TEST(TokenizerErrors, TopLevel) {
  expect_refused(json::array(), "expected an object, got an array");
  expect_refused(json::object(), "the key 'model' is missing");
  expect_refused(with("/version", "2.0"), "version: expected \"1.0\", got '2.0'");
  expect_refused(with("/version", 1), "version: expected a string, got 1");
  expect_refused(with("/model", nullptr), "model: expected an object, got null");
}

TEST(TokenizerErrors, Model) {
  expect_refused(with("/model/type", "Unigram"),
                 "model: type 'Unigram' is not supported; supported: BPE");
  expect_refused(with("/model/dropout", 0.1), "model.dropout: only null and 0 are supported");
  expect_refused(with("/model/dropout", "0"), "model.dropout: only null and 0 are supported");
  expect_refused(with("/model/continuing_subword_prefix", "##"),
                 "model.continuing_subword_prefix: only null and \"\" are supported, got '##'");
  expect_refused(with("/model/end_of_word_suffix", "</w>"),
                 "model.end_of_word_suffix: only null and \"\" are supported, got '</w>'");
  expect_refused(with("/model/unk_token", 3), "model.unk_token: expected a string, got 3");
  expect_refused(with("/model/byte_fallback", "yes"),
                 "model.byte_fallback: expected true or false, got the string 'yes'");
  expect_refused(with("/model/ignore_merges", 1),
                 "model.ignore_merges: expected true or false, got 1");
  expect_refused(without("/model", "vocab"), "model: the key 'vocab' is missing");
  expect_refused(without("/model", "merges"), "model: the key 'merges' is missing");
}

TEST(TokenizerErrors, Vocab) {
  expect_refused(with("/model/vocab", json::array({"a"})),
                 "model.vocab: expected an object, got an array");
  expect_refused(with("/model/vocab", json::object()), "model.vocab: it has no tokens");
  expect_refused(with("/model/vocab/a", "5"),
                 "model.vocab.'a': expected an integer from 0 to 16777215, got the string '5'");
  for (const json& id : {json(-1), json(1.0), json(16777216), json(18446744073709551615U)}) {
    expect_refused(with("/model/vocab/a", id),
                   "model.vocab.'a': expected an integer from 0 to 16777215, got " + id.dump());
  }
  expect_refused(with("/model/vocab/a", 'b'), "model.vocab: 'a' and 'b' both have the id 98");
}

TEST(TokenizerErrors, Merges) {
  expect_refused(with("/model/merges", "a b"), "model.merges: expected an array, got the string");
  expect_refused(with("/model/merges/1", "ab zz"),
                 "model.merges[1]: the token 'zz' is not in model.vocab");
  expect_refused(with("/model/merges/1", "zz c"),
                 "model.merges[1]: the token 'zz' is not in model.vocab");
  expect_refused(with("/model/merges/1", "b c"),
                 "model.merges[1]: the token 'bc' is not in model.vocab");
  expect_refused(with("/model/merges/0", json::array({"a", "zz"})),
                 "model.merges[0]: the token 'zz' is not in model.vocab");
  for (const char* merge : {"a", "a b c", "a  b", ""}) {
    expect_refused(with("/model/merges/0", merge),
                   "model.merges[0]: expected two tokens with a space between them, got '" +
                       std::string(merge) + "'");
  }
  for (const json& merge : {json(5), json::array({"a"}), json::array({"a", "b", "c"}),
                            json::array({"a", 5}), json(nullptr)}) {
    expect_refused(with("/model/merges/0", merge), "model.merges[0]: expected \"left right\" or");
  }
}

TEST(TokenizerErrors, AddedTokens) {
  expect_refused(with("/added_tokens", "x"), "added_tokens: expected an array");
  for (const char* key :
       {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}) {
    expect_refused(without("/added_tokens/0", key),
                   "added_tokens[0]: the key '" + std::string(key) + "' is missing");
  }
  expect_refused(with("/added_tokens/0/content", ""),
                 "added_tokens[0].content: an added token cannot be empty");
  expect_refused(with("/added_tokens/1", added_token("<x>", 258)),
                 "added_tokens[1].content: the token '<x>' stands here twice");
  expect_refused(
      with("/added_tokens/0/id", 300),
      "added_tokens[0].id: the token '<x>' has the id 300, but the next free one is 258");
  expect_refused(with("/added_tokens/0/content", "ab"),
                 "added_tokens[0].id: the token 'ab' has the id 258, but model.vocab says 256");
  expect_refused(
      with("/added_tokens/1", added_token("<y>", 258)),
      "added_tokens[1].id: the token '<y>' has the id 258, but the next free one is 259");
  // 258 tokens, but one of them with an id beyond: the next free id is taken.
  json holes = with("/model/vocab/a", 258);
  expect_refused(holes, "added_tokens[0].id: the token '<x>' has the id 258, which 'a' has in");
}

TEST(TokenizerErrors, Components) {
  expect_refused(with("/normalizer", {{"type", "Lowercase"}}),
                 "normalizer: type 'Lowercase' is not supported; supported: NFC, NFD");
  expect_refused(with("/normalizer", "NFC"),
                 "normalizer: expected an object, got the string 'NFC'");
  expect_refused(with("/normalizer", json::object()), "normalizer: the key 'type' is missing");
  expect_refused(with("/normalizer",
                      {{"type", "Sequence"}, {"normalizers", json::array({{{"type", "Nmt"}}})}}),
                 "normalizer.normalizers[0]: type 'Nmt' is not supported");
  expect_refused(with("/pre_tokenizer", {{"type", "Metaspace"}}),
                 "pre_tokenizer: type 'Metaspace' is not supported; supported: ByteLevel, Digits");
  expect_refused(without("/pre_tokenizer", "add_prefix_space"),
                 "pre_tokenizer: the key 'add_prefix_space' is missing");
  expect_refused(with("/pre_tokenizer", {{"type", "Digits"}}),
                 "pre_tokenizer: the key 'individual_digits' is missing");
  expect_refused(with("/post_processor", {{"type", "RobertaProcessing"}}),
                 "post_processor: type 'RobertaProcessing' is not supported; supported: ByteLevel");
  expect_refused(with("/decoder", {{"type", "CTC"}}), "decoder: type 'CTC' is not supported");
  expect_refused(with("/decoder", {{"type", 3}}), "decoder.type: expected a string, got 3");
}

json split(const json& pattern, const std::string& behavior) {
  return {{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}};
}

TEST(TokenizerErrors, Splits) {
  const auto place = [](const json& step) {
    return with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", json::array({step})}});
  };
  expect_refused(place(split({{"Regex", "(a"}}, "Isolated")),
                 "pre_tokenizer.pretokenizers[0].pattern.Regex: the regular expression '(a' is not "
                 "valid: ");
  expect_refused(place(split({{"Regex", "[a&&b]"}}, "Isolated")),
                 "pre_tokenizer.pretokenizers[0].pattern.Regex: the regular expression '[a&&b]' is "
                 "not supported: the intersection &&");
  expect_refused(place(split({{"Glob", "*"}}, "Isolated")),
                 "pre_tokenizer.pretokenizers[0].pattern: expected {\"String\": ...} or");
  expect_refused(place(split({{"String", "a"}}, "isolated")),
                 "pre_tokenizer.pretokenizers[0].behavior: unknown behavior 'isolated'; known: "
                 "Removed, Isolated");
}

TEST(TokenizerErrors, Templates) {
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json token = {{"SpecialToken", {{"id", "<x>"}, {"type_id", 0}}}};
  const auto made = [](const json& single, const json& special_tokens) {
    return with(
        "/post_processor",
        {{"type", "TemplateProcessing"}, {"single", single}, {"special_tokens", special_tokens}});
  };
  expect_refused(made(json::array({token}), json::object()),
                 "post_processor.special_tokens: the key '<x>' is missing");
  expect_refused(made(json::array(), json::object()),
                 "post_processor.single: it lacks the sequence A");
  expect_refused(made(json::array({text, text}), json::object()),
                 "post_processor.single[1].Sequence: a template for one text has the sequence A");
  expect_refused(made(json::array({token, text}), {{"<x>", {{"ids", json::array({-5})}}}}),
                 "post_processor.special_tokens.<x>.ids[0]: expected an integer from 0");
}

// A pattern that matching gives up on is an error of the text that needs it, not a crash.
TEST(TokenizerErrors, HostilePattern) {
  const Tokenizer tokenizer =
      tokenizer_of(with("/pre_tokenizer", split({{"Regex", "(?:a|a)*[bc]"}}, "Isolated")));
  EXPECT_EQ(tokenizer.encode("aab").size(), 2U);
  EXPECT_GRAFT_ERROR(tokenizer.encode(std::string(200, 'a')), ErrorKind::input,
                     HasSubstr("cannot be matched"));
  EXPECT_EQ(tokenizer.encode("aab").size(), 2U);
}

// Either a usable tokenizer or Error(input) that starts with the file's name.
void load_and_use(const std::string& text) {
  try {
    const Tokenizer tokenizer = Tokenizer::from_json(text, "test.json");
    const Ids ids = tokenizer.encode("a1 \u0085<x>é abc", true);
    const std::string back = tokenizer.decode(ids);
    EXPECT_TRUE(is_well_formed(back));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::input) << error.what();
    EXPECT_THAT(error.what(),
                testing::AnyOf(StartsWith("test.json"), HasSubstr("cannot be matched")));
  }
}

// A small file with every component in it.
json everything() {
  json document = with("/version", "1.0");
  document["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "NFC"}},
        {{"type", "Replace"}, {"pattern", {{"Regex", "x+"}}}, {"content", "y"}},
        {{"type", "Prepend"}, {"prepend", "_"}}}}};
  document["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Digits"}, {"individual_digits", true}},
        split({{"Regex", R"([^\s\p{L}]+|\s+(?!\S)|(?i:'s))"}}, "MergedWithNext"),
        document["pre_tokenizer"]}}};
  document["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<x>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
      {"special_tokens", {{"<x>", {{"ids", json::array({258})}}}}}};
  document["decoder"] = {{"type", "Sequence"},
                         {"decoders",
                          {{{"type", "ByteLevel"}},
                           {{"type", "Strip"}, {"content", "_"}, {"start", 1}, {"stop", 1}}}}};
  // Few bytes, so that a mutation mostly falls on structure.
  json vocab;
  for (const auto& [token, id] : document["model"]["vocab"].items()) {
    if (id.get<int>() >= 'a' || id.get<int>() < 16) vocab[token] = id;
  }
  document["model"]["vocab"] = vocab;
  return document;
}

TEST(TokenizerErrors, FuzzedBytes) {
  const std::string whole = everything().dump();
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    std::string text = whole;
    for (std::size_t edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
      const std::size_t at = random() % text.size();
      switch (random() % 5) {
        case 0:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          text.erase(at, 1 + random() % 8);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), random() % 12));
          break;
        case 3:
          text[at] = "{}[]\",:0-\\"[random() % 10];
          break;
        default:
          text.resize(at);
      }
    }
    load_and_use(text);
  }
}

// Changes values and keys anywhere in the tree, so that what is read is JSON each time.
void mutate(json& node, std::mt19937& random) {
  if (node.is_structured() && !node.empty() && random() % 6 != 0) {
    auto child = node.begin();
    std::advance(child, static_cast<std::ptrdiff_t>(random() % node.size()));
    if (random() % 12 == 0) {
      node.erase(child);
    } else {
      mutate(*child, random);
    }
    return;
  }
  const std::vector<json> values = {nullptr,
                                    true,
                                    -1,
                                    0,
                                    7,
                                    1e300,
                                    18446744073709551615U,
                                    "",
                                    "a",
                                    "é(",
                                    "[",
                                    "\\",
                                    "Isolated",
                                    "Sequence",
                                    "ByteLevel",
                                    "Fuse",
                                    "NFKC",
                                    json::array(),
                                    json::object(),
                                    json::array({1, "a"})};
  node = values[random() % values.size()];
}

TEST(TokenizerErrors, FuzzedValues) {
  const json whole = everything();
  std::mt19937 random(13);
  for (int round = 0; round < 3000; ++round) {
    json document = whole;
    for (std::size_t edits = 1 + random() % 3; edits > 0; --edits) mutate(document, random);
    load_and_use(document.dump());
  }
}

}  // namespace
}  // namespace graft::text
