// What a component says of its options, and what it makes of their values.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "kit/component.h"
#include "kit/doing.h"
#include "kit/text_forms.h"

namespace graft::conformance {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::string key_of(const graft_option& option) { return option.key == nullptr ? "" : option.key; }

std::uint32_t item_type(std::uint32_t type) {
  if (type == GRAFT_INT_LIST) return GRAFT_INT;
  return type == GRAFT_FLOAT_LIST ? static_cast<std::uint32_t>(GRAFT_FLOAT) : type;
}

// The numbers in a value: its own, or those of its list.
std::vector<double> numbers_in(const graft_value& value) {
  std::vector<double> out;
  if (value.type == GRAFT_INT) out.push_back(static_cast<double>(value.u.i));
  if (value.type == GRAFT_FLOAT) out.push_back(value.u.f);
  for (std::uint32_t i = 0; value.type == GRAFT_INT_LIST && i < value.count; ++i)
    out.push_back(static_cast<double>(value.u.il[i]));
  for (std::uint32_t i = 0; value.type == GRAFT_FLOAT_LIST && i < value.count; ++i)
    out.push_back(value.u.fl[i]);
  return out;
}

double bound(const graft_value& value, double unbounded) {
  return value.type == 0 ? unbounded : numbers_in(value).at(0);
}

std::vector<std::string> choices(const graft_option& option) {
  std::vector<std::string> out;
  for (const char* const* one = option.one_of; one != nullptr && *one != nullptr; ++one)
    out.emplace_back(*one);
  return out;
}

// ---------------------------------------------------------------- what it says

void check_bounds(const graft_option& option) {
  const std::string key = key_of(option);
  for (const auto& [what, value] : {std::pair("min", option.min), {"max", option.max}}) {
    if (value.type == 0) continue;
    const std::uint32_t type = item_type(option.def.type);
    if (type != GRAFT_INT && type != GRAFT_FLOAT)
      fail("option '", key, "' is no number and has a ", what);
    if (value.type != type)
      fail("option '", key, "': its ", what, " is of type ", value.type, ", expected ", type);
    if (std::isnan(bound(value, 0))) fail("option '", key, "': its ", what, " is no number (NaN)");
  }
  if (bound(option.min, -kInfinite) > bound(option.max, kInfinite))
    fail("option '", key, "': min ", bound(option.min, 0), " is above max ", bound(option.max, 0));
}

void check_choices(const graft_option& option) {
  if (option.one_of == nullptr) return;
  const std::string key = key_of(option);
  if (option.def.type != GRAFT_STRING) fail("option '", key, "' is no string and has a one_of");
  const std::vector<std::string> all = choices(option);
  if (all.empty()) fail("option '", key, "': its one_of is empty; NULL says that all is allowed");
  if (std::set<std::string>(all.begin(), all.end()).size() != all.size())
    fail("option '", key, "': its one_of has a value twice");
}

void text_of_options(Context& context) {
  std::set<std::string> keys;
  for (const graft_option* const option : schema_of(context.desc())) {
    const std::string key = key_of(*option);
    if (!is_option_key(key)) fail("option '", key, "': expected a key like feature_map.dim");
    if (!keys.insert(key).second) fail("option '", key, "' is there twice");
    const std::string doc = option->doc == nullptr ? "" : option->doc;
    if (doc.empty()) context.note("option '", key, "' has no doc for --help");
    if (doc.find('\n') != std::string::npos)
      fail("option '", key, "': its doc has several lines; expected one");
    check_bounds(*option);
    check_choices(*option);
  }
  context.note(keys.size(), " options");
}

void check_default(const graft_option& option) {
  const std::string key = key_of(option);
  const graft_value& def = option.def;
  if (def.type < GRAFT_BOOL || def.type > GRAFT_FLOAT_LIST)
    fail("option '", key, "': the default's type ", def.type, " is none of GRAFT_BOOL ...");
  if ((option.flags & GRAFT_OPT_REQUIRED) != 0) return;
  if (def.type == GRAFT_STRING && def.u.s == nullptr)
    fail("option '", key, "': the default is NULL; an empty string is \"\"");
  if (def.type == GRAFT_BOOL && def.u.i != 0 && def.u.i != 1)
    fail("option '", key, "': the default ", def.u.i, " is neither 0 nor 1");
  for (const double number : numbers_in(def)) {
    if (!(number >= bound(option.min, -kInfinite) && number <= bound(option.max, kInfinite)))
      fail("option '", key, "': the default ", number, " is outside of min and max");
  }
  if (option.one_of == nullptr) return;
  const std::vector<std::string> all = choices(option);
  if (std::find(all.begin(), all.end(), def.u.s) == all.end())
    fail("option '", key, "': the default '", def.u.s, "' is none of its one_of");
}

// ---------------------------------------------------------------- what it makes of values

struct Trial {
  std::string key, shown;
  sdk::Value value;
};

Outcome create_with(Context& context, const Options& options) {
  const CompleteConfig config(context.desc(), options);
  return Instance(context.library, *context.component, config.c()).outcome();
}

// The context's options, with the value of a trial.
Outcome create_with(Context& context, const Trial& trial) {
  doing(sdk::cat("create with ", trial.key, " = ", trial.shown));
  Options options = context.options;
  options.insert_or_assign(trial.key, trial.value);
  return create_with(context, options);
}

// Does the refusal name the option: as its place, or in the message about another one that it does
// not go with?
bool names_option(const Outcome& outcome, const std::string& key) {
  return outcome.where.find("config." + key) != std::string::npos ||
         (outcome.where.starts_with("config.") && outcome.message.find(key) != std::string::npos);
}

// A refusal says what is refused and why.
void check_refusal(const Outcome& outcome, const Trial& trial) {
  const std::string tried = sdk::cat("create with ", trial.key, " = ", trial.shown);
  if (outcome.message.empty())
    fail(tried, " is refused (status ", outcome.status, ") without a message");
  if (!names_option(outcome, trial.key))
    fail(tried, " is refused, and `where` is '", outcome.where, "'; expected config.", trial.key,
         " (message: ", outcome.message, ")");
}

template <class T>
Trial trial(const graft_option& option, T value) {
  return {key_of(option), sdk::cat(value), sdk::Value::of(value)};
}

std::vector<Trial> ends_of(const graft_option& option) {
  std::vector<Trial> out;
  for (const graft_value& end : {option.min, option.max}) {
    if (end.type == 0) continue;
    const double f = end.u.f;
    const std::int64_t i = end.u.i;
    switch (option.def.type) {
      case GRAFT_INT:
        out.push_back(trial(option, i));
        break;
      case GRAFT_FLOAT:
        out.push_back(trial(option, f));
        break;
      case GRAFT_INT_LIST:
        out.push_back({key_of(option), sdk::cat("[", i, "]"), sdk::Value::of(std::vector{i})});
        break;
      case GRAFT_FLOAT_LIST:
        out.push_back({key_of(option), sdk::cat("[", f, "]"), sdk::Value::of(std::vector{f})});
        break;
      default:
        break;
    }
  }
  return out;
}

std::vector<Trial> legal_values(const graft_option& option) {
  std::vector<Trial> out = ends_of(option);
  if (option.def.type == GRAFT_BOOL) {
    out.push_back({key_of(option), "false", sdk::Value::of(false)});
    out.push_back({key_of(option), "true", sdk::Value::of(true)});
  }
  for (const std::string& one : choices(option)) out.push_back(trial(option, one));
  return out;
}

void defaults(Context& context) {
  std::string missing;
  for (const graft_option* const option : schema_of(context.desc())) {
    check_default(*option);
    const bool required = (option->flags & GRAFT_OPT_REQUIRED) != 0;
    if (required && !context.options.contains(key_of(*option))) missing += " " + key_of(*option);
  }
  const Outcome outcome = create_with(context, context.options);
  if (!outcome.ok() && !missing.empty())
    skip("wants values for its required options (--option KEY=VALUE):", missing);
  must(outcome, "create with the defaults");
}

// One value is tried at a time: the others have to be right.
void skip_unless_made(Context& context) {
  const Outcome outcome = create_with(context, context.options);
  if (!outcome.ok()) skip("cannot be made with its defaults: ", outcome.text());
}

void values(Context& context) {
  skip_unless_made(context);
  int made = 0, refused = 0;
  for (const graft_option* const option : schema_of(context.desc())) {
    for (const Trial& trial : legal_values(*option)) {
      const Outcome outcome = create_with(context, trial);
      ++(outcome.ok() ? made : refused);
      if (outcome.ok()) continue;
      check_refusal(outcome, trial);
      context.note("refuses ", trial.key, " = ", trial.shown, ": ", outcome.message);
    }
  }
  context.note(made, " values accepted, ", refused, " refused");
  if (made + refused == 0) skip("has no option with values to go through");
}

// ---------------------------------------------------------------- wrong values

void add_wrong_integers(const graft_option& option, std::vector<Trial>& out) {
  constexpr auto kLeast = std::numeric_limits<std::int64_t>::min();
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  if (option.min.type == GRAFT_INT && option.min.u.i > kLeast) {
    out.push_back(trial(option, option.min.u.i - 1));
    out.push_back(trial(option, kLeast));
  }
  if (option.max.type == GRAFT_INT && option.max.u.i < kMost) {
    out.push_back(trial(option, option.max.u.i + 1));
    out.push_back(trial(option, kMost));
  }
}

void add_wrong_reals(const graft_option& option, std::vector<Trial>& out) {
  out.push_back(trial(option, kNaN));
  const double least = bound(option.min, -kInfinite), most = bound(option.max, kInfinite);
  if (std::isfinite(least)) out.push_back(trial(option, least - 1 - std::fabs(least)));
  if (std::isfinite(most)) out.push_back(trial(option, most + 1 + std::fabs(most)));
}

std::vector<Trial> wrong_values(const graft_option& option) {
  std::vector<Trial> out;
  if (option.def.type == GRAFT_INT) add_wrong_integers(option, out);
  if (option.def.type == GRAFT_FLOAT) add_wrong_reals(option, out);
  if (option.def.type == GRAFT_FLOAT_LIST)
    out.push_back({key_of(option), "[nan]", sdk::Value::of(std::vector{kNaN})});
  if (option.def.type == GRAFT_STRING && option.one_of != nullptr)
    out.push_back(trial(option, std::string("no-such-value")));
  return out;
}

// A host keeps such values away, so that taking one is no failure; a crash or a refusal that says
// nothing is.
void wrong(Context& context) {
  skip_unless_made(context);
  int tried = 0;
  std::string taken;
  for (const graft_option* const option : schema_of(context.desc())) {
    for (const Trial& trial : wrong_values(*option)) {
      ++tried;
      const Outcome outcome = create_with(context, trial);
      if (outcome.ok()) {
        taken += sdk::cat(taken.empty() ? "" : ", ", trial.key, " = ", trial.shown);
      } else {
        check_refusal(outcome, trial);
      }
    }
  }
  if (tried == 0) skip("has no option with values to be refused");
  if (!taken.empty()) context.note("takes values its schema forbids: ", taken);
}

}  // namespace

std::vector<Test> schema_tests() {
  std::vector<Test> out;
  for (const Kind kind : {Kind::mixer, Kind::initializer, Kind::objective}) {
    out.push_back({"schema.text", kind,
                   "Options have unique keys, one line of help, and bounds that make sense.",
                   text_of_options});
    out.push_back({"schema.defaults", kind,
                   "Each default keeps its own bounds, and the component can be made with them.",
                   defaults});
    out.push_back({"schema.values", kind,
                   "Every value of an enum, bool or bound works, or is refused by name.", values});
    out.push_back({"schema.wrong_values", kind,
                   "Values outside the schema crash nothing, and what is refused is named.",
                   wrong});
  }
  return out;
}

}  // namespace graft::conformance
