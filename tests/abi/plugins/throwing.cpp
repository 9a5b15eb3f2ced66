// A plugin that breaks rule R5: no wrapper, and exceptions leave its calls. `thrown` says which,
// `where` from which call.
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "graft/graft.h"

namespace {

struct Settings {
  std::string thrown, where;
};

void maybe_throw(const Settings& settings, const char* call) {
  if (settings.where != call) return;
  if (settings.thrown == "exception") throw std::runtime_error("the author forgot this");
  if (settings.thrown == "bad_alloc") throw std::bad_alloc();
  if (settings.thrown == "int") throw 42;
}

Settings& settings_of(graft_mixer* mixer) { return *static_cast<Settings*>(mixer->self); }

void destroy(graft_mixer* mixer) {
  delete &settings_of(mixer);
  delete mixer;
}

graft_status param_specs(graft_mixer* mixer, const graft_param_spec* const** specs, uint32_t* n,
                         graft_error*) {
  maybe_throw(settings_of(mixer), "param_specs");
  *specs = nullptr;
  *n = 0;
  return GRAFT_OK;
}

graft_status plan(graft_mixer* mixer, const graft_plan_in*, graft_plan_out*, graft_error*) {
  maybe_throw(settings_of(mixer), "plan");
  return GRAFT_OK;
}

graft_status forward(graft_mixer* mixer, const graft_exec*, const graft_mixer_forward*,
                     graft_error*) {
  maybe_throw(settings_of(mixer), "forward");
  return GRAFT_OK;
}

const graft_mixer_vtbl table{sizeof(graft_mixer_vtbl),
                             1,
                             &destroy,
                             &param_specs,
                             &plan,
                             &forward,
                             nullptr,
                             nullptr,
                             nullptr};

graft_option string_option(const char* key, const char* def) {
  graft_option option{};
  option.struct_size = sizeof option;
  option.key = key;
  option.doc = "";
  option.def.type = GRAFT_STRING;
  option.def.count = 1;
  option.def.u.s = def;
  return option;
}
const graft_option thrown = string_option("thrown", "exception");
const graft_option where = string_option("where", "forward");
const graft_option* const options[] = {&thrown, &where};

const graft_desc description{sizeof(graft_desc),
                             2,
                             "org.example.throwing.mixer",
                             "throwing",
                             "Throwing",
                             "1.0.0",
                             "Apache-2.0",
                             "",
                             "",
                             0,
                             options,
                             nullptr,
                             nullptr,
                             0,
                             0};
const graft_desc* const descriptions[] = {&description};

graft_status create(const char*, const graft_layer_info*, const graft_config* config,
                    graft_mixer** out, graft_error*) {
  Settings settings;
  for (uint32_t i = 0; i < config->count; ++i) {
    if (std::strcmp(config->keys[i], "thrown") == 0) settings.thrown = config->values[i].u.s;
    if (std::strcmp(config->keys[i], "where") == 0) settings.where = config->values[i].u.s;
  }
  maybe_throw(settings, "create");
  *out = new graft_mixer{&table, new Settings(settings)};
  return GRAFT_OK;
}

const graft_mixer_factory factory{sizeof(graft_mixer_factory), 1, descriptions, &create};

const void* get_extension(const char* id) {
  return std::strcmp(id, GRAFT_EXT_MIXER_FACTORY) == 0 ? &factory : nullptr;
}

// Neither init nor deinit: a plugin that keeps nothing needs none.
const graft_plugin plugin{sizeof(graft_plugin),
                          0,
                          "org.example.throwing",
                          "graft",
                          "",
                          "1.0.0",
                          "Apache-2.0",
                          nullptr,
                          nullptr,
                          nullptr,
                          &get_extension};

}  // namespace

extern "C" graft_status graft_plugin_negotiate(const graft_negotiate_in*, graft_negotiate_out* out,
                                               graft_error*) {
  out->abi = GRAFT_ABI_CURRENT;
  out->plugin = &plugin;
  return GRAFT_OK;
}
