#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>

#include "core/student/model.h"

namespace graft {

class PluginRegistry;

// A student is a Hugging Face folder: the teacher's config.json with one more key,
//
//   "graft": {"format": 1, "layers": [0, 1, ...],
//             "mixer": {"id": "org.graft.gdn", "alias": "gdn", "version": "0.1.0", "license":
//             "Apache-2.0", "param_schema": 1,
//                       "options": {...}}, "provenance": {...}}
//
// and model.safetensors with the backbone's tensors under their own names and types (float32 where
// the student's value is not the teacher's), the converted
// layers' parameters (float32) as "<layer prefix>mixer.<parameter>", e.g.
// "model.layers.3.mixer.q_proj.weight". The tokenizer's files and generation_config.json are copied
// from the teacher.

// Is the folder's config.json that of a student?
bool is_student(const std::filesystem::path& folder);

// What a student's config.json says of its mixers.
struct StudentSection {
  std::set<std::int64_t> layers;  // converted ones
  std::string mixer_id;
  std::int64_t param_schema = 0;
  std::string version;  // of the plugin that wrote it
  std::map<std::string, OptionValue> options;
};
// Throws Error(input) when the folder is no student or the section is not as written.
StudentSection read_student_section(const std::filesystem::path& folder);

// Writes the student to `folder` (made if missing, empty otherwise unless `replace`), all or
// nothing. `provenance`: teacher, initializer, objective, seed ...: free text by key, stored in
// config.json and the weights' metadata.
void write_student(const std::filesystem::path& folder, bool replace, const Model& student,
                   const std::filesystem::path& teacher_folder,
                   const std::map<std::string, std::string>& provenance);

// Reads a teacher or a student folder. `registry` finds the student's mixer by its id. Throws
// Error: everything Backbone::load() does; a plugin that is not there, or whose param_schema is
// another (both numbers named); parameters missing, unknown, of another shape or not finite.
Model load_model(const std::filesystem::path& folder, PluginRegistry& registry,
                 Compute compute = Compute::float32);

}  // namespace graft
