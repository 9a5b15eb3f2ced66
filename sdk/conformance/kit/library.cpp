#include "kit/library.h"

#include <dlfcn.h>

#include <charconv>
#include <sstream>

#include "kit/verdict.h"

namespace graft::conformance {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::library:
      return "library";
    case Kind::mixer:
      return "mixer";
    case Kind::initializer:
      return "initializer";
    case Kind::objective:
      return "objective";
  }
  return "?";
}

const char* name_of(Verdict verdict) {
  return verdict == Verdict::pass ? "pass" : verdict == Verdict::fail ? "fail" : "skip";
}

std::string Outcome::text() const {
  return sdk::cat("status ", status, where.empty() ? "" : ", " + where,
                  message.empty() ? "" : ": " + message);
}

void must(const Outcome& outcome, std::string_view what) {
  if (!outcome.ok()) fail(what, " answers with ", outcome.text());
}

CompleteConfig::CompleteConfig(const graft_desc& desc, const Options& given) : given_(given) {
  std::size_t used = 0;
  for (std::uint32_t i = 0; i < desc.n_options; ++i) {
    const graft_option& option = *desc.options[i];
    const auto found = given_.find(option.key);
    if (found != given_.end()) ++used;
    keys_.push_back(option.key);
    values_.push_back(found != given_.end() ? found->second.c() : option.def);
  }
  if (used != given_.size()) {
    for (const auto& [key, value] : given_) {
      bool known = false;
      for (const char* const have : keys_) known = known || key == have;
      if (!known) fail("'", desc.id, "' has no option '", key, "'");
    }
  }
  c_ = {sizeof c_, static_cast<std::uint32_t>(keys_.size()), keys_.data(), values_.data()};
}

namespace {

template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "[1, 2]" or "1, 2".
template <class T>
std::optional<std::vector<T>> parse_list(std::string_view text) {
  const std::size_t first = text.find_first_not_of("[ "), last = text.find_last_not_of("] ");
  std::vector<T> out;
  if (first == std::string_view::npos || last == std::string_view::npos) return out;
  std::istringstream items{std::string(text.substr(first, last + 1 - first))};
  for (std::string item; std::getline(items, item, ',');) {
    item.erase(0, item.find_first_not_of(' '));
    const auto value = parse_number<T>(item);
    if (!value) return std::nullopt;
    out.push_back(*value);
  }
  return out;
}

template <class T>
sdk::Value checked(const std::optional<T>& value, const graft_option& option,
                   const std::string& text, const char* type) {
  if (!value) fail("option '", option.key, "': expected ", type, ", got '", text, "'");
  return sdk::Value::of(*value);
}

}  // namespace

sdk::Value parse_option(const graft_desc& desc, const std::string& key, const std::string& text) {
  for (std::uint32_t i = 0; i < desc.n_options; ++i) {
    const graft_option& option = *desc.options[i];
    if (key != option.key) continue;
    switch (option.def.type) {
      case GRAFT_BOOL:
        if (text != "true" && text != "false")
          fail("option '", key, "': expected true or false, got '", text, "'");
        return sdk::Value::of(text == "true");
      case GRAFT_INT:
        return checked(parse_number<std::int64_t>(text), option, text, "an integer");
      case GRAFT_FLOAT:
        return checked(parse_number<double>(text), option, text, "a number");
      case GRAFT_INT_LIST:
        return checked(parse_list<std::int64_t>(text), option, text, "integers");
      case GRAFT_FLOAT_LIST:
        return checked(parse_list<double>(text), option, text, "numbers");
      default:
        return sdk::Value::of(text);
    }
  }
  fail("'", desc.id, "' has no option '", key, "'");
}

Library::Library(const std::filesystem::path& file) : file_(std::filesystem::absolute(file)) {
  opening_.before = process_state();
  void* const handle = ::dlopen(file_.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) fail("cannot be opened: ", ::dlerror());
  negotiate_ = reinterpret_cast<graft_plugin_negotiate_fn>(::dlsym(handle, GRAFT_ENTRY_SYMBOL));
  if (negotiate_ == nullptr) fail("exports no symbol " GRAFT_ENTRY_SYMBOL);
  const graft_negotiate_in in{
      sizeof in,         DLPACK_MAJOR_VERSION, GRAFT_ABI(GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT), 0),
      GRAFT_ABI_CURRENT, "graft-conformance",  kKitVersion.data()};
  graft_negotiate_out out{};
  out.struct_size = sizeof out;
  opening_.loaded = process_state();
  const double start = cpu_seconds();
  must(outcome_of([&](graft_error* e) { return negotiate_(&in, &out, e); }), GRAFT_ENTRY_SYMBOL);
  opening_.negotiation_seconds = cpu_seconds() - start;
  if (out.plugin == nullptr) fail(GRAFT_ENTRY_SYMBOL " answers OK and gives no plugin");
  if (out.plugin->get_extension == nullptr) fail("graft_plugin.get_extension is NULL");
  plugin_ = out.plugin;
  abi_ = out.abi;
  host_ = std::make_unique<TestHost>(abi_);
  if (plugin_->init != nullptr) {
    must(outcome_of([&](graft_error* e) { return plugin_->init(host_->c(), file_.c_str(), e); }),
         "init");
  }
  opening_.initialized = process_state();
  components_ = components();
}

Library::~Library() {
  components_.clear();
  if (plugin_ != nullptr && plugin_->deinit != nullptr) plugin_->deinit();
}

std::vector<Component> Library::components() const {
  std::vector<Component> out;
  const auto add = [&](Kind kind, const auto* factory) {
    for (std::uint32_t i = 0; factory != nullptr && i < factory->count; ++i)
      out.push_back({kind, factory->descs[i]});
  };
  add(Kind::mixer, mixers());
  add(Kind::initializer, initializers());
  add(Kind::objective, objectives());
  return out;
}

const Component& Library::find(Kind kind, std::string_view id) const {
  for (const Component& component : components_) {
    if (component.kind == kind && name_of(*component.desc) == id) return component;
  }
  fail("has no ", name_of(kind), " '", id, "'");
}

Options options_for(const graft_desc& desc, const Settings& settings) {
  Options out;
  for (const auto& [component, given] : settings.options) {
    const bool this_one =
        component == name_of(desc) || (desc.alias != nullptr && component == desc.alias);
    for (const auto& [key, text] : given) {
      if (this_one) out.insert_or_assign(key, parse_option(desc, key, text));
    }
  }
  return out;
}

std::vector<NamedOptions> configurations(const graft_desc& desc, const Options& given) {
  std::vector<NamedOptions> out{{"the defaults", given}};
  for (std::uint32_t i = 0; i < desc.n_options; ++i) {
    const graft_option& option = *desc.options[i];
    if (given.contains(option.key)) continue;
    const auto add = [&](sdk::Value value, std::string_view text) {
      Options options = given;
      options.insert_or_assign(option.key, std::move(value));
      out.push_back({sdk::cat(option.key, " = ", text), std::move(options)});
    };
    if (option.def.type == GRAFT_BOOL) {
      add(sdk::Value::of(option.def.u.i == 0), option.def.u.i == 0 ? "true" : "false");
    }
    for (const char* const* one = option.one_of; one != nullptr && *one != nullptr; ++one) {
      if (option.def.u.s == nullptr || std::string_view(option.def.u.s) != *one)
        add(sdk::Value::of(std::string(*one)), *one);
    }
  }
  return out;
}

std::string name_of(const graft_desc& desc) { return desc.id == nullptr ? "" : desc.id; }

}  // namespace graft::conformance
