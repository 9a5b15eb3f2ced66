// A plugin library in a test: loaded and called through the C ABI only, as a host would.
#pragma once

#include <dlfcn.h>
#include <graft/plugin.hpp>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace graft::testing {

struct LogLine {
  int32_t level;
  std::string text;
};

// What a call across the ABI answered.
struct Outcome {
  graft_status status = GRAFT_OK;
  std::string where, message;
  bool ok() const { return status == GRAFT_OK; }
};

template <class Call>
Outcome outcome_of(Call&& call) {
  graft_error error = sdk::empty_error();
  const graft_status status = call(&error);
  return {status, error.where, error.message};
}

// A component's options: the defaults of its schema, some of them replaced.
class ConfigUnderTest {
 public:
  ConfigUnderTest(const graft_desc& desc, const std::map<std::string, sdk::Value>& given) {
    std::size_t used = 0;
    for (uint32_t i = 0; i < desc.n_options; ++i) {
      const graft_option& option = *desc.options[i];
      const auto found = given.find(option.key);
      if (found != given.end()) kept_.push_back(std::make_unique<sdk::Value>(found->second));
      if (found != given.end()) ++used;
      keys_.push_back(option.key);
      values_.push_back(found != given.end() ? kept_.back()->c() : option.def);
    }
    if (used != given.size()) throw std::invalid_argument("an option this component has not");
    config_ = {sizeof config_, static_cast<uint32_t>(keys_.size()), keys_.data(), values_.data()};
  }
  const graft_config* c() const { return &config_; }

 private:
  std::vector<std::unique_ptr<sdk::Value>> kept_;
  std::vector<const char*> keys_;
  std::vector<graft_value> values_;
  graft_config config_{};
};

// The library stays loaded, as in a host.
class PluginUnderTest {
 public:
  explicit PluginUnderTest(const char* file) {
    void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    const auto negotiate =
        reinterpret_cast<graft_plugin_negotiate_fn>(dlsym(library, GRAFT_ENTRY_SYMBOL));
    if (negotiate == nullptr) throw std::runtime_error("no entry symbol");
    const graft_negotiate_in in{
        sizeof in, DLPACK_MAJOR_VERSION, GRAFT_ABI_CURRENT, GRAFT_ABI_CURRENT, "test", "0"};
    graft_negotiate_out out{};
    out.struct_size = sizeof out;
    must(outcome_of([&](graft_error* e) { return negotiate(&in, &out, e); }));
    plugin_ = out.plugin;
    host_.struct_size = sizeof host_;
    host_.abi = out.abi;
    host_.name = "test";
    host_.version = "0";
    host_.ctx = this;
    host_.log = [](const graft_host* host, int32_t level, const char* text) {
      static_cast<PluginUnderTest*>(host->ctx)->log_.push_back({level, text});
    };
    host_.should_stop = [](const graft_host* host) -> int32_t {
      return static_cast<PluginUnderTest*>(host->ctx)->stop ? 1 : 0;
    };
    host_.get_extension = [](const graft_host* host, const char* id) -> const void* {
      const bool threads = std::string_view(id) == GRAFT_HOST_EXT_PARALLEL;
      return threads ? static_cast<PluginUnderTest*>(host->ctx)->parallel : nullptr;
    };
    must(outcome_of([&](graft_error* e) { return plugin_->init(&host_, file, e); }));
  }
  ~PluginUnderTest() { plugin_->deinit(); }
  PluginUnderTest(const PluginUnderTest&) = delete;
  PluginUnderTest& operator=(const PluginUnderTest&) = delete;

  const graft_desc& desc(const char* factory) const {
    const auto* const f =
        static_cast<const graft_initializer_factory*>(plugin_->get_extension(factory));
    if (f == nullptr || f->count != 1) throw std::runtime_error("not the one component expected");
    return *f->descs[0];
  }

  template <class Factory, class Instance>
  Outcome create(const char* factory, const std::map<std::string, sdk::Value>& options,
                 std::shared_ptr<Instance>* out) const {
    const auto* const f = static_cast<const Factory*>(plugin_->get_extension(factory));
    const ConfigUnderTest config(desc(factory), options);
    Instance* made = nullptr;
    const Outcome outcome = outcome_of(
        [&](graft_error* e) { return f->create(desc(factory).id, config.c(), &made, e); });
    if (made != nullptr) *out = {made, [](Instance* i) { i->v->destroy(i); }};
    return outcome;
  }

  std::vector<LogLine> take_log() { return std::exchange(log_, {}); }

  const graft_host_parallel* parallel = nullptr;  // the threads the host gives; NULL = none
  bool stop = false;  // what the plugin hears when it asks whether to stop

 private:
  static void must(const Outcome& outcome) {
    if (!outcome.ok()) throw std::runtime_error(outcome.where + ": " + outcome.message);
  }

  const graft_plugin* plugin_ = nullptr;
  graft_host host_{};
  std::vector<LogLine> log_;
};

}  // namespace graft::testing
