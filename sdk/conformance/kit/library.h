// A plugin file, opened as a host would.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graft/conformance/conformance.hpp"
#include "graft/description.hpp"
#include "kit/process.h"
#include "kit/test_host.h"

namespace graft::conformance {

// What a call across the ABI answered.
struct Outcome {
  graft_status status = GRAFT_OK;
  std::string where, message;
  bool ok() const { return status == GRAFT_OK; }
  std::string text() const;  // "status 3, tensor:x: expected ..."
};

template <class Call>
Outcome outcome_of(Call&& call) {
  graft_error error = sdk::empty_error();
  const graft_status status = call(&error);
  return {status, error.where, error.message};
}

// Fails with "<what>: <what it answered>".
void must(const Outcome& outcome, std::string_view what);

// A component's options: the defaults of its schema, some of them replaced.
using Options = std::map<std::string, sdk::Value>;
class CompleteConfig {
 public:
  CompleteConfig(const graft_desc& desc, const Options& given);
  CompleteConfig(const CompleteConfig&) = delete;
  const graft_config* c() const { return &c_; }

 private:
  Options given_;
  std::vector<const char*> keys_;
  std::vector<graft_value> values_;
  graft_config c_{};
};

// The value of an option written as in TOML; fails naming the option when it is of another type, or
// none of the component's.
sdk::Value parse_option(const graft_desc& desc, const std::string& key, const std::string& text);

// What the settings say of a component, over its defaults.
Options options_for(const graft_desc& desc, const Settings& settings);
// The component's own configuration and, one option at a time, each other value that an enum or a
// bool may take over `given`: "variant = paper".
struct NamedOptions {
  std::string name;  // "the defaults" for the first
  Options options;
};
std::vector<NamedOptions> configurations(const graft_desc& desc, const Options& given);

struct Component {
  Kind kind;
  const graft_desc* desc;
  bool has(std::uint64_t cap) const { return (desc->caps & cap) == cap; }
};

// dlopen (NOW|LOCAL), negotiate and init. It stays open, as in a host; init has its deinit.
class Library {
 public:
  // Fails naming the step that did not work.
  explicit Library(const std::filesystem::path& file);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const std::filesystem::path& file() const { return file_; }
  graft_plugin_negotiate_fn negotiate() const { return negotiate_; }
  const graft_plugin& plugin() const { return *plugin_; }
  std::uint32_t abi() const { return abi_; }
  TestHost& host() const { return *host_; }

  // How it was when the file was opened.
  struct Opening {
    ProcessState before, loaded, initialized;
    double negotiation_seconds = 0;  // of the processor, the first time
  };
  const Opening& opening() const { return opening_; }

  template <class Factory>
  const Factory* factory(const char* id) const {
    return static_cast<const Factory*>(plugin_->get_extension(id));
  }
  const graft_mixer_factory* mixers() const {
    return factory<graft_mixer_factory>(GRAFT_EXT_MIXER_FACTORY);
  }
  const graft_initializer_factory* initializers() const {
    return factory<graft_initializer_factory>(GRAFT_EXT_INITIALIZER_FACTORY);
  }
  const graft_objective_factory* objectives() const {
    return factory<graft_objective_factory>(GRAFT_EXT_OBJECTIVE_FACTORY);
  }
  std::vector<Component> components() const;
  const Component& find(Kind kind, std::string_view id) const;

 private:
  std::filesystem::path file_;
  graft_plugin_negotiate_fn negotiate_ = nullptr;
  const graft_plugin* plugin_ = nullptr;
  std::uint32_t abi_ = 0;
  Opening opening_;
  std::unique_ptr<TestHost> host_;
  std::vector<Component> components_;
};

// "org.example.gdn" for a component with or without a name.
std::string name_of(const graft_desc& desc);

}  // namespace graft::conformance
