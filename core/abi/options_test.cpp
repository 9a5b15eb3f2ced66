#include "core/abi/options.h"

#include <cmath>
#include <limits>

#include "core/base/testing.h"
#include "graft/description.hpp"

namespace graft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A schema out of the SDK's own option type, as a plugin would declare it.
OptionSchema schema_of(std::vector<sdk::Option> options) {
  std::vector<const graft_option*> pointers;
  for (auto& option : options) pointers.push_back(&option.c());
  graft_desc desc{};
  desc.struct_size = sizeof desc;
  desc.n_options = static_cast<std::uint32_t>(pointers.size());
  desc.options = pointers.data();
  return OptionSchema(desc, "mixer 'gdn'");
}

const OptionSchema& schema() {
  static const OptionSchema all = schema_of({
      sdk::Option::boolean("silu_q", true, "apply SiLU to q"),
      sdk::Option::integer("chunk_size", 64, "tokens per chunk").range(1, 4096),
      sdk::Option::real("gate.scale", 0.5, "a factor").range(0.0, 2.0),
      sdk::Option::string("gates", "random", "how gates start").one_of({"random", "zero", "small"}),
      sdk::Option::string("note", "", "anything"),
      sdk::Option::integers("layers", {}, "which").at_least(0),
      sdk::Option::reals("rates", {1.0}, "learning rates").range(0.0, 1.0),
  });
  return all;
}

ResolvedOptions resolve(const std::map<std::string, OptionValue>& given) {
  return ResolvedOptions(schema(), given, "mixer 'gdn'");
}

TEST(Options, DefaultsFillWhatIsNotGiven) {
  const auto options = resolve({{"chunk_size", std::int64_t{16}}});
  EXPECT_EQ(options.values().size(), 7u);
  EXPECT_EQ(std::get<std::int64_t>(options.at("chunk_size")), 16);
  EXPECT_EQ(std::get<bool>(options.at("silu_q")), true);
  EXPECT_EQ(std::get<std::string>(options.at("gates")), "random");
  EXPECT_GRAFT_ERROR(options.at("nothing"), ErrorKind::internal, HasSubstr("'nothing'"));
}

TEST(Options, UnknownKeyNamesTheNearest) {
  EXPECT_GRAFT_ERROR(resolve({{"chunk_sise", std::int64_t{1}}}), ErrorKind::usage,
                     "mixer 'gdn' has no option 'chunk_sise' (did you mean 'chunk_size'?)");
  EXPECT_GRAFT_ERROR(resolve({{"zzzzz", true}}), ErrorKind::usage,
                     "mixer 'gdn' has no option 'zzzzz'; known: silu_q, chunk_size, gate.scale, "
                     "gates, note, layers, "
                     "rates");
  EXPECT_GRAFT_ERROR(ResolvedOptions(OptionSchema(), {{"a", true}}, "mixer 'x'"), ErrorKind::usage,
                     "mixer 'x' has no option 'a'; it has no options");
  try {
    resolve({{"chunk_sise", true}});
    FAIL();
  } catch (const OptionError& error) {
    EXPECT_EQ(error.key(), "chunk_sise");
  }
}

TEST(Options, IntegerWhereAFloatIsWanted) {
  EXPECT_EQ(std::get<double>(resolve({{"gate.scale", std::int64_t{1}}}).at("gate.scale")), 1.0);
  EXPECT_THAT(std::get<std::vector<double>>(
                  resolve({{"rates", std::vector<std::int64_t>{0, 1}}}).at("rates")),
              ElementsAre(0.0, 1.0));
  // An empty list fits either list.
  EXPECT_TRUE(
      std::get<std::vector<std::int64_t>>(resolve({{"layers", std::vector<double>{}}}).at("layers"))
          .empty());
  // 2^53 + 1 is no double.
  const auto wide = schema_of({sdk::Option::real("r", 0.0, "")});
  EXPECT_GRAFT_ERROR(ResolvedOptions(wide, {{"r", std::int64_t{9007199254740993}}}, "mixer 'x'"),
                     ErrorKind::usage,
                     "mixer 'x', option 'r': expected a number, got 9007199254740993");
}

struct Wrong {
  const char* key;
  OptionValue value;
  const char* text;
};

TEST(Options, WrongTypesAndRanges) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  const Wrong wrongs[] = {
      {"silu_q", std::int64_t{1}, "'silu_q': expected true or false, got 1"},
      {"silu_q", std::string("yes"), "'silu_q': expected true or false, got \"yes\""},
      {"chunk_size", 1.5, "'chunk_size': expected an integer from 1 to 4096, got 1.5"},
      {"chunk_size", 64.0, "'chunk_size': expected an integer from 1 to 4096, got 64.0"},
      {"chunk_size", true, "'chunk_size': expected an integer from 1 to 4096, got true"},
      {"chunk_size", std::int64_t{0}, "'chunk_size': expected an integer from 1 to 4096, got 0"},
      {"chunk_size", std::int64_t{4097},
       "'chunk_size': expected an integer from 1 to 4096, got 4097"},
      {"gate.scale", std::string("1e-3"),
       "'gate.scale': expected a number from 0.0 to 2.0, got \"1e-3\""},
      {"gate.scale", -0.1, "'gate.scale': expected a number from 0.0 to 2.0, got -0.1"},
      {"gate.scale", std::int64_t{3}, "'gate.scale': expected a number from 0.0 to 2.0, got 3"},
      {"gate.scale", nan, "'gate.scale': expected a number from 0.0 to 2.0, got nan"},
      {"gate.scale", inf, "'gate.scale': expected a number from 0.0 to 2.0, got inf"},
      {"gates", std::string("zeros"),
       "'gates': expected 'random', 'zero' or 'small', got \"zeros\" (did you mean 'zero'?)"},
      {"gates", std::int64_t{0}, "'gates': expected 'random', 'zero' or 'small', got 0"},
      {"note", true, "'note': expected a string, got true"},
      {"layers", std::vector<std::int64_t>{3, -1},
       "'layers': expected a list of integers, at least 0 of each item, got [3, -1]"},
      {"layers", std::int64_t{3},
       "'layers': expected a list of integers, at least 0 of each item, got 3"},
      {"layers", std::vector<double>{1.0},
       "'layers': expected a list of integers, at least 0 of each item, got [1.0]"},
      {"rates", std::vector<double>{0.5, 1.5},
       "'rates': expected a list of numbers, each from 0.0 to 1.0, got [0.5, 1.5]"},
  };
  for (const auto& [key, value, text] : wrongs) {
    EXPECT_GRAFT_ERROR(resolve({{key, value}}), ErrorKind::usage,
                       std::string("mixer 'gdn', option ") + text);
  }
}

TEST(Options, EdgesOfARangeAreInside) {
  for (const std::int64_t edge : {1, 4096}) EXPECT_NO_THROW(resolve({{"chunk_size", edge}}));
  for (const double edge : {0.0, 2.0}) EXPECT_NO_THROW(resolve({{"gate.scale", edge}}));
  // Not through double: these two differ by one.
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const auto wide = schema_of({sdk::Option::integer("n", 0, "").range(std::int64_t{0}, most - 1)});
  EXPECT_NO_THROW(ResolvedOptions(wide, {{"n", most - 1}}, "x"));
  EXPECT_THROW(ResolvedOptions(wide, {{"n", most}}, "x"), OptionError);
}

TEST(Options, RequiredHasToBeGiven) {
  const auto needing = schema_of(
      {sdk::Option::integer("width", 0, "channels of the convolution").at_least(1).required(),
       sdk::Option::string("name", "", "").required()});
  EXPECT_TRUE(needing.find("width")->required());
  EXPECT_GRAFT_ERROR(ResolvedOptions(needing, {}, "mixer 'conv'"), ErrorKind::usage,
                     "mixer 'conv' needs the option 'width': an integer, at least 1 (channels of "
                     "the convolution)");
  EXPECT_NO_THROW(ResolvedOptions(needing, {{"width", std::int64_t{4}}, {"name", std::string("a")}},
                                  "mixer 'conv'"));
}

TEST(Options, FlagsAndTexts) {
  const auto flagged = schema_of({sdk::Option::integer("dim", 8, "size").shapes().deprecated()});
  EXPECT_TRUE(flagged.find("dim")->shapes());
  EXPECT_TRUE(flagged.find("dim")->deprecated());
  EXPECT_FALSE(flagged.find("dim")->required());
  EXPECT_EQ(to_text(OptionValue(0.1)), "0.1");
  EXPECT_EQ(to_text(OptionValue(1e300)), "1e+300");
  EXPECT_EQ(to_text(OptionValue(-2.0)), "-2.0");
  EXPECT_EQ(to_text(OptionValue(std::string("a\nb"))), "\"a\\x0ab\"");
  EXPECT_EQ(to_text(OptionValue(std::vector<std::int64_t>{})), "[]");
}

TEST(Options, CConfigHoldsEveryValue) {
  const auto options =
      resolve({{"layers", std::vector<std::int64_t>{7, 8}}, {"note", std::string("hello")}});
  const graft_config& c = *options.c_config();
  EXPECT_EQ(c.struct_size, sizeof(graft_config));
  ASSERT_EQ(c.count, 7u);
  std::map<std::string, graft_value> values;
  for (std::uint32_t i = 0; i < c.count; ++i) values[c.keys[i]] = c.values[i];
  EXPECT_EQ(values.at("silu_q").type, static_cast<std::uint32_t>(GRAFT_BOOL));
  EXPECT_EQ(values.at("silu_q").u.i, 1);
  EXPECT_EQ(values.at("chunk_size").u.i, 64);
  EXPECT_EQ(values.at("gate.scale").u.f, 0.5);
  EXPECT_STREQ(values.at("note").u.s, "hello");
  EXPECT_EQ(values.at("layers").count, 2u);
  EXPECT_EQ(values.at("layers").u.il[1], 8);
  EXPECT_EQ(values.at("rates").type, static_cast<std::uint32_t>(GRAFT_FLOAT_LIST));
  EXPECT_EQ(values.at("rates").u.fl[0], 1.0);
  // A copy does not point into the original.
  const ResolvedOptions copy = options;
  EXPECT_NE(copy.c_config()->values, c.values);
}

// ---------------------------------------------------------------- declarations that are wrong
// themselves

graft_option raw_option(const char* key, std::uint32_t type) {
  graft_option option{};
  option.struct_size = sizeof option;
  option.key = key;
  option.def.type = type;
  option.def.count = 1;
  return option;
}

void declare(const std::vector<graft_option>& options) {
  std::vector<const graft_option*> pointers;
  for (const auto& option : options) pointers.push_back(&option);
  graft_desc desc{};
  desc.struct_size = sizeof desc;
  desc.n_options = static_cast<std::uint32_t>(pointers.size());
  desc.options = pointers.data();
  OptionSchema(desc, "mixer 'x'");
}

TEST(BadSchema, IsThePluginsFault) {
  EXPECT_GRAFT_ERROR(declare({raw_option(nullptr, GRAFT_INT)}), ErrorKind::plugin,
                     "mixer 'x', option 0 has no key");
  EXPECT_GRAFT_ERROR(declare({raw_option("", GRAFT_INT)}), ErrorKind::plugin,
                     "mixer 'x', option 0 has no key");
  EXPECT_GRAFT_ERROR(declare({raw_option("a", GRAFT_INT), raw_option("a", GRAFT_BOOL)}),
                     ErrorKind::plugin, "mixer 'x', option 'a' is declared twice");
  for (const std::uint32_t type : {0u, 7u, 1000u}) {
    EXPECT_GRAFT_ERROR(
        declare({raw_option("a", type)}), ErrorKind::plugin,
        "mixer 'x', option 'a' has no usable default (type " + std::to_string(type) + ")");
  }
  EXPECT_GRAFT_ERROR(declare({raw_option("a", GRAFT_STRING)}), ErrorKind::plugin,
                     HasSubstr("no usable default"));
  auto list = raw_option("a", GRAFT_INT_LIST);
  list.def.count = 3;
  EXPECT_GRAFT_ERROR(declare({list}), ErrorKind::plugin, HasSubstr("no usable default"));
  auto outside = raw_option("a", GRAFT_INT);
  outside.min = {GRAFT_INT, 1, {.i = 1}};
  EXPECT_GRAFT_ERROR(declare({outside}), ErrorKind::plugin,
                     "mixer 'x', option 'a' has the default 0, but takes an integer, at least 1");
  auto bound = raw_option("a", GRAFT_INT);
  bound.max = {GRAFT_STRING, 1, {.s = "z"}};
  EXPECT_GRAFT_ERROR(declare({bound}), ErrorKind::plugin,
                     "mixer 'x', option 'a' has a bound that is no number");
  graft_desc desc{};
  desc.struct_size = sizeof desc;
  desc.n_options = 2;
  EXPECT_GRAFT_ERROR(OptionSchema(desc, "mixer 'x'"), ErrorKind::plugin,
                     "mixer 'x' declares 2 options, but their list is NULL");
  const graft_option* const null_option[] = {nullptr};
  desc.n_options = 1;
  desc.options = null_option;
  EXPECT_GRAFT_ERROR(OptionSchema(desc, "mixer 'x'"), ErrorKind::plugin,
                     "mixer 'x', option 0 is NULL");
}

}  // namespace
}  // namespace graft
