#include "core/student/student_io.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

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

// A mixer's tensor out of the checkpoint: float32, finite.
at::Tensor read_parameter(const Checkpoint& checkpoint, const std::string& name) {
  const TensorView& view = checkpoint.at(name);
  if (view.dtype != DType::F32)
    fail(ErrorKind::input, checkpoint.file_of(name).string() + ": tensor " + quoted(name) + " is " +
                               graft::name(view.dtype) +
                               "; a mixer's parameters are stored as F32");
  if (const auto bad = find_non_finite(view))
    fail(ErrorKind::input, checkpoint.file_of(name).string() + ": tensor " + quoted(name) +
                               " holds " + bad->value + " at element " +
                               std::to_string(bad->flat_index));
  at::Tensor value = at::empty(view.shape, at::kFloat);
  std::memcpy(value.data_ptr(), view.data, view.bytes);
  return value;
}

void load_mixer(TokenMixer& mixer, const Checkpoint& checkpoint, const std::string& prefix,
                std::set<std::string>& unused) {
  for (const MixerParameter& parameter : mixer.parameters()) {
    const std::string name = prefix + parameter.name;
    const bool optional = (parameter.spec->flags & GRAFT_P_OPTIONAL) != 0;
    if (optional && checkpoint.find(name) == nullptr) continue;  // keeps its default
    mixer.load_parameter(parameter.name, read_parameter(checkpoint, name));
    unused.erase(name);
  }
}

std::string schema_problem(const StudentSection& section, const Mixer& plugin,
                           const std::string& file) {
  return file + ": the student's parameters follow param_schema " +
         std::to_string(section.param_schema) + " of mixer '" + section.mixer_id + "' (version " +
         section.version + "); the plugin at hand has param_schema " +
         std::to_string(plugin.param_schema()) + " (version " + plugin.component().version + ")";
}

// What was stored under an older schema goes through the plugin's own graft.mixer-migrate/1.
void migrate_mixer(TokenMixer& mixer, const Checkpoint& checkpoint, const std::string& prefix,
                   const StudentSection& section, const std::string& file,
                   std::set<std::string>& unused) {
  std::map<std::string, at::Tensor> stored;
  for (const std::string& name : checkpoint.names())
    if (name.starts_with(prefix))
      stored.emplace(name.substr(prefix.size()), read_parameter(checkpoint, name));
  std::deque<BorrowedTensor> borrowed;
  std::map<std::string, const DLTensor*> old_params;
  for (const auto& [name, tensor] : stored) old_params[name] = borrowed.emplace_back(tensor).get();
  const std::vector<at::Tensor> tensors = mixer.parameter_tensors();
  BorrowedTensors params(tensors);
  const std::vector<DLTensor*> pointers(params.data(), params.data() + params.size());
  if (!mixer.plugin().migrate(static_cast<std::uint32_t>(section.param_schema), old_params,
                              pointers))
    fail(ErrorKind::plugin,
         schema_problem(section, mixer.plugin(), file) + ", which cannot read the older one");
  for (const auto& [name, tensor] : stored) unused.erase(prefix + name);
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
  metadata["graft.mixer"] = mixer.dump();
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
  // Plugins first: they are quickly refused, and weights may be gigabytes.
  Model::Mixers mixers;
  std::vector<std::string> prefixes;
  for (const std::int64_t layer : section.layers) {
    const LayerInfo info(config, layer);
    auto plugin = make_mixer(section, info.c_info(), registry, file);
    const auto schema = static_cast<std::int64_t>(plugin->param_schema());
    if (section.param_schema > schema)
      fail(ErrorKind::plugin,
           schema_problem(section, *plugin, file) + "; a newer plugin is needed");
    mixers[layer] = std::make_shared<TokenMixer>(std::move(plugin), 0);
    prefixes.push_back(mixer_prefix(config, layer));
  }

  const Checkpoint checkpoint = Checkpoint::open(folder);
  const auto foreign = [&](const std::string& name) {
    return std::any_of(prefixes.begin(), prefixes.end(),
                       [&](const auto& prefix) { return name.starts_with(prefix); });
  };
  auto backbone = std::make_shared<Backbone>(
      Backbone::load(config, checkpoint, {compute, section.layers, foreign}));
  std::set<std::string> unused(backbone->left_over().begin(), backbone->left_over().end());
  std::size_t i = 0;
  bool migrated = false;
  for (const auto& [layer, mixer] : mixers) {
    const std::string& prefix = prefixes[i++];
    migrated = static_cast<std::int64_t>(mixer->plugin().param_schema()) != section.param_schema;
    if (migrated)
      migrate_mixer(*mixer, checkpoint, prefix, section, file, unused);
    else
      load_mixer(*mixer, checkpoint, prefix, unused);
  }
  if (migrated)
    log_info(file + ": parameters of param_schema " + std::to_string(section.param_schema) +
             " were brought to the plugin's " +
             std::to_string(mixers.begin()->second->plugin().param_schema()));
  if (!unused.empty())
    fail(ErrorKind::input, checkpoint.file_of(*unused.begin()).string() + ": tensor " +
                               quoted(*unused.begin()) + " (and " +
                               std::to_string(unused.size() - 1) +
                               " more) belongs to no parameter of mixer '" + section.mixer_id +
                               "' with these options");
  return Model(std::move(backbone), std::move(mixers));
}

}  // namespace graft
