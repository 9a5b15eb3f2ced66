#include "kit/names.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "graft/graft.h"
#include "graft/status.hpp"

namespace graft::conformance {
namespace {

using Names = std::initializer_list<std::string_view>;

const Names kRoles = {GRAFT_ROLE_QUERY,        GRAFT_ROLE_KEY,           GRAFT_ROLE_VALUE,
                      GRAFT_ROLE_OUTPUT,       GRAFT_ROLE_DECAY_GATE,    GRAFT_ROLE_DECAY_GATE_BIAS,
                      GRAFT_ROLE_DECAY_SCALE,  GRAFT_ROLE_WRITE_GATE,    GRAFT_ROLE_OUTPUT_GATE,
                      GRAFT_ROLE_SHORT_CONV,   GRAFT_ROLE_SHORT_CONV_Q,  GRAFT_ROLE_SHORT_CONV_K,
                      GRAFT_ROLE_SHORT_CONV_V, GRAFT_ROLE_FEATURE_MAP_Q, GRAFT_ROLE_FEATURE_MAP_K,
                      GRAFT_ROLE_QUERY_NORM,   GRAFT_ROLE_KEY_NORM,      GRAFT_ROLE_NORM};
const Names kCalibration = {GRAFT_SIGNAL_BLOCK_INPUT, GRAFT_SIGNAL_BLOCK_OUTPUT,
                            GRAFT_SIGNAL_HEAD_CONTEXT, GRAFT_SIGNAL_ATTENTION_PROBS,
                            GRAFT_SIGNAL_RESIDUAL};
const Names kObjective = {GRAFT_SIGNAL_STUDENT_LOGITS, GRAFT_SIGNAL_TEACHER_LOGITS,
                          GRAFT_SIGNAL_LABELS,         GRAFT_SIGNAL_STUDENT_HIDDEN,
                          GRAFT_SIGNAL_TEACHER_HIDDEN, GRAFT_SIGNAL_LOSS_MASK,
                          GRAFT_SIGNAL_TOKEN_WEIGHT};

bool among(const Names& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// "org.example.role.conv-mix": three parts or more, none of them empty, and not in graft's own.
bool reverse_dns(std::string_view name) {
  if (name.starts_with("graft.") || name.find_first_of(" \t\n") != name.npos) return false;
  if (name.starts_with('.') || name.ends_with('.') || name.find("..") != name.npos) return false;
  return std::ranges::count(name, '.') >= 2;
}

std::string problem(const char* name, const char* what, bool known) {
  if (name == nullptr || *name == '\0') return sdk::cat("a ", what, " without a name");
  if (known || reverse_dns(name)) return "";
  return sdk::cat("the ", what, " '", name,
                  "' is not one of graft.h; one's own is named by reverse DNS, as in "
                  "'org.example.",
                  what, ".name'");
}

std::string_view view(const char* name) { return name == nullptr ? "" : name; }

}  // namespace

std::string role_problem(const char* role) {
  std::string_view stem = view(role);
  if (stem.ends_with("-bias") && !among(kRoles, stem)) stem.remove_suffix(5);
  return problem(role, "role", among(kRoles, stem));
}

std::string calibration_signal_problem(const char* signal) {
  return problem(signal, "signal", among(kCalibration, view(signal)));
}

std::string objective_signal_problem(const char* signal) {
  const std::string_view name = view(signal), tap = GRAFT_SIGNAL_STUDENT_TAP;
  const bool of_a_tap = name.starts_with(tap) && name.size() > tap.size();
  return problem(signal, "signal", of_a_tap || among(kObjective, name));
}

}  // namespace graft::conformance
