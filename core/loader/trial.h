#pragma once

#include <chrono>
#include <filesystem>
#include <string>

namespace graft {

// Opens and negotiates a plugin in a child process and says how that ended: "" when the child
// lived, else "crashes when it is opened (signal 11, Segmentation fault)", or that it took longer
// than `limit`. What the plugin prints is dropped. An ordinary refusal is no crash: opening the
// file here tells it.
std::string trial_in_child(const std::filesystem::path& file,
                           std::chrono::milliseconds limit = std::chrono::seconds(20));

}  // namespace graft
