#include "apps/hostapp/new_plugin.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <regex>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/suggest.h"

namespace graft {
namespace {

namespace fs = std::filesystem;

struct Template {
  const char* kind;
  const char* folder;  // below share/graft/templates
  const char* name;    // what the template's plugin is called
  bool torch;          // links LibTorch
  const char* job;     // flags of a run with it; %s is its name
};

constexpr const char* mixer_job = "--mixer %s --init projection_copy --objective layer_alignment";
constexpr std::array templates = {
    Template{"mixer", "mixer_cpp", "my_mixer", true, mixer_job},
    Template{"mixer-c", "mixer_c", "my_c_mixer", false, mixer_job},
    Template{"initializer", "initializer_cpp", "my_initializer", false,
             "--mixer gdn --init %s --objective layer_alignment"},
    Template{"objective", "objective_cpp", "my_objective", false,
             "--mixer gdn --init projection_copy --objective %s"},
};

const Template& template_of(const std::string& kind) {
  std::vector<std::string> known;
  for (const Template& each : templates) {
    if (kind == each.kind) return each;
    known.emplace_back(each.kind);
  }
  fail(ErrorKind::usage, "there is no kind " + quoted(kind) + did_you_mean(kind, known));
}

void check_name(const std::string& name) {
  static const std::regex allowed("[a-z][a-z0-9_]*");
  if (!std::regex_match(name, allowed)) {
    fail(ErrorKind::usage, "NAME " + quoted(name) +
                               ": expected a small letter, then small letters, digits and "
                               "underscores, as in my_mixer");
  }
  // The plugin is a target of its CMakeLists.txt.
  constexpr std::array taken = {"all", "clean", "help", "install", "package", "test"};
  if (std::find(taken.begin(), taken.end(), name) != taken.end())
    fail(ErrorKind::usage, "NAME " + quoted(name) + ": CMake keeps this name for itself");
}

void check_id_prefix(const std::string& prefix) {
  static const std::regex allowed("[a-z][a-z0-9-]*(\\.[a-z0-9][a-z0-9-]*)+");
  if (!std::regex_match(prefix, allowed)) {
    fail(ErrorKind::usage, "--id-prefix " + quoted(prefix) +
                               ": expected a domain of yours from its end, in small letters, as in "
                               "org.example");
  }
}

void check_folder(const fs::path& folder) {
  const fs::file_type type = file_type_of(folder);
  if (type == fs::file_type::not_found ||
      (type == fs::file_type::directory && fs::is_empty(folder)))
    return;
  fail(ErrorKind::usage,
       quoted_path(folder) + (type == fs::file_type::directory
                                  ? " is not empty; name a folder that is, or is not there yet"
                                  : " is no folder; name another place"));
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at)) {
    text.replace(at, from.size(), to);
    at += to.size();
  }
}

std::string renamed(std::string text, const std::string& from, const NewPlugin& wanted) {
  replace_all(text, from, wanted.name);
  replace_all(text, class_name(from), class_name(wanted.name));
  replace_all(text, id_name(from), id_name(wanted.name));
  replace_all(text, display_name(from), display_name(wanted.name));
  replace_all(text, "org.example", wanted.id_prefix);
  return text;
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::is_directory(folder)) {
    fail(ErrorKind::usage, "there is no " + quoted_path(folder) +
                               ": the templates come with graft's SDK (cmake --install BUILD "
                               "--component sdk)");
  }
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// A path as one word of a shell's line.
std::string shell_word(const fs::path& path) {
  std::string text = path.string();
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string("/._-+,:=@%").find(static_cast<char>(c)) != std::string::npos;
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  replace_all(text, "'", "'\\''");
  return "'" + text + "'";
}

std::string next_steps(const NewPlugin& wanted, const Template& from, const SdkPlaces& places) {
  const fs::path build = wanted.folder / "build", plugins = build / "plugins";
  std::string configure = "cmake -S " + shell_word(wanted.folder) + " -B " + shell_word(build) +
                          " -DCMAKE_PREFIX_PATH=" + shell_word(places.prefix);
  if (from.torch && !places.libtorch.empty())
    configure += " -DLibTorch_ROOT=" + shell_word(places.libtorch);
  std::string job = from.job;
  replace_all(job, "%s", wanted.name);
  return "build\n  " + configure + " && cmake --build " + shell_word(build) +
         "\nvalidate\n  hostapp plugins validate " + shell_word(plugins / (wanted.name + ".so")) +
         "\nrun\n  hostapp --plugin-path " + shell_word(plugins) + " " + job +
         " --teacher TEACHER --text TEXT --out runs/" + wanted.name + "\n";
}

// The words of a name, the first letter of the first one, or of each, made large.
std::string words_of(const std::string& name, const std::string& between, bool each_large) {
  std::string out;
  bool start = true;
  for (const char c : name) {
    if (c == '_') {
      if (!start) out += between;
      start = true;
      continue;
    }
    const bool large = start && (each_large || out.empty());
    out += large ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    start = false;
  }
  return out;
}

}  // namespace

std::string class_name(const std::string& name) { return words_of(name, "", true); }

std::string display_name(const std::string& name) { return words_of(name, " ", false); }

std::string id_name(const std::string& name) {
  std::string out = name;
  std::replace(out.begin(), out.end(), '_', '-');
  return out;
}

std::string new_plugin(const NewPlugin& wanted, const SdkPlaces& places) {
  const Template& from = template_of(wanted.kind);
  check_name(wanted.name);
  check_id_prefix(wanted.id_prefix);
  check_folder(wanted.folder);
  const auto files = files_of(places.prefix / "share/graft/templates" / from.folder);

  AtomicDirectory out(wanted.folder, /*replace_existing=*/false);
  std::string told = wanted.folder.string() + ":";
  for (const fs::path& file : files) {
    const std::string name = renamed(file.filename().string(), from.name, wanted);
    write_file_atomically(out.path() / name, renamed(read_text(file), from.name, wanted));
    told += " " + name;
  }
  out.commit();
  return told + "\n\n" + next_steps(wanted, from, places);
}

}  // namespace graft
