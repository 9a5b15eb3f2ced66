#pragma once

#include <filesystem>
#include <string>

namespace graft {

// What `plugins new KIND NAME DIR` is asked for.
struct NewPlugin {
  std::string kind;  // mixer, mixer-c, initializer, objective
  std::string name;  // the alias; ids, classes and files are called after it
  std::filesystem::path folder;
  std::string id_prefix = "org.example";
};

// Where an author's commands find graft and the LibTorch this program runs with.
struct SdkPlaces {
  std::filesystem::path prefix;    // of the installation: share/graft/templates lies below
  std::filesystem::path libtorch;  // a plugin that links LibTorch needs the same one
};

// Writes the template of that kind into the folder, renamed, and gives back what to tell the user:
// the files and the commands to build, validate and run them. Error(usage), before anything is
// written, for an unknown kind, a bad name or prefix, and a folder that is not empty.
std::string new_plugin(const NewPlugin& wanted, const SdkPlaces& places);

// "my_c_gate" as "MyCGate", "my-c-gate" and "My c gate".
std::string class_name(const std::string& name);
std::string id_name(const std::string& name);
std::string display_name(const std::string& name);

}  // namespace graft
