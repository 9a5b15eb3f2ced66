#include "core/student/student_io.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/message.h"
#include "core/base/suggest.h"
#include "core/loader/registry.h"

namespace graft {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr const char* kKey = "graft";
constexpr const char* kMetadataKey = "graft.mixer";

// "model.layers.3.mixer."
std::string mixer_prefix(const ModelConfig& config, std::int64_t layer) {
  std::string prefix = attention_prefix(config, layer);
  prefix.erase(prefix.find_last_of('.', prefix.size() - 2) + 1);
  return prefix + "mixer.";
}

json to_json(const OptionValue& value) {
  return std::visit([](const auto& v) { return json(v); }, value);
}

OptionValue to_option(const json& value, const std::string& where) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  const auto all = [&](auto&& is) {
    return value.is_array() && std::all_of(value.begin(), value.end(), is);
  };
  if (all([](const json& v) { return v.is_number_integer(); }))
    return value.get<std::vector<std::int64_t>>();
  if (all([](const json& v) { return v.is_number(); })) return value.get<std::vector<double>>();
  fail(ErrorKind::input,
       where + ": a mixer option must be a truth value, number, string or list of numbers, got " +
           value.dump());
}

json mixer_json(const Mixer& mixer) {
  json options = json::object();
  for (const auto& [key, value] : mixer.options().values()) options[key] = to_json(value);
  const Component& component = mixer.component();
  return {{"id", component.id},
          {"alias", component.alias},
          {"version", component.version},
          {"license", component.license},
          {"param_schema", mixer.param_schema()},
          {"options", options}};
}

TensorView view_for_file(const std::string& name, const at::Tensor& tensor, DType dtype) {
  return {name,
          dtype,
          tensor.sizes().vec(),
          static_cast<const std::byte*>(tensor.const_data_ptr()),
          static_cast<std::uint64_t>(tensor.nbytes()),
          nullptr};
}

at::ScalarType file_type(DType dtype) {
  switch (dtype) {
    case DType::BF16:
      return at::kBFloat16;
    case DType::F16:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

void write_weights(const fs::path& path, const Model& student,
                   std::map<std::string, std::string> metadata) {
  std::vector<at::Tensor> kept;  // what the views point to
  std::vector<TensorView> views;
  std::vector<std::string> replaced;
  for (const auto& [layer, mixer] : student.mixers())
    replaced.push_back(attention_prefix(student.config(), layer));
  for (const auto& [name, parameter] : student.backbone().parameters()) {
    if (std::any_of(replaced.begin(), replaced.end(),
                    [&](const auto& prefix) { return name.starts_with(prefix); }))
      continue;
    const DType dtype = parameter.file_dtype == DType::BF16 || parameter.file_dtype == DType::F16
                            ? parameter.file_dtype
                            : DType::F32;
    kept.push_back(parameter.value.detach().to(file_type(dtype)).contiguous());
    views.push_back(view_for_file(name, kept.back(), dtype));
  }
  for (const auto& [layer, mixer] : student.mixers())
    for (const MixerParameter& parameter : mixer->parameters()) {
      kept.push_back(parameter.tensor.detach().contiguous());
      views.push_back(view_for_file(mixer_prefix(student.config(), layer) + parameter.name,
                                    kept.back(), DType::F32));
    }
  write_safetensors(path, std::move(views), std::move(metadata));
}

// The student is whole without these: none of them may end the work that came before.
void copy_if_readable(const fs::path& from, const fs::path& to) {
  std::error_code ignored;
  if (!fs::is_regular_file(from, ignored)) return;
  std::string content;
  try {
    content = read_text(from);
  } catch (const Error& error) {
    log_warning(std::string("not copied to the student: ") + error.what());
    return;
  }
  write_file_atomically(to, content);
}

void copy_teacher_files(const fs::path& from, const fs::path& to) {
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "generation_config.json", "vocab.json", "merges.txt", "chat_template.jinja", "LICENSE"})
    copy_if_readable(from / name, to / name);
}

// What `object` has under the key; `where` is how messages call the object.
const json& member(const json& object, const char* key, const std::string& where) {
  if (!object.is_object())
    fail(ErrorKind::input, where + " is " + printable(object.dump(-1, ' ', true), 60) +
                               ", not an object of keys and values, as graft writes it");
  const auto found = object.find(key);
  if (found == object.end())
    fail(ErrorKind::input, where + ": the key " + quoted(key) + " is missing");
  return *found;
}

std::string text_member(const json& object, const char* key, const std::string& where) {
  const json& value = member(object, key, where);
  if (!value.is_string())
    fail(ErrorKind::input, where + "." + key + " is " + printable(value.dump(-1, ' ', true), 60) +
                               "; a string is needed");
  return value.get<std::string>();
}

std::int64_t integer_of(const json& value, const std::string& where) {
  if (!value.is_number_integer())
    fail(ErrorKind::input,
         where + " is " + printable(value.dump(-1, ' ', true), 60) + "; an integer is needed");
  return value.get<std::int64_t>();
}

std::set<std::int64_t> read_layers(const json& list, const std::string& where,
                                   std::int64_t n_layers) {
  if (!list.is_array())
    fail(ErrorKind::input,
         where + " is " + printable(list.dump(-1, ' ', true), 60) + "; a list of layers is needed");
  std::set<std::int64_t> layers;
  for (const json& layer : list) {
    const std::int64_t index = integer_of(layer, where + ": an entry");
    if (index < 0 || index >= n_layers)
      fail(ErrorKind::input, where + " names layer " + layer.dump() +
                                 "; the model has layers 0 to " + std::to_string(n_layers - 1));
    if (!layers.insert(index).second)
      fail(ErrorKind::input, where + " names layer " + layer.dump() + " twice");
  }
  return layers;
}

StudentSection read_section(const json& config, const std::string& file, std::int64_t n_layers) {
  const std::string where = file + ": " + kKey;
  const json& section = config.at(kKey);
  const json& format = member(section, "format", where);
  if (format != kFormat)
    fail(ErrorKind::input, where + ".format is " + printable(format.dump(-1, ' ', true), 60) +
                               "; this program reads format " + std::to_string(kFormat));
  StudentSection out;
  out.layers = read_layers(member(section, "layers", where), where + ".layers", n_layers);
  const std::string in_mixer = where + ".mixer";
  const json& mixer = member(section, "mixer", where);
  out.mixer_id = text_member(mixer, "id", in_mixer);
  out.param_schema =
      integer_of(member(mixer, "param_schema", in_mixer), in_mixer + ".param_schema");
  out.version = text_member(mixer, "version", in_mixer);
  const json& options = member(mixer, "options", in_mixer);
  if (!options.is_object())
    fail(ErrorKind::input, in_mixer + ".options is " + printable(options.dump(-1, ' ', true), 60) +
                               ", not an object of keys and values, as graft writes it");
  for (const auto& [key, value] : options.items())
    out.options.emplace(key, to_option(value, in_mixer + ".options." + key));
  return out;
}

// The options stand in a file: what is wrong with them is said of the file.
std::unique_ptr<Mixer> make_mixer(const StudentSection& section, const graft_layer_info& layer,
                                  PluginRegistry& registry, const std::string& file) {
  try {
    return registry.create_mixer(section.mixer_id, layer, section.options);
  } catch (const OptionError& error) {
    fail(ErrorKind::input, file + ": " + kKey + ".mixer.options." + error.key() + " does not fit " +
                               kKey + ".mixer.id " + quoted(section.mixer_id) + ": " +
                               error.what());
  }
}

// config.json can be edited; the weights say what they were written with. Nothing where they do
// not.
void check_written_with(const StudentSection& section, const Mixer& plugin,
                        const Checkpoint& checkpoint, const std::string& config_file) {
  const auto& files = checkpoint.files();
  const auto by_graft = std::find_if(files.begin(), files.end(), [](const SafetensorsFile& file) {
    return file.metadata().contains(kMetadataKey);
  });
  if (by_graft == files.end()) return;
  const json written = json::parse(by_graft->metadata().at(kMetadataKey), nullptr, false);
  if (!written.is_object()) return;
  const auto same = [&](const std::string& key, const json& was, const json& is) {
    if (was.is_null() || was == is) return;
    fail(ErrorKind::input, config_file + ": " + kKey + ".mixer." + key + " is " + is.dump() +
                               ", but " + by_graft->path().string() + " was written with " +
                               was.dump() + ": set it back");
  };
  same("id", written.value("id", json()), section.mixer_id);
  same("param_schema", written.value("param_schema", json()), section.param_schema);
  const json options = written.value("options", json::object());
  for (const Option& option : plugin.component().schema.options())
    if (option.shapes())
      same("options." + option.key, options.value(option.key, json()),
           to_json(plugin.options().at(option.key)));
}

// What was stored of one converted layer, on its way into a mixer.
class StoredLayer {
 public:
  StoredLayer(const Checkpoint& checkpoint, const ModelConfig& config, std::int64_t layer)
      : checkpoint_(checkpoint), layer_(layer), prefix_(mixer_prefix(config, layer)) {
    for (const std::string& name : checkpoint.names())
      if (name.starts_with(prefix_)) names_.push_back(name.substr(prefix_.size()));
  }

  void load_into(TokenMixer& mixer) {
    for (const MixerParameter& parameter : mixer.parameters()) {
      const bool optional = (parameter.spec->flags & GRAFT_P_OPTIONAL) != 0;
      const bool there = checkpoint_.find(prefix_ + parameter.name) != nullptr;
      if (!there && optional) continue;  // keeps its default
      if (!there) fail_missing(mixer, parameter);
      const at::Tensor value = read(parameter.name);
      at_place([&] { mixer.load_parameter(parameter.name, value); }, parameter.name);
    }
    refuse_others(mixer);
  }

  // Through the plugin's own graft.mixer-migrate/1. False when it cannot read that schema.
  bool migrate_into(TokenMixer& mixer, std::uint32_t old_schema) {
    std::deque<BorrowedTensor> borrowed;
    std::map<std::string, const DLTensor*> old_params;
    for (const std::string& name : names_)
      old_params[name] = borrowed.emplace_back(read(name)).get();
    const std::vector<at::Tensor> tensors = mixer.parameter_tensors();
    BorrowedTensors params(tensors);
    bool migrated = false;
    at_place([&] {
      migrated = mixer.plugin().migrate(old_schema, old_params, {params.data(), params.size()});
    });
    for (std::size_t i = 0; migrated && i < tensors.size(); ++i)
      if (!at::isfinite(tensors[i]).all().item<bool>())
        fail(ErrorKind::plugin, where() + "mixer '" + mixer.plugin().label() +
                                    "' made values that are not finite of param_schema " +
                                    std::to_string(old_schema) + " for parameter " +
                                    quoted(mixer.parameters()[i].name));
    return migrated;
  }

  // Names in the checkpoint that are this layer's.
  bool holds(const std::string& name) const { return name.starts_with(prefix_); }

 private:
  std::string where(const std::string& parameter = "") const {
    const fs::path file = parameter.empty() || checkpoint_.find(prefix_ + parameter) == nullptr
                              ? checkpoint_.folder()
                              : checkpoint_.file_of(prefix_ + parameter);
    return file.string() + ": layer " + std::to_string(layer_) + ": ";
  }

  template <class Work>
  void at_place(Work&& work, const std::string& parameter = "") const {
    try {
      work();
    } catch (const Error& error) {
      throw Error(error.kind(), where(parameter) + error.what());
    }
  }

  // Float32 and finite.
  at::Tensor read(const std::string& parameter) const {
    const TensorView& view = checkpoint_.at(prefix_ + parameter);
    const std::string tensor = where(parameter) + "tensor " + quoted(prefix_ + parameter);
    if (view.dtype != DType::F32)
      fail(ErrorKind::input,
           tensor + " is " + graft::name(view.dtype) + "; a mixer's parameters are stored as F32");
    if (const auto bad = find_non_finite(view))
      fail(ErrorKind::input,
           tensor + " holds " + bad->value + " at element " + std::to_string(bad->flat_index));
    at::Tensor value = at::empty(view.shape, at::kFloat);
    std::memcpy(value.data_ptr(), view.data, view.bytes);
    return value;
  }

  [[noreturn]] void fail_missing(const TokenMixer& mixer, const MixerParameter& parameter) const {
    fail(ErrorKind::input,
         where() + "mixer '" + mixer.plugin().label() + "' has a parameter " +
             quoted(parameter.name) + " of shape " + shape_text(parameter.tensor.sizes()) +
             " with these options, but there is no tensor " + quoted(prefix_ + parameter.name) +
             did_you_mean(parameter.name, names_));
  }

  void refuse_others(const TokenMixer& mixer) const {
    std::vector<std::string> known;
    for (const MixerParameter& parameter : mixer.parameters()) known.push_back(parameter.name);
    for (const std::string& name : names_)
      if (std::find(known.begin(), known.end(), name) == known.end())
        fail(ErrorKind::input, where(name) + "tensor " + quoted(prefix_ + name) + " of shape " +
                                   shape_text(checkpoint_.at(prefix_ + name).shape) +
                                   " belongs to no parameter of mixer '" + mixer.plugin().label() +
                                   "' with these options" + did_you_mean(name, known));
  }

  const Checkpoint& checkpoint_;
  std::int64_t layer_;
  std::string prefix_;
  std::vector<std::string> names_;  // without the prefix
};

std::string schema_problem(const StudentSection& section, const Mixer& plugin,
                           const std::string& file) {
  return file + ": the student's parameters follow param_schema " +
         std::to_string(section.param_schema) + " of mixer '" + section.mixer_id + "' (version " +
         section.version + "); the plugin at hand has param_schema " +
         std::to_string(plugin.param_schema()) + " (version " + plugin.component().version + ")";
}

void load_layer(StoredLayer& stored, TokenMixer& mixer, const StudentSection& section,
                const std::string& file) {
  const Mixer& plugin = mixer.plugin();
  if (section.param_schema == static_cast<std::int64_t>(plugin.param_schema()))
    return stored.load_into(mixer);
  if (!stored.migrate_into(mixer, static_cast<std::uint32_t>(section.param_schema)))
    fail(ErrorKind::plugin,
         schema_problem(section, plugin, file) + ", which cannot read the older one");
}

void say_migrated(const StudentSection& section, const Mixer& plugin, const std::string& file) {
  if (section.param_schema == static_cast<std::int64_t>(plugin.param_schema())) return;
  log_info(file + ": mixer '" + plugin.label() + "' brought its parameters from param_schema " +
           std::to_string(section.param_schema) + " to " + std::to_string(plugin.param_schema()));
}

}  // namespace

bool is_student(const fs::path& folder) {
  const fs::path file = folder / "config.json";
  if (file_type_of(file) != fs::file_type::regular) return false;
  const json config = json::parse(read_text(file), nullptr, /*allow_exceptions=*/false);
  return config.is_object() && config.contains(kKey);
}

StudentSection read_student_section(const fs::path& folder) {
  const ModelConfig config = load_model_config(folder);
  const fs::path file = folder / "config.json";
  if (!config.raw.contains(kKey))
    fail(ErrorKind::input, quoted(folder.string()) + " is no student: " + file.string() +
                               " has no section " + quoted(kKey));
  return read_section(config.raw, file.string(), config.n_layers);
}

void write_student(const fs::path& folder, bool replace, const Model& student,
                   const fs::path& teacher_folder,
                   const std::map<std::string, std::string>& provenance) {
  if (student.mixers().empty())
    fail(ErrorKind::internal, "a student needs at least one converted layer");
  AtomicDirectory out(folder, replace);
  json layers = json::array();
  for (const auto& [layer, mixer] : student.mixers()) layers.push_back(layer);
  const json mixer = mixer_json(student.mixers().begin()->second->plugin());

  json config = student.config().raw;
  config.erase(kKey);
  config[kKey] = {
      {"format", kFormat}, {"layers", layers}, {"mixer", mixer}, {"provenance", provenance}};
  write_file_atomically(out.path() / "config.json", config.dump(2) + "\n");

  std::map<std::string, std::string> metadata = provenance;
  metadata[kMetadataKey] = mixer.dump();
  write_weights(out.path() / "model.safetensors", student, std::move(metadata));
  copy_teacher_files(teacher_folder, out.path());
  out.commit();
}

Model load_model(const fs::path& folder, PluginRegistry& registry, Compute compute) {
  const ModelConfig config = load_model_config(folder);
  const std::string file = (folder / "config.json").string();
  if (!config.raw.contains(kKey))
    return Model(std::make_shared<Backbone>(Backbone::load(folder, {compute, {}, {}})));

  const StudentSection section = read_section(config.raw, file, config.n_layers);
  // Plugins and their parameters first: the other weights may be gigabytes.
  Model::Mixers mixers;
  for (const std::int64_t layer : section.layers) {
    const LayerInfo info(config, layer);
    auto plugin = make_mixer(section, info.c_info(), registry, file);
    if (section.param_schema > static_cast<std::int64_t>(plugin->param_schema()))
      fail(ErrorKind::plugin,
           schema_problem(section, *plugin, file) + "; a newer plugin is needed");
    mixers[layer] = std::make_shared<TokenMixer>(std::move(plugin), 0);
  }
  const Checkpoint checkpoint = Checkpoint::open(folder);
  std::vector<StoredLayer> stored;
  for (const auto& [layer, mixer] : mixers) {
    check_written_with(section, mixer->plugin(), checkpoint, file);
    load_layer(stored.emplace_back(checkpoint, config, layer), *mixer, section, file);
  }
  if (!mixers.empty()) say_migrated(section, mixers.begin()->second->plugin(), file);

  const auto of_a_mixer = [&](const std::string& name) {
    return std::any_of(stored.begin(), stored.end(),
                       [&](const StoredLayer& layer) { return layer.holds(name); });
  };
  auto backbone = std::make_shared<Backbone>(
      Backbone::load(config, checkpoint, {compute, section.layers, of_a_mixer}));
  return Model(std::move(backbone), std::move(mixers));
}

}  // namespace graft
