#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace graft {

enum class Command {
  convert,
  train,
  eval,
  generate,
  inspect,
  report,
  select_layers,
  compare,
  plugins_list,
  plugins_info,
  plugins_new,
  plugins_validate
};

// A flag that sets a key of the configuration.
struct FlagValue {
  std::string key;
  std::vector<std::string> words;
  std::string flag;  // as messages name it: "--mixer", "--set calibrate.lr"
};

struct CommandLine {
  Command command = Command::convert;
  // The MODEL of eval, generate and inspect, the RECIPE of train, the RUN of report, the TEACHER of
  // compare, the ID of plugins info, the KIND of plugins new.
  std::string subject;
  std::vector<std::string> students;            // of compare
  std::string new_name, new_folder, id_prefix;  // of plugins new
  std::vector<std::string> passed_on;           // of plugins validate, for graft-validate
  std::vector<FlagValue> flags;
  std::vector<std::filesystem::path> config_files;
  bool help = false, version = false, print_config = false, quiet = false;
  bool resume = false, allow_change = false;  // of train
  int verbose = 0;
  std::string help_text;  // of the command; without the options of plugins
};

// Throws Error(usage) that names the flag, and for an unknown one the nearest there is.
CommandLine parse_command_line(const std::vector<std::string>& arguments);

// How help and messages spell a key's flag: its short one, or "--keep-attention", "--calibrate.lr".
std::string flag_of(const std::string& key);

}  // namespace graft
